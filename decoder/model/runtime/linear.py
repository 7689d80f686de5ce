"""Linear layers joined by their outputs, with plain weights or with weights packed for a CPU.

A packed weight is reordered once and replaces the original: in float32 for our own products
(`tiles`), in bfloat16 for oneDNN's. `torch.nn.functional.linear` brings a bfloat16 weight into
oneDNN's blocks at every call, which takes longer than a product of few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from decoder.cpu import this_cpu
from decoder.model.runtime import tiles
from decoder.model.runtime.fused import join_linears

ROWS = 1  # that weights are reordered for
OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")


class JoinedLinear(Protocol):
    """Linear layers whose outputs lie side by side."""

    weight_bytes: float  # that a product reads of one weight, scales included

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs [..., out] of inputs [..., in]."""

    def outputs_from(self, first: int, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs from number `first` on."""

    def added_to(
        self, rows: torch.Tensor, inputs: torch.Tensor, *, overwrite: bool = False
    ) -> torch.Tensor:
        """rows + outputs of inputs; `overwrite` allows to use the memory of rows."""

    def weight(self) -> torch.Tensor:
        """The plain weight [out, in], or a copy."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows [..., in] of the weight by their numbers [...]."""


class PlainLinear(JoinedLinear):
    """Layers with a joined weight, of which the modules' weights are views."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._weight, self._bias = join_linears(linears)
        self.weight_bytes = self._weight.itemsize

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self._weight, self._bias)

    def outputs_from(self, first: int, inputs: torch.Tensor) -> torch.Tensor:
        bias = None if self._bias is None else self._bias[first:]
        return functional.linear(inputs, self._weight[first:], bias)

    def added_to(
        self, rows: torch.Tensor, inputs: torch.Tensor, *, overwrite: bool = False
    ) -> torch.Tensor:
        if self._bias is not None:
            return rows + self(inputs)
        out = rows if overwrite else None
        return torch.addmm(rows, inputs, self._weight.t(), out=out)

    def weight(self) -> torch.Tensor:
        return self._weight

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._weight[numbers]


class PackedLinear(JoinedLinear):
    """Layers in bfloat16 with a weight packed by oneDNN: bit for bit `functional.linear`, `addmm`.

    The modules compute by it from now on, and their weights keep only shape and dtype; see
    `plain_state`.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self._bias = joined_weights(linears)
        self.weight_bytes = weight.itemsize
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary
        release(linears, self)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._product(inputs, self._packed, self._bias, "none", [], "")
        return outputs

    def outputs_from(self, first: int, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)[..., first:]  # a part of a packed weight cannot be read alone

    def added_to(
        self, rows: torch.Tensor, inputs: torch.Tensor, *, overwrite: bool = False
    ) -> torch.Tensor:
        total: torch.Tensor = self._product_and_sum(inputs, rows, self._packed, self._bias, "add")
        return total

    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.weight()[numbers]


class TiledLinear(JoinedLinear):
    """Layers in float32 with a weight in blocks, in bfloat16 where its numbers are such."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self._bias = joined_weights(linears)
        self._outputs, self._blocks = len(weight), tiles.pack(tiles.smallest(weight))
        self.weight_bytes = self._blocks.itemsize
        release(linears, self)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outputs_from(0, inputs)

    def outputs_from(self, first: int, inputs: torch.Tensor) -> torch.Tensor:
        unit = first // (tiles.UNIT * tiles.LANES) * tiles.UNIT
        start = unit * tiles.LANES
        rows = inputs.reshape(-1, inputs.shape[-1])
        outputs = tiles.product(rows, self._blocks[unit:])
        if outputs.shape[1] != self._outputs - first:  # whole units hold more
            outputs = outputs[:, first - start : self._outputs - start].contiguous()
        if self._bias is not None:
            outputs += self._bias[first:]
        return outputs.view(*inputs.shape[:-1], -1)

    def added_to(
        self, rows: torch.Tensor, inputs: torch.Tensor, *, overwrite: bool = False
    ) -> torch.Tensor:
        return self(inputs).add_(rows)

    def weight(self) -> torch.Tensor:
        return tiles.unpacked(self._blocks, self._outputs)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return tiles.rows_of(self._blocks, numbers)


def joined_weights(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights and the biases of layers, each joined by rows."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(weights) if weights[1:] else weights[0], torch.cat(biases) if biases else None


class JoinedPart:
    """The forward of one of the joined layers."""

    def __init__(self, joined: JoinedLinear, part: slice) -> None:
        self.joined, self.part = joined, part

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.joined(inputs)[..., self.part]


def release(linears: Sequence[nn.Linear], joined: JoinedLinear) -> None:
    """Let the layers compute by `joined`, and give up their weights but for shape and dtype."""
    first = 0
    for linear in linears:
        linear.forward = JoinedPart(joined, slice(first, first + linear.out_features))
        linear.weight = nn.Parameter(linear.weight.detach().to("meta"), requires_grad=False)
        first += linear.out_features


def pack(linears: Sequence[nn.Linear]) -> JoinedLinear:
    """The layers joined and packed, in a dtype that `packing_refused` allows."""
    bfloat16 = linears[0].weight.dtype == torch.bfloat16
    return PackedLinear(linears) if bfloat16 else TiledLinear(linears)


def join(linears: Sequence[nn.Linear]) -> JoinedLinear:
    """The layers joined: packed where their device and dtype allow it. They end as they are."""
    weight = linears[0].weight
    if packing_refused(weight.device, weight.dtype) is None:
        return pack(linears)
    return PlainLinear(linears)


def pack_layers(module: nn.Module) -> None:
    """Pack every linear layer of a module that can be, each for itself."""
    for layer in module.modules():
        plain = type(layer) is nn.Linear and "forward" not in layer.__dict__
        if plain and packing_refused(layer.weight.device, layer.weight.dtype) is None:
            pack([layer])


def packing_refused(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why weights of this dtype cannot be packed on the device; None where they can."""
    if device.type != "cpu":
        return f"packed weights are for a CPU, not for {device}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"weights are packed in bfloat16 and float32, not in {dtype}"
    if dtype == torch.bfloat16 and not this_cpu().bfloat16:
        return "this CPU has no bfloat16 products"
    if dtype == torch.bfloat16 and not all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS):
        return "this build of torch has no oneDNN operators"
    return None


def read_bytes(module: nn.Module, apart: Sequence[nn.Module] = ()) -> float | None:
    """Bytes that steps read of one weight of a module's matrices, but for the modules `apart`.

    None where the dtype says it.
    """
    packed = {}
    for layer in module.modules():
        part = layer.__dict__.get("forward")
        if isinstance(part, JoinedPart) and part.joined.weight_bytes != layer.weight.itemsize:
            packed[id(layer.weight)] = part.joined.weight_bytes
    outside = {id(tensor) for one in apart for tensor in one.parameters()}
    inside = [one for one in module.parameters() if one.ndim > 1 and id(one) not in outside]
    if not any(id(one) in packed for one in inside):
        return None
    read = sum(packed.get(id(one), one.itemsize) * one.numel() for one in inside)
    return read / sum(one.numel() for one in inside)


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a module, with plain copies of the weights that are packed."""
    state: dict[str, torch.Tensor] = dict(module.state_dict())
    for name, layer in module.named_modules():
        forward = layer.__dict__.get("forward")
        if isinstance(forward, JoinedPart):
            state[f"{name}.weight"] = forward.joined.weight()[forward.part]
        elif hasattr(forward, "__self__"):  # a tied embedding
            state[f"{name}.weight"] = forward.__self__.weight()
    return state

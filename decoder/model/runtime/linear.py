"""Linear layers joined by their outputs, with plain weights or with weights packed for a CPU.

A packed weight is reordered once for our own products (`tiles`) and replaces the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decoder.cpu import this_cpu
from decoder.model.runtime import tiles
from decoder.model.runtime.fused import PlainLinear, is_plain, joined_weights

LARGEST = 127  # of an int8 weight


class TiledLinear:
    """Layers with a weight in blocks: bfloat16 where its numbers are such, float32, or int8.

    Its methods are those of `PlainLinear`. The modules compute by it from now on, and their
    weights keep only shape and dtype; see `plain_state`.
    """

    def __init__(self, linears: Sequence[nn.Linear], stored: torch.dtype | None = None) -> None:
        """stored: the dtype of the weights in blocks; int8 rounds them to a scale an output."""
        weight, bias = joined_weights(linears)
        self._size, self.dtype = weight.shape, weight.dtype
        self.scales = torch.empty(0)
        if stored is None:
            stored = torch.bfloat16 if tiles.is_bfloat16(weight) else weight.dtype
        if stored == torch.int8:
            weight, scales = rounded_to_int8(weight)
            self.scales = tiles.padded(scales)
        self.blocks = tiles.pack(weight.to(stored))
        self.bias = tiles.padded(torch.zeros(len(weight)) if bias is None else bias.float())
        self.outputs = len(weight)
        scale_bytes = self.scales.itemsize if len(self.scales) else 0
        self.weight_bytes = stored.itemsize + scale_bytes / weight.shape[1]
        first, layers = 0, list[Any](linears)
        for layer in layers:
            layer.forward = JoinedPart(self, slice(first, first + layer.out_features))
            layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)
            first += layer.out_features

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.outputs_from(0, inputs)

    def outputs_from(self, first: int, inputs: Tensor) -> Tensor:
        return self.numbers(inputs, first).to(self.dtype)

    def numbers(self, inputs: Tensor, first: int = 0) -> Tensor:
        """The outputs from number `first` on as they are summed, in float32."""
        block = first // tiles.OUTPUTS
        start = block * tiles.OUTPUTS
        rows = inputs.reshape(-1, inputs.shape[-1])
        out = self.bias[start:].repeat(len(rows), 1)
        tiles.add_product(out, rows, self.blocks[block:], self.scales[start:])
        return out[:, first - start : self._size[0] - start].view(*inputs.shape[:-1], -1)

    def added_to(self, rows: Tensor, inputs: Tensor, *, overwrite: bool = False) -> Tensor:
        return self.numbers(inputs).add_(rows).to(self.dtype)

    def weight(self) -> Tensor:
        weight = tiles.unpacked(self.blocks, *self._size).to(self.dtype)
        scales = self.scales[: len(weight), None]
        return weight * scales.to(self.dtype) if len(scales) else weight

    def rows(self, numbers: Tensor) -> Tensor:
        rows = tiles.rows_of(self.blocks, numbers, self._size[1]).to(self.dtype)
        return rows * self.scales[numbers][..., None].to(self.dtype) if len(self.scales) else rows


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of the weight [out, in], symmetric and to the nearest, and scales [out]."""
    largest = weight.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny)
    scales = (largest / LARGEST).to(weight.dtype).float()
    steps = (weight.float() / scales[:, None]).round()
    return steps.clamp(-LARGEST, LARGEST).to(torch.int8), scales


class JoinedPart(NamedTuple):
    """The forward of one of the joined layers."""

    joined: TiledLinear
    part: slice

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.joined(inputs)[..., self.part]


JoinedLinear = PlainLinear | TiledLinear


def join(linears: Sequence[nn.Linear]) -> JoinedLinear:
    """The layers joined: packed where their device and dtype allow it. They end as they are."""
    made = linears[0].__dict__.get("forward")
    if isinstance(made, JoinedPart):  # by compiled layers
        return made.joined
    weight = linears[0].weight
    if packing_refused(weight.device, weight.dtype) is None:
        return TiledLinear(linears)
    return PlainLinear(linears)


def pack_layers(module: nn.Module) -> None:
    """Pack every linear layer of a module that can be, each for itself."""
    for layer in module.modules():
        if is_plain(layer) and packing_refused(layer.weight.device, layer.weight.dtype) is None:
            TiledLinear([layer])


def packing_refused(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why weights of this dtype cannot be packed on the device; None where they can."""
    if device.type != "cpu":
        return f"packed weights are for a CPU, not for {device}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"weights are packed in bfloat16 and float32, not in {dtype}"
    if dtype == torch.bfloat16 and not this_cpu().bfloat16:
        return "this CPU has no bfloat16 products"
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


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module, with plain copies of the weights that are packed."""
    state: dict[str, Tensor] = dict(module.state_dict())
    for name, layer in module.named_modules():
        forward = layer.__dict__.get("forward")
        if isinstance(forward, JoinedPart):
            state[f"{name}.weight"] = forward.joined.weight()[forward.part]
        elif hasattr(forward, "__self__"):  # a tied embedding
            state[f"{name}.weight"] = forward.__self__.weight()
    return state

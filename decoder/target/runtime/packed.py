"""Packed weights for a CPU: products with weights reordered once, and layers of few calls.

`torch.nn.functional.linear` brings a bfloat16 weight into oneDNN's blocks at every call, which
takes longer than a product of few rows. Here each weight is reordered once, in place of the
original. The layers of the common families then run without transformers' modules. The query,
key and value products are joined, as are gate and up, and residual additions are part of the
products; all other operations round as in transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from decoder.target.attention import AttentionPlan
from decoder.target.runtime.base import RuntimeKind
from decoder.target.runtime.eager import EagerRuntime, ModelStep
from decoder.target.runtime.fused import FUSIBLE, is_plain, plain_linears, unfuse
from decoder.target.structure import base_of

ROWS = 1  # that weights are reordered for
BLOCKS = (64, 48, 32, 16, 1)  # rows of a weight that oneDNN may keep together
FIRST_POSITIONS = 1024  # of the first table of rotary factors


def packing_refused(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why weights of this dtype cannot be packed on the device; None where they can."""
    if device.type != "cpu":
        return f"packed weights are for a CPU, not for {device}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"weights are packed in bfloat16 and float32, not in {dtype}"
    operators = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return "this build of torch has no oneDNN operators"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN has no bfloat16 products on this CPU"
    return None


class PackedLinear:
    """A linear layer with a reordered weight: in bfloat16 bit for bit `functional.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs [..., out] of inputs [..., in]."""
        outputs: torch.Tensor = self._product(inputs, self._packed, self._bias, "none", [], "")
        return outputs

    def added_to(self, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """rows + outputs of inputs, rounded once."""
        total: torch.Tensor = self._product_and_sum(inputs, rows, self._packed, self._bias, "add")
        return total

    def blocks(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed numbers as a view [blocks, in / pair, rows, pair]; None for another layout.

        weight  the same numbers in rows [out, in]
        """
        size = torch.ops.mkldnn._nbytes(self._packed)
        memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(self._packed))
        numbers = torch.frombuffer(memory, dtype=weight.dtype)
        out, width = weight.shape
        pair = 4 // weight.dtype.itemsize  # bfloat16 numbers are multiplied in pairs
        some = torch.arange(0, out, max(out // 64, 1))
        for rows in BLOCKS:
            if numbers.numel() == -(-out // rows) * rows * width and width % pair == 0:
                blocks = numbers.view(-1, width // pair, rows, pair)
                if torch.equal(rows_of(blocks, some), weight[some]):
                    return blocks
        return None


def rows_of(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows [..., in] of a packed weight by their numbers [...]."""
    size = blocks.shape[2]
    return blocks[numbers // size, :, numbers % size].flatten(-2)


def pack_linears(linears: Sequence[nn.Linear]) -> PackedLinear:
    """One product of the modules' weights, joined by rows; the modules now compute by it.

    The modules' own weights keep only shape and dtype.
    """
    weight = torch.cat([linear.weight for linear in linears]) if linears[1:] else linears[0].weight
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    product, first = PackedLinear(weight.detach(), bias), 0
    for linear in linears:
        part = slice(first, first + linear.out_features)
        linear.forward = partial(_part_of, product, part) if linears[1:] else product
        _release(linear)
        first = part.stop
    return product


def _part_of(product: PackedLinear, part: slice, inputs: torch.Tensor) -> torch.Tensor:
    return product(inputs)[..., part]


def _release(module: nn.Module) -> None:
    """Give up a module's weight, but for its shape and dtype."""
    module.weight = nn.Parameter(module.weight.detach().to("meta"), requires_grad=False)


class RmsNorm:
    """An RMSNorm of transformers in two calls; it rounds before it scales."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.detach(), eps

    @classmethod
    def of(cls, norm: Any) -> RmsNorm:
        return cls(norm.weight, norm.variance_epsilon)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], None, self._eps).mul_(self._weight)


class PackedLayer:
    """One layer of a family in `FUSIBLE`, over rows [rows, hidden]."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention_norm = RmsNorm.of(layer.input_layernorm)
        self._ffn_norm = RmsNorm.of(layer.post_attention_layernorm)
        self._index, self._scale = attention.layer_idx, attention.scaling
        self._head_dim = width = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads = [projection.out_features // width for projection in projections]
        self._head_norms = _head_norms(attention, *self._heads[:2])
        self._qkv = pack_linears(projections)
        self._output = pack_linears([attention.o_proj])
        self._gate_up = pack_linears([mlp.gate_proj, mlp.up_proj])
        self._down = pack_linears([mlp.down_proj])
        is_silu = isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))
        self._activation = functional.silu if is_silu else mlp.act_fn

    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """The layer's output; cosine and sine are [rows, head_dim], see `RopeTable`."""
        qkv = self._qkv(self._attention_norm(rows))
        qkv = qkv.view(len(rows), -1, self._head_dim).transpose(0, 1)
        queries, keys, values = self._heads
        turned, value = qkv.split((queries + keys, values))
        if self._head_norms is not None:
            turned = self._head_norms(turned)
        turned = (turned * cosine).add_(turned.roll(self._head_dim // 2, -1).mul_(sine))
        query, key = turned.split((queries, keys))
        mixed = plan.attend(self._index, query[None], key[None], value[None], self._scale)
        rows = self._output.added_to(rows, mixed.reshape(len(rows), -1))
        gate, up = self._gate_up(self._ffn_norm(rows)).chunk(2, -1)
        return self._down.added_to(rows, self._activation(gate).mul_(up))


class RopeTable:
    """Rotary factors of all positions, in a table that grows by doubling.

    The first half of the sines is negated: with it, heads are rotated by their halves swapped.
    """

    def __init__(self, rotary: nn.Module, like: torch.Tensor) -> None:
        self._rotary, self._like = rotary, like
        self._table = self._make(FIRST_POSITIONS)  # [positions, 2, head_dim]

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [rows, head_dim] of positions [rows]."""
        last = int(positions.max())
        if last >= len(self._table):
            self._table = self._make(2 * last)
        cosine, sine = self._table[positions].unbind(1)
        return cosine, sine

    def _make(self, positions: int) -> torch.Tensor:
        cosine, sine = self._rotary(self._like, torch.arange(positions)[None])
        half = sine.shape[-1] // 2
        return torch.stack((cosine[0], torch.cat((-sine[0, :, :half], sine[0, :, half:]), -1)), 1)


class PackedLayers:
    """All layers of a model, and its final norm."""

    def __init__(self, base: Any) -> None:
        self._layers = [PackedLayer(layer) for layer in base.layers]
        self._norm = RmsNorm.of(base.norm)
        self._rope = RopeTable(base.rotary_emb, base.norm.weight)

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        captured: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `ModelStep.run`; rows [rows, hidden] are embeddings."""
        cosine, sine = self._rope(positions)
        states = [rows]
        for layer in self._layers:
            rows = layer(rows, cosine, sine, plan)
            states.append(rows)
        features = torch.cat([states[i] for i in captured], -1) if captured else None
        return self._norm(rows), features


class PackedModel:
    """The packed weights of a model, which has given up its own.

    head    the LM head's weight in blocks (`PackedLinear.blocks`); None where it is not packed
    layers  the forward of the layers; None for families whose modules call packed products
    """

    def __init__(self, step: ModelStep) -> None:
        model = step.model
        unfuse(model)
        self.head = _pack_head(step)
        layers = list(getattr(base_of(model), "layers", ()))
        known = all(type(layer) in FUSIBLE and plain_linears(layer) for layer in layers)
        self.layers = PackedLayers(base_of(model)) if layers and known and not step.rope else None
        for module in model.modules():
            if type(module) is nn.Linear and module is not step.head and is_plain(module):
                pack_linears([module])


def _pack_head(step: ModelStep) -> torch.Tensor | None:
    """Pack the LM head, from whose blocks a tied embedding then takes its rows."""
    head, embedding = step.head, step.embedding
    tied = head.weight is embedding.weight
    if type(head) is not nn.Linear or (tied and type(embedding) is not nn.Embedding):
        return None
    product = PackedLinear(head.weight.detach(), head.bias)
    blocks = product.blocks(head.weight)
    if blocks is not None:
        head.forward = product
        _release(head)
        if tied:
            embedding.forward = partial(rows_of, blocks)
            embedding.weight = head.weight
    return blocks


class PackedStep(ModelStep):
    """The forward of an owned causal LM by packed weights."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__(step.model, owned=True)
        self.plain_head = step.plain_head
        if packed_of(self.model) is None:
            with torch.no_grad():
                self.model.packed_weights = PackedModel(step)
        self._packed: PackedModel = self.model.packed_weights

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layers = self._packed.layers
        if layers is None:
            return super().run(tokens, positions, plan)
        return layers.run(self.embedding(tokens), positions, plan, self.captured)

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        blocks = self._packed.head
        return super().head_rows(tokens) if blocks is None else rows_of(blocks, tokens)


class PackedRuntime(EagerRuntime):
    """Runs a model by packed weights on a CPU."""

    kind: RuntimeKind = "packed"


def packed_of(model: nn.Module) -> PackedModel | None:
    """The packed weights of a model; None for a model with its own."""
    return getattr(model, "packed_weights", None)


def _head_norms(attention: Any, queries: int, keys: int) -> RmsNorm | None:
    """One norm of all queries and keys [heads, rows, head_dim]; None in families without."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    heads = query.weight.expand(queries, 1, -1), key.weight.expand(keys, 1, -1)
    return RmsNorm(torch.cat(heads), query.variance_epsilon)

"""The packed runtime: a CPU's forwards by weights packed once, and by few calls a layer.

The layers of the common families run without transformers' modules. The query, key and value
products are joined, as are gate and up, and residual additions are part of the products; all
other operations round as in transformers. A step of few rows reads the weights and does little
else, so each call that it saves counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from decoder.configs import base_of
from decoder.model.attention import AttentionPlan, ForwardPlan
from decoder.model.runtime.base import RuntimeKind
from decoder.model.runtime.eager import EagerRuntime, ModelStep
from decoder.model.runtime.few_rows import NO_NORM, FewNorm, FewRows, are_few
from decoder.model.runtime.fused import FUSIBLE, is_plain, plain_linears, unfuse
from decoder.model.runtime.int8 import Int8Linear, fits_int8
from decoder.model.runtime.linear import JoinedLinear, PackedLinear, pack
from decoder.model.structure import bypassed_linears

Join = Callable[[Sequence[nn.Linear]], JoinedLinear]


class RmsNorm:
    """An RMSNorm of transformers in two calls; it rounds before it scales."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight.detach(), eps

    @cached_property
    def few(self) -> FewNorm:
        """The norm of few rows, made at its first use: it loads compiled functions."""
        weight = self._weight
        return FewNorm.of(weight[:, 0] if weight.ndim == 3 else weight, self._eps)

    @classmethod
    def of(cls, norm: Any) -> RmsNorm:
        return cls(norm.weight, norm.variance_epsilon)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], None, self._eps).mul_(self._weight)


class PackedLayer:
    """One layer of a family in `FUSIBLE`, over rows [rows, hidden]."""

    def __init__(self, layer: Any, join: Join) -> None:
        """join: makes a `JoinedLinear`"""
        attention, mlp = layer.self_attn, layer.mlp
        self._attention_norm = RmsNorm.of(layer.input_layernorm)
        self._ffn_norm = RmsNorm.of(layer.post_attention_layernorm)
        self._index, self._scale = attention.layer_idx, attention.scaling
        self._head_dim = width = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads = [projection.out_features // width for projection in projections]
        self._head_norms = _head_norms(attention, *self._heads[:2])
        self._qkv = join(projections)
        self._output = join([attention.o_proj])
        self._gate_up = join([mlp.gate_proj, mlp.up_proj])
        self._down = join([mlp.down_proj])
        is_silu = isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))
        self._activation = functional.silu if is_silu else mlp.act_fn

    def norms(self) -> list[RmsNorm]:
        norms = (self._attention_norm, self._ffn_norm, self._head_norms)
        return [norm for norm in norms if norm is not None]

    def few(self, rows: torch.Tensor, few: FewRows) -> torch.Tensor:
        """The layer's output, for few rows."""
        qkv = self._qkv(few.norm(rows, self._attention_norm.few))
        qkv = qkv.view(len(rows), -1, self._head_dim)
        norms = NO_NORM if self._head_norms is None else self._head_norms.few
        mixed = few.attend(self._index, qkv, norms, self._scale)
        rows = self._output.added_to(rows, mixed)
        return self._with_ffn(rows, few.norm(rows, self._ffn_norm.few))

    def many(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """The layer's output; cosine and sine are [rows, head_dim], see `RopeFactors`."""
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
        return self._with_ffn(rows, self._ffn_norm(rows))

    def _with_ffn(self, rows: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(normed).chunk(2, -1)
        return self._down.added_to(rows, self._activation(gate).mul_(up), overwrite=True)


class RopeFactors:
    """Rotary factors of positions, by the arithmetic of transformers' rotary modules.

    The first half of the sines is negated: with it, heads are rotated by their halves swapped.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self._frequencies, self._scaling = rotary.inv_freq.float(), rotary.attention_scaling
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [rows, head_dim] of positions [rows]."""
        angles = positions.float()[:, None] * self._frequencies
        cosine, sine = angles.cos() * self._scaling, angles.sin() * self._scaling
        factors = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return factors[0].to(self._dtype), factors[1].to(self._dtype)


class PackedLayers:
    """All layers of a model, and its final norm."""

    def __init__(self, base: Any, join: Join) -> None:
        self._layers = [PackedLayer(layer, join) for layer in base.layers]
        self._norm = RmsNorm.of(base.norm)
        self._rope = RopeFactors(base.rotary_emb, base.norm.weight.dtype)

    @cached_property
    def _sums_known(self) -> bool:
        """Whether compiled norms sum as torch does on this CPU."""
        return all(norm.few.lanes for layer in self._layers for norm in layer.norms())

    def run(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        captured: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `ModelStep.run`; rows [rows, hidden] are embeddings."""
        cosine, sine = self._rope(positions)
        few = None
        if are_few(rows) and isinstance(plan, ForwardPlan) and not plan.masked and self._sums_known:
            few = FewRows(rows, cosine, sine, plan)
        states = [rows]
        for layer in self._layers:
            rows = layer.few(rows, few) if few else layer.many(rows, cosine, sine, plan)
            states.append(rows)
        features = torch.cat([states[i] for i in captured], -1) if captured else None
        return self._norm(rows), features


class PackedModel:
    """The packed weights of a model, which has given up its own.

    head    the LM head; None where it is not packed
    layers  the forward of the layers; None for families whose modules call packed products
    """

    def __init__(self, step: ModelStep, *, int8: bool) -> None:
        model = step.model
        unfuse(model)
        join = _int8 if int8 else pack
        self.head = _pack_head(step, join)
        base = base_of(model)
        layers = list(getattr(base, "layers", ()))
        known = all(type(layer) in FUSIBLE and plain_linears(layer) for layer in layers)
        self.layers = PackedLayers(base, join) if layers and known and not step.rope else None
        keep = {id(step.head)} if self.layers else {id(step.head), *bypassed_linears(model)}
        for module in model.modules():
            if type(module) is nn.Linear and id(module) not in keep and is_plain(module):
                join([module])


def _int8(linears: Sequence[nn.Linear]) -> JoinedLinear:
    return Int8Linear(linears) if fits_int8(linears[0]) else pack(linears)


def _pack_head(step: ModelStep, join: Join) -> JoinedLinear | None:
    """Pack the LM head. A tied embedding takes its rows from it, or keeps a copy from oneDNN's."""
    head, embedding = step.head, step.embedding
    weight = head.weight
    tied = weight is embedding.weight
    if type(head) is not nn.Linear or (tied and type(embedding) is not nn.Embedding):
        return None
    packed = join([head])
    if tied and isinstance(packed, PackedLinear):
        embedding.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    elif tied:
        embedding.forward, embedding.weight = packed.rows, head.weight
    return packed


class PackedStep(ModelStep):
    """The forward of an owned causal LM by packed weights."""

    def __init__(self, step: ModelStep, *, int8: bool = False) -> None:
        """int8: round the weights to int8"""
        super().__init__(step.model, owned=True)
        self.plain_head, self.masks = step.plain_head, step.masks
        if packed_of(self.model) is None:
            with torch.no_grad():
                self.model.packed_weights = PackedModel(step, int8=int8)
        self._packed: PackedModel = self.model.packed_weights

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layers = self._packed.layers
        if layers is None:
            return super().run(tokens, positions, plan)
        return layers.run(self.embedding(tokens), positions, plan, self.captured)

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.logits(hidden))

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        head = self._packed.head
        return super().head_rows(tokens) if head is None else head.rows(tokens)

    def head_weight(self) -> torch.Tensor:
        head = self._packed.head
        return super().head_weight() if head is None else head.weight()


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

"""Decoder layers of a model that the engine owns, with fewer and larger operations.

A layer's query, key and value products become one, and so do gate and up; residual
additions go into the products that precede them, and queries and keys are rotated together.
On CUDA, norm, rotary embedding with the store into the cache, and SwiGLU are one Triton
kernel each: some 10 launches a layer in place of 56. Elsewhere the rest is as in the model.

No module is replaced: a layer gets a `forward` of its own, which `unfuse` takes off again,
and its weights become views of the joined ones, so that its state dict stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from decoder.attention import AttentionPlan
from decoder.parallel import SummedLinear
from decoder.runtime.tables import TablePlan
from decoder.runtime.triton_support import kernels_usable

# The layers whose forward is the one below; a mixture of experts and GPT-NeoX, whose query,
# key and value are one product already, stay as they are.
FUSIBLE = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


def fuse(model: nn.Module) -> int:
    """Fuse every layer that can be; how many are fused now. Repeating it changes nothing."""
    fused = 0
    with torch.no_grad():
        for layer in model.modules():
            if type(layer) in FUSIBLE and _plain_linears(layer):
                if not isinstance(layer.__dict__.get("forward"), FusedForward):
                    layer.forward = FusedForward(layer)
                fused += 1
    return fused


def unfuse(model: nn.Module) -> None:
    """Give every fused layer its own forward back; the weights stay equal."""
    for layer in model.modules():
        if isinstance(layer.__dict__.get("forward"), FusedForward):
            del layer.forward


class FusedForward:
    """The forward of one decoder layer, fused where it runs under an attention plan."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv_weight, self._qkv_bias = join_linears(projections)
        self._gate_up_weight, self._gate_up_bias = join_linears((mlp.gate_proj, mlp.up_proj))
        self._sizes = [projection.out_features for projection in projections]

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """As transformers calls it; without a plan the layer's own forward runs.

        hidden_states        [1, rows, hidden], likewise returned
        position_embeddings  cosines and sines [1, rows, head_dim]
        """
        layer = self._layer
        if plan is None:
            own: torch.Tensor = type(layer).forward(
                layer, hidden_states, position_embeddings=position_embeddings, **rest
            )
            return own
        rows = hidden_states[0]
        normed = normalise(layer.input_layernorm, rows)
        qkv = nn.functional.linear(normed, self._qkv_weight, self._qkv_bias)
        attended = self._attend(qkv, position_embeddings, plan)
        rows = add_product(rows, attended, layer.self_attn.o_proj)
        normed = normalise(layer.post_attention_layernorm, rows)
        gate_up = nn.functional.linear(normed, self._gate_up_weight, self._gate_up_bias)
        return add_product_(rows, gated(layer.mlp.act_fn, gate_up), layer.mlp.down_proj)[None]

    def _attend(
        self,
        qkv: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """[rows, heads * head_dim] from [rows, (heads + 2 kv_heads) * head_dim]."""
        attention = self._layer.self_attn
        cos, sin = position_embeddings
        if isinstance(plan, TablePlan) and _by_kernel(qkv):
            from decoder.runtime.triton_layers import rotate_and_store

            query = rotate_and_store(
                qkv, (cos[0], sin[0]), _norms(attention), plan.layer(attention.layer_idx)
            )
            return plan.attend_stored(attention.layer_idx, query, attention.scaling).flatten(1)
        heads = qkv.unflatten(1, (-1, attention.head_dim))  # [rows, heads + 2 kv_heads, head_dim]
        queries, keys, values = (size // attention.head_dim for size in self._sizes)
        turned, value = heads.split((queries + keys, values), dim=1)
        if hasattr(attention, "q_norm"):
            query, key = turned.split((queries, keys), dim=1)
            turned = torch.cat((attention.q_norm(query), attention.k_norm(key)), dim=1)
        turned = turned.transpose(0, 1)[None]  # queries and keys are rotated alike
        query, key = (turned * cos + rotate_half(turned) * sin).split((queries, keys), dim=1)
        value = value.transpose(0, 1)[None]
        found = plan.attend(attention.layer_idx, query, key, value, attention.scaling)
        return found[0].flatten(1)


def join_linears(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of all of them in one; their own become views of it."""
    weight = torch.cat([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if bias is not None:
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            linear.bias = nn.Parameter(part, requires_grad=False)
    return weight, bias


def add_product(rows: torch.Tensor, inputs: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """rows + linear(inputs), the addition inside the product: [rows, hidden].

    Not inside one that is summed over ranks, each of which would add the rows.
    """
    if linear.bias is not None or type(linear) is SummedLinear:
        return rows + linear(inputs)
    return torch.addmm(rows, inputs, linear.weight.t())


def add_product_(rows: torch.Tensor, inputs: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """The same, written over `rows`, which spares copying them: for rows that nobody else has."""
    if linear.bias is not None or type(linear) is SummedLinear:
        return rows.add_(linear(inputs))
    return rows.addmm_(inputs, linear.weight.t())


def normalise(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    """An RMSNorm module of transformers on [rows, hidden]."""
    if _by_kernel(rows):
        from decoder.runtime.triton_layers import rms_norm

        return rms_norm(rows, norm.weight, norm.variance_epsilon)
    found: torch.Tensor = norm(rows)
    return found


def gated(activation: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up of [rows, 2 * ffn], gate first: [rows, ffn]."""
    if isinstance(activation, nn.SiLU) and _by_kernel(gate_up):
        from decoder.runtime.triton_layers import swiglu

        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    found: torch.Tensor = activation(gate) * up
    return found


def _by_kernel(tensor: torch.Tensor) -> bool:
    return kernels_usable(tensor.device) and tensor.dtype != torch.float64


def _norms(attention: Any) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Weights of the query's and key's norm, and their epsilon, where a family has them."""
    if not hasattr(attention, "q_norm"):
        return None
    query, key = attention.q_norm, attention.k_norm
    return query.weight, key.weight, query.variance_epsilon


def _plain_linears(layer: Any) -> bool:
    """Whether all products are plain ones, or summed over ranks: not quantised or adapted."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    )  # fmt: skip
    return all(type(linear) in (nn.Linear, SummedLinear) for linear in linears)

"""Fused decoder layers for a model that the engine owns: fewer and larger operations.

The query, key and value products become one, and so do gate and up; residual additions are part
of the product before or of the norm behind. Each operation is a Triton kernel on CUDA (10 launches
a layer instead of 56), and PyTorch elsewhere and in float64.

No module is replaced. A layer gets its own `forward`, which `unfuse` removes, and its weights
become views of the joined weights, so the state dict is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, rotate_half
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from decoder.configs import base_of, first_reason
from decoder.model.attention import ForwardAttention, Scoring, current_attention, joined
from decoder.model.runtime.tables import RowTables
from decoder.tree.draft_tree import WORD

AMPERE = (8, 0)  # the least compute capability of our kernels, and of PyTorch's flash attention
FLASH_WIDEST = 256  # lanes of a head


@cache
def triton_version() -> str:
    """Empty without Triton: CUDA builds of PyTorch for Linux bring it, CPU builds do not."""
    return version("triton") if find_spec("triton") else ""


@cache
def kernels_refused(device: torch.device) -> str:
    """The reason why our Triton kernels do not run on a GPU, by a trial; empty where they do."""
    if not triton_version():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "the GPU is older than compute capability 8.0 (Ampere)"
    from decoder.model.runtime import kernels

    try:
        kernels.swiglu(torch.zeros(1, 2, device=device))
    except Exception as error:  # no C compiler or Python.h: Triton's errors have no common class
        return f"Triton does not start ({first_reason(error)})"
    return ""


def kernels_usable(device: torch.device) -> bool:
    """Whether our Triton kernels are compiled for the device; False in Triton's interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not interpreted and not kernels_refused(device)


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`runtime.kernels` where its kernels take the tensor, else None."""
    if tensor.dtype == torch.float64 or not kernels_usable(tensor.device):
        return None
    from decoder.model.runtime import kernels  # cannot be imported without Triton

    return kernels


@dataclass(frozen=True, slots=True)
class TableAttention(ForwardAttention):
    """Attention of the rows in some tables over a cache's tensor.

    data  [layers, 2, sequences, kv_heads, slots, head_dim]
    text  where the rows continue one sequence's text, for which PyTorch's kernel is faster: the
          sequence, and the number of its keys, these rows' included
    """

    data: Tensor
    tables: RowTables
    text: tuple[int, int] | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        self.store(layer, key[0], value[0])
        return self.attend_stored(layer, query[0].transpose(0, 1), scoring.scale)[None]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the rows' keys and values [kv_heads, rows, head_dim] to their slots."""
        place = self.tables.owners, slice(None), self.tables.slots
        for stored, new in zip(self.data[layer], (key, value), strict=True):
            stored[place] = new.transpose(0, 1)

    def attend_stored(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attention [rows, heads, head_dim] of rows whose keys and values are stored."""
        keys, values = self.data[layer]
        if self.text is not None and flash_usable(query):
            place = (self.text[0], slice(None), slice(self.text[1]))
            return text_attention(query, keys[place], values[place], scale)
        kernels = kernels_for(query)
        if kernels is None or query.shape[-1] > kernels.WIDEST:
            return reference_table_attention(query, keys, values, self.tables, scale)
        return kernels.table_attention(query, keys, values, self.tables, scale)


def flash_usable(query: Tensor) -> bool:
    """Whether PyTorch's flash attention takes the tensor: 16 bits on compute capability 8.0."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    capability = torch.cuda.get_device_capability(query.device)
    return query.shape[-1] <= FLASH_WIDEST and capability >= AMPERE


def text_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last rows of a text.

    query         [rows, heads, head_dim]
    keys, values  [kv_heads, keys, head_dim], the rows' own last
    returns       [rows, heads, head_dim]
    """
    output = nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=causal_lower_right(len(query), keys.shape[1]),
        scale=scale,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)


def reference_table_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: RowTables, scale: float
) -> Tensor:
    """Tree attention over row tables in PyTorch operations of fixed shapes.

    Reads every slot of the cache under a mask. For tests, and where no kernel runs.

    query         [rows, heads, head_dim]
    keys, values  [sequences, kv_heads, slots, head_dim]
    returns       [rows, heads, head_dim]
    """
    rows, heads, width = query.shape
    kv_heads, slots = keys.shape[1:3]
    accurate = torch.promote_types(query.dtype, torch.float32)
    prefix = tables.prefixes[tables.owners].long()[:, None]  # [rows, 1]
    place = torch.arange(slots, device=query.device)[None] - prefix  # [rows, slots] in the tail
    inside = (place >= 0) & (place < tables.tails[tables.owners][:, None])
    word = (place // WORD).clamp(0, tables.bits.shape[1] - 1)
    bit = (tables.bits.gather(1, word) >> (place % WORD).int()) & 1
    seen = (place < 0) | (inside & (bit == 1))
    packed = query.view(rows, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("rhgd,rhsd->rhgs", packed, keys[tables.owners]).to(accurate) * scale
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    mixed = torch.einsum("rhgs,rhsd->rhgd", weights.to(values.dtype), values[tables.owners])
    return mixed.reshape(rows, heads, width)


def normalise(norm: Any, hidden_states: Tensor) -> Tensor:
    """An RMSNorm module of transformers applied to [..., hidden]."""
    kernels = kernels_for(hidden_states)
    if kernels is None:
        return type(norm).forward(norm, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, normed = kernels.add_rms_norm(rows, None, norm.weight, norm.variance_epsilon)
    return normed.view(hidden_states.shape)


# Layers whose forward `FusedForward` computes. Not among them: mixtures of experts, and
# GPT-NeoX, whose query, key and value are one product already.
FUSIBLE = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


PROJECTIONS = attrgetter(
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def plain_linears(layer: Any) -> bool:
    """Whether all products are plain (`is_plain`)."""
    return all(map(is_plain, PROJECTIONS(layer)))


def fuse(model: nn.Module) -> int:
    """Fuse every layer of a known family; returns the number of fused layers. Idempotent."""
    fused = 0
    with torch.no_grad():
        for layer in model.modules():
            if type(layer) in FUSIBLE and plain_linears(layer):
                if not isinstance(layer.__dict__.get("forward"), FusedForward):
                    layer.forward = FusedForward(layer)
                fused += 1
    last: Any = getattr(base_of(model), "norm", None)
    if fused and type(last) in NORMS:
        last.forward = partial(normalise, last)
    return fused


def unfuse(model: nn.Module) -> None:
    """Remove the fused forwards; the weights keep their values."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, FusedForward) or getattr(forward, "func", None) is normalise:
            del module.forward


class FusedForward:
    """The fused forward of one decoder layer, used within our forwards."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        *qkv, output, gate, up, down = PROJECTIONS(layer)
        self._qkv, self._output = PlainLinear(qkv), PlainLinear([output])
        self._gate_up, self._down = PlainLinear([gate, up]), PlainLinear([down])
        self._sizes = [projection.out_features for projection in qkv]

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **rest: Any
    ) -> Tensor:
        """The layer's output [1, rows, hidden]; outside our forwards by the layer's own forward.

        hidden_states        [1, rows, hidden]
        position_embeddings  cosines and sines [1, rows, head_dim]
        """
        layer, running = self._layer, current_attention()
        if running is None:
            rest["position_embeddings"] = position_embeddings
            return type(layer).forward(layer, hidden_states, **rest)
        rows = hidden_states[0]
        norm, activation = layer.post_attention_layernorm, layer.mlp.act_fn
        kernels = kernels_for(rows)
        qkv = self._qkv(normalise(layer.input_layernorm, rows))
        attended = self._attend(qkv, position_embeddings, running)
        if kernels is None:
            rows = self._output.added_to(rows, attended)
            normed = normalise(norm, rows)
        else:  # `addmm` would copy the rows first; the sum costs the norm's kernel one more read
            added = self._output(attended)
            rows, normed = kernels.add_rms_norm(rows, added, norm.weight, norm.variance_epsilon)
        gate_up = self._gate_up(normed)
        if kernels is not None and isinstance(activation, (nn.SiLU, SiLUActivation)):
            active = kernels.swiglu(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            active = activation(gate) * up
        return self._down.added_to(rows, active, overwrite=True)[None]

    def _attend(
        self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], running: ForwardAttention
    ) -> Tensor:
        """Attention [rows, heads * head_dim] of qkv [rows, (heads + 2 kv_heads) * head_dim]."""
        attention = self._layer.self_attn
        cos, sin = position_embeddings
        layer, kernels, normed = attention.layer_idx, kernels_for(qkv), hasattr(attention, "q_norm")
        if kernels is not None and isinstance(running, TableAttention):
            norms = None
            if normed:
                query_norm, key_norm = attention.q_norm, attention.k_norm
                norms = query_norm.weight, key_norm.weight, query_norm.variance_epsilon
            cache = *running.data[layer], running.tables
            query = kernels.rotate_and_store(qkv, (cos[0], sin[0]), norms, *cache)
            return running.attend_stored(layer, query, attention.scaling).flatten(1)
        heads = qkv.unflatten(1, (-1, attention.head_dim))  # [rows, heads + 2 kv_heads, head_dim]
        queries, keys, values = (size // attention.head_dim for size in self._sizes)
        turned, value = heads.split((queries + keys, values), dim=1)
        if normed:
            query, key = turned.split((queries, keys), dim=1)
            turned = torch.cat((attention.q_norm(query), attention.k_norm(key)), dim=1)
        turned = turned.transpose(0, 1)[None]  # queries and keys are rotated alike
        query, key = (turned * cos + rotate_half(turned) * sin).split((queries, keys), dim=1)
        value = value.transpose(0, 1)[None]
        return running.attend(layer, query, key, value, Scoring(attention.scaling))[0].flatten(1)


def joined_weights(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights and the biases of layers, each joined by rows."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return joined(weights), torch.cat(biases) if biases else None


class PlainLinear:
    """Layers with a joined weight, of which the modules' weights are views.

    weight_bytes  that a product reads of one weight, scales included
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._weight, self._bias = joined_weights(linears)
        self.weight_bytes = self._weight.itemsize
        sizes = [linear.out_features for linear in linears]
        for linear, part in zip(linears, self._weight.split(sizes), strict=True):
            linear.weight = nn.Parameter(part, requires_grad=False)
        if self._bias is not None:
            for linear, part in zip(linears, self._bias.split(sizes), strict=True):
                linear.bias = nn.Parameter(part, requires_grad=False)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs [..., out] of inputs [..., in], side by side."""
        return nn.functional.linear(inputs, self._weight, self._bias)

    def outputs_from(self, first: int, inputs: Tensor) -> Tensor:
        """The outputs from number `first` on."""
        bias = None if self._bias is None else self._bias[first:]
        return nn.functional.linear(inputs, self._weight[first:], bias)

    def added_to(self, rows: Tensor, inputs: Tensor, *, overwrite: bool = False) -> Tensor:
        """rows + outputs of inputs; `overwrite` allows to use the memory of rows."""
        if self._bias is not None:
            return rows + self(inputs)
        add = rows.addmm_ if overwrite else rows.addmm
        return add(inputs, self._weight.t())

    def weight(self) -> Tensor:
        """The plain weight [out, in], or a copy."""
        return self._weight

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [..., in] of the weight by their numbers [...]."""
        return self._weight[numbers]


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an `nn.Linear`: not quantised, adapted or packed."""
    return type(linear) is nn.Linear and "forward" not in linear.__dict__

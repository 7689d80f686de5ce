"""Building blocks of drafters that are a transformer: rotary embedding, cache, attention.

Sequences are drafted one at a time, so tensors have no batch axis: [rows, width].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

from costmodel.errors import InputError

FIRST_POSITIONS = 256  # of a table of rotary factors
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
# Kinds of rotary embedding whose angles do not depend on how long the text has become.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Rope = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, [rows, head_dim] each


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The sizes of a drafter's layers; `bias` is attention's, `rope` the rotary fields."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    bias: bool
    rope: Mapping[str, Any]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def costs(self) -> dict[str, int | bool]:
        """The fields that the time of a forward depends on."""
        names = ("hidden", "ffn", "heads", "kv_heads", "head_dim", "bias")
        return {name: getattr(self, name) for name in names}

    def norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.hidden, eps=self.norm_eps)

    def mlp(self) -> nn.Module:
        """The gated feed-forward of Llama and Qwen models."""
        heads = 1  # unused; a config's default must divide its hidden size
        sizes = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.ffn, num_attention_heads=heads
        )
        return LlamaMLP(sizes)


def hash_of(fields: Mapping[str, object]) -> str:
    """12 hex digits over the fields that costs depend on, as in `ModelArchitecture.hash`."""
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Rotary:
    """The rotary position embedding that a drafter's config.json describes."""

    def __init__(self, shape: DraftShape, device: torch.device) -> None:
        self._tables: dict[torch.dtype, Rope] = {}
        try:
            config = LlamaConfig(head_dim=shape.head_dim, **shape.rope)
            kind = (config.rope_parameters or {})["rope_type"]
            if kind not in ROPE_TYPES:
                raise InputError(
                    f"the drafter's rotary embedding of type '{kind}' is not supported",
                    hint=f"Supported are {', '.join(ROPE_TYPES)}.",
                )
            self.module = LlamaRotaryEmbedding(config).to(device)
        except (TypeError, ValueError, LookupError, AttributeError, StrictDataclassError) as error:
            raise InputError(
                f"the drafter's rotary embedding cannot be built: {error}",
                hint="Look at rope_theta and rope_scaling in its config.json.",
            ) from error

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        """Cosines and sines [rows, head_dim] at positions [rows]."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cosine, sine = self.module(like, positions[None])
        return cosine[0], sine[0]

    def looked_up(self, positions: torch.Tensor, end: int, dtype: torch.dtype) -> Rope:
        """The same of positions below `end`, from a table that grows by doubling."""
        table = self._tables.get(dtype)
        if table is None or len(table[0]) < end:
            every = torch.arange(max(2 * end, FIRST_POSITIONS), device=positions.device)
            table = self._tables[dtype] = self(every, dtype)
        return table[0][positions], table[1][positions]


def rotate(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotated heads [heads, rows, head_dim]; each half holds one of the two coordinates."""
    cosine, sine = rope
    return heads * cosine + rotate_half(heads) * sine


@dataclass(frozen=True, slots=True)
class Span:
    """The cached rows that the rows of one forward see: slots first..end, under a mask.

    mask   additive, over the last of these slots (`decoder.model.attention.attend`), or None
    slots  int64 [keys], 0 or more: slots that are gathered in place of first..end
    """

    first: int
    end: int
    mask: torch.Tensor | None
    slots: torch.Tensor | None = None


ALL_ROWS = Span(0, 0, None)  # the whole prefix, and of the rows behind it what their block says


class RowCache(Protocol):
    """The keys and values of all layers, and attention over them."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [kv_heads, rows, head_dim] of the rows of a forward."""

    def attend(self, layer: int, query: torch.Tensor, seen: Span, scale: float) -> torch.Tensor:
        """Attention of queries [heads, rows, head_dim] over the span they see; same shape."""


class DraftAttention(nn.Module):
    """Attention over a cache, for input rows of some width; `normed` has query and key norms."""

    def __init__(self, shape: DraftShape, width: int, *, normed: bool) -> None:
        super().__init__()
        self.head_dim, self.scaling = shape.head_dim, shape.head_dim**-0.5
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, queries, bias=shape.bias)
        self.k_proj = nn.Linear(width, keys, bias=shape.bias)
        self.v_proj = nn.Linear(width, keys, bias=shape.bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.bias)
        if normed:
            self.q_norm: nn.Module = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
            self.k_norm: nn.Module = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def store(self, rows: torch.Tensor, rope: Rope, cache: RowCache, layer: int) -> None:
        cache.write(layer, *self.keys_values(rows, rope))

    def keys_values(self, rows: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, rows, head_dim] of rows [rows, width]."""
        # Under autocast, what comes from a product is narrower than the norm's weight.
        key = rotate(self.k_norm(self._heads(self.k_proj(rows)).to(rows.dtype)), rope)
        return key, self._heads(self.v_proj(rows))

    def queries(self, rows: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Queries [heads, rows, head_dim] of rows [rows, width]."""
        return rotate(self.q_norm(self._heads(self.q_proj(rows)).to(rows.dtype)), rope)

    def forward(
        self, rows: torch.Tensor, rope: Rope, cache: RowCache, layer: int, seen: Span
    ) -> torch.Tensor:
        """Outputs [rows, hidden] of rows [rows, width] over the stored rows that they see."""
        mixed = cache.attend(layer, self.queries(rows, rope), seen, self.scaling)
        return self.o_proj(mixed.transpose(0, 1).reshape(len(rows), -1))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

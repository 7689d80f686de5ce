"""Attention for batched writing: query heads of a group read their keys once.

transformers repeats keys and values for every query head wherever there is a mask, which takes
most of a batched step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "rooftree-grouped"


def register_grouped() -> str:
    """Make the function known to transformers; the name by which a model asks for it."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """[batch, rows, heads, head_dim] of queries [batch, heads, rows, head_dim]."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if rows > 1 or attention_mask is None:
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            is_causal=attention_mask is None and rows > 1,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2).contiguous(), None
    # One row each: the heads of a group take the place of rows.
    folded = query.reshape(batch, kv_heads, heads // kv_heads, width)
    mixed = scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(batch, 1, heads, width), None

"""Tree attention: every row sees the whole prefix and its own ancestors.

The grouped query heads are packed into rows of their KV head, so keys and values
are never expanded, and only the few columns of the tree itself are masked: no
mask over the prefix exists. The prefix part and the tree part are computed apart
and merged by their log-sum-exp (the two-part form of online softmax; Dao et al.,
FlashAttention), or, in bfloat16 on a CPU, in one softmax a block of rows at a
time. Memory is O(rows x rows) or O(block x context), never O(rows x context). The
exception is a CPU with little to compute, where one call under a mask is quicker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import AttentionInterface

from decoder.kv_cache import KVCache

ATTENTION_NAME = "rooftree_split"
BLOCK_SCORES = 1 << 20  # scores held at once in `blocked_attention`, about a cache's worth
BLOCKED_FROM = 1 << 13  # rows x keys from which `blocked_attention` is the quickest on a CPU
KEY_MULTIPLE = 128  # its key counts, since a matrix product of a new shape costs 0.6 ms to set up


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a forward.

    rows       which of the forward's rows
    start      the cache slot of the first of them
    keys       how many keys each layer reads: prefix, pending rows, these, and padding
               where blocked
    tail_mask  None for one row, else an additive mask [1, 1, group * rows, tail] over the
               last `tail` keys (0 where a row sees one, -inf elsewhere), repeated for
               the `group` query heads that share a KV head
    blocked    whether `blocked_attention` is used
    """

    sequence: int
    rows: slice
    start: int
    keys: int
    tail_mask: torch.Tensor | None
    blocked: bool


class AttentionPlan(Protocol):
    """What every layer of one forward shares, and how each attends."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store the layer's new keys and values in the cache, and attend over all of it.

        query, key, value  [1, heads or kv_heads, rows, head_dim]
        returns            [1, rows, heads, head_dim]
        """


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Attention sequence by sequence; sequences of any length lie end to end."""

    cache: KVCache
    segments: tuple[Segment, ...]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionPlan`; each sequence attends over its own keys."""
        parts = []
        for part in self.segments:
            rows = part.rows
            self.cache.write(layer, part.sequence, part.start, key[:, :, rows], value[:, :, rows])
            keys, values = self.cache.read(layer, part.sequence, part.keys)
            parts.append(
                attend(query[:, :, rows], keys, values, part.tail_mask, scale, part.blocked)
            )
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return output.transpose(1, 2)


def plan_segment(
    cache: KVCache, sequence: int, rows: slice, visible: torch.Tensor | None, group: int
) -> Segment:
    """The plan of some rows behind a sequence's committed and pending ones.

    visible  boolean [rows, pending + rows], None for a single row without pending ones
    """
    prefix, start = cache.lengths[sequence], cache.end(sequence)
    count = rows.stop - rows.start
    keys = start + count
    if visible is None:
        return Segment(sequence, rows, start, keys, None, blocked=False)
    data = cache.data
    blocked = (
        data.device.type == "cpu" and data.dtype == torch.bfloat16 and count * keys >= BLOCKED_FROM
    )
    if blocked:
        keys = min(-(-keys // KEY_MULTIPLE) * KEY_MULTIPLE, cache.capacity)
    # Where there is little to compute, one masked call is quicker than two and their merging.
    whole = data.device.type == "cpu" and count * keys < BLOCKED_FROM
    seen = prefix if whole else 0
    mask = tail_mask(visible, group, keys - prefix, data.dtype, seen)
    return Segment(sequence, rows, start, keys, mask, blocked)


def tail_mask(
    visible: torch.Tensor, group: int, tail: int, dtype: torch.dtype, seen: int = 0
) -> torch.Tensor:
    """The additive mask of packed heads from a boolean visibility [rows, pending + rows].

    Returns [1, 1, group * rows, seen + tail]: every row sees the first `seen` keys; keys behind
    the rows are padding that none sees.
    """
    rows, known = visible.shape
    mask = torch.full((rows, seen + tail), float("-inf"), dtype=dtype, device=visible.device)
    mask[:, :seen] = 0.0
    mask[:, seen : seen + known].masked_fill_(visible, 0.0)
    return mask.repeat(group, 1)[None, None]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    blocked: bool = False,
) -> torch.Tensor:
    """Attention of some rows over a prefix that all see and a tail under a mask.

    query       [batch, heads, rows, head_dim]
    key, value  [batch, kv_heads, context + tail, head_dim]
    mask        additive [1, 1, group * rows, tail], or None where every row sees every key
    returns     [batch, heads, rows, head_dim]
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    packed = query.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    if mask is None:
        merged, _ = partial_attention(packed, key, value, None, scale)
        return merged.view(batch, heads, rows, width)
    if blocked:
        return blocked_attention(packed, key, value, mask, scale).view(batch, heads, rows, width)
    context = key.shape[2] - mask.shape[3]
    tail, tail_lse = partial_attention(
        packed, key[:, :, context:], value[:, :, context:], mask, scale
    )
    if context == 0:
        return tail.view(batch, heads, rows, width)
    prefix, prefix_lse = partial_attention(
        packed, key[:, :, :context], value[:, :, :context], None, scale
    )
    weight = torch.sigmoid(tail_lse - prefix_lse).unsqueeze(-1).to(tail.dtype)
    return torch.lerp(prefix, tail, weight).view(batch, heads, rows, width)


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Masked softmax attention as two matrix products, a block of query rows at a time.

    torch's flash kernel does not use the CPU's bfloat16 instructions; its matrix
    products do and are about twice as fast here. Scores are rounded to bfloat16, as
    in transformers' eager attention. Shapes as in `attend`, heads packed.
    """
    context = key.shape[2] - mask.shape[3]
    scaled, keys = query * scale, key.transpose(-1, -2)
    output = torch.empty_like(query)
    rows = max(BLOCK_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]), 64)
    for start in range(0, query.shape[2], rows):
        block = slice(start, start + rows)
        scores = torch.matmul(scaled[:, :, block], keys)
        scores[..., context:] += mask[:, :, block]
        output[:, :, block] = torch.matmul(scores.softmax(-1), value)
    return output


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over some of the keys, with the log-sum-exp that merging needs.

    query [batch, kv_heads, q, head_dim]; key, value [batch, kv_heads, k, head_dim];
    mask broadcastable to [batch, kv_heads, q, k] or None.
    Returns the output like query and the log-sum-exp [batch, kv_heads, q].
    """
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return output, lse
    return reference_attention(query, key, value, mask, scale)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`partial_attention` in plain PyTorch operations, for any device and for tests."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)).to(accurate) * scale
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(value.dtype)
    return torch.matmul(weights, value), lse


def split_attention_forward(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    plan: AttentionPlan,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers as `rooftree_split`.

    Tensors are [1, heads, rows, head_dim]; returns [1, rows, heads, head_dim], as
    transformers expects. The plan of the forward does the work.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(layer, query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, split_attention_forward)

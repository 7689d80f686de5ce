"""Tree attention: every row sees the whole prefix and its own ancestors.

The query heads of a KV head are packed as rows, so keys and values are never expanded. The
prefix and the tree's tail are attended separately and merged by their log-sum-exp (the
two-part form of online softmax; Dao et al., FlashAttention), so only the tail needs a mask. On
a CPU there are two other ways: in bfloat16 one softmax over a block of rows at a time, and
for small inputs one call under a mask over prefix and tail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from costmodel.errors import InputError
from costmodel.statistics import Bools, Ints
from decoder.model.kv_cache import KVCache

ATTENTION_NAME = "rooftree_split"
BLOCK_SCORES = 1 << 20  # scores held at once by `blocked_attention`, to fit a CPU's cache
BLOCKED_FROM = 3 << 12  # rows x keys from which `blocked_attention` is fastest on a CPU
KEY_MULTIPLE = 128  # its key counts are rounded up: a product of a new shape costs 0.6 ms to set up


LayerViews = list[tuple[Tensor, Tensor]]  # see `KVCache.views`


@dataclass(frozen=True, slots=True)
class RowBlock:
    """One sequence's rows of a forward, on the host.

    tokens   int64 [rows]
    offsets  int64 [rows]  positions counted from the end of the committed tokens
    visible  boolean [rows, pending + rows]: what each row sees of the pending and new rows; None
             for a piece of text, whose rows see all before them
    """

    sequence: int
    tokens: Ints
    offsets: Ints
    visible: Bools | None

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def mask(self) -> Bools | None:
        """What the rows see of each other; None for a single row that sees all."""
        if self.visible is None and self.rows > 1:
            return np.tri(self.rows, dtype=np.bool_)
        return self.visible


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys, beside a mask.

    scale   of the products of queries and keys
    cap     scores go through cap * tanh(score / cap)
    sinks   [heads]: a score of each head that takes its share of the weights, and has no value
    chosen  [1, rows, keys]: the numbers of the keys that each row reads, of all that the forward
            reads; see `decoder.model.latents`
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None
    chosen: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence in a forward.

    rows       the sequence's slice of the forward's rows
    start      the cache slot of its first row
    read       each layer's keys and values: prefix, pending rows, these rows, and padding
               where blocked
    tail_mask  additive mask [1, 1, group * rows, tail] over the last `tail` keys (0 where a row
               sees the key, -inf elsewhere), repeated for the `group` query heads of a KV
               head; None for one row
    blocked    True to use `blocked_attention`
    spans      of a text that is longer than some layer's window: for each layer, the first slot
               that it reads and the additive mask [1, 1, group * rows, keys] from there on, or
               None where it sees everything
    """

    rows: slice
    cache: KVCache
    sequence: int
    start: int
    read: LayerViews
    tail_mask: Tensor | None
    blocked: bool
    spans: Sequence[tuple[int, Tensor] | None] | None = None

    @property
    def end(self) -> int:
        """The cache slot behind its rows."""
        return self.start + self.rows.stop - self.rows.start

    @cached_property
    def written(self) -> LayerViews:
        """Each layer's cache slots of these rows."""
        return self.cache.views(self.sequence, self.start, self.end)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the layer's keys and values [1, kv_heads, rows, head_dim] to the cache."""
        keys, values = self.written[layer]
        keys.copy_(key)
        values.copy_(value)

    def attend(self, layer: int, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of stored rows: queries and result [1, heads, rows, head_dim]."""
        span = None if self.spans is None else self.spans[layer]
        (key, value), mask = self.read[layer], self.tail_mask
        if span is not None:
            first, mask = span
            key, value = (part[:, :, first : first + mask.shape[3]] for part in (key, value))
        return attend(query, key, value, mask, scoring, self.blocked)


class ForwardAttention(ABC):
    """Attention of one forward: state that its layers share, and the call that each makes.

    states  `RowStates` of a model that has some (`decoder.model.mixers`); its attentions are then
            known by their order, since several may be of one layer
    """

    states: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model's forward gets beside its tokens."""
        return {}

    @abstractmethod
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Store the layer's new keys and values in the cache, and attend over the whole cache.

        query, key, value  [1, heads or kv_heads, rows, head_dim]
        returns            [1, rows, heads, head_dim]
        """


@dataclass(frozen=True)
class SegmentAttention(ForwardAttention):
    """Attention sequence by sequence, with the sequences' rows end to end."""

    segments: tuple[Segment, ...]
    states: Any = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        parts = []
        for part in self.segments:
            rows, *stored = (heads[:, :, part.rows] for heads in (query, key, value))
            part.store(layer, *stored)
            parts.append(part.attend(layer, rows, scoring))
        return joined(parts, 2).transpose(1, 2)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, which would copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def plan_segment(
    cache: KVCache, sequence: int, rows: slice, visible: Tensor | None, group: int
) -> Segment:
    """The segment of a sequence's new rows, behind its committed and pending rows.

    visible  boolean [rows, pending + rows], None for a single row with no pending rows
    """
    prefix, start = cache.lengths[sequence], cache.end(sequence)
    count = rows.stop - rows.start
    keys, mask, blocked = start + count, None, False
    if visible is not None:
        on_cpu, small = cache.device.type == "cpu", count * keys < BLOCKED_FROM
        blocked = on_cpu and cache.dtype == torch.bfloat16 and not small
        if blocked:
            keys = min(-(-keys // KEY_MULTIPLE) * KEY_MULTIPLE, cache.capacity)
        # For small inputs one masked call is faster than two calls and their merge.
        seen = prefix if on_cpu and small else 0
        mask = tail_mask(visible, group, keys - prefix, cache.dtype, seen)
    return Segment(rows, cache, sequence, start, cache.views(sequence, 0, keys), mask, blocked)


def tail_mask(visible: Tensor, group: int, tail: int, dtype: torch.dtype, seen: int = 0) -> Tensor:
    """The additive mask [1, 1, group * rows, seen + tail] of packed heads.

    visible  boolean [rows, pending + rows]
    tail     keys behind the first `seen`; those beyond `visible` are padding that no row sees
    seen     leading keys that every row sees
    """
    rows, real = visible.shape
    mask = torch.full((rows, seen + tail), float("-inf"), dtype=dtype, device=visible.device)
    mask[:, :seen] = 0.0
    mask[:, seen : seen + real].masked_fill_(visible, 0.0)
    return mask.repeat(group, 1)[None, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    blocked: bool = False,
) -> Tensor:
    """Attention of rows over a prefix that all of them see and a tail under a mask.

    query       [batch, heads, rows, head_dim], as the result
    key, value  [batch, kv_heads, context + tail, head_dim]
    mask        additive [1, 1, group * rows, tail], or None where every row sees every key; it is
                repeated for all heads where it was not when it was made
    """
    (batch, heads, rows, width), kv_heads = query.shape, key.shape[1]
    packed = query.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    context = 0
    if mask is not None:
        context = key.shape[2] - mask.shape[3]
        if mask.shape[2] < packed.shape[2]:
            mask = mask.repeat(1, 1, packed.shape[2] // mask.shape[2], 1)
    sinks = scoring.sinks
    if blocked and mask is not None and scoring.cap is None and sinks is None:
        mixed = blocked_attention(packed, key, value, mask, scoring.scale)
        return mixed.view(batch, heads, rows, -1)
    tail = (key[:, :, context:], value[:, :, context:]) if context else (key, value)
    merged, lse = partial_attention(packed, *tail, mask, scoring)
    if context:
        leading = key[:, :, :context], value[:, :, :context]
        prefix, prefix_lse = partial_attention(packed, *leading, None, scoring)
        weight = torch.sigmoid(lse - prefix_lse).unsqueeze(-1).to(merged.dtype)
        merged, lse = torch.lerp(prefix, merged, weight), torch.logaddexp(lse, prefix_lse)
    merged = merged.view(batch, heads, rows, -1)
    if sinks is None:
        return merged
    # A sink takes its share of the merged result.
    share = torch.sigmoid(lse.reshape(batch, heads, rows, 1) - sinks.to(lse.dtype).view(-1, 1, 1))
    return (merged * share).to(merged.dtype)


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Masked softmax attention as two matrix products, a block of query rows at a time.

    torch's matrix products use the CPU's bfloat16 instructions and are about twice as fast as
    its flash kernel, which does not. Scores are rounded to bfloat16, as in transformers'
    eager attention. Shapes as in `attend`, with packed heads.
    """
    context = key.shape[2] - mask.shape[3]
    scaled, keys = query * scale, key.transpose(-1, -2)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    rows = max(BLOCK_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]), 64)
    for start in range(0, query.shape[2], rows):
        block = slice(start, start + rows)
        scores = torch.matmul(scaled[:, :, block], keys)
        scores[..., context:] += mask[:, :, block]
        output[:, :, block] = torch.matmul(scores.softmax(-1), value)
    return output


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a part of the keys, with the log-sum-exp for the merge.

    query       [batch, kv_heads, q, head_dim]
    key, value  [batch, kv_heads, k, head_dim]
    mask        broadcastable to [batch, kv_heads, q, k], or None
    returns     the output [batch, kv_heads, q, width of values], and the log-sum-exp
                [batch, kv_heads, q]
    """
    scale, cap = scoring.scale, scoring.cap
    if query.device.type == "cpu" and cap is None and key.shape[3] == value.shape[3]:
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, attn_mask=mask, scale=scale)
    accurate = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(-1, -2)).to(accurate) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(value.dtype)
    return torch.matmul(weights, value), lse


# Not an argument of the model's forward: not every family passes those on to its attention.
_RUNNING: ContextVar[ForwardAttention | None] = ContextVar("attention", default=None)


def current_attention() -> ForwardAttention | None:
    """The attention of the forward that is running here; None outside of ours."""
    return _RUNNING.get()


@contextmanager
def attending(by: ForwardAttention) -> Iterator[None]:
    """Forwards inside attend by this attention."""
    token = _RUNNING.set(by)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def replace_once(place: Any, name: str, following: Callable[[Any], Any]) -> None:
    """Let `following(function)` take a function's place, for as long as the process runs."""
    function = getattr(place, name, None)
    if function is not None and not hasattr(function, "follows"):
        new: Any = wraps(function)(following(function))
        new.follows = function
        setattr(place, name, new)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """The model attends by the registered function of this name."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def split_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers as `rooftree_split`.

    query, key, value  [1, heads or kv_heads, rows, head_dim]
    returns            [1, rows, heads, head_dim] and None, as transformers expects
    """
    running = current_attention()
    if running is None:
        raise InputError(
            "this model is a decoder's own, and attends only inside its forwards",
            hint="Load another model for calls of your own, or make the decoder from yours.",
        )
    layer: Any = module.layer_idx if running.states is None else running.states.next_attention()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, *map(options.get, ("softcap", "s_aux", "indices")))
    return running.attend(layer, query, key, value, scoring).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, split_attention_forward)

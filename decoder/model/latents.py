"""Latent attention over a cache of latents, and the keys that an indexer chooses for each row.

transformers makes each head's keys and values of a latent vector (DeepSeek-V2, arXiv 2405.04434).
Here a query is brought to the latents instead, which all heads then read as one key and value.
An indexer (DeepSeek-V3.2) has keys of its own, and the rows of a tree choose among those that
they see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

import torch
from torch.nn.functional import pad

from decoder.model.attention import (
    ATTENTION_NAME,
    Extras,
    Segment,
    SegmentAttention,
    attend,
    joined,
)

TRACE_NAME = "rooftree_trace"  # of the attention function that notes a model's structure


def follow_latents(model: torch.nn.Module) -> None:
    """Let the model's modules give latents to our attention functions; once for each class."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in kinds:
        expand = getattr(kind, "expand_kv", None)
        if expand is not None and not hasattr(expand, "follows"):
            kind.expand_kv = _following(expand)


def _following(expand: Any) -> Any:
    @wraps(expand)
    def follow(module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        ours = module.config._attn_implementation in (ATTENTION_NAME, TRACE_NAME)
        if not ours or not keeps_latents(module):
            return expand(module, latents, rotated)
        weights = module.kv_b_proj.weight.view(1, module.num_heads, -1, latents.shape[3])
        return torch.cat((latents, rotated), -1), weights

    follow.follows = expand  # type: ignore[attr-defined]
    return follow


def keeps_latents(module: Any) -> bool:
    """Whether a module's attention reads latents; quantised weights cannot be taken apart."""
    linear = getattr(module, "kv_b_proj", None)
    plain = type(linear) is torch.nn.Linear and linear.bias is None
    return plain and getattr(module.config, "quantization_config", None) is None


def has_indexer(model: torch.nn.Module) -> bool:
    """Whether some layers choose the keys that they read."""
    return any(hasattr(part, "index_topk") for part in model.modules()) and any(
        hasattr(part, "expand_kv") for part in model.modules()
    )


@dataclass(frozen=True)
class LatentAttention(SegmentAttention):
    """Latent attention sequence by sequence.

    It is also the cache that a model with an indexer gives its keys to.

    layers  number of the model's; the stores behind theirs are those of indexers, in their order
    """

    layers: int = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        extras: Extras | None = None,
    ) -> torch.Tensor:
        """
        key    latents [1, 1, rows, latent + rotary width]
        value  the weights [1, heads, key and value width, latent width] that would expand them
        """
        parts, first = [], 0
        for part in self.segments:
            part.written[layer][0].copy_(key[:, :, part.rows])
            latents, mask = part.read[layer][0], part.tail_mask
            if extras is not None and extras.chosen is not None:
                mask = _chosen_mask(part, extras.chosen[0, part.rows] - first, latents)
            attention = partial(attend, mask=mask, scale=scale, blocked=part.blocked, extras=extras)
            parts.append(_attend(query[:, :, part.rows], latents, value, attention))
            first += _keys(part)
        return joined(parts, 2).transpose(1, 2)

    @property
    def arguments(self) -> dict[str, Any]:
        indexed = len(self.segments[0].read) > self.layers
        return {"past_key_values": self, "attention_mask": self._visible} if indexed else {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a cache: what `expand_kv` gave goes on to the attention function."""
        return key, value

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Store an indexer's keys [1, rows, width]; returns those of all sequences, end to end."""
        store, parts = self.layers + self._indexed.setdefault(layer, len(self._indexed)), []
        for part in self.segments:
            part.written[store][0].copy_(keys[:, None, part.rows])
            parts.append(part.read[store][0][:, 0, : _keys(part)])
        return joined(parts, 1)

    @cached_property
    def _indexed(self) -> dict[int, int]:
        """The number of each layer's indexer, in the order of this forward."""
        return {}

    @cached_property
    def _visible(self) -> torch.Tensor:
        """Boolean [1, 1, rows, keys of all sequences]."""
        blocks = []
        for part in self.segments:
            seen = torch.ones(
                part.rows.stop - part.rows.start, _keys(part), dtype=torch.bool,
                device=part.cache.device,
            )  # fmt: skip
            if part.tail_mask is not None:
                tail = part.tail_mask[0, 0] == 0
                first = part.read[0][0].shape[2] - tail.shape[1]
                seen[:, first:] = tail[:, : seen.shape[1] - first]
            blocks.append(seen)
        return torch.block_diag(*blocks).bool()[None, None]


def _attend(
    query: torch.Tensor,
    latents: torch.Tensor,
    weights: torch.Tensor,
    attention: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention [1, heads, rows, value width], in the form that takes fewer products."""
    _, heads, made, rank = weights.shape
    own = query.shape[3] - latents.shape[3] + rank  # the width that is not rotated
    expanding = query.shape[2] * (2 * rank - made) >= rank * made
    value = latents[..., :rank]
    if expanding:
        states = value @ weights.transpose(2, 3)
        rotated = latents[..., rank:].expand(-1, heads, -1, -1)
        key, value = torch.cat((states[..., :own], rotated), -1), states[..., own:]
        value = pad(value, (0, max(key.shape[3] - made + own, 0)))  # a CPU's kernel has one width
    else:
        key = latents
        query = torch.cat((query[..., :own] @ weights[:, :, :own], query[..., own:]), -1)
    mixed = attention(query, key, value)
    return mixed[..., : made - own] if expanding else mixed @ weights[:, :, own:].transpose(2, 3)


def _keys(part: Segment) -> int:
    """Keys that a segment's rows read, without padding."""
    return part.start + part.rows.stop - part.rows.start


def _chosen_mask(part: Segment, chosen: torch.Tensor, latents: torch.Tensor) -> torch.Tensor | None:
    """The segment's mask where its rows read the chosen of their keys only.

    chosen  [rows, keys]; numbers outside of the segment's keys are of keys that no row sees
    """
    width, mask = latents.shape[2], part.tail_mask
    if chosen.shape[1] >= _keys(part):
        return mask
    inside = (chosen >= 0) & (chosen < width)
    hidden = latents.new_full((len(chosen), width + 1), float("-inf"))
    hidden.scatter_(1, chosen.long().where(inside, width), 0.0)
    if mask is not None:
        hidden[:, width - mask.shape[3] : width] += mask[0, 0]
    return hidden[None, None, :, :width]

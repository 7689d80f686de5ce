"""Latent attention over a cache of latents, and the keys that an indexer chooses for each row.

transformers makes each head's keys and values of a latent vector (DeepSeek-V2, arXiv 2405.04434).
Here a query is brought to the latents instead, which all heads then read as one key and value.
An indexer (DeepSeek-V3.2) has keys of its own, and the rows of a tree choose among those that
they see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from decoder.model.attention import (
    ATTENTION_NAME,
    Scoring,
    Segment,
    SegmentAttention,
    attend,
    joined,
    replace_once,
)

TRACE_NAME = "rooftree_trace"  # of the attention function that notes a model's structure


def follow_latents(model: torch.nn.Module) -> None:
    """Let the model's modules give latents to our attention functions; once for each class."""
    for kind in {type(module) for module in model.modules()}:
        replace_once(kind, "expand_kv", _following)


def _following(expand: Any) -> Any:
    def follow(module: Any, latents: Tensor, rotated: Tensor) -> Any:
        ours = module.config._attn_implementation in (ATTENTION_NAME, TRACE_NAME)
        if not ours or not keeps_latents(module):
            return expand(module, latents, rotated)
        weights = module.kv_b_proj.weight.view(1, module.num_heads, -1, latents.shape[3])
        return torch.cat((latents, rotated), -1), weights

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
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """
        key    latents [1, 1, rows, latent + rotary width]
        value  the weights [1, heads, key and value width, latent width] that would expand them
        """
        parts, first = [], 0
        for part in self.segments:
            part.written[layer][0].copy_(key[:, :, part.rows])
            latents, mask = part.read[layer][0], part.tail_mask
            if scoring.chosen is not None:
                mask = _chosen_mask(part, scoring.chosen[0, part.rows] - first, latents)
            attention = partial(attend, mask=mask, scoring=scoring, blocked=part.blocked)
            parts.append(_attend(query[:, :, part.rows], latents, value, attention))
            first += part.end
        return joined(parts, 2).transpose(1, 2)

    @property
    def arguments(self) -> dict[str, Any]:
        indexed = len(self.segments[0].read) > self.layers
        return {"past_key_values": self, "attention_mask": self._visible} if indexed else {}

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As of a cache: what `expand_kv` gave goes on to the attention function."""
        return key, value

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Store an indexer's keys [1, rows, width]; returns those of all sequences, end to end."""
        store, parts = self.layers + self._indexed.setdefault(layer, len(self._indexed)), []
        for part in self.segments:
            part.written[store][0].copy_(keys[:, None, part.rows])
            parts.append(part.read[store][0][:, 0, : part.end])
        return joined(parts, 1)

    @cached_property
    def _indexed(self) -> dict[int, int]:
        """The number of each layer's indexer, in the order of this forward."""
        return {}

    @cached_property
    def _visible(self) -> Tensor:
        """Boolean [1, 1, rows, keys of all sequences]."""
        blocks = []
        for part in self.segments:
            sizes = part.end - part.start, part.end
            seen = torch.ones(sizes, dtype=torch.bool, device=part.cache.device)
            if part.tail_mask is not None:
                tail = part.tail_mask[0, 0] == 0
                first = part.read[0][0].shape[2] - tail.shape[1]
                seen[:, first:] = tail[:, : seen.shape[1] - first]
            blocks.append(seen)
        return torch.block_diag(*blocks).bool()[None, None]


def _attend(
    query: Tensor, latents: Tensor, weights: Tensor, attention: Callable[..., Tensor]
) -> Tensor:
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


def _chosen_mask(part: Segment, chosen: Tensor, latents: Tensor) -> Tensor | None:
    """The segment's mask where its rows read the chosen of their keys only.

    chosen  [rows, keys]; numbers outside of the segment's keys are of keys that no row sees
    """
    width, mask = latents.shape[2], part.tail_mask
    if chosen.shape[1] >= part.end:
        return mask
    inside = (chosen >= 0) & (chosen < width)
    hidden = latents.new_full((len(chosen), width + 1), float("-inf"))
    hidden.scatter_(1, chosen.long().where(inside, width), 0.0)
    if mask is not None:
        hidden[:, width - mask.shape[3] : width] += mask[0, 0]
    return hidden[None, None, :, :width]

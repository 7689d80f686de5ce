"""Masks by position, for texts that are longer than the windows of some layers.

They are the mask functions of transformers, asked with the positions of a tree's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decoder.model.attention import Extras, Segment, attend, attend_with_extras, tail_mask

MaskFunction = Callable[..., torch.Tensor]  # of transformers: (batch, head, rows, keys) to booleans


@dataclass(frozen=True)
class MaskedSegment(Segment):
    """The rows of a sequence that is longer than some layer's window.

    spans  for each layer, the first slot that it reads and the additive mask
           [1, 1, group * rows, keys] from there on; None where it sees everything
    """

    spans: Sequence[tuple[int, torch.Tensor] | None]

    def attend(
        self, layer: int, query: torch.Tensor, scale: float, extras: Extras | None = None
    ) -> torch.Tensor:
        span = self.spans[layer]
        if span is None:
            return super().attend(layer, query, scale, extras)
        first, mask = span
        end = first + mask.shape[3]
        key, value = (part[:, :, first:end] for part in self.read[layer])
        if extras is None:
            return attend(query, key, value, mask, scale, self.blocked)
        return attend_with_extras(query, key, value, mask, scale, extras)


def mask_segment(
    segment: Segment,
    masks: Sequence[MaskFunction | None],
    positions: torch.Tensor,
    visible: torch.Tensor | None,
    group: int,
) -> MaskedSegment:
    """The segment with masks by position, for a text that is longer than a window.

    masks      each layer's own mask function; None where it sees everything
    positions  int64 [rows]
    visible    see `plan_segment`; a row sees all its ancestors, in the order of their positions
    """
    if visible is None:
        visible = torch.ones((1, 1), dtype=torch.bool, device=positions.device)
    cache, prefix = segment.cache, segment.cache.lengths[segment.sequence]
    rows = positions[:, None]
    behind = prefix + visible.cumsum(1) - 1  # the positions of the pending and new rows
    before = torch.arange(prefix, device=positions.device)[None]
    spans: dict[MaskFunction | None, tuple[int, torch.Tensor] | None] = {None: None}
    for mask in dict.fromkeys(masks):
        if mask is not None:
            seen = mask(0, 0, rows, before).expand(len(rows), prefix)
            first = int((~seen.any(0)).cumprod(0).sum())
            seen = torch.cat((seen[:, first:], mask(0, 0, rows, behind) & visible), 1)
            spans[mask] = first, tail_mask(seen, group, seen.shape[1], cache.dtype)
    fields = {name: getattr(segment, name) for name in Segment.__dataclass_fields__}
    return MaskedSegment(**fields, spans=[spans[mask] for mask in masks])

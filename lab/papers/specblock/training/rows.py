"""Training forwards of SpecBlock drafters: blocks from many anchors of one text at once.

All first blocks of the text are one forward, each further round of blocks another. They run the
drafter's modules over a cache that stays in the autograd graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoder.drafters.blocks import Rotary
from lab.papers.specblock.cache import DraftCache, span
from lab.papers.specblock.model import SpecBlockModel


class GraphCache(DraftCache):
    """A draft cache with gradients, to which rows are only appended.

    Rows are float32, as queries are: under autocast keys and values have different dtypes.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]

    def make_room(self, rows: int) -> None:
        return

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._parts[layer].append((key.float(), value.float()))

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self._parts[layer], strict=True)
        return (
            torch.cat(keys, dim=1)[None, :, first:end],
            torch.cat(values, dim=1)[None, :, first:end],
        )


@dataclass(frozen=True, slots=True)
class Passage:
    """A text as the drafter reads it, on the drafter's device.

    tokens      int64 [L]
    features    [L, 3 * hidden]
    embeddings  [L, hidden]
    """

    tokens: torch.Tensor
    features: torch.Tensor
    embeddings: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftedBlocks:
    """One block from every anchor.

    hidden  h^(L), [A, K, hidden]
    after   int64 [A]: position k = 1..K proposes the text's token at index after + k
    """

    hidden: torch.Tensor
    after: torch.Tensor


def run_blocks(
    model: SpecBlockModel,
    rotary: Rotary,
    passage: Passage,
    anchors: torch.Tensor,
    cuts: torch.Tensor,
    chained: torch.Tensor | None = None,
) -> list[DraftedBlocks]:
    """A first block from each anchor, and chains of blocks behind some of them.

    anchors  int64 [A]: tokens t of the text, whose first block proposes the tokens behind t + 1
    cuts     int64 [M - 1, C], 1..K: the position of the last block at which the next starts
    chained  int64 [C]: places among the anchors of those with a chain; None for all
    A start past the text's end repeats its last token; nothing there is supervised.
    """
    first, count = int(anchors.min()), int(anchors.max()) + 1
    length, cache = model.config.block_length, GraphCache(model.config.layers)
    conditions = model.condition(passage.features[:count])
    embeddings = passage.embeddings[1 : count + 1]
    hidden = model.first_blocks(rotary, cache, conditions, embeddings, count - first)
    cache.length = count * length
    drafted = [DraftedBlocks(hidden[anchors - first], anchors + 1)]
    if chained is None:
        chained = torch.arange(len(anchors), device=anchors.device)
    # The rows that a chain's newest block sees: those of earlier tokens, and its own blocks'.
    own = anchors[chained, None] * length + torch.arange(length, device=anchors.device)
    visible = torch.arange(cache.length, device=anchors.device) <= own[..., None]
    last = DraftedBlocks(drafted[0].hidden[chained], anchors[chained] + 1)
    rope = rotary(model.positions(anchors[chained]).flatten(), model.dtype)
    for cut in cuts:
        each, after = torch.arange(len(cut), device=cut.device), last.after + cut
        embeddings = passage.embeddings[after.clamp_max(len(passage.tokens) - 1)]
        rows = model.inputs(last.hidden[each, cut - 1], embeddings).flatten(0, 1)
        within = torch.block_diag(*[torch.ones(length, length).tril()] * len(cut)).bool()
        path = visible[each, cut - 1].repeat_interleave(length, dim=0)
        mask = torch.cat((path, within.to(cut.device)), dim=1)
        end = cache.length + len(rows)
        seen = span(model.config.shape, (0, end), mask, rows.dtype)
        hidden = model(rows, rope, cache, seen).unflatten(0, (-1, length))
        cache.length = end
        visible = mask.unflatten(0, (-1, length))
        last = DraftedBlocks(hidden, after)
        drafted.append(last)
    return drafted

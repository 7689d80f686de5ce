"""Training forwards of SpecBlock drafters: blocks from many anchors of one text at once.

The prefix rows of the text and all first blocks are one forward, each further round of blocks
another. They run the drafter's modules over a cache that stays in the autograd graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoder.drafters.blocks import DraftCache, Rotary, span
from lab.papers.specblock.model import SpecBlockModel, Wanted


class GraphCache(DraftCache):
    """A draft cache with gradients, to which rows are only appended.

    Rows are float32, as queries are: under autocast keys and values have different dtypes.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]

    def make_room(self, rows: int) -> None:
        return

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
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
    singles: torch.Tensor | None = None,
) -> list[DraftedBlocks]:
    """One chain of blocks from each anchor.

    anchors  int64 [A]: prefix rows t whose block proposes the tokens behind t + 1
    cuts     int64 [M - 1, A], 1..K: the position of the last block at which the next starts
    singles  int64 [S]: prefix rows, up to the last anchor, of whose blocks only position 1 is
             wanted; that costs no forward. They come last, with K = 1
    A start past the text's end repeats its last token; nothing there is supervised.
    """
    chains = _Chains(model, rotary, passage)
    if singles is None:
        singles = anchors[:0]
    first, alone = chains.first(anchors, singles)
    drafted = [first]
    for cut in cuts:
        drafted.append(chains.next(drafted[-1], cut))
    return drafted if len(singles) == 0 else [*drafted, alone]


class _Chains:
    """The forwards over one text, which share a cache."""

    def __init__(self, model: SpecBlockModel, rotary: Rotary, passage: Passage) -> None:
        self._model, self._rotary, self._passage = model, rotary, passage
        self._cache = GraphCache(model.config.layers)
        self._length = model.config.block_length
        self._offsets = torch.arange(self._length, device=passage.tokens.device)
        self._visible = torch.empty(0)  # rows that the newest blocks see, [A, K, rows so far]
        self._positions = torch.empty(0)  # their rotary positions, [A, K]

    def first(
        self, anchors: torch.Tensor, singles: torch.Tensor
    ) -> tuple[DraftedBlocks, DraftedBlocks]:
        """First blocks from the anchors, and blocks of position 1 alone from other prefix rows."""
        model, passage, count = self._model, self._passage, int(anchors.max()) + 1
        conditions = model.condition(passage.features[:count])
        fused = model.inputs(conditions, passage.embeddings[1 : count + 1])
        rows = torch.cat((fused[:, 0], fused[anchors, 1:].flatten(0, 1)))
        every = torch.arange(len(rows), device=anchors.device)
        # A block's rows: the anchor itself, and K - 1 behind the prefix.
        numbers = torch.cat((anchors[:, None], every[count:].view(len(anchors), -1)), dim=1)
        before, positions = every.clone(), every.clone()
        before[numbers[:, 1:]] = numbers[:, :-1]
        positions[numbers] = anchors[:, None] + self._offsets
        visible = _first_visible(count, numbers)
        wanted = torch.cat((numbers.flatten(), singles))
        hidden = self._run(rows, before, positions, visible, wanted)
        blocks, alone = hidden.split((numbers.numel(), len(singles)))
        self._visible, self._positions = visible[numbers], positions[numbers]
        return (
            DraftedBlocks(blocks.unflatten(0, numbers.shape), anchors + 1),
            DraftedBlocks(alone[:, None], singles + 1),
        )

    def next(self, block: DraftedBlocks, cut: torch.Tensor) -> DraftedBlocks:
        """A block from position `cut` [A] of each of the newest blocks."""
        passage, length, count = self._passage, self._length, len(cut)
        each = torch.arange(count, device=cut.device)
        start, after = (each, cut - 1), block.after + cut
        embeddings = passage.embeddings[after.clamp_max(len(passage.tokens) - 1)]
        rows = self._model.inputs(block.hidden[start], embeddings).flatten(0, 1)
        before = length * each[:, None] + (self._offsets - 1).clamp_min(0)
        positions = self._positions[start][:, None] + 1 + self._offsets
        tril = torch.ones(length, length, device=cut.device).tril()
        within = torch.block_diag(*[tril] * count).bool()
        path = self._visible[start].repeat_interleave(length, dim=0)
        visible = torch.cat((path, within), dim=1)
        hidden = self._run(rows, before.flatten(), positions.flatten(), visible)
        self._visible = visible.unflatten(0, (count, length))
        self._positions = positions
        return DraftedBlocks(hidden.unflatten(0, (count, length)), after)

    def _run(
        self,
        rows: torch.Tensor,
        before: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h^(L) of the wanted rows (None: all); `visible` is [rows, all rows so far]."""
        cache, shape = self._cache, self._model.config.shape
        end = cache.length + len(rows)
        seen = span(shape, (0, end), visible, rows.dtype)
        rope = self._rotary(positions, rows.dtype)
        some = None
        if wanted is not None:
            some = Wanted(wanted, span(shape, (0, end), visible[wanted], rows.dtype))
        hidden: torch.Tensor = self._model(rows, before, rope, cache, seen, some)
        cache.length = end
        return hidden


def _first_visible(count: int, numbers: torch.Tensor) -> torch.Tensor:
    """The mask [rows, rows]: causal in the prefix; a block sees it up to its anchor, and itself.

    numbers  [A, K]: rows of each block, of which the first is in the prefix
    """
    blocks, length = numbers.shape
    total = count + blocks * (length - 1)
    visible = torch.ones(total, total, dtype=torch.bool, device=numbers.device).tril()
    for position in range(1, length):
        rows = numbers[:, position]
        visible[rows] = visible[numbers[:, position - 1]]
        visible[rows, rows] = True
    return visible

"""The drafter that is a smaller causal language model of the target's vocabulary.

It grows the tree level by level, one forward a level, over its own KV cache of the text. The rows
of accepted nodes stay in the cache; tokens that have no row there (of plain rounds, of nodes that
were never expanded) go into one forward together with the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from costmodel.statistics import Bools, Ints
from decoder.acceptance.drawn import LevelDistributions, draw_levels
from decoder.acceptance.sampling import cooled
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.drafters.caches import PlacedText, SharedCaches
from decoder.drafters.vocabulary import check_vocabulary, top_children
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.model.target import Target
from decoder.tree.draft_tree import EMPTY, NO_CANDIDATES, CandidateTree, DraftTree, visibility
from decoder.tree.growth import Frontier, grow

CATCH_UP_ROWS = 64  # uncached tokens that go into the bonus token's forward; more are prefilled


class CausalLMDrafter(Drafter):
    """Drafts with a causal language model, which `model` runs as it would a target.

    Under the runtime `graphs` its forwards are captured as the target's are. Its sessions share
    one cache, since captured forwards belong to a cache.

    vocab   size of the target's vocabulary, where one of the two models is padded
    target  the target that is drafted for; a shared cache is as large as the target's
    """

    name = "autoregressive"
    draws: Draws = "levels"
    max_depth = 8  # each level costs a forward
    deepens = True

    def __init__(
        self, model: Target, *, vocab: int | None = None, target: Target | None = None
    ) -> None:
        self.model = model
        self.architecture_hash = model.architecture.hash
        self.vocab = vocab or model.architecture.vocab
        self.caches = SharedCaches(model.structure, model.dtype, model.device, target)

    @classmethod
    def from_pretrained(cls, name: str | Path, target: Target) -> CausalLMDrafter:
        """The drafter of a name. Raises InputError if its tokens are not the target's."""
        loaded = load_model(
            str(name), weights="pretrained", dtype=target.dtype, device=target.device, download=True
        )
        check_vocabulary(loaded, target.loaded)
        return cls(make_target(loaded), vocab=target.architecture.vocab, target=target)

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> CausalLMSession:
        return CausalLMSession(self, prompt)


class CausalLMSession(DraftSession):
    """The drafting of one text, over its own sequence of a KV cache.

    Between `draft` and `observe` the cache's pending rows are the uncached tokens, the bonus
    token and the expanded nodes; `_rows` describes them.
    """

    def __init__(self, drafter: CausalLMDrafter, prompt: Ints) -> None:
        self._drafter, self.vocab = drafter, drafter.vocab
        self.rewinds = not drafter.model.structure.states
        self._model = drafter.model
        self._text = PlacedText(drafter.caches)
        self._rows = PendingRows(prompt[:0])
        if len(prompt) < self._model.max_context:
            self._prefill(prompt)

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """Candidates below the bonus token; none past the drafter's last position."""
        deepest = self._drafter.deepest(request.growth)
        depth = min(request.depth, deepest, self._levels(context))
        if depth < 1:
            return NO_CANDIDATES
        q = self._distributions(context, request.temperature)
        return grow(top_children(q), request.growth, depth)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        depth = min(int(shape.depths.max(initial=0)), self._levels(context))
        if depth < 1:
            return EMPTY
        return draw_levels(shape, self._distributions(context, temperature), generator, depth)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the rows of the text and of the accepted nodes that were expanded."""
        if len(self._rows.tokens) == 0:
            return
        self._make_room(0)
        self._model.commit(self._rows.path(emitted[:-1]), self._text.sequence)
        self._rows = PendingRows(self._rows.tokens[:0])

    def rewind(self, tokens: int) -> None:
        self._text.cut(tokens)
        self._rows = PendingRows(self._rows.tokens[:0])

    def _levels(self, context: Ints) -> int:
        """Levels that can be drafted; nodes of the last level need no position of their own."""
        return self._model.max_context + 1 - len(context)

    def _distributions(self, context: Ints, temperature: float) -> LevelDistributions:
        """q below the bonus token, after a forward of all uncached tokens, then by levels."""
        text, vocab = self._text, self.vocab
        text.cut(text.length)  # rows of a draft that was not observed
        if len(context) - text.length > CATCH_UP_ROWS:
            self._prefill(context[text.length : -1])
        self._rows = pending = PendingRows(context[text.length :])
        visible = np.tri(len(pending.tokens), dtype=np.bool_)
        at_bonus = self._extend(pending.tokens, pending.offsets, visible)[-1:]
        rows = np.zeros(0, np.int64)  # pending rows of the last frontier

        @torch.inference_mode()
        def q(frontier: Frontier) -> torch.Tensor:
            nonlocal rows
            if frontier.depth:
                first = len(pending.tokens)
                visible = pending.add(frontier.tokens, rows[frontier.above])
                logits = self._extend(frontier.tokens, pending.offsets[first:], visible)
                rows = np.arange(first, len(pending.tokens))
            else:
                logits, rows = at_bonus, np.array([pending.text_rows - 1])
            accurate = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
            shares = cooled(accurate, temperature).softmax(-1)
            return torch.nn.functional.pad(shares, (0, vocab - shares.shape[1]))

        return q

    def _prefill(self, tokens: Ints) -> None:
        self._make_room(len(tokens))
        self._model.prefill(torch.from_numpy(tokens.copy()), self._text.sequence)

    def _extend(self, tokens: Ints, offsets: Ints, visible: Bools) -> torch.Tensor:
        self._make_room(len(tokens))
        return self._model.extend(tokens, offsets, visible, self._text.sequence)

    def _make_room(self, rows: int) -> None:
        """Make room for more rows of the text, and give its cache to the model."""
        self._text.make_room(rows)
        self._model.cache = self._text.cache


class PendingRows:
    """The P rows after the committed ones: some text, then nodes of the tree.

    tokens   int64 [P]
    parents  int64 [P]  the row before in text or tree, -1 for the first
    offsets  int64 [P]  positions, counted from the committed tokens
    """

    def __init__(self, text: Ints) -> None:
        self.text_rows = len(text)
        self.tokens = text.copy()  # the context is read-only
        self.parents = np.arange(len(text)) - 1
        self.offsets = np.arange(len(text))

    def add(self, tokens: Ints, parents: Ints) -> Bools:
        """Append nodes below some rows; returns which rows each of them sees, [F, P + F]."""
        self.tokens = np.concatenate((self.tokens, tokens))
        self.parents = np.concatenate((self.parents, parents))
        self.offsets = np.concatenate((self.offsets, self.offsets[parents] + 1))
        return visibility(self.parents[1:])[-len(tokens) :]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows of the text, and of the nodes on the path of `tokens` below it."""
        rows = list(range(self.text_rows))
        for token in tokens:
            below = np.flatnonzero((self.parents == rows[-1]) & (self.tokens == token))
            if len(below) == 0:
                break
            rows.append(int(below[0]))
        return rows

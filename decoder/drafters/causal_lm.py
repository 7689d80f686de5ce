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
from decoder.acceptance.drawn import draw_levels
from decoder.acceptance.sampling import cooled
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.drafters.caches import PlacedText, SharedCaches
from decoder.drafters.vocabulary import TopChildren, check_vocabulary
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.model.target import Target
from decoder.tree.draft_tree import EMPTY, NO_CANDIDATES, CandidateTree, DraftTree
from decoder.tree.growth import Frontier, grow

MAX_DEPTH = 8
CATCH_UP_ROWS = 64  # uncached tokens that go into the bonus token's forward; more are prefilled


class CausalLMDrafter(Drafter):
    """Drafts with a causal language model, which `model` runs as it would a target.

    Under the runtime `graphs` its forwards are captured as the target's are. Its sessions share
    one cache, since captured forwards belong to a cache.

    max_depth  deepest position drafted; each costs a forward of the drafter. By default 8, or
               the depth of a growth rule that has a larger one
    vocab      size of the target's vocabulary, where one of the two models is padded
    target     the target that is drafted for; a shared cache is as large as the target's
    """

    name = "autoregressive"
    draws: Draws = "levels"

    def __init__(
        self,
        model: Target,
        *,
        max_depth: int | None = None,
        vocab: int | None = None,
        target: Target | None = None,
    ) -> None:
        self.model = model
        self.max_depth = MAX_DEPTH if max_depth is None else max_depth
        self.deepens = max_depth is None
        self.architecture_hash = model.architecture.hash
        self.vocab = vocab or model.architecture.vocab
        self.caches = SharedCaches(model.structure, model.dtype, model.device, target)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, target: Target, *, max_depth: int | None = None
    ) -> CausalLMDrafter:
        """The drafter in a folder or of a hub id, on the target's device and in its dtype.

        Raises InputError if its weights cannot be loaded or its tokens are not the target's.
        """
        loaded = load_model(
            str(name), weights="pretrained", dtype=target.dtype, device=target.device, download=True
        )
        check_vocabulary(loaded, target.loaded)
        vocab = target.architecture.vocab
        return cls(make_target(loaded), max_depth=max_depth, vocab=vocab, target=target)

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
        q = _CausalDistributions(self, self._catch_up(context), request.temperature)
        return grow(TopChildren(q), request.growth, depth)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        """As the base says; the empty tree past the drafter's last position."""
        depth = min(int(shape.depths.max(initial=0)), self._levels(context))
        if depth < 1:
            return EMPTY
        q = _CausalDistributions(self, self._catch_up(context), temperature)
        return draw_levels(shape, q, generator, depth)

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

    def expand(self, tokens: Ints, parents: Ints) -> tuple[Ints, torch.Tensor]:
        """Forward nodes below some pending rows; the nodes' rows [F] and logits [F, vocab]."""
        first = len(self._rows.tokens)
        visible = self._rows.add(tokens, parents)
        logits = self._extend(tokens, self._rows.offsets[first:], visible)
        return np.arange(first, first + len(tokens)), logits

    @property
    def bonus_row(self) -> int:
        """The pending row of the bonus token, the root of the tree."""
        return self._rows.text_rows - 1

    def _levels(self, context: Ints) -> int:
        """Levels that can be drafted; nodes of the last level need no position of their own."""
        return self._model.max_context + 1 - len(context)

    def _catch_up(self, context: Ints) -> torch.Tensor:
        """Logits [1, vocab] at the bonus token, from a forward of all uncached tokens."""
        text = self._text
        text.cut(text.length)  # rows of a draft that was not observed
        if len(context) - text.length > CATCH_UP_ROWS:
            self._prefill(context[text.length : -1])
        self._rows = PendingRows(context[text.length :])
        logits = self._extend(self._rows.tokens, self._rows.offsets, self._rows.visible)
        return logits[-1:]

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
    parents  int64 [P]    the row before in text or tree, -1 for the first
    offsets  int64 [P]    positions, counted from the committed tokens
    visible  bool [P, P]  whether row i sees row j
    """

    def __init__(self, text: Ints) -> None:
        self.text_rows = len(text)
        self.tokens = text.copy()  # the context is read-only
        self.parents = np.arange(len(text)) - 1
        self.offsets = np.arange(len(text))
        self.visible = np.tri(len(text), dtype=np.bool_)

    def add(self, tokens: Ints, parents: Ints) -> Bools:
        """Append nodes below some rows; returns which rows each of them sees, [F, P + F]."""
        before, count = len(self.tokens), len(tokens)
        visible = np.zeros((before + count, before + count), np.bool_)
        visible[:before, :before] = self.visible
        visible[before:, :before] = self.visible[parents]
        visible[before:, before:] = np.eye(count, dtype=np.bool_)
        self.visible = visible
        self.tokens = np.concatenate((self.tokens, tokens))
        self.parents = np.concatenate((self.parents, parents))
        self.offsets = np.concatenate((self.offsets, self.offsets[parents] + 1))
        return visible[before:]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows of the text, and of the nodes on the path of `tokens` below it."""
        rows = list(range(self.text_rows))
        for token in tokens:
            below = np.flatnonzero((self.parents == rows[-1]) & (self.tokens == token))
            if len(below) == 0:
                break
            rows.append(int(below[0]))
        return rows


class _CausalDistributions:
    """q at the bonus token and at nodes, over the target's vocabulary, one forward a level.

    logits  [1, vocab] at the bonus token
    """

    def __init__(self, session: CausalLMSession, logits: torch.Tensor, temperature: float) -> None:
        self._session = session
        self._logits = logits
        self._temperature = temperature
        self._rows = np.array([session.bonus_row])  # pending rows of the last frontier

    def root(self) -> torch.Tensor:
        self._rows = np.array([self._session.bonus_row])
        return self._q(self._logits)

    def expand(self, frontier: Frontier) -> torch.Tensor:
        parents = self._rows[frontier.above]
        self._rows, logits = self._session.expand(frontier.tokens, parents)
        return self._q(logits)

    @torch.inference_mode()
    def _q(self, logits: torch.Tensor) -> torch.Tensor:
        """q [rows, vocab] in float32 or finer."""
        vocab = self._session.vocab
        accurate = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
        q = cooled(accurate, self._temperature).softmax(-1)
        return torch.nn.functional.pad(q, (0, vocab - q.shape[1]))

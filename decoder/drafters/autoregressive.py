"""A smaller causal language model of the same vocabulary as drafter.

It grows the tree level by level, one forward a level, over a KV cache of its own
that follows the text: the rows of accepted nodes stay in it, and what it has not
seen (plain rounds, nodes that were never expanded) is caught up in one forward
together with the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.acceptance.drawn_levels import draw_levels
from decoder.drafters.base import DraftRequest, Draws
from decoder.drafters.caches import Caches, OwnCaches, Place, SharedCaches
from decoder.drafters.vocabulary import check_vocabulary
from decoder.growth import Children, Frontier, grow
from decoder.loading import load_model
from decoder.target import Target
from decoder.tree import EMPTY, CandidateTree, DraftTree

MAX_DEPTH = 8
CATCH_UP_ROWS = 64  # unseen tokens that go into the bonus token's forward; more are prefilled
NOTHING = CandidateTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class AutoregressiveDrafter:
    """Drafts with a causal language model; `model` runs it, as a target of its own.

    So its forwards are captured as the target's are, where its runtime is `graphs`; its
    sessions then share a cache, to which the captured forwards belong.

    max_depth  deepest position drafted; each costs a forward of the drafter
    vocab      size of the target's vocabulary, where one of the two is padded
    target     that is drafted for: the cache is made for what it has reserved
    """

    name = "autoregressive"
    feature_layers: tuple[int, ...] = ()
    draws: Draws = "levels"

    def __init__(
        self,
        model: Target,
        *,
        max_depth: int = MAX_DEPTH,
        vocab: int | None = None,
        target: Target | None = None,
    ) -> None:
        self.model = model
        self.max_depth = max_depth
        self.architecture_hash = model.architecture.hash
        self.vocab = vocab or model.architecture.vocab
        place = (model.architecture, model.dtype, model.device)
        self._own, self._shared = OwnCaches(*place), SharedCaches(*place, target)

    @property
    def caches(self) -> Caches:
        """Where sessions keep their keys and values."""
        return self._own if self.model.runtime.capture is None else self._shared

    @classmethod
    def from_pretrained(
        cls, name: str | Path, target: Target, *, max_depth: int = MAX_DEPTH
    ) -> AutoregressiveDrafter:
        """The drafter of a folder or hub id, on the target's device and in its dtype.

        Raises InputError where its weights cannot be loaded or its tokens are not the
        target's.
        """
        loaded = load_model(
            str(name),
            weights="pretrained",
            dtype=target.dtype,
            device=target.device,
            download=True,
        )
        check_vocabulary(loaded, target.loaded)
        vocab = target.architecture.vocab
        return cls(Target(loaded), max_depth=max_depth, vocab=vocab, target=target)

    def session(self) -> AutoregressiveSession:
        return AutoregressiveSession(self)


class AutoregressiveSession:
    """The drafting of one sequence, with its own KV cache on the drafter's model.

    Between `draft` and `observe` the cache's pending rows are the tokens caught up, the
    bonus token and the expanded nodes; `_rows` says what they are.
    """

    def __init__(self, drafter: AutoregressiveDrafter) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._caches = drafter.caches
        self._place: Place | None = None
        self._rows = PendingRows(np.zeros(0, np.int64))

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        self._rows = PendingRows(prompt[:0])
        if self._place is not None:
            self._place.cut(0)
        if len(prompt) < self._model.max_context:
            self._prefill(prompt)

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        """Candidates below the bonus token; none where the drafter's positions have run out."""
        depth = self._depth(context, request.depth)
        if depth < 1:
            return NOTHING
        distributions = _Distributions(self, self._catch_up(context), request.temperature)
        return grow(_BestChildren(distributions), request.growth, depth)

    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        """A `DrawnTree` of this shape, drawn from q; a chain is speculative sampling.

        The empty tree where the drafter's positions have run out.
        """
        depth = self._depth(context, int(shape.depths.max(initial=0)))
        if depth < 1:
            return EMPTY
        distributions = _Distributions(self, self._catch_up(context), temperature)
        return draw_levels(shape, distributions, generator, depth)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Keep the rows of the text and of the accepted nodes that were expanded."""
        if len(self._rows.tokens) == 0:
            return
        kept = self._rows.path(emitted[:-1])
        place = self._room(0)
        self._model.commit(kept, place.sequence)
        self._rows = PendingRows(self._rows.tokens[:0])

    def rewind(self, tokens: int) -> None:
        """Forget the rows behind the first tokens, and those of the last draft."""
        if self._place is not None:
            self._place.cut(tokens)
        self._rows = PendingRows(self._rows.tokens[:0])

    def expand(
        self, tokens: NDArray[np.int64], parents: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Forward nodes below the given pending rows: their own rows and logits [F, vocab]."""
        first = len(self._rows.tokens)
        visible = self._rows.add(tokens, parents)
        logits = self._extend(tokens, self._rows.offsets[first:], visible)
        return np.arange(first, first + len(tokens)), logits

    @property
    def bonus_row(self) -> int:
        """The pending row that is the root of the tree."""
        return self._rows.text_rows - 1

    @property
    def vocab(self) -> int:
        """Of the target."""
        return self._drafter.vocab

    def _depth(self, context: NDArray[np.int64], wanted: int) -> int:
        """Levels that can be drafted; a node of the last level is never forwarded itself."""
        room = self._model.max_context + 1 - len(context)
        return min(wanted, self._drafter.max_depth, room)

    def _catch_up(self, context: NDArray[np.int64]) -> torch.Tensor:
        """Logits [1, vocab] at the bonus token, after all of the context that is not cached."""
        place = self._room(0)
        place.cut(place.length)  # rows of a draft that was not observed
        if len(context) - place.length > CATCH_UP_ROWS:
            place = self._prefill(context[place.length : -1])
        self._rows = PendingRows(context[place.length :])
        logits = self._extend(self._rows.tokens, self._rows.offsets, self._rows.visible)
        return logits[-1:]

    def _prefill(self, tokens: NDArray[np.int64]) -> Place:
        place = self._room(len(tokens))
        self._model.prefill(torch.from_numpy(tokens), place.sequence)
        return place

    def _extend(
        self,
        tokens: NDArray[np.int64],
        offsets: NDArray[np.int64],
        visible: NDArray[np.bool_],
    ) -> torch.Tensor:
        place = self._room(len(tokens))
        return self._model.extend(tokens, offsets, visible, place.sequence)

    def _room(self, rows: int) -> Place:
        """This sequence's place, its cache put under the model, with room for more rows."""
        self._place = self._caches.room(self, self._place, rows)
        self._model.cache = self._place.cache
        return self._place


class PendingRows:
    """What the rows behind the drafter's committed ones are: some text, then nodes.

    tokens   int64 [P]
    parents  int64 [P]    the row before in text or tree, -1 for the first
    offsets  int64 [P]    positions behind the committed tokens
    visible  bool [P, P]  row i sees row j
    """

    def __init__(self, text: NDArray[np.int64]) -> None:
        self.text_rows = len(text)
        self.tokens = text
        self.parents = np.arange(len(text)) - 1
        self.offsets = np.arange(len(text))
        self.visible = np.tri(len(text), dtype=np.bool_)

    def add(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Append nodes below the given rows; which rows they see, [F, P + F]."""
        known, count = len(self.tokens), len(tokens)
        visible = np.zeros((known + count, known + count), np.bool_)
        visible[:known, :known] = self.visible
        visible[known:, :known] = self.visible[parents]
        visible[known:, known:] = np.eye(count, dtype=np.bool_)
        self.visible = visible
        self.tokens = np.concatenate((self.tokens, tokens))
        self.parents = np.concatenate((self.parents, parents))
        self.offsets = np.concatenate((self.offsets, self.offsets[parents] + 1))
        return visible[known:]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows of the text and of the nodes that `tokens` pass through below it."""
        rows = list(range(self.text_rows))
        for token in tokens:
            below = np.flatnonzero((self.parents == rows[-1]) & (self.tokens == token))
            if len(below) == 0:
                break
            rows.append(int(below[0]))
        return rows


class _Distributions:
    """The drafter's q at the bonus token and at nodes, one forward a level.

    logits  [1, vocab] at the bonus token
    """

    def __init__(
        self, session: AutoregressiveSession, logits: torch.Tensor, temperature: float
    ) -> None:
        self._session = session
        self._logits = logits
        self._temperature = temperature
        self._rows = np.array([session.bonus_row])  # pending rows of the frontier before

    def root(self) -> torch.Tensor:
        self._rows = np.array([self._session.bonus_row])
        return self._q(self._logits)

    def expand(self, frontier: Frontier) -> torch.Tensor:
        parents = self._rows[frontier.above]
        self._rows, logits = self._session.expand(frontier.tokens, parents)
        return self._q(logits)

    @torch.inference_mode()
    def _q(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, the target's vocabulary], in float32 or finer."""
        vocab = self._session.vocab
        accurate = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
        q = (accurate / self._temperature).softmax(-1)
        return torch.nn.functional.pad(q, (0, vocab - q.shape[1]))


class _BestChildren:
    """The most probable children of each node; a row of q that is no numbers has none."""

    def __init__(self, distributions: _Distributions) -> None:
        self._distributions = distributions

    def root(self, width: int) -> Children:
        return _best(self._distributions.root(), width)

    def expand(self, frontier: Frontier, width: int) -> Children:
        return _best(self._distributions.expand(frontier), width)


@torch.inference_mode()
def _best(q: torch.Tensor, width: int) -> Children:
    """The top of each row of q, [F, K], on the host."""
    top = q.topk(min(width, q.shape[1]))
    # One copy for both; float64 holds every token id exactly.
    both = torch.stack((top.values.double(), top.indices.double())).cpu().numpy()
    return both[1].astype(np.int64), both[0]

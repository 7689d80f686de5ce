"""What a drafter is to the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.growth import Growth
from decoder.tree import CandidateTree, DraftTree, Lattice

# How a drafter serves sampled trees: not at all, having no q over the whole vocabulary; by
# `Lattice.whole`, q at every position; or by `DrawingSession.draw`, level by level.
Draws = Literal["never", "whole", "levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """What one round wants drafted.

    depth        deepest position wanted, 1 or more
    width        K: candidates a position of which any could end in the tree
    growth       how a drafter that goes level by level expands its tree
    temperature  of the drafter's softmax q; the target's own, 1 where that is 0
    whole        also give q over the whole vocabulary, which drawn trees need
    """

    depth: int
    width: int
    growth: Growth
    temperature: float = 1.0
    whole: bool = False


class DraftSession(Protocol):
    """The drafting of one sequence; `draft` twice without `observe` gives the same."""

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        """Begin with the prompt, int64 [tokens], and its target features [tokens, width]."""

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice | CandidateTree:
        """Candidates for the tokens after `context`, whose last token is the bonus."""

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """What the target emitted this round, the new bonus token last.

        features  [len(emitted), width]: of the rows that were kept, which are the last
                  bonus token and the accepted ones; None where none are asked for
        Called after every round, a plain step included.
        """


@runtime_checkable
class PartialSession(Protocol):
    """What a session also has whose drafts sometimes leave a part of the work out."""

    def drafted_share(self) -> float:
        """What the last draft took of a whole one's time: 1 where nothing was left out."""


@runtime_checkable
class LogitReader(Protocol):
    """What a session also has where it looks at the target's distributions."""

    def read_logits(self, logits: torch.Tensor) -> None:
        """The logits [vocab] that gave the next bonus token.

        Called before `start` with those of the prompt's last token, and before every
        `observe` with those of the last accepted row. The next forward may overwrite them.
        """


class DrawingSession(DraftSession, Protocol):
    """A session whose q depends on the path, so that it draws sampled trees itself."""

    def draw(
        self,
        context: NDArray[np.int64],
        shape: DraftTree,
        temperature: float,
        generator: torch.Generator,
    ) -> DraftTree:
        """A `DrawnTree` of this shape: siblings, in row order, drawn without replacement.

        The tokens of `shape` do not count; children for which q has no token left are left
        out, with what hangs below them. `temperature` is that of q.
        """


class RewindableSession(DraftSession, Protocol):
    """A session whose drafts take in what was observed, which is part of their cost."""

    def rewind(self, tokens: int) -> None:
        """Forget the context behind its first tokens, for a round to be timed again.

        Its bonus token, and what follows, must be observed anew.
        """


class Drafter(Protocol):
    """Proposes candidates for the tokens after the bonus token."""

    name: str
    architecture_hash: str  # the key of its cost in a profile
    max_depth: int  # gamma: the deepest position it drafts
    feature_layers: tuple[int, ...]  # hidden states it reads (0: the embedding), or none
    draws: Draws  # how it serves sampled trees

    def session(self) -> DraftSession:
        """The drafting of a new sequence; what it learns of acceptance may be shared."""

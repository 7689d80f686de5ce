"""Two drafters as one: a cheap one that looks at the text, and a neural one.

Both candidates become one tree (`decoder.drafters.union`), weighed by what has come true of
each so far (`decoder.drafters.trust`). Where the cheap drafter alone promises almost as much,
the neural one is left out of a round (`decoder.drafters.saving`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drafters.base import (
    Drafter,
    DraftRequest,
    DraftSession,
    Draws,
    LogitReader,
    RewindableSession,
)
from decoder.drafters.blocks import hash_of
from decoder.drafters.evidence import Evidence, evidence_of
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.saving import Round, Saving
from decoder.drafters.trust import Lean, Trust
from decoder.drafters.union import unite
from decoder.parallel import ALONE, Ranks
from decoder.tree import CandidateTree, Lattice


@dataclass(frozen=True, slots=True)
class Drafted:
    """A round's draft, until the round is observed.

    alone, both  the evidence of the first drafter, and of those that drafted
    expected     tokens that the first drafter alone promises, by what is known of it
    first_s      time of the first's draft
    draft_s      time of the second's draft, None where it was left out
    at_s         when the draft was done
    """

    alone: Evidence
    both: Evidence
    expected: float
    first_s: float
    draft_s: float | None
    at_s: float


class CombinedDrafter:
    """Drafts the union of two drafters' candidates; the second one is left out at times.

    first   the cheap one, best one that gives trees, as `NgramDrafter`
    second  one of marginals or trees; marginals also apply behind the first one's paths
    saving  decides when the second is left out; by default from times measured as it runs
    ranks   the processes that share the target: all of them do as the first one decides

    What is learnt of both is shared by all sessions, and so is each drafter's own learning.
    """

    draws: Draws = "never"

    def __init__(
        self,
        first: Drafter,
        second: Drafter,
        saving: Saving | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.first, self.second, self.ranks = first, second, ranks
        self.name = f"{first.name}+{second.name}"
        self.architecture_hash = hash_of(
            {
                "drafter": "combined",
                "first": first.architecture_hash,
                "second": second.architecture_hash,
            }
        )
        self.max_depth = max(first.max_depth, second.max_depth)
        self.feature_layers = (*first.feature_layers, *second.feature_layers)
        self.trust = Trust()
        self.saving = saving or Saving()
        _compile()

    def session(self) -> CombinedSession:
        first, second = self.first.session(), self.second.session()
        if hasattr(first, "rewind") and hasattr(second, "rewind"):
            return _RewindableSession(self, first, second)
        return CombinedSession(self, first, second)

    def unlearnt(self) -> CombinedDrafter:
        """The same two drafters before any text; the weights of models are shared."""
        first, second = (
            drafter.unlearnt() if isinstance(drafter, NgramDrafter) else drafter
            for drafter in (self.first, self.second)
        )
        return CombinedDrafter(first, second, ranks=self.ranks)


class CombinedSession:
    """One text, drafted by a session of each drafter."""

    def __init__(self, drafter: CombinedDrafter, first: DraftSession, second: DraftSession) -> None:
        self._drafter, self._first, self._second = drafter, first, second
        self._readers = [own for own in (first, second) if isinstance(own, LogitReader)]
        self._forget()

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        self._forget()
        first, second = self._split(features)
        self._first.start(prompt, first)
        self._second.start(prompt, second)

    def read_logits(self, logits: torch.Tensor) -> None:
        for reader in self._readers:
            reader.read_logits(logits)

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        """The `request.width` best paths of both drafters' candidates, the best ones first."""
        drafter, nodes, began_s = self._drafter, request.width, perf_counter()
        known = drafter.trust.arrays, self._lean.factors()
        first = _draft(self._first, drafter.first, context, request)
        alone = both = evidence_of(first, None, nodes)
        tree, expected = unite(alone, *known, nodes)
        first_s, draft_s = perf_counter() - began_s, None
        if drafter.ranks.decide(lambda: drafter.saving.saves(expected, self._saved)):
            self._share = drafter.ranks.decide(drafter.saving.part)
        else:
            started_s = perf_counter()
            second = _draft(self._second, drafter.second, context, request)
            self._share, draft_s = 1.0, perf_counter() - started_s
            both = evidence_of(first, second, nodes)
            tree, _ = unite(both, *known, nodes)
        self._drafted = Drafted(alone, both, expected, first_s, draft_s, perf_counter())
        return tree

    def drafted_share(self) -> float:
        """1, or what the first drafter takes of both drafters' time where it was alone."""
        return self._share

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Let both drafters know of the round, and learn which of them was right."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            verify_s = perf_counter() - drafted.at_s
            self._saved = self._saved + 1 if drafted.draft_s is None else 0
            self._drafter.saving.observe(
                Round(
                    expected=drafted.expected,
                    followed=drafted.alone.followed(emitted),
                    committed=len(emitted),
                    first_s=drafted.first_s,
                    draft_s=drafted.draft_s,
                    verify_s=verify_s,
                )
            )
            self._lean.learn(drafted.both, emitted, self._drafter.trust)
        first, second = self._split(features)
        self._first.observe(emitted, first)
        self._second.observe(emitted, second)

    def _forget(self) -> None:
        self._lean = Lean()
        self._drafted: Drafted | None = None
        self._share = 1.0  # of a whole draft's time, in the last draft
        self._saved = 0  # rounds without the second drafter since its last one

    def _split(
        self, features: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Each drafter's part of the features [tokens, layers * hidden]."""
        layers, own = self._drafter.feature_layers, len(self._drafter.first.feature_layers)
        if features is None or not layers:
            return None, None
        width = features.shape[1] // len(layers) * own
        first = features[:, :width] if own else None
        return first, features[:, width:] if own < len(layers) else None


class _RewindableSession(CombinedSession):
    """One whose two sessions can both go back."""

    def rewind(self, tokens: int) -> None:
        self._drafted = None  # a round to be timed again teaches nothing
        for own in (self._first, self._second):
            cast(RewindableSession, own).rewind(tokens)


def _draft(
    session: DraftSession, drafter: Drafter, context: NDArray[np.int64], request: DraftRequest
) -> Lattice | CandidateTree:
    depth = min(request.depth, drafter.max_depth)
    return session.draft(context, replace(request, depth=depth, whole=False))


def _compile() -> None:
    """Compile what drafting calls, so that no round waits for it."""
    tree = CandidateTree(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))
    evidence = evidence_of(tree, Lattice(np.zeros((1, 1), np.int64), np.ones((1, 1))), 1)
    trust, lean = Trust(), Lean()
    unite(evidence, trust.arrays, lean.factors(), 1)
    evidence.followed([0])
    lean.learn(evidence, [0], trust)

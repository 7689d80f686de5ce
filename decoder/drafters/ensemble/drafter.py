"""The ensemble of two drafters: a cheap one that reads the text, and a neural one.

The candidates of both become one tree, by a mixture of their probabilities that is learnt online
(`ensemble.mixture`, `ensemble.learning`). Where the cheap drafter alone promises almost as much,
the neural one is left out of a round (`ensemble.gate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.drafters.blocks import hash_of
from decoder.drafters.ensemble.gate import EnsembleGate, EnsembleRound
from decoder.drafters.ensemble.learning import EnsembleStatistics, TextWeights
from decoder.drafters.ensemble.mixture import JointDraft, join_drafts
from decoder.drafters.ensemble.search import best_paths
from decoder.drafters.ngram import NgramDrafter
from decoder.tree.draft_tree import CandidateTree, Lattice


class EnsembleDrafter(Drafter):
    """Drafts from the candidates of two drafters; the second one is left out at times.

    first   the cheap one, best one that gives trees, as `NgramDrafter`
    second  one of marginals or trees; marginals also apply behind the first one's paths
    gate    decides when the second is left out; by default from times measured as it runs

    What is learnt of both is shared by all sessions, and so is each drafter's own learning.
    """

    def __init__(
        self,
        first: Drafter,
        second: Drafter,
        gate: EnsembleGate | None = None,
    ) -> None:
        self.first, self.second = first, second
        self.members = (first, second)
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
        self.statistics = EnsembleStatistics()
        self.gate = gate or EnsembleGate()
        _compile()

    def start(
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> EnsembleSession:
        first, second = self.split(features)
        return EnsembleSession(
            self,
            self.first.start(prompt, first, logits),
            self.second.start(prompt, second, logits),
        )

    def split(
        self, features: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Each drafter's part of the features [tokens, layers * hidden]."""
        layers, first_layers = len(self.feature_layers), len(self.first.feature_layers)
        if features is None or not layers:
            return None, None
        width = features.shape[1] // layers * first_layers
        first = features[:, :width] if first_layers else None
        return first, features[:, width:] if first_layers < layers else None

    def unlearnt(self) -> EnsembleDrafter:
        """The same two drafters before any text; the weights of models are shared."""
        first, second = (
            drafter.unlearnt() if isinstance(drafter, NgramDrafter) else drafter
            for drafter in (self.first, self.second)
        )
        return EnsembleDrafter(first, second)


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A round's draft, kept until the round is observed.

    first, both  the first drafter's candidates, and those of all that drafted
    expected     tokens that the first drafter's candidates promise
    first_s      time of the first draft
    second_s     time of the second draft, None where it was left out
    at_s         when the draft was done
    """

    first: JointDraft
    both: JointDraft
    expected: float
    first_s: float
    second_s: float | None
    at_s: float


class EnsembleSession(DraftSession):
    """One text, drafted by a session of each drafter."""

    def __init__(self, drafter: EnsembleDrafter, first: DraftSession, second: DraftSession) -> None:
        self._drafter, self._first, self._second = drafter, first, second
        self.rewinds = first.rewinds and second.rewinds
        self._weights = TextWeights()
        self._drafted: _Drafted | None = None
        self._share = 1.0  # of a full draft's time, in the last draft
        self._skipped = 0  # rounds since the second drafter's last one

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> CandidateTree:
        """The `request.width` most probable paths of both drafters' candidates, best first."""
        drafter, nodes, began_s = self._drafter, request.width, perf_counter()
        learnt = drafter.statistics.arrays, self._weights.factors()
        first = _draft(self._first, drafter.first, context, request)
        alone = both = join_drafts(first, None, nodes)
        tree, expected = best_paths(alone, *learnt, nodes)
        first_s, second_s = perf_counter() - began_s, None
        if drafter.gate.skips(expected, self._skipped):
            self._share = drafter.gate.first_share()
        else:
            started_s = perf_counter()
            second = _draft(self._second, drafter.second, context, request)
            self._share, second_s = 1.0, perf_counter() - started_s
            both = join_drafts(first, second, nodes)
            tree, _ = best_paths(both, *learnt, nodes)
        self._drafted = _Drafted(alone, both, expected, first_s, second_s, perf_counter())
        return tree

    def drafted_share(self) -> float:
        """The first drafter's share of both drafters' time where it drafted alone, else 1."""
        return self._share

    def read_logits(self, logits: torch.Tensor) -> None:
        self._first.read_logits(logits)
        self._second.read_logits(logits)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Count the round for the mixture and the gate, and pass it on to both drafters."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            verify_s = perf_counter() - drafted.at_s
            self._skipped = self._skipped + 1 if drafted.second_s is None else 0
            self._drafter.gate.observe(
                EnsembleRound(
                    expected=drafted.expected,
                    followed=drafted.first.followed(emitted),
                    committed=len(emitted),
                    first_s=drafted.first_s,
                    second_s=drafted.second_s,
                    verify_s=verify_s,
                )
            )
            self._weights.learn(drafted.both, emitted, self._drafter.statistics)
        first, second = self._drafter.split(features)
        self._first.observe(emitted, first)
        self._second.observe(emitted, second)

    def rewind(self, tokens: int) -> None:
        self._drafted = None  # a round that is timed again changes no statistics
        self._first.rewind(tokens)
        self._second.rewind(tokens)


def _draft(
    session: DraftSession, drafter: Drafter, context: NDArray[np.int64], request: DraftRequest
) -> Lattice | CandidateTree:
    depth = min(request.depth, drafter.max_depth)
    return session.draft(context, replace(request, depth=depth, whole=False))


def _compile() -> None:
    """Compile the functions that drafting calls, so that no round waits for it."""
    tree = CandidateTree(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))
    joint = join_drafts(tree, Lattice(np.zeros((1, 1), np.int64), np.ones((1, 1))), 1)
    statistics, weights = EnsembleStatistics(), TextWeights()
    best_paths(joint, statistics.arrays, weights.factors(), 1)
    joint.followed([0])
    weights.learn(joint, [0], statistics)

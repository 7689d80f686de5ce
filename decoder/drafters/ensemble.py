"""The ensemble of two drafters, whose candidates become one draft tree.

A mixture of both drafters' probabilities scores the paths (`drafters.mixture`). It is learnt
online, from the tokens that the target emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from costmodel.statistics import Ints
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.drafters.blocks import hash_of
from decoder.drafters.mixture import JointDraft, best_paths, join_drafts, learn, new_statistics
from decoder.drafters.ngram import NgramDrafter
from decoder.tree.draft_tree import Candidates, CandidateTree, Lattice


class EnsembleDrafter(Drafter):
    """Drafts one tree from the candidates of two drafters.

    first   best one that gives trees, as `NgramDrafter`
    second  any; marginals also apply behind the first one's paths

    What is learnt of both is shared by all sessions, and so is each drafter's own learning.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.members = (first, second)
        self.name = f"{first.name}+{second.name}"
        hashes = {"first": first.architecture_hash, "second": second.architecture_hash}
        self.architecture_hash = hash_of({"drafter": "combined", **hashes})
        self.max_depth = max(first.max_depth, second.max_depth)
        self.deepens = first.deepens or second.deepens
        self.feature_layers = (*first.feature_layers, *second.feature_layers)
        self.statistics = new_statistics()
        # Compile the functions that drafting calls, so that no round waits for it.
        tree = CandidateTree(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1))
        lattice, unused = Lattice(np.zeros((1, 1), np.int64), np.ones((1, 1))), new_statistics()
        joint = join_drafts(tree, lattice, 1)
        best_paths(joint, unused, 1)
        learn(np.zeros(1, np.int64), joint, unused)

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> EnsembleSession:
        first, second = self.split(features)
        return EnsembleSession(
            self, self.first.start(prompt, first, logits), self.second.start(prompt, second, logits)
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


class EnsembleSession(DraftSession):
    """One text, drafted by a session of each drafter."""

    def __init__(self, drafter: EnsembleDrafter, first: DraftSession, second: DraftSession) -> None:
        self._drafter, self._first, self._second = drafter, first, second
        self.rewinds = first.rewinds and second.rewinds
        self._joint: JointDraft | None = None  # of this round, until it is observed

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The `request.width` most probable paths of both drafters' candidates, best first."""
        drafter = self._drafter
        first = _draft(self._first, drafter.first, context, request)
        second = _draft(self._second, drafter.second, context, request)
        self._joint = join_drafts(first, second, request.width)
        return best_paths(self._joint, drafter.statistics, request.width)

    def read_logits(self, logits: torch.Tensor) -> None:
        self._first.read_logits(logits)
        self._second.read_logits(logits)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Learn the mixture from the round's tokens, and pass them on to both drafters."""
        joint, self._joint = self._joint, None
        if joint is not None:
            learn(np.array(emitted, dtype=np.int64), joint, self._drafter.statistics)
        first, second = self._drafter.split(features)
        self._first.observe(emitted, first)
        self._second.observe(emitted, second)

    def rewind(self, tokens: int) -> None:
        self._joint = None  # a round that is timed again teaches nothing
        self._first.rewind(tokens)
        self._second.rewind(tokens)


def _draft(
    session: DraftSession, drafter: Drafter, context: Ints, request: DraftRequest
) -> Candidates:
    depth = min(request.depth, drafter.deepest(request.growth))
    return session.draft(context, replace(request, depth=depth, whole=False)).sound()

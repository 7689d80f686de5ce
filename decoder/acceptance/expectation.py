"""Expected acceptance of draws: from it a policy chooses the shape of a sampled tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.acceptance.drawn import DrawnTree
from decoder.device import to_device
from decoder.tree import Lattice


class RankExpectation:
    """How likely the j-th child drawn below an accepted node is the one accepted.

    Learnt from past rounds as a hazard: of the nodes that were accepted with none of their
    first j - 1 children on the accepted path, the share whose j-th child is. Counts are kept
    by the confidence of the drafter (the largest probability of q) and by j, and start as
    `PRIOR` observations of what benchmarks/acceptance_rules.py finds for a calibrated drafter:
    (0.6 + 0.35 c^2) / j^(1 - c) at confidence c. Present draws are never looked at.
    """

    EDGES = np.array([0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95])  # of the confidence classes
    RANKS = 16  # later draws share the counts of the last
    PRIOR = 8.0
    FADING = 0.995  # a round
    USUAL = 0.7  # confidence before any round
    DEPTHS = 64

    def __init__(self) -> None:
        shape = (len(self.EDGES) + 1, self.RANKS)
        self._trials = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self._confidence = np.full(self.DEPTHS, self.USUAL)
        self._rounds = np.ones(self.DEPTHS)

    def lattice(self, confidences: NDArray[np.float64], width: int) -> Lattice:
        """What the policies choose a shape from: token j is the j-th draw, [depth, width].

        confidences  [depth] the largest probability of q at each position
        """
        draws = np.arange(width, dtype=np.int64)
        expected = self.of(confidences, width)
        return Lattice(np.broadcast_to(draws, expected.shape), expected)

    def of(self, confidences: NDArray[np.float64], width: int) -> NDArray[np.float64]:
        """Expected acceptance of each draw given its parent's, [len(confidences), width].

        Never rising along a row, so that an earlier draw is never chosen after a later one.
        """
        sure = np.clip(np.nan_to_num(confidences), 0.0, 1.0)[:, None]
        draws = np.arange(1, width + 1)
        prior = (0.6 + 0.35 * sure**2) / draws ** (1.0 - sure)
        classes = np.searchsorted(self.EDGES, sure[:, 0])[:, None]
        ranks = np.minimum(draws, self.RANKS) - 1
        trials, accepted = self._trials[classes, ranks], self._accepted[classes, ranks]
        hazards = (accepted + self.PRIOR * prior) / (trials + self.PRIOR)
        before = np.cumprod(1.0 - hazards, axis=1)
        before = np.concatenate((np.ones((len(sure), 1)), before[:, :-1]), axis=1)
        expected: NDArray[np.float64] = np.minimum.accumulate(hazards * before, axis=1)
        return expected

    def usual_confidences(self, depth: int) -> NDArray[np.float64]:
        """[depth] the mean confidence of past rounds, for q's that are not known beforehand."""
        kept = min(depth, self.DEPTHS)
        return np.pad(self._confidence[:kept], (0, depth - kept), mode="edge")

    def observe(self, tree: DrawnTree, accepted_rows: list[int]) -> None:
        """Learn from a finished round, at every node of the accepted path."""
        self._trials *= self.FADING
        self._accepted *= self.FADING
        path = [row for row in (0, *accepted_rows) if tree.sources[row] >= 0]
        if not path:
            return
        sources = tree.sources[path]
        q = tree.q.index_select(0, to_device(sources, tree.q.device))
        confidences = (q.amax(-1) / q.sum(-1)).double().cpu().numpy()
        for depth, (row, confidence) in enumerate(zip(path, confidences, strict=True)):
            children = tree.children(row)
            hit = depth < len(accepted_rows)
            tried = 1 + int(np.searchsorted(children, accepted_rows[depth])) if hit else None
            ranks = np.minimum(np.arange(len(children))[:tried], self.RANKS - 1)
            level = int(np.searchsorted(self.EDGES, confidence))
            np.add.at(self._trials[level], ranks, 1.0)
            if hit:
                self._accepted[level, ranks[-1]] += 1.0
            self._learn_confidence(depth, confidence)

    def _learn_confidence(self, depth: int, confidence: float) -> None:
        if depth < self.DEPTHS:
            self._rounds[depth] = self._rounds[depth] * self.FADING + 1.0
            self._confidence[depth] += (confidence - self._confidence[depth]) / self._rounds[depth]

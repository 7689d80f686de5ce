"""The adaptive policy: each round the tree size of highest estimated speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.speculation import expected_committed
from decoder.policies.base import (
    DEFAULT_MAX_NODES,
    Candidates,
    Cost,
    Limits,
    Offer,
    PolicyBase,
)
from decoder.policies.bias import DepthBias, DraftGate, Pace
from decoder.tree import EMPTY, DraftTree, best_first

FIRST_WANTED = 32  # candidates before any tree, and never fewer
WANTED_SHARE = 2  # candidates for each node of the largest tree of late
WANTED_FADING = 0.98  # of that tree, a round


@dataclass(frozen=True, slots=True)
class Took:
    """What a drafted round takes by the cost model, in plain steps of as many sequences.

    cycle  all of it
    draft  its drafts alone
    """

    cycle: float
    draft: float


class Bastion(PolicyBase):
    """The tree size that adds most to the speed of the whole text, from the cost model.

    The speed of a text is all its tokens over all its seconds, and such a ratio of sums is
    highest where every round takes the size of highest A(N) - rate x C(N), at the rate that
    is reached on the whole (renewal reward; Dinkelbach, 1967). The paper instead takes each
    round's own highest A(N) / C(N) (BASTION eqs. 6, 7), which spends too much on rounds that
    promise little and too little on those that promise much.

    Unlike the paper's first-drop rule, every size is scored, because measured
    costs are stairs; size 0 (a plain step) competes with the rest, and the rate is never
    taken below that of plain steps, so a round is never expected to be slower than not
    speculating. Path scores are corrected online by depth, since drafters are biased.
    """

    name = "bastion"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes
        self._largest_lately = 0.0
        self._bias = DepthBias()
        self._gate = DraftGate()
        self._pace = Pace()
        self._draft_share = 1.0  # of a whole draft's time, in the round under way
        self._took: Took | None = None  # the round under way; None where it did not draft

    def wanted_nodes(self) -> int:
        """A few times the largest tree of late: candidates far beyond it only cost time."""
        wanted = max(int(WANTED_SHARE * self._largest_lately), FIRST_WANTED)
        return max(min(wanted, self.max_nodes), 1)

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        self._draft_share, self._took = 1.0, None
        return self._gate.open()

    def drafted(self, share: float) -> None:
        self._draft_share = share

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = self._largest(candidates, limits)
        size = self._best_size(expected_committed(tree.scores), context)
        return tree.first(size) if size else EMPTY

    def choose_together(self, offers: Sequence[Offer]) -> list[DraftTree]:
        """One budget for the batch: the best nodes of all trees compete for it.

        Trees are nested, so the n best nodes over all sequences are a prefix of each tree;
        the forward is priced at the mean number of nodes and the mean context.
        """
        if len(offers) == 1:
            only = offers[0]
            return [self.choose(only.candidates, only.context, only.limits)]
        trees = [self._largest(offer.candidates, offer.limits) for offer in offers]
        scores = np.concatenate([tree.scores for tree in trees])
        owner = np.repeat(np.arange(len(trees)), [tree.nodes for tree in trees])
        order = np.argsort(-scores, kind="stable")
        batch, context = len(offers), float(np.mean([offer.context for offer in offers]))
        committed = batch - 1.0 + expected_committed(scores[order])
        taken = owner[order[: self._best_size(committed, context, batch)]]
        counts = np.bincount(taken, minlength=batch)
        return [tree.first(int(count)) for tree, count in zip(trees, counts, strict=True)]

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        self._largest_lately = max(float(tree.nodes), WANTED_FADING * self._largest_lately)
        self._bias.observe(tree, accepted_rows)
        committed = 1 + len(accepted_rows)
        if self._took is not None:  # a round without a draft says nothing about drafting
            self._gate.observe(committed, self._took.cycle, self._took.draft)
        self._pace.observe(committed, 1.0 if self._took is None else self._took.cycle)

    def _largest(self, candidates: Candidates, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes), self._bias.factors())

    def _best_size(self, committed: NDArray[np.float64], context: float, batch: int = 1) -> int:
        """The number of nodes, in all sequences, to verify; `committed` [sizes] are A(N)."""
        most = len(committed) - 1
        sizes = self.cost.sizes(most) if batch == 1 else np.arange(most + 1)
        worth = committed[sizes]
        whole_s = self.cost.draft_s(context)
        drafts_s = self._draft_share * whole_s * batch  # one after the other
        # Without the draft, which is already paid for.
        rest_s = self.cost.cycle_s(sizes / batch, context, batch) - whole_s
        plain_s = self.cost.plain_s(context, batch)
        speed = self._pace.speed()
        # At first nothing is known but the round itself.
        rate = float(np.max(worth / rest_s)) if speed is None else speed * batch / plain_s
        best = int(np.argmax(worth - rate * rest_s))
        self._took = Took((float(rest_s[best]) + drafts_s) / plain_s, drafts_s / plain_s)
        return int(sizes[best])


class PaperBastion(PolicyBase):
    """BASTION as printed: nodes are added until the estimated speed drops for the first time.

    Algorithm 1 with uncorrected path scores, over a cost that should be the paper's own
    linear static calibration; there is no choice not to draft.
    """

    name = "bastion:paper"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = best_first(candidates, min(self.max_nodes, limits.nodes))
        sizes: NDArray[np.int64] = np.arange(tree.nodes + 1)
        speed = expected_committed(tree.scores) / self.cost.cycle_s(sizes, context)
        drops = np.flatnonzero(np.diff(speed) < 0.0)
        return tree.first(int(drops[0]) if len(drops) else tree.nodes)

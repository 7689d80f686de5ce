"""The adaptive policy: each round the tree size of highest estimated speed."""

from __future__ import annotations

from collections.abc import Sequence

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
from decoder.policies.bias import DepthBias, DraftGate
from decoder.tree import EMPTY, DraftTree, best_first


class Bastion(PolicyBase):
    """The tree size of highest estimated speed, from the cost model (BASTION eqs. 6, 7).

    Unlike the paper's first-drop rule, every size is scored, because measured
    costs are stairs; size 0 (a plain step) competes with the rest, so a round is
    never expected to be slower than not speculating. Path scores are corrected
    online by depth, since drafters are biased.
    """

    name = "bastion"

    def __init__(self, cost: Cost, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes
        self._bias = DepthBias()
        self._gate = DraftGate(cost)

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return self._gate.open(context, batch)

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        tree = self._largest(candidates, limits)
        if tree.nodes == 0:
            return EMPTY
        # Size 0 is the plain step. The draft is already paid for, so it counts for no size.
        sizes = np.arange(tree.nodes + 1)
        cycle_s = self.cost.cycle_s(sizes, context) - self.cost.draft_s(context)
        return tree.first(int(np.argmax(expected_committed(tree.scores) / cycle_s)))

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
        sizes = np.arange(len(scores) + 1) / batch
        cycle_s = self.cost.cycle_s(sizes, context, batch) - self.cost.draft_s(context)
        taken = owner[order[: int(np.argmax(committed / cycle_s))]]
        counts = np.bincount(taken, minlength=batch)
        return [tree.first(int(count)) for tree, count in zip(trees, counts, strict=True)]

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        self._bias.observe(tree, accepted_rows)
        self._gate.observe(tree, len(accepted_rows), context)

    def _largest(self, candidates: Candidates, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes), self._bias.factors())


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

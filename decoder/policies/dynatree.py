"""DynaTree (Chen, Liu and Li): trees shaped by the drafter's confidence and by recent acceptance.

The paper gives the rules of its section 3.3, the base depth 5, the largest depth 8,
1 to 3 children, the confidence thresholds 0.9 and 0.4 and the budget of 256 nodes.
The rest is not printed there. It was chosen for these reasons before any run on text
and tuned on none; the meaning of the share and its target were settled on simulated
acceptance (benchmarks/dynatree_history.py):

- 2 children in the middle: the only whole number between the bounds.
- Early stopping below 0.1: the best threshold of the paper's sweep of fixed trees
  (appendix C.1), where that threshold is what ends expansion.
- Pruning below 0.03: a node is worth its path score in tokens, and a row more costs
  a few hundredths of a plain step where verification has left the flat part of its
  cost. Algorithm 1 only stops expanding such nodes, which early stopping does
  already; the text of section 3.3 leaves them out of the tree, and so does this.
- Deep expansion above 0.3: a level more costs a forward of the drafter, which pays
  from a few tenths of a token on.
- A window of 16 rounds, and steps of 0.5 levels and 0.05 of confidence: a lasting
  surplus of 0.1 then moves the depth by one level and the threshold by 0.1 in 20
  rounds, slowly enough for the window to see what the last change did.
- A target share of 0.5: as many drafted levels used as wasted.

The root is the bonus token, which the target has already chosen, so depth 1 branches
too; the paper's tree begins with one drafted token and pays for a wrong one with the
whole tree.

The paper's "fraction of drafted tokens committed" is taken as accepted levels over
drafted levels. That is what its table 3 reports (its acceptance rates are its mean
path lengths over a constant: 10 for the fixed tree, 7 for DynaTree), it is the same
for a chain, and it mostly keeps the control off its bounds: over nodes, a high share
narrows the tree, which raises the share, until the tree is a chain
(benchmarks/dynatree_history.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from decoder.policies.grown import Grown
from decoder.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidentGrowth:
    """DynaTree's breadth, depth and pruning rules (section 3.3, algorithm 1), symbols behind.

    A node's confidence c(u) is the probability of its most probable child.

    base_depth    D_0: levels that every path may have, save for early stopping
    max_depth     D_max
    few, some, many   B_min, B_mid, B_max children, by falling confidence
    sure, unsure  tau_h, tau_l: confidence from which a node gets `few`, below which `many`
    stop_score    rho_stop: path score below which a node is not expanded
    deep_score    rho_deep: path score above which it is expanded beyond the base depth
    least_score   tau: path score below which it is no node at all
    max_nodes     N_max
    """

    base_depth: int = 5
    max_depth: int = 8
    few: int = 1
    some: int = 2
    many: int = 3
    sure: float = 0.9
    unsure: float = 0.4
    stop_score: float = 0.1
    deep_score: float = 0.3
    least_score: float = 0.03
    max_nodes: int = 256

    @property
    def width(self) -> int:
        return self.many

    def keep(
        self, depth: int, scores: NDArray[np.float64], probabilities: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        if probabilities.shape[1] == 0:
            return np.zeros(probabilities.shape, np.bool_)
        confidence = probabilities[:, 0]
        # In the paper's order of cases: a threshold `sure` that fell below `unsure` wins.
        children = np.select(
            [confidence >= self.sure, confidence < self.unsure], [self.few, self.many], self.some
        )
        ranks = np.arange(probabilities.shape[1])
        likely = scores[:, None] * probabilities >= self.least_score
        return (ranks < children[:, None]) & likely

    def expand(self, depth: int, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        deep_enough = scores > self.deep_score if depth >= self.base_depth else True
        return (scores >= self.stop_score) & deep_enough


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """How recent acceptance moves the base depth and the threshold `sure`.

    window        W: rounds in the mean, before which nothing is moved
    target_share  a*: accepted over drafted levels that leaves both where they are
    depth_step    eta_D: levels a round for a share above the target by 1
    sure_step     eta_h: of the threshold, in the other direction
    """

    window: int = 16
    target_share: float = 0.5
    depth_step: float = 0.5
    sure_step: float = 0.05


class DynaTree(Grown):
    """Every node of the tree that `ConfidentGrowth` makes, adapted to recent acceptance.

    After each round with a tree (section 3.3, last paragraph), with the mean share over
    the window above the target by s,

        D_0 <- clip(D_0 + eta_D s, 1, D_max - 1),  tau_h <- clip(tau_h - eta_h s, 0, 1).

    D_0 is kept as a real number and rounded for use.
    """

    growth: ConfidentGrowth

    def __init__(self, max_nodes: int, settings: HistorySettings | None = None) -> None:
        default = ConfidentGrowth()
        growth = replace(default, max_nodes=min(default.max_nodes, max_nodes))
        super().__init__("dynatree", growth)
        self._settings = settings or HistorySettings()
        self._shares: deque[float] = deque(maxlen=self._settings.window)
        self._base_depth = float(growth.base_depth)

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        if tree.nodes == 0:
            return  # neither accepted nor wasted
        self._shares.append(len(accepted_rows) / int(tree.depths.max()))
        if len(self._shares) < self._settings.window:
            return
        surplus = sum(self._shares) / len(self._shares) - self._settings.target_share
        deepest = float(self.growth.max_depth - 1)
        depth = self._base_depth + self._settings.depth_step * surplus
        self._base_depth = min(max(depth, 1.0), deepest)
        sure = min(max(self.growth.sure - self._settings.sure_step * surplus, 0.0), 1.0)
        self.growth = replace(self.growth, base_depth=int(self._base_depth + 0.5), sure=sure)

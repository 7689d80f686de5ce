"""DynaTree (Chen, Liu and Li): trees shaped by the drafter's confidence and recent acceptance.

The rules are those of section 3.3, their values the paper's or else the defaults of its authors'
code (github.com/cny123222/DynaTree, tree_speculative_generator_adaptive.py). The name
`dynatree:window=5,deep_score=0.3` sets any of them. README.md says how acceptance is counted, and
which two things differ from that code.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from costmodel.errors import InputError
from costmodel.statistics import Array, Bools
from decoder.statistics import Round
from lab.papers.dynatree.baselines import Grown

# Bounds of what the history moves, in the authors' code.
LEAST_BASE_DEPTH = 2
SURE_BOUNDS = (0.5, 0.95)
DEEP_BOUNDS = (0.3, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidentGrowth:
    """DynaTree's breadth, depth and pruning rules (section 3.3, algorithm 1).

    A node's confidence c(u) is the probability of its most probable child. Symbols are those
    of the paper.

    base_depth       D_0: levels that every path may have, apart from early stopping
    max_depth        D_max
    few, some, many  B_min, B_mid, B_max: children of a node, by falling confidence
    sure, unsure     tau_h, tau_l: confidence from which a node gets `few`, below which `many`
    stop_score       rho_stop: nodes of a lower path score are not expanded
    deep_score       rho_deep: nodes of a higher path score are expanded beyond the base depth
    least_score      tau: children of a lower path score do not become nodes
    max_nodes        N_max
    """

    base_depth: int = 5
    max_depth: int = 8
    few: int = 1
    some: int = 2
    many: int = 3
    sure: float = 0.9
    unsure: float = 0.4
    stop_score: float = 0.1
    deep_score: float = 0.5
    least_score: float = 0.05
    max_nodes: int = 256

    def __post_init__(self) -> None:
        counts = ("base_depth", "max_depth", "few", "some", "many", "max_nodes")
        _check(self, counts, ("sure", "unsure", "stop_score", "deep_score", "least_score"))

    @property
    def width(self) -> int:
        return self.many

    def keep(self, depth: int, scores: Array, probabilities: Array) -> Bools:
        if probabilities.shape[1] == 0:
            return np.zeros(probabilities.shape, np.bool_)
        confidence = probabilities[:, 0]
        # The paper's order of cases: `sure` wins if it has fallen below `unsure`.
        children = np.select(
            [confidence >= self.sure, confidence < self.unsure], [self.few, self.many], self.some
        )
        ranks = np.arange(probabilities.shape[1])
        likely = scores[:, None] * probabilities >= self.least_score
        return (ranks < children[:, None]) & likely

    def expand(self, depth: int, scores: Array) -> Bools:
        deep_enough = scores > self.deep_score if depth >= self.base_depth else True
        return (scores >= self.stop_score) & deep_enough


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """The adaptation of base depth and thresholds to the acceptance of recent texts.

    window          W: texts in the mean
    least_texts     texts before anything is adapted
    target_share    a*: committed tokens over the first base depth + 2
    dead_zone       distance from the target share within which nothing changes
    depth_step      levels by which the base depth D_0 moves after a text
    threshold_step  by which tau_h and rho_deep move, in the other direction
    """

    window: int = 10
    least_texts: int = 5
    target_share: float = 0.7
    dead_zone: float = 0.1
    depth_step: int = 1
    threshold_step: float = 0.05

    def __post_init__(self) -> None:
        _check(self, ("window", "least_texts"), ("target_share", "dead_zone", "threshold_step"))
        if self.depth_step < 0:
            raise InputError(f"depth_step must be 0 or more, got {self.depth_step}")


def _check(settings: object, counts: tuple[str, ...], shares: tuple[str, ...]) -> None:
    for name in counts:
        if getattr(settings, name) < 1:
            raise InputError(f"{name} must be 1 or more, got {getattr(settings, name)}")
    for name in shares:
        if not 0.0 <= getattr(settings, name) <= 1.0:
            raise InputError(f"{name} must lie in [0, 1], got {getattr(settings, name)}")


class DynaTree(Grown):
    """Every node of the tree that `ConfidentGrowth` makes, adapted to recent acceptance.

    After each text with a tree, by the mean share of committed tokens over the window: above the
    target share and its dead zone, D_0 rises and tau_h and rho_deep fall by a step; below, the
    other way round.
    """

    growth: ConfidentGrowth

    def __init__(
        self,
        max_nodes: int,
        history: HistorySettings | None = None,
        growth: ConfidentGrowth | None = None,
        name: str = "dynatree",
    ) -> None:
        growth = growth or ConfidentGrowth()
        super().__init__(name, replace(growth, max_nodes=min(growth.max_nodes, max_nodes)))
        self._history = history or HistorySettings()
        self._shares: deque[float] = deque(maxlen=self._history.window)
        self._first_levels = growth.base_depth + 2
        self._counts: dict[int, tuple[int, int]] = {}  # tokens and rounds of texts under way

    def observe(self, finished: Round) -> None:
        if finished.nodes == 0:
            return  # a plain step says nothing about drafts
        tokens, rounds = self._counts.get(finished.text, (0, 0))
        self._counts[finished.text] = (tokens + 1 + finished.accepted_tokens, rounds + 1)

    def ended(self, text: int) -> None:
        if text not in self._counts:
            return
        tokens, rounds = self._counts.pop(text)
        self._shares.append(tokens / (rounds * self._first_levels))
        if len(self._shares) < min(self._history.least_texts, self._history.window):
            return
        surplus = sum(self._shares) / len(self._shares) - self._history.target_share
        if abs(surplus) > self._history.dead_zone:
            self._move(1 if surplus > 0.0 else -1)

    def _move(self, sign: int) -> None:
        """One step to deeper trees (1) or to shallower ones (-1)."""
        growth, step = self.growth, sign * self._history.threshold_step
        depth = growth.base_depth + sign * self._history.depth_step
        deepest = max(growth.max_depth - 1, LEAST_BASE_DEPTH)
        self.growth = replace(
            growth,
            base_depth=min(max(depth, LEAST_BASE_DEPTH), deepest),
            sure=_moved(growth.sure, step, SURE_BOUNDS),
            deep_score=_moved(growth.deep_score, step, DEEP_BOUNDS),
        )


class PrintedDynaTree(DynaTree):
    """DynaTree with the history of section 3.3: D_0 and tau_h follow every round in proportion.

    D_0 gains eta_D, and tau_h loses eta_h, times what the mean share of the last W rounds exceeds
    a*. The share of a round is its accepted levels over the drafted ones, as the paper counts for
    a linear draft (table 3: 7.05 of 8 are 88.2 %).
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._depth = float(self.growth.base_depth)

    def observe(self, finished: Round) -> None:
        if finished.nodes == 0:
            return
        self._shares.append(finished.accepted_tokens / int(finished.tree.depths.max()))
        history, growth = self._history, self.growth
        surplus = sum(self._shares) / len(self._shares) - history.target_share
        deepest = max(growth.max_depth - 1, 1)
        self._depth = min(max(self._depth + history.depth_step * surplus, 1.0), deepest)
        sure = min(max(growth.sure - history.threshold_step * surplus, 0.0), 1.0)
        # A level d is below a real D_0 if it is below D_0 rounded up.
        self.growth = replace(growth, base_depth=math.ceil(self._depth), sure=sure)


def _moved(value: float, step: float, bounds: tuple[float, float]) -> float:
    """The value less the step, stopped by the bounds; outside of them it only moves inwards."""
    low, high = min(value, bounds[0]), max(value, bounds[1])
    return min(max(value - step, low), high)


def dynatree(arguments: str, max_nodes: int) -> DynaTree:
    """`dynatree` or `dynatree:printed`, and `dynatree:NAME=VALUE,...` with settings of either."""
    name = f"dynatree:{arguments}" if arguments else "dynatree"
    values: dict[type, dict[str, Any]] = {ConfidentGrowth: {}, HistorySettings: {}}
    settings = {one.name: (part, type(one.default)) for part in values for one in fields(part)}
    items = arguments.split(",") if arguments else []
    policy = PrintedDynaTree if items[:1] == ["printed"] else DynaTree
    for item in items[policy is PrintedDynaTree :]:
        setting, _, value = item.partition("=")
        try:
            part, kind = settings[setting]
            values[part][setting] = kind(value)
        except (KeyError, ValueError):
            raise InputError(
                f"'{name}' is not a policy: '{item}' sets nothing",
                hint="Write dynatree, dynatree:printed, or dynatree:NAME=VALUE,... with "
                f"{', '.join(settings)}.",
            ) from None
    growth = ConfidentGrowth(**values[ConfidentGrowth])
    return policy(max_nodes, HistorySettings(**values[HistorySettings]), growth, name)

"""Simulation of budget policies without a model: drawn drafts, costs from a cost model.

Each round draws one block of a calibrated drafter and the tokens that the target then writes.
Every policy chooses its tree from that block, observes the accepted nodes, and is charged by the
cost model. Best-first trees are nested, so all fixed sizes run on the same rounds, and the best
of them in hindsight is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodel.acceptance import AcceptanceProcess
from decoder.acceptance.rules import Accepted
from decoder.drafters.base import DraftRequest
from decoder.policies.base import Cost, Limits, Policy
from decoder.statistics import Round
from decoder.tree.draft_tree import EMPTY, DraftTree, Lattice, best_first
from decoder.tree.growth import TopPaths
from lab.bench.simulated import SimulatedDrafter, Truth

WIDTH = 256  # candidates a position; lower ranks hardly ever end in a tree
VOCAB = 151_936  # Qwen3's; only its order of size matters


Array = NDArray[np.float64]


def accepted_rows(tree: DraftTree, truth: Sequence[int]) -> list[int]:
    """The rows that a target accepts whose next tokens are `truth`, in order."""
    rows: list[int] = []
    row = 0
    for token in truth:
        row = tree.child(row, int(token))
        if row < 0:
            break
        rows.append(row)
    return rows


def committed_by_size(tree: DraftTree, truth: Sequence[int], max_nodes: int) -> NDArray[np.int64]:
    """Tokens that the first N = 0 .. `max_nodes` nodes of a tree commit, the bonus token included.

    tree  in best-first order, so that its first N nodes are the best tree of N nodes
    Row r is in every tree of r nodes or more, so an accepted row r adds one token to all sizes
    N >= r.
    """
    rows = np.asarray(accepted_rows(tree, truth), dtype=np.int64)
    return 1 + np.searchsorted(rows, np.arange(max_nodes + 1), side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHindsight:
    """Tokens and seconds of R rounds at S tree sizes.

    sizes      int [S]  nodes
    committed  [R, S]   tokens that each size commits in each round
    seconds    [R, S]   of the whole cycle
    """

    sizes: NDArray[np.int64]
    committed: Array
    seconds: Array

    def fixed_rates(self) -> Array:
        """[S] tokens per second if every round had verified a tree of that size."""
        rates: Array = self.committed.sum(axis=0) / self.seconds.sum(axis=0)
        return rates

    def best_fixed(self) -> tuple[int, float]:
        """The size with the highest overall rate, and that rate in tokens per second."""
        rates = self.fixed_rates()
        best = int(np.argmax(rates))
        return int(self.sizes[best]), float(rates[best])

    def oracle(self) -> tuple[NDArray[np.int64], float]:
        """The sizes [R] that maximise total tokens / total seconds, and that rate.

        Dinkelbach's iteration (1967): at the optimal rate, each round takes the size with the
        highest tokens - rate x seconds. It is an upper bound for every policy, since it knows
        the outcome of each round.
        """
        rounds = np.arange(len(self.committed))
        _, rate = self.best_fixed()
        while True:
            chosen = np.argmax(self.committed - rate * self.seconds, axis=1)
            tokens = float(self.committed[rounds, chosen].sum())
            better = tokens / float(self.seconds[rounds, chosen].sum())
            if better <= rate * (1.0 + 1e-12):
                return self.sizes[chosen], max(better, rate)
            rate = better


class Played:
    """The rounds of one policy: rows of tokens, seconds and nodes."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    @property
    def rounds(self) -> Array:
        """[rounds, 3]"""
        return np.array(self.rows, dtype=np.float64)

    @property
    def rate(self) -> float:
        """Tokens a second over all rounds."""
        committed, seconds, _ = self.rounds.sum(axis=0)
        return float(committed / seconds)

    @property
    def mean_nodes(self) -> float:
        return float(self.rounds[:, 2].mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting in which policies are compared.

    cost       of rounds; a policy may use another cost model
    context    cached tokens, the same in all rounds
    max_nodes  of the fixed trees in hindsight
    """

    cost: Cost
    context: int
    max_nodes: int
    rounds: int
    seed: int = 0


def draw_rounds(
    process: AcceptanceProcess, rounds: int, seed: int
) -> Iterator[tuple[Lattice, NDArray[np.int64]]]:
    """Blocks of independent positions, each with the tokens [gamma] that come true."""
    gamma = process.gamma
    text = np.random.default_rng(seed).integers(0, VOCAB, rounds * gamma + 1)
    session = SimulatedDrafter(Truth([text]), process, vocab=VOCAB, seed=seed).start(text[:1], None)
    request = DraftRequest(depth=gamma, width=WIDTH, growth=TopPaths())
    for start in range(1, rounds * gamma + 1, gamma):
        yield session.draft(text[:start], request), text[start : start + gamma]


def compare(
    process: AcceptanceProcess, policies: Mapping[str, Policy], setting: Setting
) -> tuple[dict[str, Played], RecordedHindsight]:
    """Run every policy over the same rounds; also every fixed size of 0 .. max_nodes."""
    played = {name: Played() for name in policies}
    cost, context = setting.cost, setting.context
    sizes = np.arange(setting.max_nodes + 1)
    cycle_s = np.asarray(cost.cycle_s(sizes.astype(np.float64), context), dtype=np.float64)
    committed = np.empty((setting.rounds, len(sizes)))
    for index, (block, truth) in enumerate(draw_rounds(process, setting.rounds, setting.seed)):
        largest = best_first(block, setting.max_nodes)
        committed[index] = committed_by_size(largest, truth.tolist(), setting.max_nodes)
        for name, policy in policies.items():
            _play(policy, played[name], (block, truth), setting)
    seconds = np.broadcast_to(cycle_s, committed.shape)
    return played, RecordedHindsight(sizes=sizes, committed=committed, seconds=seconds)


def _play(
    policy: Policy,
    played: Played,
    drawn: tuple[Lattice, NDArray[np.int64]],
    setting: Setting,
) -> None:
    """One round of one policy."""
    block, truth = drawn
    context, cost = setting.context, setting.cost
    if not policy.wants_draft(context):
        plain = Accepted([], [], int(truth[0]))
        policy.observe(Round(tree=EMPTY, accepted=plain, context=context, drafted=False))
        played.rows.append((1, cost.plain_s(context), 0))
        return
    limits = Limits(nodes=max(policy.max_nodes, 1), depth=len(truth))
    tree = policy.choose(block, context, limits)
    rows = accepted_rows(tree, truth.tolist())
    tokens = truth[: len(rows)].tolist()
    policy.observe(Round(tree=tree, accepted=Accepted(rows, tokens, 0), context=context))
    cycle_s = float(cost.cycle_s(np.array([float(tree.nodes)]), context)[0])
    played.rows.append((1 + len(rows), cycle_s, tree.nodes))


@dataclass(frozen=True, slots=True)
class CostAt:
    """A cost model evaluated once at one context."""

    cycles_s: NDArray[np.float64]
    draft: float
    plain: float

    @classmethod
    def of(cls, cost: Cost, context: int, max_nodes: int) -> CostAt:
        sizes = np.arange(max_nodes + 1, dtype=np.float64)
        return cls(cost.cycle_s(sizes, context), cost.draft_s(context), cost.plain_s(context))

    def plain_s(self, context: float, batch: int = 1) -> float:
        return self.plain

    def draft_s(self, context: float) -> float:
        return self.draft

    def sizes(self, most: int) -> NDArray[np.int64]:
        return np.arange(most + 1)

    def cycle_s(
        self, nodes: NDArray[np.float64], context: float, batch: int = 1
    ) -> NDArray[np.float64]:
        return self.cycles_s[np.asarray(nodes, dtype=np.int64)]

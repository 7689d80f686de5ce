"""Which tree to verify: the budget policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.speculation import expected_committed
from decoder.tree import EMPTY, CandidateTree, DraftTree, Lattice, best_first, chain

Candidates = Lattice | CandidateTree

DEFAULT_MAX_NODES = 256


class Cost(Protocol):
    """What the controller asks of a cost model; `costmodel.estimator` provides it."""

    def plain_s(self, context: int) -> float: ...

    def draft_s(self, context: int) -> float: ...

    def cycle_s(self, nodes: NDArray[np.int64], context: int) -> NDArray[np.float64]:
        """Seconds of whole cycles, the draft included."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a round's tree: room in the cache and tokens still wanted."""

    nodes: int
    depth: int


class Policy(Protocol):
    """Chooses each round's tree; one object lives as long as its decoder."""

    name: str
    max_nodes: int

    def wants_draft(self, context: int) -> bool:
        """Whether to draft at all this round, decided before the drafter has run."""

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        """The tree to verify, `EMPTY` for a plain step."""

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        """What the target accepted of the tree that was chosen."""


@dataclass(slots=True)
class Plain:
    """No speculation: one target step a token."""

    name: str = "plain"
    max_nodes: int = 0

    def wants_draft(self, context: int) -> bool:
        return False

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return EMPTY

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        pass


@dataclass(slots=True)
class Chain:
    """The drafter's single most probable path, as deep as it drafts."""

    name: str = "chain"
    max_nodes: int = DEFAULT_MAX_NODES

    def wants_draft(self, context: int) -> bool:
        return True

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return chain(candidates, min(limits.depth, limits.nodes))

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        pass


@dataclass(slots=True)
class Fixed:
    """The best-first tree of a fixed number of nodes (DDTree)."""

    max_nodes: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"fixed:{self.max_nodes}"

    def wants_draft(self, context: int) -> bool:
        return True

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes))

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        pass


class Bastion:
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

    def wants_draft(self, context: int) -> bool:
        return self._gate.open(context)

    def choose(self, candidates: Candidates, context: int, limits: Limits) -> DraftTree:
        nodes = min(self.max_nodes, limits.nodes)
        tree = best_first(candidates, nodes, self._bias.factors())
        if tree.nodes == 0:
            return EMPTY
        # Size 0 is the plain step. The draft is already paid for, so it counts for no size.
        sizes = np.arange(tree.nodes + 1)
        cycle_s = self.cost.cycle_s(sizes, context) - self.cost.draft_s(context)
        return tree.first(int(np.argmax(expected_committed(tree.scores) / cycle_s)))

    def observe(self, tree: DraftTree, accepted_rows: list[int], context: int) -> None:
        self._bias.observe(tree, accepted_rows)
        self._gate.observe(tree, len(accepted_rows), context)


class DepthBias:
    """How often a depth's drafted children were accepted, over how often predicted.

    Both sums fade by `FADING` a drafted round and start from `PRIOR` pseudo-observations
    of a drafter without bias. In plain rounds they fade by `RECOVERY`, so that a drafter
    once found useless is tried again, at some few per cent of the rounds.
    """

    FADING = 0.99
    RECOVERY = 0.998
    PRIOR = 0.5
    DEPTHS = 64

    def __init__(self) -> None:
        self._predicted = np.zeros(self.DEPTHS)
        self._realised = np.zeros(self.DEPTHS)
        self._factors = np.ones(self.DEPTHS)

    def factors(self) -> NDArray[np.float64]:
        """[depths] factors for the probabilities of each depth."""
        self._factors = (self._realised + self.PRIOR) / (self._predicted + self.PRIOR)
        return self._factors

    def observe(self, tree: DraftTree, accepted_rows: list[int]) -> None:
        """Compare, at each visited row, the children's probability with what happened."""
        fading = self.FADING if tree.nodes else self.RECOVERY
        self._predicted *= fading
        self._realised *= fading
        above = 1.0
        for depth, row in enumerate([0, *accepted_rows]):
            children = tree.scores[tree.parents == row]
            if depth >= self.DEPTHS or len(children) == 0 or above <= 0.0:
                return
            # The tree was built with the factors on; predictions are compared without them.
            predicted = float(children.sum()) / above / self._factors[depth]
            self._predicted[depth] += min(predicted, 1.0)
            if depth < len(accepted_rows):
                self._realised[depth] += 1.0
                above = float(tree.scores[accepted_rows[depth] - 1])


class DraftGate:
    """Stops drafting while it does not pay, and tries again every few dozen rounds.

    Once candidates exist their cost is sunk, so this decision is made before
    drafting, from the committed length and the cost of recent drafted rounds.
    """

    RETRY_ROUNDS = 32
    FADING = 0.9
    FREE_SHARE = 0.005  # a draft below this share of a plain step never needs a decision

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._rounds = 0.0
        self._committed = 0.0
        self._worth = 0.0
        self._plain_left = 0
        self._drafting = False

    def open(self, context: int) -> bool:
        self._drafting = self._plain_left == 0
        self._plain_left = max(self._plain_left - 1, 0)
        return self._drafting

    def observe(self, tree: DraftTree, accepted: int, context: int) -> None:
        if not self._drafting:
            return  # a round without a draft says nothing about drafting
        plain_s = self._cost.plain_s(context)
        draft_s = self._cost.draft_s(context)
        if draft_s < self.FREE_SHARE * plain_s:
            return
        cycle_s = float(self._cost.cycle_s(np.array([tree.nodes]), context)[0])
        self._rounds = self._rounds * self.FADING + 1.0
        # Plain steps that the drafted round replaced, against what it cost in plain steps.
        self._committed = self._committed * self.FADING + 1.0 + accepted
        self._worth = self._worth * self.FADING + cycle_s / plain_s
        if self._rounds > 4.0 and self._committed < self._worth:
            self._plain_left = self.RETRY_ROUNDS


def parse_policy(text: str, cost: Callable[[], Cost], max_nodes: int) -> Policy:
    """`bastion`, `fixed:N`, `chain` or `plain`.

    `cost` is called only where one is needed; `max_nodes` bounds bastion and chain.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    name, _, argument = text.partition(":")
    if name == "fixed":
        if not argument.isdecimal() or int(argument) < 1:
            raise InputError(
                f"'{text}' is not a policy", hint="Write fixed:N with N of 1 or more, as fixed:16."
            )
        return Fixed(int(argument))
    if text == "bastion":
        return Bastion(cost(), max_nodes)
    if text == "chain":
        return Chain(max_nodes=max_nodes)
    if text == "plain":
        return Plain()
    raise InputError(f"'{text}' is not a policy", hint="Use bastion, fixed:N, chain or plain.")

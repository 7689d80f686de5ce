"""The adaptive policy of BASTION, the tree size of highest estimated speed; policies by name.

It learns three things while decoding: the drafter's bias at each depth, the speed of the
text, and whether drafting pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from costmodel.errors import InputError
from costmodel.online import FadingMean
from costmodel.statistics import Array
from decoder.extensions import POLICIES, make_extension
from decoder.jit import jit
from decoder.names import FIXED, check_policy
from decoder.policies import base
from decoder.statistics import Round
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, best_first


class DepthBias:
    """The drafter's bias at each depth: realised over predicted acceptance of children.

    Both counts fade by `FADING` in a drafted round, by `RECOVERY` in a plain one, so that a
    useless drafter is tried again. They start from pseudo-observations of an unbiased drafter:
    `PRIOR` of them lower a factor, `UPWARD_PRIOR` raise it. Raising takes more, because deep rows
    are reached only in texts that go on as drafted, and the product of many factors above 1
    predicts long paths everywhere.
    """

    FADING = 0.99
    RECOVERY = 0.999
    PRIOR = 1.0
    UPWARD_PRIOR = 8.0
    DEPTHS = 64

    def __init__(self) -> None:
        self._predicted = np.zeros(self.DEPTHS)
        self._realised = np.zeros(self.DEPTHS)
        self._factors = np.ones(self.DEPTHS)
        self.observe(EMPTY, [])  # compiled before the first round

    def factors(self) -> Array:
        """[depths] factors for the probabilities of each depth."""
        predicted, realised = self._predicted, self._realised
        pseudo = np.where(realised > predicted, self.UPWARD_PRIOR, self.PRIOR)
        self._factors = (realised + pseudo) / (predicted + pseudo)
        return self._factors

    def observe(self, tree: DraftTree, accepted_rows: list[int]) -> None:
        """Count predicted and realised acceptance of the children of each visited row."""
        fading = self.FADING if tree.nodes else self.RECOVERY
        path = np.array([0, *accepted_rows], dtype=np.int64)
        # The tree's scores include the factors; predictions are counted without them.
        counts = self._predicted, self._realised
        _count(tree.parents, tree.scores, path, self._factors, counts, fading)


@jit
def _count(parents, scores, path, factors, counts, fading):  # type: ignore[no-untyped-def]
    """Add what is predicted and realised below the rows of the path to counts that fade first."""
    predicted, realised = counts
    for depth in range(len(predicted)):
        predicted[depth] *= fading
        realised[depth] *= fading
    above = 1.0
    for depth in range(min(len(path), len(predicted))):
        total, children = 0.0, 0
        for node in range(len(parents)):
            if parents[node] == path[depth]:
                total += scores[node]
                children += 1
        if children == 0 or above <= 0.0:
            return
        predicted[depth] += min(total / above / factors[depth], 1.0)
        if depth + 1 < len(path):
            realised[depth] += 1.0
            above = scores[path[depth + 1] - 1]


class DraftGate:
    """Stops drafting while it does not pay, and tries again after a number of plain rounds.

    The cost of a draft is sunk once candidates exist, so the decision is made before drafting.
    It depends on the gain of recent drafted rounds: the plain steps that they replaced less
    those that they took. The gate closes if the gain is below zero by more than its standard
    error, and halves the weight of past rounds. Each wait is twice as long as the one before.
    """

    FIRST_WAIT, LONGEST_WAIT = 4, 64  # plain rounds
    ENOUGH = 4.0  # drafted rounds before the gate may close
    FADING = 0.95
    FREE_SHARE = 0.005  # a draft below this share of a plain step is always made

    def __init__(self) -> None:
        self._sums = np.zeros(3)  # of rounds, gains and squared gains
        self._wait = self.FIRST_WAIT
        self._plain_left = 0

    def open(self) -> bool:
        drafting = self._plain_left == 0
        self._plain_left = max(self._plain_left - 1, 0)
        return drafting

    def observe(self, committed: int, plain_steps: float, draft_steps: float) -> None:
        """A drafted round's tokens, its time in plain steps, and that of its draft alone."""
        if draft_steps < self.FREE_SHARE:
            return
        gain = committed - plain_steps
        self._sums = self._sums * self.FADING + (1.0, gain, gain**2)
        rounds, mean, square = self._sums / (1.0, self._sums[0], self._sums[0])
        error = math.sqrt(max(square - mean**2, 0.0) / rounds)
        if rounds > self.ENOUGH and mean + error < 0.0:
            self._plain_left = self._wait
            self._wait = min(2 * self._wait, self.LONGEST_WAIT)
            self._sums *= 0.5
        elif rounds > 2 * self.ENOUGH and mean > 0.0:
            self._wait = self.FIRST_WAIT


SPEED_FADING = 0.99  # a round
LEAST_WANTED = 32  # candidates
WANTED_SHARE = 2  # candidates for each node of the largest recent tree
WANTED_FADING = 0.98  # of the largest recent tree, a round


class Bastion(base.Policy):
    """The tree size that adds most to the speed of the whole text, by the cost model.

    The speed of a text, all its tokens over all its seconds, is highest if every round takes the
    size N of highest A(N) - rate x C(N), with the rate of the whole text (renewal reward;
    Dinkelbach, 1967). The paper takes the highest A(N) / C(N) of each round by itself (BASTION
    eqs. 6, 7), which spends too much on poor rounds and too little on good ones.

    Every size is scored instead of the paper's first drop, because measured costs are stairs.
    Size 0, a plain step, is one of them, and the rate is never below that of plain steps.
    """

    name = "bastion"

    def __init__(self, cost: base.Cost, max_nodes: int = base.DEFAULT_MAX_NODES) -> None:
        self.cost = cost
        self.max_nodes = max_nodes
        self._largest_lately = 0.0
        self._bias = DepthBias()
        self._gate = DraftGate()
        # Tokens in the time of a plain step, by the cost model: an error by a constant factor does
        # not change the choices.
        self._speed = FadingMean(SPEED_FADING)
        # Predicted time of the present round and of its drafts, in plain steps of the same batch.
        self._round_steps = 1.0
        self._draft_steps = 0.0

    def wanted_nodes(self) -> int:
        """A multiple of the largest recent tree; candidates far beyond it only cost time."""
        wanted = max(int(WANTED_SHARE * self._largest_lately), LEAST_WANTED)
        return max(min(wanted, self.max_nodes), 1)

    def wants_draft(self, context: int, batch: int = 1) -> bool:
        return self._gate.open()

    def choose(self, candidates: Candidates, context: int, limits: base.Limits) -> DraftTree:
        tree = self._largest(candidates, limits)
        size = self._best_size(tree.scores, context)
        return tree.first(size) if size else EMPTY

    def choose_together(self, requests: Sequence[base.TreeRequest]) -> list[DraftTree]:
        """One budget for the whole batch, spent on the best nodes of all trees.

        Trees are nested, so the n best nodes of all sequences are a prefix of each tree. The
        forward is priced at the mean number of nodes and the mean context.
        """
        if len(requests) == 1:
            only = requests[0]
            return [self.choose(only.candidates, only.context, only.limits)]
        trees = [self._largest(request.candidates, request.limits) for request in requests]
        scores = np.concatenate([tree.scores for tree in trees])
        tree_of = np.repeat(np.arange(len(trees)), [tree.nodes for tree in trees])
        order = np.argsort(-scores, kind="stable")
        batch, context = len(requests), float(np.mean([request.context for request in requests]))
        taken = tree_of[order[: self._best_size(scores[order], context, batch)]]
        counts = np.bincount(taken, minlength=batch)
        return [tree.first(int(count)) for tree, count in zip(trees, counts, strict=True)]

    def observe(self, finished: Round) -> None:
        largest = max(float(finished.nodes), WANTED_FADING * self._largest_lately)
        self._largest_lately = largest
        self._bias.observe(finished.tree, finished.accepted.rows)
        committed = 1 + finished.accepted_tokens
        if finished.drafted:
            self._gate.observe(committed, self._round_steps, self._draft_steps)
        self._speed.add(committed, self._round_steps if finished.drafted else 1.0)

    def _largest(self, candidates: Candidates, limits: base.Limits) -> DraftTree:
        return best_first(candidates, min(self.max_nodes, limits.nodes), self._bias.factors())

    def _best_size(self, scores: Array, context: float, batch: int = 1) -> int:
        """The number of nodes to verify in all sequences; `scores` [nodes] fall."""
        most = len(scores)
        sizes = self.cost.sizes(most) if batch == 1 else np.arange(most + 1)
        cycle_s = self.cost.cycle_s(sizes / batch, context, batch)
        draft_s = self.cost.draft_s(context)
        plain_s = self.cost.plain_s(context, batch)
        tokens = batch + np.concatenate((np.zeros(1), scores.cumsum()))[sizes]
        speed = self._speed.mean()
        if speed is None:  # the highest speed of this round; its draft is spent already
            rate = float((tokens / (cycle_s - draft_s)).max())
        else:
            rate = max(speed, 1.0) * batch / plain_s
        best = int(np.argmax(tokens - rate * cycle_s))
        drafts_s = draft_s * batch  # one after the other
        self._round_steps = (float(cycle_s[best]) - draft_s + drafts_s) / plain_s
        self._draft_steps = drafts_s / plain_s
        return int(sizes[best])


def parse_policy(text: str, cost: base.FindCost, max_nodes: int) -> base.Policy:
    """The policy of a name, as `bastion` or `fixed:16`; `POLICY_NAMES` lists those of the decoder.

    Entry points give other packages' policies names, and `package.module:Class` needs none.

    cost       gives the cost model; called only for a policy that reads one
    max_nodes  bounds every tree whose size is not in the name
    Raises InputError for another name.
    """
    if max_nodes < 1:
        raise InputError(f"the largest tree must have 1 node or more, got {max_nodes}")
    if text == "bastion":
        return Bastion(cost(), max_nodes)
    if text == "chain":
        return base.Chain(max_nodes=max_nodes)
    if text == "plain":
        return base.Plain()
    check_policy(text)
    match = FIXED.fullmatch(text)
    if match is not None:
        return base.Fixed(int(match[1]))
    policy: base.Policy | None = make_extension(
        text, POLICIES, base.Policy, cost=cost, max_nodes=max_nodes
    )
    if policy is None:  # the entry point is that of a format
        raise InputError(f"'{text}' is not a policy")
    return policy

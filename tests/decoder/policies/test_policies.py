"""Tree sizes against brute force over a cost of stairs, and the no-loss rule."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.online import FadingMean
from decoder.policies.base import DEFAULT_MAX_NODES, Chain, Fixed, Limits, Plain
from decoder.policies.bastion import SPEED_FADING, Bastion, DepthBias, DraftGate, parse_policy
from decoder.tree.draft_tree import EMPTY, Lattice, best_first
from tests.decoder.models import StairCost, round_of

CONTEXT = 100
FREE = Limits(nodes=10_000, depth=64)


@dataclass
class Stairs(StairCost):
    """A forward costs a step more at 4, 12, 20, ... rows; the rest is flat or by node."""

    step_s: float = 0.3
    node_s: float = 0.001
    drafting_s: float = 0.0
    every: int = 8

    def draft_s(self, context):
        return self.drafting_s

    def cycle_s(self, nodes, context, batch=1):
        assert context == CONTEXT
        stairs = (np.asarray(nodes) + 5) // self.every
        return 1.0 + self.step_s * stairs + self.node_s * np.asarray(nodes) + self.drafting_s


def lattice(first, fading=0.8, depth=6, width=8):
    ranks = first * 0.5 ** np.arange(width)
    probabilities = np.minimum(ranks[None] * fading ** np.arange(depth)[:, None], 1.0)
    tokens = np.arange(depth * width, dtype=np.int64).reshape(depth, width)
    return Lattice(tokens, probabilities)


def best_by_hand(candidates, cost, most):
    """Every size in turn, a tree of its own for each."""
    best, best_rate = 0, 0.0
    for nodes in range(most + 1):
        tree = best_first(candidates, nodes)
        if tree.nodes < nodes:
            break
        cycle_s = float(cost.cycle_s(np.array([nodes]), CONTEXT)[0]) - cost.draft_s(CONTEXT)
        rate = tree.expected_committed / cycle_s
        if rate > best_rate + 1e-12:
            best, best_rate = nodes, rate
    return best


costs = st.builds(
    Stairs, step_s=st.floats(0.0, 1.0), node_s=st.floats(0.0, 0.1), drafting_s=st.floats(0.0, 0.5),
    every=st.integers(1, 16),
)  # fmt: skip


class TestBastion:
    @given(first=st.floats(0.02, 0.5), fading=st.floats(0.3, 1.0), cost=costs)
    def test_the_size_of_highest_rate(self, first, fading, cost):
        candidates = lattice(first, fading)
        tree = Bastion(cost, 60).choose(candidates, CONTEXT, FREE)
        expected = best_by_hand(candidates, cost, 60)
        if tree.nodes != expected:  # equal rates up to rounding
            sizes = np.array([tree.nodes, expected])
            committed = [best_first(candidates, n).expected_committed for n in sizes]
            rates = committed / (cost.cycle_s(sizes, CONTEXT) - cost.drafting_s)
            assert rates[0] == pytest.approx(rates[1], rel=1e-9)

    @pytest.mark.parametrize(("most", "room", "nodes"), [(5, 100, 5), (100, 3, 3), (100, 0, 0)])
    def test_limits(self, most, room, nodes):
        cost = Stairs(step_s=0.0, node_s=0.0)
        tree = Bastion(cost, most).choose(lattice(0.5), CONTEXT, Limits(nodes=room, depth=6))
        assert tree.nodes == nodes

    def test_a_drafter_that_lies_is_found_out(self):
        """It says 0.9 and is right one time in twenty: a tree does not pay here."""
        cost = Stairs(step_s=0.0, node_s=0.3)
        policy = Bastion(cost, 1)
        random = np.random.default_rng(0)
        candidates = Lattice(np.array([[1]]), np.array([[0.9]]))
        sizes = []
        for _ in range(200):
            tree = policy.choose(candidates, CONTEXT, FREE)
            sizes.append(tree.nodes)
            accepted = [1] if tree.nodes and random.random() < 0.05 else []
            policy.observe(round_of(tree, accepted, CONTEXT))
        assert sizes[0] == 1
        assert sum(sizes[100:]) < 25


class TestSpeed:
    """The speed of the text so far decides what a second of this round has to bring."""

    def test_it_is_the_ratio_of_faded_sums(self):
        decoding, rounds = FadingMean(SPEED_FADING), [(3, 1.5), (1, 1.0), (6, 2.0)]
        for committed, plain_steps in rounds:
            decoding.add(committed, plain_steps)
        weights = [SPEED_FADING**2, SPEED_FADING, 1.0]
        tokens = sum(w * committed for w, (committed, _) in zip(weights, rounds, strict=True))
        steps = sum(w * plain_steps for w, (_, plain_steps) in zip(weights, rounds, strict=True))
        assert decoding.mean() == pytest.approx(tokens / steps)

    @given(first=st.floats(0.05, 0.5), speed=st.floats(1.0, 8.0), cost=costs)
    def test_the_size_gains_most_at_the_known_speed(self, first, speed, cost):
        """Every size in turn: A(N) less what its seconds bring elsewhere."""
        policy, candidates = Bastion(cost, 60), lattice(first)
        policy._speed.add(speed, 1.0)
        tree = policy.choose(candidates, CONTEXT, FREE)
        gains = []
        for nodes in range(61):
            grown = best_first(candidates, nodes)
            cycle_s = float(cost.cycle_s(np.array([nodes]), CONTEXT)[0])
            gains.append(grown.expected_committed - speed * cycle_s / cost.plain_s(CONTEXT))
        assert gains[tree.nodes] == pytest.approx(max(gains), abs=1e-9)


class TestGate:
    """Rounds as the policy runs them: asked first, told afterwards of those that drafted."""

    @staticmethod
    def rounds(gate, count, drafting_s, accepted=0, nodes=1):
        """Which of `count` rounds drafted, when each drafted round accepts `accepted`."""
        cycle_s = float(Stairs(drafting_s=drafting_s).cycle_s(np.array([nodes]), CONTEXT)[0])
        asked = []
        for _ in range(count):
            asked.append(gate.open())
            if asked[-1]:
                gate.observe(1 + accepted, cycle_s, drafting_s)
        return asked

    def test_it_tries_again_soon_and_then_rarely(self):
        asked = self.rounds(DraftGate(), 400, drafting_s=0.5)
        waits = np.diff(np.flatnonzero(asked)) - 1
        longest = DraftGate.LONGEST_WAIT
        assert [wait for wait in waits if wait][:5] == [4, 8, 16, 32, longest]
        assert set(waits[-8:]) <= {0, longest}
        assert sum(asked[100:]) <= 0.1 * 300

    def test_it_opens_again_when_drafting_pays(self):
        gate = DraftGate()
        self.rounds(gate, 30, drafting_s=0.5)
        asked = self.rounds(gate, 400, drafting_s=0.5, accepted=4, nodes=4)
        assert all(asked[-100:])

    def test_a_free_draft_is_never_given_up(self):
        """The plain step competes with the tree after drafting anyway."""
        assert all(self.rounds(DraftGate(), 100, drafting_s=0.001))


class TestDraftedRounds:
    """What the policy tells its gate and its speed of decoding about each round."""

    HOPELESS = Lattice(np.zeros((1, 1), np.int64), np.full((1, 1), 0.01))

    @staticmethod
    def rounds(policy, count, candidates=HOPELESS):
        """Which of `count` rounds drafted; nothing is ever accepted."""
        asked = []
        for _ in range(count):
            asked.append(policy.wants_draft(CONTEXT))
            tree = policy.choose(candidates, CONTEXT, FREE) if asked[-1] else EMPTY
            policy.observe(round_of(tree, [], CONTEXT, drafted=asked[-1]))
        return asked

    def test_a_draft_that_brings_nothing_closes_the_gate(self):
        asked = self.rounds(Bastion(Stairs(step_s=0.5, drafting_s=0.5)), 100)
        assert all(asked[:4])
        assert sum(asked) < 30

    def test_no_candidates_still_cost_their_draft(self):
        policy = Bastion(Stairs(step_s=0.0, node_s=0.0, drafting_s=0.5))
        none = Lattice(np.zeros((0, 3), np.int64), np.zeros((0, 3)))
        asked = self.rounds(policy, 100, candidates=none)
        assert sum(asked) < 30


class TestDepthBias:
    @staticmethod
    def learn(predicted, true, rounds=600, depth=3):
        """Factors after chains of `predicted` probabilities that hold with `true`."""
        random = np.random.default_rng(1)
        bias = DepthBias()
        for _ in range(rounds):
            said = np.full((depth, 1), predicted)
            candidates = Lattice(np.arange(depth)[:, None], said)
            tree = best_first(candidates, depth, bias.factors())
            held = (random.random(depth) < true).cumprod().sum()
            bias.observe(tree, list(range(1, held + 1)))
        return bias.factors()

    @pytest.mark.parametrize(("predicted", "true"), [(0.9, 0.45), (0.8, 0.7), (0.4, 0.8)])
    def test_it_learns_the_factor(self, predicted, true):
        factors = self.learn(predicted, true)
        assert factors[0] * predicted == pytest.approx(true, abs=0.1)
        assert factors[1] * predicted == pytest.approx(true, abs=0.12)

    def test_scores_rise_slower_than_they_fall(self):
        candidates = Lattice(np.array([[1]]), np.array([[0.5]]))
        for accepted, factor in (([1], (1 + 8) / (0.5 + 8)), ([], 1 / (0.5 + 1))):
            bias = DepthBias()
            bias.observe(EMPTY, [])  # a plain round teaches nothing
            assert np.all(bias.factors() == 1.0)
            bias.observe(best_first(candidates, 1, bias.factors()), accepted)
            assert bias.factors()[0] == pytest.approx(factor)


class TestParsing:
    def cost(self, fit=None):
        self.asked = True
        return Stairs()

    @pytest.mark.parametrize(("text", "kind", "most"), [
        ("plain", Plain, 0), ("chain", Chain, 9), ("fixed:12", Fixed, 12),
    ])  # fmt: skip
    def test_policies_without_a_cost(self, text, kind, most):
        self.asked = False
        policy = parse_policy(text, self.cost, 9)
        assert (type(policy), policy.name, policy.max_nodes) == (kind, text, most)
        assert not self.asked

    def test_bastion_asks_for_its_cost(self):
        policy = parse_policy("bastion", self.cost, DEFAULT_MAX_NODES)
        assert (policy.name, policy.max_nodes, self.asked) == ("bastion", DEFAULT_MAX_NODES, True)

    def test_unknown_ones(self):
        for text in ("bastion:3", "Plain", "fixed", "fixed:0", "fixed:1.5", "tree"):
            with pytest.raises(InputError, match="is not a policy"):
                parse_policy(text, self.cost, 9)


class TestSimplePolicies:
    def test_fixed_takes_the_best_tree_that_fits(self):
        tree = Fixed(7).choose(lattice(0.5), CONTEXT, FREE)
        np.testing.assert_array_equal(tree.tokens, best_first(lattice(0.5), 7).tokens)
        assert Fixed(7).choose(lattice(0.5), CONTEXT, Limits(nodes=4, depth=6)).nodes == 4

    def test_chain_takes_the_first_of_each_position(self):
        tree = Chain(max_nodes=10).choose(lattice(0.5), CONTEXT, Limits(nodes=10, depth=4))
        assert tree.tokens.tolist() == [0, 8, 16, 24]
        assert tree.parents.tolist() == list(range(tree.nodes))

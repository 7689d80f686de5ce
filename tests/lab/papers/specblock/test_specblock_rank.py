"""SpecBlock's rank head and the tree it shapes, against plain Python and cases by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.papers.specblock.model import (
    CONCENTRATED,
    FALLBACK,
    RankHead,
    buckets_of,
    ranks_of,
    summary,
)
from lab.papers.specblock.tree import UNIFORM_WIDTH, BlockGrowth, BlockTree, uniform
from tests.lab.papers.specblock.specblock_models import nodes_of, plain_summary, reference_tree


class TestSummary:
    def test_against_plain_python(self):
        logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 4
        for row, features in zip(logits.tolist(), summary(logits).tolist(), strict=True):
            assert len(features) == 15
            assert features == pytest.approx(plain_summary(row), abs=1e-5)

    def test_a_flat_distribution(self):
        features = summary(torch.full((1, 16), 3.0))[0].tolist()
        assert features[:10] == pytest.approx([-math.log(16)] * 10)
        assert features[10:] == pytest.approx([0.0, 0.0, 0.0, 1 / 16, math.log(16)])

    def test_a_certain_one_by_hand(self):
        """Logits 10, 8, 7, 6, 4, then 0: the gaps are 2, 3 and 6."""
        logits = torch.tensor([[0.0, 8.0, 10.0, 6.0, 7.0, 4.0] + [0.0] * 6])
        features = summary(logits)[0].tolist()
        assert features[10:13] == pytest.approx([2.0, 3.0, 6.0])
        total = sum(math.exp(v) for v in (10, 8, 7, 6, 4)) + 7
        assert features[13] == pytest.approx(math.exp(10) / total)
        assert features[9] == pytest.approx(-math.log(total))

    def test_impossible_tokens(self):
        logits = torch.tensor([[1.0] * 10 + [-math.inf] * 5])
        assert summary(logits)[0, -1] == pytest.approx(math.log(10))


class TestBuckets:
    def test_edges(self):
        ranks = [1, 2, 4, 5, 10, 11, 8192]
        assert buckets_of(torch.tensor(ranks)).tolist() == [0, 1, 1, 2, 2, 3, 3]

    def test_ranks_by_sorting(self):
        logits = torch.randn(20, 17, generator=torch.Generator().manual_seed(1))
        ids = torch.arange(20) % 17
        expected = [
            sorted(row.tolist(), reverse=True).index(row[i]) + 1
            for row, i in zip(logits, ids, strict=True)
        ]
        assert ranks_of(logits, ids).tolist() == expected

    def test_a_token_that_is_not_drafted_is_behind_all(self):
        assert ranks_of(torch.zeros(1, 17), torch.tensor([-1])).tolist() == [18]
        assert buckets_of(ranks_of(torch.zeros(1, 12), torch.tensor([-1]))).tolist() == [3]

    def test_the_head_leaves_the_trunk_alone(self):
        head = RankHead(8)
        hidden = torch.randn(3, 8, requires_grad=True)
        logits = torch.randn(3, 12, requires_grad=True)
        head(hidden, logits).square().sum().backward()
        assert hidden.grad is None and logits.grad is None
        assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def block(tokens, probabilities, buckets):
    """One start's part of a forward, with its leading axis."""
    return np.array([tokens]), np.array([probabilities]), np.array([buckets])


class TestByHand:
    """K = 2, tokens 10 to 13 at position 1 and 20 to 23 at position 2."""

    TOKENS = ((10, 11, 12, 13), (20, 21, 22, 23))
    Q = ((0.5, 0.2, 0.1, 0.05), (0.4, 0.3, 0.2, 0.1))

    def grown(self, buckets, growth=None, depth=9, width=9):
        growth = growth or BlockGrowth(branching=(2, 4, 4, 0), starts=9)
        tree = BlockTree(growth, depth, width)
        tree.attach(*block(self.TOKENS, self.Q, buckets))
        return tree

    def starts(self, tree):
        return [(s.token, s.position, s.depth, round(s.score, 6)) for s in tree.starts]

    def test_sure_positions_give_two_children_and_one_start(self):
        tree = self.grown((0, 0))
        assert nodes_of(tree.candidates()) == {(10,): 0.5, (11,): 0.2, (10, 20): 0.4, (10, 21): 0.3}
        assert self.starts(tree) == [(20, 1, 2, 0.2)]

    def test_an_uncertain_position_lets_its_siblings_start_blocks(self):
        tree = self.grown((1, 0))
        assert len(tree.tokens) == 6
        # Path scores: 0.5 * 0.4 of the chain's end, then the siblings' own.
        assert self.starts(tree) == [
            (11, 0, 1, 0.2),
            (20, 1, 2, 0.2),
            (12, 0, 1, 0.1),
            (13, 0, 1, 0.05),
        ]

    def test_a_position_given_up_ends_the_chain(self):
        tree = self.grown((0, 3))
        assert set(nodes_of(tree.candidates())) == {(10,), (11,)}
        assert self.starts(tree) == [(10, 0, 1, 0.5)]
        nothing = self.grown((3, 0))
        assert len(nothing.candidates().tokens) == 0 and nothing.starts == []

    def test_the_fallback_keeps_candidates_but_starts_nothing_from_them(self):
        tree = self.grown((3, 0), BlockGrowth(branching=FALLBACK))
        assert set(nodes_of(tree.candidates())) == {
            *((10,), (11,), (12,), (13,)),
            *((10, 20), (10, 21)),
        }
        assert self.starts(tree) == [(20, 1, 2, 0.2)]

    def test_depth_and_width_of_the_request(self):
        shallow = self.grown((1, 1), depth=1)
        assert set(nodes_of(shallow.candidates())) == {(10,), (11,), (12,), (13,)}
        assert shallow.starts == []
        narrow = self.grown((1, 1), width=1)
        assert set(nodes_of(narrow.candidates())) == {(10,), (10, 20)}
        even = self.grown((1, 1), depth=2)
        assert {s.depth for s in even.starts} == {1}

    def test_the_best_starts_and_the_best_nodes(self):
        growth = BlockGrowth(branching=(2, 4, 4, 0), starts=2, nodes=3)
        tree = self.grown((1, 1), growth)
        assert self.starts(tree) == [(11, 0, 1, 0.2), (20, 1, 2, 0.2)]
        # Path scores 0.5, 0.2, 0.2 (0.5 * 0.4): the earlier one first among equals.
        assert set(nodes_of(tree.candidates())) == {(10,), (11,), (10, 20)}

    def test_a_second_block_hangs_below_its_start(self):
        tree = self.grown((1, 0), BlockGrowth(branching=(2, 4, 4, 0), starts=2))
        second = ((30, 31, 32, 33), (40, 41, 42, 43))
        third = ((50, 51, 52, 53), (60, 61, 62, 63))
        tree.attach(
            np.array([second, third]), np.array([self.Q, self.Q]), np.array([[0, 3], [0, 0]])
        )
        nodes = nodes_of(tree.candidates())
        assert {path for path in nodes if len(path) > 1 and path[0] == 11} == {(11, 30), (11, 31)}
        assert {path for path in nodes if len(path) > 2} == {
            *((10, 20, 50), (10, 20, 51)),
            *((10, 20, 50, 60), (10, 20, 50, 61)),
        }

    def test_the_paper_s_settings(self):
        assert CONCENTRATED == (2, 4, 10, 0) and FALLBACK == (2, 4, 6, 4)
        growth = BlockGrowth()
        assert (growth.nodes, growth.blocks, growth.branching) == (60, 2, CONCENTRATED)
        even = uniform(UNIFORM_WIDTH, growth)
        # The first block and four more of four positions: the same 60 nodes.
        assert even.branching == (3, 3, 3, 3)
        assert 4 * UNIFORM_WIDTH * (1 + even.starts) == even.nodes


class Tables:
    """Random distributions and buckets of every block, in the place of a drafter.

    A row is its block's path of start tokens and its position.
    """

    def __init__(self, seed, length, width):
        self.seed, self.length, self.width = seed, length, width

    def drawn(self, path):
        random = np.random.default_rng([self.seed, *path])
        tokens = np.stack([random.permutation(self.width + 5)[: self.width] for _ in self.places])
        q = -np.sort(-random.dirichlet(np.ones(self.width), self.length), axis=1)
        return tokens, q, random.integers(0, 4, self.length)

    @property
    def places(self):
        return range(self.length)

    def first_block(self):
        return [((), place) for place in self.places], ()

    def next_block(self, rows, above, place, token):
        start = (*rows[place][0], place, token)
        return [(start, k) for k in self.places], ()

    def read(self, row):
        return None, int(self.drawn(row[0])[2][row[1]])

    def best(self, row, count, temperature):
        tokens, q, _ = self.drawn(row[0])
        return list(zip(tokens[row[1]][:count].tolist(), q[row[1]][:count].tolist(), strict=True))


class TestAgainstStraightLines:
    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        length=st.integers(1, 4),
        depth=st.integers(1, 12),
        width=st.integers(1, 12),
        growth=st.builds(
            BlockGrowth,
            branching=st.sampled_from([CONCENTRATED, FALLBACK, (3, 3, 3, 3), (0, 1, 2, 3)]),
            blocks=st.integers(1, 3),
            starts=st.integers(1, 5),
            nodes=st.integers(1, 60),
        ),
    )
    def test_random_tables(self, seed, length, depth, width, growth):
        tables = Tables(seed, length, growth.widest)
        tree, paths = BlockTree(growth, depth, width), [()]
        for _ in range(growth.blocks):
            drawn = [tables.drawn(path) for path in paths]
            tree.attach(*(np.stack(part) for part in zip(*drawn, strict=True)))
            paths = [(*paths[s.block], s.position, s.token) for s in tree.starts]
            if not paths:
                break
        expected = reference_tree(
            tables,
            branching=growth.branching,
            blocks=growth.blocks,
            starts=growth.starts,
            nodes=growth.nodes,
            depth=depth,
            width=width,
        )
        assert nodes_of(tree.candidates()) == pytest.approx(expected)

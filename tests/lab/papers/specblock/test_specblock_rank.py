"""SpecBlock's rank head and the tree it shapes, against plain Python and cases by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.papers.specblock.model import ranks_of, summary
from lab.papers.specblock.tree import CONCENTRATED, FALLBACK, BlockGrowth, BlockTree
from tests.decoder.models import as_paths
from tests.lab.papers.specblock.specblock_models import plain_summary, reference_tree


class TestSummary:
    def test_against_plain_python(self):
        logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 4
        for row, features in zip(logits.tolist(), summary(logits).tolist(), strict=True):
            assert len(features) == 15
            assert features == pytest.approx(plain_summary(row), abs=1e-5)


class TestBuckets:
    def test_ranks_by_sorting(self):
        logits = torch.randn(20, 17, generator=torch.Generator().manual_seed(1))
        ids = torch.arange(20) % 17
        expected = [
            sorted(row.tolist(), reverse=True).index(row[i]) + 1
            for row, i in zip(logits, ids, strict=True)
        ]
        assert ranks_of(logits, ids).tolist() == expected


def block(tokens, probabilities, buckets):
    """One start's part of a forward, with its leading axis."""
    return np.array([tokens]), np.array([probabilities]), np.array([buckets])


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
    @settings(max_examples=40)
    @given(
        seed=st.integers(0, 10**6),
        length=st.integers(1, 4),
        depth=st.integers(1, 12),
        width=st.integers(1, 12),
        growth=st.builds(
            BlockGrowth,
            branching=st.sampled_from([CONCENTRATED, FALLBACK, (3, 3, 3, 3), (0, 1, 2, 3)]),
            adaptive=st.booleans(),
            blocks=st.integers(1, 3),
            beam=st.integers(1, 5),
            nodes=st.integers(1, 60),
        ),
    )
    def test_random_tables(self, seed, length, depth, width, growth):
        tables = Tables(seed, length, growth.widest)
        tree, paths = BlockTree(growth, depth, width), [()]
        for _ in range(growth.blocks):
            drawn = [tables.drawn(path) for path in paths]
            tree.attach(*(np.stack(part) for part in zip(*drawn, strict=True)))
            s = tree.starts
            paths = [
                (*paths[block], position, token)
                for block, position, token in zip(
                    s.blocks.tolist(), s.positions.tolist(), s.tokens.tolist(), strict=True
                )
            ]
            if not paths:
                break
        expected = reference_tree(tables, growth, depth, width)
        assert as_paths(tree.candidates()) == pytest.approx(expected)


class TestByHand:
    Q = (0.5, 0.25, 0.125)

    def test_starts_and_a_chain_that_gives_up(self):
        """The first position has the beam's children in any bucket; b_3 ends all branching."""
        growth = BlockGrowth(branching=(2, 3, 3, 0), beam=3)
        tree = BlockTree(growth, depth=9, width=9)
        tokens = [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]]
        tree.attach(*block(tokens, [self.Q] * 4, [3, 0, 3, 1]))
        s = tree.starts
        assert sorted(zip(s.tokens, s.depths, s.positions, s.scores, strict=True)) == [
            (10, 1, 0, 0.5), (11, 1, 0, 0.25), (12, 1, 0, 0.125), (20, 2, 1, 0.25),
            (21, 2, 1, 0.125),
        ]  # fmt: skip
        assert as_paths(tree.candidates()) == {
            (10,): 0.5, (11,): 0.25, (12,): 0.125, (10, 20): 0.5, (10, 21): 0.25,
            (10, 20, 30): 0.5, (10, 20, 30, 40): 0.5,
        }  # fmt: skip

    def test_later_starts_share_what_is_left_and_paths_are_there_once(self):
        """Five nodes, then five more from each of five starts: two blocks of two are left."""
        growth = BlockGrowth(branching=(2, 2, 2, 2), beam=3, nodes=34, blocks=3)
        tree = BlockTree(growth, depth=9, width=9)
        tree.attach(*block([[10, 11, 12], [20, 21, 22]], [self.Q] * 2, [0, 0]))
        assert sorted(tree.starts.tokens) == [10, 11, 12, 20, 21]
        again = block([[20, 7, 8], [30, 31, 32]], [(0.75, 0.125, 0.125), self.Q], [0, 0])
        tree.attach(*(np.repeat(part, 5, axis=0) for part in again))
        assert len(tree.starts) == 3  # of (34 - 25) // 2 = 4, the beam's
        nodes = as_paths(tree.candidates())
        assert nodes[10, 20] == 0.75  # the first block gave 0.5, the one behind 10 more
        assert nodes[10, 21] == 0.25 and nodes[10, 20, 20] == pytest.approx(0.25 * 0.75 / 0.375)
        small = BlockTree(BlockGrowth(beam=3, nodes=2), depth=9, width=9)
        small.attach(*block([[10, 11, 12]], [self.Q], [0]))
        assert as_paths(small.candidates()) == {(10,): 0.5, (11,): 0.25}

    def test_probable_first_tokens_have_fewer_siblings(self):
        growth = BlockGrowth(branching=(4, 4, 4, 4), adaptive=True, beam=10)
        for likely, first, later in [(0.5, 10, 4), (0.6, 8, 4), (0.8, 5, 4), (0.85, 5, 3),
                                     (0.9, 3, 3), (0.95, 3, 2)]:  # fmt: skip
            tree, q = BlockTree(growth, 9, 99), [likely] + [0.001] * 11
            tree.attach(*block([range(12), range(12)], [q, q], [0, 0]))
            parents = tree.candidates().parents.tolist()
            assert [parents.count(0), parents.count(1)] == [first, later]

"""The tree that SpecBlock's rank head shapes, against algorithm 2 by paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.papers.specblock.tree import CONCENTRATED, FALLBACK, BlockGrowth, BlockTree
from tests.decoder.models import as_paths
from tests.lab.papers.specblock.specblock_models import reference_tree


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
            adaptive=st.booleans(), blocks=st.integers(1, 3), beam=st.integers(1, 5),
            nodes=st.integers(1, 60),
        ),
    )  # fmt: skip
    def test_random_tables(self, seed, length, depth, width, growth):
        tables = Tables(seed, length, growth.widest)
        tree, paths = BlockTree(growth, depth, width), [()]
        for _ in range(growth.blocks):
            drawn = [tables.drawn(path) for path in paths]
            tree.attach(*(np.stack(part) for part in zip(*drawn, strict=True)))
            s = tree.starts
            starts = zip(s.blocks, s.positions.tolist(), s.tokens.tolist(), strict=True)
            paths = [(*paths[block], position, token) for block, position, token in starts]
            if not paths:
                break
        expected = reference_tree(tables, growth, depth, width)
        assert as_paths(tree.candidates()) == pytest.approx(expected)

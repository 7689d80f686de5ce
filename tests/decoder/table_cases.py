"""Random trees over random caches, and their attention computed row by row."""

import numpy as np
import torch
from hypothesis import strategies as st

from decoder.model.attention import RowBlock
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.runtime.tables import RowTables, needed_words

cases = st.fixed_dictionaries({
    "rows": st.lists(st.integers(1, 12), min_size=1, max_size=3),
    "prefixes": st.lists(st.integers(0, 90), min_size=3, max_size=3),
    "pending": st.integers(0, 5), "padding": st.integers(0, 4), "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 3), "width": st.sampled_from([8, 24, 32]), "seed": st.integers(0, 2**31)
})  # fmt: skip


class TableCase:
    """Tables, a query and a cache of noise for one drawn case; sequence 0 has rows pending.

    The cache has one sequence more than the blocks use.
    """

    def __init__(self, case, dtype=torch.float32, device="cpu"):
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.random = np.random.default_rng(case["seed"])
        self.kv_heads, self.group, self.width = case["kv_heads"], case["group"], case["width"]
        self.device, self.dtype = torch.device(device), dtype
        rows, sequences = case["rows"], len(case["rows"]) + 1
        self.cache = self._cache(sequences)
        self.keys, self.values = self.cache.data[0]
        self.cache.lengths = [*case["prefixes"], 7][:sequences]
        self.cache.pending = [case["pending"]] + [0] * (sequences - 1)
        order = self.random.permutation(len(rows))
        self.visible = [self._visible(rows[s], self.cache.pending[s]) for s in range(len(rows))]
        nothing = [np.zeros(count, np.int64) for count in rows]
        self.blocks = [RowBlock(int(s), nothing[s], nothing[s], self.visible[s]) for s in order]
        total = sum(rows) + case["padding"]
        words = needed_words(self.cache, self.blocks)
        self.tables = RowTables(total, sequences, words, self.device)
        self.tables.fill(self.cache, self.blocks)
        heads = self.kv_heads * self.group
        self.query = torch.randn(total, heads, self.width, generator=self.generator)
        self.query = self.query.to(self.device, dtype)

    def truth(self):
        """Float64 [rows of the blocks, heads, width], each row over the slots that it sees."""
        outputs, row = [], 0
        for block in self.blocks:
            prefix = self.cache.lengths[block.sequence]
            for seen in self.visible[block.sequence]:
                slots = [*range(prefix), *(prefix + np.flatnonzero(seen))]
                for head in range(self.kv_heads * self.group):
                    place = (block.sequence, head // self.group, slots)
                    keys, values = self.keys[place].double(), self.values[place].double()
                    scores = keys @ self.query[row, head].double() * self.width**-0.5
                    outputs.append(scores.softmax(0) @ values)
                row += 1
        return torch.stack(outputs).view(row, -1, self.width)

    def _cache(self, sequences):
        shape = CacheShape(layers=1, kv_heads=self.kv_heads, head_dim=self.width)
        place = {"dtype": self.dtype, "device": self.device}
        cache = KVCache(shape, capacity=120, sequences=sequences, **place)
        cache.data.copy_(torch.randn(cache.data.shape, generator=self.generator))
        return cache

    def _visible(self, rows, pending):
        if pending:
            later = np.tril(self.random.random((rows, rows)) < 0.5)
            first = self.random.random((rows, pending)) < 0.5
            return np.concatenate((first, later | np.eye(rows, dtype=bool)), axis=1)
        seen = np.eye(rows, dtype=bool)
        for row in range(1, rows):
            seen[row] |= seen[self.random.integers(0, row)]
        return seen


def one_sequence(rows, padding=0, group=1, **where):
    """A case of so many rows behind 20 tokens."""
    return TableCase(
        {"rows": [rows], "prefixes": [20, 0, 0], "pending": 0, "padding": padding, "kv_heads": 1,
         "group": group, "width": 8, "seed": 0},
        **where,
    )  # fmt: skip


def assert_finite_padding(case, output):
    """Padding rows must be finite too: their outputs stay in shared buffers."""
    assert bool(output.isfinite().all())
    assert len(output) == len(case.query)

"""Row tables: their description of each row, and attention over them in PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.target.attention import RowBlock
from decoder.target.runtime.fused import reference_table_attention
from decoder.target.runtime.tables import RowTables
from decoder.tree.draft_tree import CandidateTree, ancestor_bits, best_first, pack_bits
from tests.decoder.table_cases import TableCase, assert_finite_padding, cases


@given(case=cases)
@settings(max_examples=60, deadline=None)
def test_attention_from_tables_is_full_masked_attention(case):
    made = TableCase(case)
    output = reference_table_attention(
        made.query, made.keys, made.values, made.tables, made.width**-0.5
    )
    truth = made.truth()
    torch.testing.assert_close(output[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, output)


@given(rows=st.integers(1, 100), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_bits_say_what_visibility_says(rows, seed):
    random = np.random.default_rng(seed)
    parents = np.array([random.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    tree = best_first(CandidateTree(parents, parents, random.uniform(0.1, 0.9, rows - 1)), rows - 1)
    words = -(-rows // 32) + 1
    bits = ancestor_bits(tree.parents, words)
    unpacked = np.array(
        [[bool(bits[i, j // 32] >> (j % 32) & 1) for j in range(words * 32)] for i in range(rows)]
    )
    assert (unpacked[:, :rows] == tree.visibility()).all()
    assert not unpacked[:, rows:].any()
    assert (pack_bits(tree.visibility(), words) == bits).all()


def test_padding_writes_behind_the_rows_and_sees_one_key():
    made = TableCase(
        {
            "rows": [3], "prefixes": [20, 0, 0], "pending": 0, "padding": 2,
            "kv_heads": 1, "group": 1, "width": 8, "seed": 0,
        }
    )  # fmt: skip
    tables = made.tables
    assert tables.slots.tolist() == [20, 21, 22, 23, 23]
    assert tables.owners.tolist() == [0] * 5
    assert tables.bits[3:].tolist() == [[1], [1]]
    assert (tables.counts.tolist(), tables.tails.tolist()) == ([5, 0], [3, 0])


def test_too_many_rows_or_keys_are_refused():
    made = TableCase(
        {
            "rows": [3], "prefixes": [20, 0, 0], "pending": 0, "padding": 0,
            "kv_heads": 1, "group": 1, "width": 8, "seed": 0,
        }
    )  # fmt: skip
    small = RowTables(2, 2, 1, torch.device("cpu"))
    with pytest.raises(InputError, match="tables of 2 rows"):
        small.fill(made.cache, made.blocks)
    with pytest.raises(InputError, match="cannot hold 33 rows"):
        ancestor_bits(np.zeros(32, np.int64), 1)
    with pytest.raises(InputError, match="cannot hold 33 keys"):
        pack_bits(np.ones((1, 33), np.bool_), 1)


def test_a_lone_row_sees_the_prefix_and_itself():
    made = TableCase(
        {
            "rows": [1], "prefixes": [20, 0, 0], "pending": 0, "padding": 0,
            "kv_heads": 1, "group": 2, "width": 8, "seed": 0,
        }
    )  # fmt: skip
    bare = RowBlock(0, np.zeros(1, np.int64), np.zeros(1, np.int64), None)
    made.tables.fill(made.cache, [bare])
    output = reference_table_attention(made.query, made.keys, made.values, made.tables, 8**-0.5)
    torch.testing.assert_close(output.double(), made.truth(), atol=1e-5, rtol=1e-5)

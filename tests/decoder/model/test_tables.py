"""Attention of trees, from row tables and split, against full masked attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.model.attention import RowBlock, Scoring, attend, partial_attention, tail_mask
from decoder.model.runtime import fused
from decoder.model.runtime.fused import reference_table_attention, text_attention
from decoder.model.target import Step
from decoder.tree.draft_tree import pack_bits, visibility
from tests.decoder.models import random_model, random_tree, target_of
from tests.decoder.table_cases import TableCase, assert_finite_padding, cases, one_sequence


@given(case=cases)
@settings(max_examples=60)
def test_attention_from_tables_is_full_masked_attention(case):
    made = TableCase(case)
    parts = made.query, made.keys, made.values, made.tables
    output = reference_table_attention(*parts, made.width**-0.5)
    truth = made.truth()
    torch.testing.assert_close(output[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, output)


@given(rows=st.integers(1, 100), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_bits_say_what_visibility_says(rows, seed):
    tree = random_tree(rows, seed)
    words = -(-rows // 32) + 1
    bits = pack_bits(visibility(tree.parents), words)
    places = np.arange(words * 32)
    unpacked = (bits[:, places // 32] >> (places % 32) & 1).astype(bool)
    assert (unpacked[:, :rows] == visibility(tree.parents)).all()
    assert not unpacked[:, rows:].any()


def test_padding_writes_behind_the_rows_and_sees_one_key():
    tables = one_sequence(3, padding=2).tables
    assert tables.slots.tolist() == [20, 21, 22, 23, 23]
    assert tables.owners.tolist() == [0] * 5
    assert tables.bits[3:].tolist() == [[1], [1]]
    assert (tables.counts.tolist(), tables.tails.tolist()) == ([5, 0], [3, 0])


def test_a_lone_row_sees_the_prefix_and_itself():
    made = one_sequence(1, group=2)
    bare = RowBlock(0, np.zeros(1, np.int64), np.zeros(1, np.int64), None)
    made.tables.fill(made.cache, [bare])
    output = reference_table_attention(made.query, made.keys, made.values, made.tables, 8**-0.5)
    torch.testing.assert_close(output.double(), made.truth(), atol=1e-5, rtol=1e-5)


@given(rows=st.integers(1, 9), before=st.integers(0, 20), group=st.integers(1, 3))
@settings(max_examples=25)
def test_a_piece_of_text_sees_what_is_before_each_row(rows, before, group):
    random = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, 2 * group, 8, generator=random, dtype=torch.float64)
    keys, values = torch.randn(2, 2, before + rows, 8, generator=random, dtype=torch.float64)
    output = text_attention(query, keys, values, 0.3)
    for row in range(rows):
        seen = slice(before + row + 1)
        for head in range(2 * group):
            weights = (keys[head // group, seen] @ query[row, head] * 0.3).softmax(0)
            torch.testing.assert_close(output[row, head], weights @ values[head // group, seen])


def test_a_prompt_on_a_gpu_is_a_piece_of_text_and_a_tree_is_none(monkeypatch):
    """Two chunks and a single row, then a tree, by tables as on a GPU."""
    model, pieces = random_model("qwen3"), []
    target, eager = target_of(model), target_of(model)
    prompt, tree = torch.arange(33) % 97, Step(5, random_tree(7, 0))
    monkeypatch.setattr("decoder.model.target.PREFILL_CHUNK", 16)
    eager.reserve(60)
    truth = eager.prefill(prompt), eager.verify([tree])[0]
    monkeypatch.setattr("decoder.model.runtime.eager.kernels_usable", lambda device: True)
    monkeypatch.setattr(fused, "flash_usable", lambda query: True)

    def counted(query, keys, values, scale):
        pieces.append((len(query), keys.shape[1]))
        return text_attention(query, keys, values, scale)

    monkeypatch.setattr(fused, "text_attention", counted)
    target.reserve(60)
    torch.testing.assert_close((target.prefill(prompt), target.verify([tree])[0]), truth)
    assert pieces == 2 * [(16, 16)] + 2 * [(16, 32)]  # by both layers


def full_masked_attention(query, key, value, visible):
    """Every head on its own, the whole mask written out, float64."""
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    context = key.shape[2] - rows
    mask = torch.cat((torch.ones(rows, context, dtype=torch.bool), visible), dim=1)
    output = torch.empty_like(query, dtype=torch.float64)
    for item in range(batch):
        for head in range(heads):
            keys, values = key[item, head // group].double(), value[item, head // group].double()
            scores = query[item, head].double() @ keys.T / width**0.5
            scores = scores.masked_fill(~mask, float("-inf"))
            output[item, head] = scores.softmax(-1) @ values
    return output


shapes = st.tuples(
    st.integers(1, 40), st.integers(0, 200), st.integers(0, 9),  # rows, context, padding
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([8, 64, 80]),  # KV heads, group, width
)  # fmt: skip


@given(shape=shapes, seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_split_equals_full(shape, seed):
    rows, context, padding, kv_heads, group, width = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, kv_heads * group, rows, width, generator=generator)
    key = torch.randn(2, kv_heads, context + rows, width, generator=generator)
    value = torch.randn(2, kv_heads, context + rows, width, generator=generator)
    visible = torch.from_numpy(visibility(random_tree(rows, seed).parents))
    truth = full_masked_attention(query, key, value, visible)
    mask = tail_mask(visible, group, rows, torch.float32) if rows > 1 else None
    ours = attend(query, key, value, mask, Scoring(width**-0.5))
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)
    padded = tail_mask(visible, group, rows + padding, torch.float32)
    more = (0, 0, 0, padding)
    key, value = (torch.nn.functional.pad(kept, more, value=3.0) for kept in (key, value))
    for blocked in (False, True):
        ours = attend(query, key, value, padded, Scoring(width**-0.5), blocked)
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_operations_agree_with_the_cpu_kernel(dtype):
    """Which a soft cap asks for, here one that is never reached."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 12, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, 50, 16, generator=generator).to(dtype)
    fast, fast_lse = partial_attention(query, key, value, None, Scoring(0.25))
    plain, plain_lse = partial_attention(query, key, value, None, Scoring(0.25, cap=1e9))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)
    fast, plain = fast_lse.double(), plain_lse.double()
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)

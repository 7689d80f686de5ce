"""The KV cache against a plain list of rows: append, compact, truncate, refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from lab.tiny_models import tiny_model

LAYERS, HEADS, WIDTH = 3, 2, 4
SHAPE = CacheShape(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH)


def make(capacity=32, sequences=1):
    return KVCache(
        SHAPE, capacity=capacity, sequences=sequences, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


def rows_of(names, layer, kind):
    """[1, kv_heads, rows, head_dim] filled with a number for each row, layer and kind."""
    values = torch.tensor([1000.0 * layer + 100.0 * kind + name for name in names])
    shape = (1, HEADS, len(names), WIDTH)
    return values[None, None, :, None].expand(shape).clone()


def forward(cache, names, sequence=0):
    """Write a forward's rows into every layer; what attention sees of the last one."""
    start = cache.end(sequence)
    for layer, slots in enumerate(cache.views(sequence, start, start + len(names))):
        for kind in range(2):
            slots[kind].copy_(rows_of(names, layer, kind))
    cache.pending[sequence] += len(names)
    return cache.views(sequence, 0, start + len(names))[LAYERS - 1]


def held(cache, sequence=0):
    """The committed rows' names, the same in every layer and head."""
    length = cache.lengths[sequence]
    names = cache.data[0, 0, sequence, 0, :length, 0].tolist()
    for layer in range(LAYERS):
        for kind in range(2):
            expected = rows_of(names, layer, kind)[0]
            torch.testing.assert_close(cache.data[layer, kind, sequence, :, :length], expected)
    return names


@st.composite
def one_round(draw):
    rows = draw(st.integers(1, 6))
    picked = draw(st.lists(st.integers(1, rows), unique=True, max_size=rows))
    return rows, [0, *sorted(row for row in picked if row < rows)]


rounds = st.lists(one_round(), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 1), rounds), max_size=4))
def test_committed_rows_are_those_of_a_plain_list(turns):
    """Two sequences in turn, each with the history of a list of its own."""
    cache, truths, name = make(capacity=128, sequences=2), [[], []], 0
    for sequence, turn in turns:
        truth = truths[sequence]
        for rows, accepted in turn:
            names = [float(name + row) for row in range(rows)]
            name += rows
            keys, values = forward(cache, names, sequence)
            assert keys[0, 0, :, 0].tolist() == [2000.0 + n for n in truth + names]
            assert values[0, 0, :, 0].tolist() == [2100.0 + n for n in truth + names]
            cache.commit(accepted, sequence)
            truth += [names[row] for row in accepted]
            assert [held(cache, 0), held(cache, 1)] == truths


@pytest.mark.parametrize(("length", "rows", "fits"), [(0, 8, True), (0, 9, False), (7, 2, False)])
def test_room(length, rows, fits):
    cache = make(capacity=8)
    cache.truncate(length)
    if fits:
        cache.check_room(rows, 0)
        return
    with pytest.raises(InputError, match=r"do not fit a KV cache of 8 tokens\. Use a smaller"):
        cache.check_room(rows, 0)


def test_no_memory_is_an_error_that_says_so():
    with pytest.raises(InputError, match=r"no memory for a KV cache of .* tokens x batch 1"):
        make(capacity=1 << 50)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text", "falcon_h1", "lfm2", "kimi_linear"])
def test_bytes_are_those_of_a_plan(kind):
    target = make_target(borrow_model(tiny_model(kind).float()), owned=False)
    cache, planned = target.reserve(40), target.architecture
    values = sum(plane[:, 0, :, 0].numel() for plane in cache.planes)
    assert values == planned.token_values
    states = cache.states.state if cache.states.shapes else None
    kept = [states(i, 0).nbytes for i in range(len(target.structure.states))]
    assert sum(kept) == planned.state_bytes(4)

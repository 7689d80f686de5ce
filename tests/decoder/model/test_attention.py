"""Split attention against full masked attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.model.attention import attend, reference_attention, tail_mask
from decoder.tree.draft_tree import CandidateTree, best_first


def random_tree(rows, seed):
    rng = np.random.default_rng(seed)
    parents = np.array([rng.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    candidates = CandidateTree(np.arange(rows - 1), parents, rng.uniform(0.1, 0.9, rows - 1))
    return best_first(candidates, rows - 1)


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


shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 40),
        "context": st.integers(0, 200),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "width": st.sampled_from([8, 64, 80]),
        "padding": st.integers(0, 9),
    }
)


@given(shape=shapes, seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_split_equals_full(shape, seed):
    rows, context, padding = shape["rows"], shape["context"], shape["padding"]
    kv_heads, group, width = shape["kv_heads"], shape["group"], shape["width"]
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, kv_heads * group, rows, width, generator=generator)
    key = torch.randn(2, kv_heads, context + rows, width, generator=generator)
    value = torch.randn(2, kv_heads, context + rows, width, generator=generator)
    visible = torch.from_numpy(random_tree(rows, seed).visibility())
    truth = full_masked_attention(query, key, value, visible)
    mask = tail_mask(visible, group, rows, torch.float32) if rows > 1 else None
    ours = attend(query, key, value, mask, width**-0.5)
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)
    padded = tail_mask(visible, group, rows + padding, torch.float32)
    key, value = (
        torch.nn.functional.pad(kept, (0, 0, 0, padding), value=3.0) for kept in (key, value)
    )
    for blocked in (False, True):
        ours = attend(query, key, value, padded, width**-0.5, blocked)
        torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_reference_agrees_with_the_cpu_kernel(dtype):
    from decoder.model.attention import partial_attention

    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 12, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, 50, 16, generator=generator).to(dtype)
    fast, fast_lse = partial_attention(query, key, value, None, 0.25)
    plain, plain_lse = reference_attention(query, key, value, None, 0.25)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        fast_lse.double(), plain_lse.double(), atol=tolerance, rtol=tolerance
    )

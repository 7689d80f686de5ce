"""The Triton kernels in Triton's interpreter; run by test_triton.py, which sets it up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.runtime.triton_attention import Launch, table_attention
from tests.decoder.table_cases import TableCase, assert_finite_padding, cases

LAUNCHES = st.builds(
    Launch,
    block_rows=st.sampled_from([16, 32]),
    block_keys=st.sampled_from([16, 32]),
    parts=st.integers(1, 5),
)


@given(case=cases, launch=st.none() | LAUNCHES)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_kernel_is_full_masked_attention(case, launch):
    made = TableCase(case)
    scale = made.width**-0.5
    found = table_attention(made.query, made.keys, made.values, made.tables, scale, launch)
    truth = made.truth()
    torch.testing.assert_close(found[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, found)


def test_what_lies_behind_the_rows_is_never_read():
    """Slots behind the tail may hold anything, not-a-number included."""
    made = TableCase(
        {
            "rows": [5, 2], "prefixes": [40, 3, 0], "pending": 2, "padding": 3,
            "kv_heads": 2, "group": 2, "width": 24, "seed": 1,
        }
    )  # fmt: skip
    truth = made.truth()
    for sequence in range(made.cache.sequences):
        rows = 5 if sequence == 0 else 2
        made.cache.data[:, :, sequence, :, made.cache.end(sequence) + rows :] = float("nan")
    found = table_attention(made.query, made.keys, made.values, made.tables, 24**-0.5)
    torch.testing.assert_close(found[: len(truth)].double(), truth, atol=1e-5, rtol=1e-5)
    assert_finite_padding(made, found)


def test_float64_is_refused():
    made = TableCase(
        {
            "rows": [1], "prefixes": [4, 0, 0], "pending": 0, "padding": 0,
            "kv_heads": 1, "group": 1, "width": 8, "seed": 1,
        },
        dtype=torch.float64,
    )  # fmt: skip
    with pytest.raises(InputError, match="no float64"):
        table_attention(made.query, made.keys, made.values, made.tables, 1.0)

"""Few rows in compiled calls: the numbers of torch's own operations, in bfloat16 bit for bit."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from decoder.model.attention import ForwardPlan, plan_segment
from decoder.model.kv_cache import KVCache
from decoder.model.runtime.base import NO_TOKEN
from decoder.model.runtime.eager import greedy_token, greedy_tokens
from decoder.model.runtime.few_rows import (
    LANES,
    MOST_NUMBERS,
    NO_NORM,
    FewNorm,
    FewRows,
    are_few,
    sum_lanes,
)
from decoder.model.structure import Structure
from decoder.tree.draft_tree import visibility

pytestmark = pytest.mark.cpu_kind

HEADS, KV_HEADS, WIDTH, EPS = 6, 2, 16, 1e-5
LAYERS, LAYER, PREFIX = 3, 1, 11


DTYPES = [torch.bfloat16, torch.float32]


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def assert_same(ours, theirs):
    """Equal bit for bit in bfloat16, but for rounding in float32."""
    bound = 0.0 if ours.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


def forward_of(rows, dtype=torch.bfloat16):
    """A cache with a prefix, and the plan of so many rows of a tree behind it."""
    shape = Structure(layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, window=None)
    cache = KVCache(shape, capacity=64, sequences=2, dtype=dtype, device=torch.device("cpu"))
    cache.data.normal_()
    cache.lengths = [PREFIX, PREFIX + 3]
    parents = (np.arange(1, rows) - 1) // 2
    visible = torch.from_numpy(visibility(parents)) if rows > 1 else None
    parts = [
        plan_segment(cache, s, slice(s * rows, (s + 1) * rows), visible, HEADS // KV_HEADS)
        for s in range(2)
    ]
    return cache, ForwardPlan(tuple(parts))


def torch_norm(rows, weight):
    """RMSNorm as transformers rounds it."""
    return weight * functional.rms_norm(rows, rows.shape[-1:], None, EPS)


@pytest.mark.parametrize("width", [1, 7, 64, 128, 576, 1000, 4096, 11008])
def test_rows_are_summed_in_the_order_of_torch(width):
    assert sum_lanes(width) in LANES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (1, 576), (5, 4096)])
def test_a_norm_is_that_of_torch(rows, width, dtype):
    torch.manual_seed(width)
    x, weight = random(rows, width, dtype=dtype) * 3, random(width, dtype=dtype)
    few = FewRows(x, random(rows, WIDTH), random(rows, WIDTH), forward_of(1, dtype)[1])
    assert_same(few.norm(x, FewNorm.of(weight, EPS)), torch_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_rotated_attention_and_the_cache_are_those_of_torch(rows, head_norms, dtype):
    torch.manual_seed(rows)
    cache, plan = forward_of(rows, dtype)
    qkv = random(2 * rows, HEADS + 2 * KV_HEADS, WIDTH, dtype=dtype)
    cosine, sine = (random(2 * rows, WIDTH, dtype=dtype) for _ in range(2))
    weights = random(HEADS + KV_HEADS, WIDTH, dtype=dtype)
    few = FewRows(random(2 * rows, 8, dtype=dtype), cosine, sine, plan)
    ours = few.attend(LAYER, qkv, FewNorm.of(weights, EPS) if head_norms else NO_NORM, 0.25)
    written = cache.data.clone()

    turned, value = qkv.split((HEADS + KV_HEADS, KV_HEADS), 1)
    if head_norms:
        turned = torch_norm(turned, weights)
    swapped = torch.cat(turned.chunk(2, -1)[::-1], -1)
    turned = turned * cosine[:, None] + swapped * sine[:, None]
    query, key = (part.transpose(0, 1)[None] for part in turned.split((HEADS, KV_HEADS), 1))
    theirs = plan.attend(LAYER, query, key, value.transpose(0, 1)[None], 0.25)
    assert_same(ours, theirs.reshape(2 * rows, -1))
    assert_same(written, cache.data)


def test_few_rows_are_in_bfloat16_and_float32():
    for dtype in DTYPES:
        assert are_few(torch.zeros(8, 16, dtype=dtype))
        assert not are_few(torch.zeros(MOST_NUMBERS // 16 + 1, 16, dtype=dtype))
    assert not are_few(torch.zeros(8, 16, dtype=torch.float64))


@pytest.mark.parametrize("vocab", [1, 3, 512, 513, 5000])
def test_greedy_tokens_are_those_of_torch(vocab):
    torch.manual_seed(vocab)
    for logits in (
        random(vocab),
        -random(vocab).abs(),
        random(vocab).round(),
        -0.0 * random(vocab),
    ):
        assert greedy_token(logits) == int(greedy_tokens(logits.float()))


@pytest.mark.parametrize("value", ["nan", "-nan", "inf"])
def test_logits_that_are_no_numbers_have_no_greedy_token(value):
    logits = random(700)
    logits[600] = -torch.tensor(float("nan")) if value == "-nan" else float(value)
    assert greedy_token(logits) == NO_TOKEN
    assert greedy_token(torch.full((700,), float("-inf")).bfloat16()) == NO_TOKEN

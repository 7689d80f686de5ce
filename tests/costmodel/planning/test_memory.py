"""Memory: numbers worked out by hand."""

from __future__ import annotations

import pytest

from costmodel.catalog import find_target
from costmodel.errors import InputError
from costmodel.planning.engines import MemoryRule, ValueBytes, cache_bytes_per_token, weight_bytes
from lab.studies.fit_overheads import cache_tokens, largest_concurrency

LLAMA = find_target("meta-llama/Llama-3.1-8B-Instruct").architecture
LARGE = find_target("meta-llama/Llama-3.1-70B-Instruct").architecture
SMALL = find_target("Qwen/Qwen3-0.6B").architecture


def test_cache_of_a_token():
    """2 x 32 layers x 8 heads x 128 x 2 bytes; 80 layers for the 70B."""
    assert cache_bytes_per_token(LLAMA, ValueBytes()) == 131072
    assert cache_bytes_per_token(LLAMA, ValueBytes(cached=1)) == 65536
    assert cache_bytes_per_token(LARGE, ValueBytes()) == 327680
    assert cache_bytes_per_token(LARGE, ValueBytes(), 8) == 40960
    assert cache_bytes_per_token(LLAMA, ValueBytes(), 16) == 131072 / 8  # heads are never split


def test_weights_in_bfloat16_are_two_bytes_each():
    assert weight_bytes(LLAMA, ValueBytes()) == 2 * 8030261248
    assert weight_bytes(LLAMA, ValueBytes(), 4) == 2 * 8030261248 / 4
    assert weight_bytes(SMALL, ValueBytes()) == 2 * 596049920


def test_quantised_weights_leave_embedding_and_head_alone():
    embeddings = 2 * 128256 * 4096
    rest = 8030261248 - embeddings
    assert weight_bytes(LLAMA, ValueBytes(weight=1)) == rest + 2 * embeddings
    assert weight_bytes(LLAMA, ValueBytes(weight=0.5625)) == 0.5625 * rest + 2 * embeddings


def test_cache_tokens_of_both_rules():
    """80 GB: 0.9 x 80 - 16.06 - 3 GB, or 0.9 x (80 - 16.06 - 4 GB), over 131,072 bytes."""
    weights = 2 * 8030261248
    whole = MemoryRule(fraction=0.9, reserve_bytes=3e9)
    rest = MemoryRule(fraction=0.9, reserve_bytes=4e9, after_weights=True)
    assert cache_tokens(whole, LLAMA, ValueBytes(), 80e9) == pytest.approx(
        (72e9 - weights - 3e9) / 131072
    )
    assert cache_tokens(rest, LLAMA, ValueBytes(), 80e9) == pytest.approx(
        0.9 * (76e9 - weights) / 131072
    )


def test_a_target_that_does_not_fit_is_named():
    rule = MemoryRule(fraction=0.9, reserve_bytes=3e9)
    with pytest.raises(InputError, match=r"does not fit: 141\.1 GB") as bad:
        cache_tokens(rule, LARGE, ValueBytes(), 80e9)
    assert "more devices" in bad.value.hint


def test_concurrency():
    half = MemoryRule(fraction=0.9, reserve_bytes=0.0)
    whole = MemoryRule(fraction=0.9, reserve_bytes=0.0, whole_answer=True)
    assert half.tokens_held(1000, 400) == 1200
    assert whole.tokens_held(1000, 400) == 1400
    assert largest_concurrency(12000, 1200) == 10
    assert largest_concurrency(100, 1200) == 1

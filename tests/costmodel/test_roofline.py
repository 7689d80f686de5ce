"""FLOPs and bytes against independent answers and numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks, find_device, find_target, load_targets
from costmodel.profile.profile import Profile
from costmodel.roofline import (
    Roofline,
    distinct_experts,
    paper_bytes,
    paper_flops,
    physical_bytes,
    physical_flops,
)
from tests.conftest import DATA, reference
from tests.costmodel.conftest import FORWARDS, altered, measured_forwards, measured_points

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
TINY = ModelArchitecture(
    name="tiny", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, ffn=16, vocab=100, tied=False
)


def replace(**changes) -> ModelArchitecture:
    return ModelArchitecture.from_dict(TINY.to_dict() | changes)


def test_paper_count_against_the_oracle():
    cases = reference("roofline")
    assert len(cases) == 30
    for case in cases:
        a = ModelArchitecture(name="case", tied=False, **{size: case[size] for size in SIZES})
        rows, context = case["new_tokens"], case["context_tokens"]
        flops = paper_flops(a, rows, context)
        moved = paper_bytes(a, rows, context, element_bytes=case["bytes_per_element"])
        for module, expected in case["flops"].items():
            assert getattr(flops, module) == expected, (case["target"], module)
        for module, expected in case["bytes"].items():
            assert getattr(moved, module) == expected, (case["target"], module)
        assert flops.total == case["total_flops"]
        assert moved.total == case["total_bytes"]


def test_batch_counts_weights_once_and_the_rest_per_sequence():
    one, three = paper_bytes(TINY, 5, 7), paper_bytes(TINY, 5, 7, 3)
    for weights in ("embedding_and_lm_head_weights", "attention_weights", "ffn_weights"):
        assert getattr(three, weights) == getattr(one, weights)
    for moved in ("kv_read", "kv_write", "attention_io", "ffn_io", "lm_head_io"):
        assert getattr(three, moved) == 3 * getattr(one, moved)
    assert paper_flops(TINY, 5, 7, 3).total == 3 * paper_flops(TINY, 5, 7).total
    assert physical_flops(TINY, 5, 7, 3).total == 3 * physical_flops(TINY, 5, 7).total
    one, three = physical_bytes(TINY, 5, 7), physical_bytes(TINY, 5, 7, 3)
    assert three.attention_weights == one.attention_weights
    assert three.ffn_weights == one.ffn_weights
    assert three.kv_read == 3 * one.kv_read
    # the LM head once and 15 instead of 5 gathered rows of the untied embedding
    assert one.embedding_and_lm_head_weights == 2 * 8 * (100 + 5)
    assert three.embedding_and_lm_head_weights == 2 * 8 * (100 + 15)


def test_mixtures_of_experts_by_hand():
    moe = replace(experts=8, active_experts=2, expert_ffn=4)
    # a row runs 2 experts of width 4
    assert paper_flops(moe, 5, 7).down == 2 * 2 * 5 * 8 * (2 * 4)
    assert paper_bytes(moe, 5, 7).ffn_weights == 2 * 2 * 3 * 8 * (2 * 4)
    assert physical_flops(moe, 5, 7).router == 2 * 2 * 5 * 8 * 8
    # one token reads 2 experts, two tokens 8 (1 - (3/4)^2) = 3.5, many all 8
    assert distinct_experts(moe, [1, 2, 1000]) == pytest.approx([2, 3.5, 8])
    assert distinct_experts(TINY, [1, 9]) == pytest.approx([1, 1])
    for shape in ((2, 7), (1, 7, 2)):
        assert physical_bytes(moe, *shape).ffn_weights == pytest.approx(2 * 2 * 3.5 * 3 * 8 * 4)
    # three layers, the first dense with 16; two sparse: 8 experts of 4, 2 active, and 6 shared
    a = replace(layers=3, experts=8, active_experts=2, expert_ffn=4, dense_layers=1, shared_ffn=6)
    assert (a.sparse_layers, a.common_ffn, a.active_ffn) == (2, 16 + 2 * 6, 16 + 2 * (6 + 2 * 4))
    flops = physical_flops(a, 5, 0)
    assert flops.down == 2 * 5 * 8 * (16 + 2 * 14)
    assert flops.gate_up == 2 * flops.down
    assert flops.router == 2 * 5 * 8 * 8 * 2
    moved = physical_bytes(a, 1, 0)
    assert moved.ffn_weights == 2 * 3 * 8 * (16 + 2 * 6 + 2 * 2 * 4)
    assert paper_bytes(a, 1, 0).ffn_weights == moved.ffn_weights


def test_both_counts_by_hand():
    flops = physical_flops(TINY, 5, 7)
    # a chain's rows see 8, 9, 10, 11, 12 keys: 50 row-key pairs
    assert flops.scores == 2 * 2 * 50 * 12
    assert flops.lm_head == 2 * 5 * 8 * 100
    moved = physical_bytes(TINY, 5, 7)
    assert moved.kv_read == 2 * 2 * 2 * 7 * 6
    assert moved.kv_write == 2 * 2 * 2 * 5 * 6
    assert moved.attention_io == 0
    assert moved.ffn_io == 2 * 2 * 2 * 5 * 8
    assert moved.lm_head_io == 2 * 5 * 100
    # two norms a layer and the last one
    assert moved.small_weights == 2 * (2 * 16 + 8)
    tied = physical_bytes(replace(tied=True), 5, 7)
    assert tied.embedding_and_lm_head_weights == 2 * 8 * 100
    plain = replace(gated_ffn=False)
    assert paper_flops(plain, 5, 7).gate_up == paper_flops(TINY, 5, 7).gate_up / 2
    assert paper_flops(plain, 5, 7).down == paper_flops(TINY, 5, 7).down
    assert paper_bytes(plain, 5, 7).ffn_weights == 2 * 2 * 2 * 8 * 16
    assert paper_bytes(plain, 5, 7).ffn_io == 2 * 2 * 5 * (2 * 8 + 2 * 16)
    paper, physical = (one(TINY, 5, 7, 1, 4, (0.5, 3)) for one in (paper_bytes, physical_bytes))
    assert paper.attention_weights == 0.5 * 2 * (2 * 8 * 12 + 2 * 8 * 6)
    assert paper.ffn_weights == physical.ffn_weights == 0.5 * 2 * 3 * 8 * 16
    assert paper.embedding_and_lm_head_weights == 3 * 2 * 8 * 100
    assert physical.embedding_and_lm_head_weights == 3 * 8 * (100 + 5)


def test_weights_that_the_paper_counts_twice_and_published_bandwidth_limits():
    # the paper's weights over the physical ones: 8 % on Qwen3-8B and 26 % on Qwen3-0.6B
    for name, excess in (("Qwen3-8B", 0.08), ("Qwen3-0.6B", 0.26)):
        a = find_target(name).architecture
        paper, physical = (count(a, 1, 0) for count in (paper_bytes, physical_bytes))
        parts = ("embedding_and_lm_head", "attention", "ffn", "small")
        weights = [sum(getattr(m, f"{p}_weights") for p in parts) for m in (paper, physical)]
        assert weights[0] / weights[1] - 1 == pytest.approx(excess, abs=0.006)
    # 7.4 ms on A100, 4.5 ms on H100, 3.1 ms on H200
    a = find_target("Qwen3-8B").architecture
    for device, milliseconds in (("a100-sxm-80gb", 7.4), ("h100-sxm", 4.5), ("h200", 3.15)):
        roofline = Roofline(architecture=a, peaks=find_device(device).peaks, count="physical")
        assert float(roofline.seconds(1, 0)) * 1e3 == pytest.approx(milliseconds, abs=0.06)


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_physical_weights_are_the_parameters(name):
    a = find_target(name).architecture
    moved = physical_bytes(a, 10**6 if a.experts else 1, 0, element_bytes=1)
    weights = moved.attention_weights + moved.ffn_weights + moved.small_weights
    embedding = a.vocab * a.hidden
    assert weights + embedding * (1 if a.tied else 2) == pytest.approx(a.parameters, rel=1e-12)


@pytest.mark.parametrize("name", FORWARDS)
def test_no_published_forward_is_faster_than_the_physical_bound(measured, name):
    _, roofline = measured_points(name)
    rows, context, seconds = measured_forwards(measured, name)
    assert np.all(seconds >= roofline.with_count("physical").seconds(rows, context))


def test_sliding_window_limits_keys_and_traffic():
    window = replace(sliding_window=4)
    # rows at 7 cached tokens see 4 keys each; at 2 cached tokens 3, 4, 4, 4, 4
    assert physical_flops(window, 5, 7).scores == 2 * 2 * 5 * 4 * 12
    assert physical_flops(window, 5, 2).scores == 2 * 2 * 19 * 12
    assert physical_bytes(window, 5, 7).kv_read == 2 * 2 * 2 * 3 * 6
    assert paper_flops(window, 5, 7).total == paper_flops(TINY, 5, 7).total
    # One of two layers reads everything.
    mixed = replace(sliding_window=4, full_layers=1)
    for rows, context in ((5, 7), (5, 2), (1, 100)):
        for count in (physical_flops, physical_bytes):
            apart = [count(a, rows, context).total for a in (TINY, window)]
            assert count(mixed, rows, context).total == pytest.approx(sum(apart) / 2)
    assert physical_bytes(mixed, 5, 7).kv_read == 2 * (3 + 7) * 2 * 6


def test_latent_attention_by_hand():
    """DeepSeek-V3 in bfloat16: 576 cached values a token and layer, 61 layers, 128 heads."""
    a = find_target("deepseek-ai/DeepSeek-V3").architecture
    assert a.cached_width * a.layers * 2 == 70_272  # bytes a token, as DeepSeek publishes
    assert physical_bytes(a, 4, 8192, 3).kv_read == 3 * 8192 * 70_272
    assert physical_bytes(a, 4, 8192, 3).kv_write == 3 * 4 * 70_272
    # A layer: 7168 x 1536 + 1536 x 24576, 7168 x 576 + 512 x 32768, and 16384 x 7168
    assert a.attention_parameters == 48_758_784 + 20_905_984 + 117_440_512
    # One row multiplies with the cached vectors: 512 + 64 values for a score, 512 for the value.
    one = physical_flops(a, 1, 8192)
    assert one.scores == 2 * 61 * 8193 * 128 * 576
    assert one.values == 2 * 61 * 8193 * 128 * 512
    assert one.kv_projection == 2 * 61 * 20_905_984
    # A prompt makes keys of 192 and values of 128 from the vectors, which takes less.
    prompt = physical_flops(a, 4096, 0)
    assert prompt.scores == 2 * 61 * 4096 * 2048.5 * 128 * 192
    assert prompt.values == 2 * 61 * 4096 * 2048.5 * 128 * 128
    chunk = physical_flops(a, 4096, 1000)
    made = 2 * 61 * 1000 * 512 * 32768
    assert chunk.kv_projection == 4096 * one.kv_projection + made


def test_the_roofline_is_the_larger_side():
    peaks = Peaks(flops_per_s=1e6, bytes_per_s=1e4)
    roofline = Roofline(architecture=TINY, peaks=peaks)
    compute_s, memory_s = roofline.branches_s([1, 1000], 0)
    assert np.array_equal(roofline.seconds([1, 1000], 0), np.maximum(compute_s, memory_s))
    assert compute_s[0] == paper_flops(TINY, 1, 0).total / 1e6
    assert memory_s[0] == paper_bytes(TINY, 1, 0).total / 1e4
    two = Roofline(architecture=TINY, peaks=peaks, tensor_parallel=2)
    assert two.seconds(3, 4) == roofline.seconds(3, 4) / 2
    assert roofline.predict_s(3, 4) == roofline.seconds(3, 4)


@given(
    rows=st.integers(1, 1024), context=st.integers(0, 100_000), batch=st.integers(1, 64),
    tied=st.booleans(), experts=st.booleans(), window=st.none() | st.integers(1, 5000),
)  # fmt: skip
def test_both_counts_grow_with_all_work(rows, context, batch, tied, experts, window):
    extra = {"experts": 8, "active_experts": 2, "expert_ffn": 4} if experts else {}
    a = replace(tied=tied, sliding_window=window, **extra)
    if not experts:  # LinearCalibration.predict_s relies on it
        for paper, physical in ((paper_flops, physical_flops), (paper_bytes, physical_bytes)):
            more, less = (count(a, rows, context, batch).total for count in (paper, physical))
            assert more >= less
    for count in (paper_flops, paper_bytes, physical_flops, physical_bytes):
        here = count(a, rows, context, batch).total
        assert here > 0
        assert count(a, rows + 1, context, batch).total >= here
        assert count(a, rows, context + 1, batch).total >= here
        assert count(a, rows, context, batch + 1).total >= here


@pytest.mark.parametrize("count", ["paper", "physical"])
@pytest.mark.parametrize("name", ["quiet_2", "quiet_long"])
def test_no_measured_time_lies_below_the_bytes_that_were_read(name, count):
    # float32 with weights kept in 16 bits, timed before profiles said what a runtime reads
    profile = Profile.from_yaml(DATA / "measured" / "calibrations_avx2" / f"{name}.yaml")
    bound = altered(profile, runtime={"weight_bytes": 2.0, "head_bytes": 2.0})
    points = profile.surface.points()
    shape = points.rows, points.context
    assert (bound.roofline(count).seconds(*shape) <= points.seconds).all()
    if (name, count) != ("quiet_long", "physical"):  # its four bytes a weight lie just below
        assert (profile.roofline(count).seconds(*shape) > points.seconds).any()

"""What no plan may say, over devices, degrees, precisions and engines with operator tables."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.catalog import find_device, find_target, load_targets
from costmodel.compose.operators import ComposedForward
from costmodel.errors import RooftreeError
from costmodel.planning.acceptance import find_acceptance
from costmodel.planning.request import Precision, ServingPolicy
from costmodel.planning.search import make_server
from costmodel.planning.traffic import Traffic
from costmodel.roofline import Roofline
from integrations.aiconfigurator.package import SYSTEMS
from integrations.aiconfigurator.tables import load_published
from tests.costmodel.planning.conftest import SHIPPED, asked, find_forward

QWEN = find_target("Qwen/Qwen3-8B")
GPUS = ("a100-sxm-80gb", "h100-sxm", "b200", "gb300", "rtx-pro-6000-server")
BATCHES, CONTEXTS, ROWS = (1, 4, 24), (64, 1000, 32000), (1, 2, 8)
MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)  # fmt: skip
FP8 = Precision(weights="fp8", cache="fp8")


@pytest.fixture(scope="module", autouse=True)
def operator_tables():
    for module in ("aiconfigurator_core", "pyarrow"):
        pytest.importorskip(module, reason="the extra 'operators' is not installed")


@pytest.fixture(scope="module")
def steps():
    """{(gpu, degree, precision, engine): seconds [batches, contexts, rows]}; fp8 on one GPU."""
    times = {}
    ways = ((1, Precision(), "vllm"), (2, Precision(), "vllm"), (1, FP8, "vllm"),
            (1, Precision(), "sglang"))  # fmt: skip
    for gpu, (degree, precision, engine) in itertools.product(GPUS, ways):
        try:
            forward = find_forward(
                find_device(gpu), QWEN, SHIPPED,
                tensor_parallel=degree, precision=precision, engine=engine,
            )  # fmt: skip
        except RooftreeError:
            continue
        times[gpu, degree, precision, engine] = np.array(
            [[[forward.decode(b, c, r).total for r in ROWS] for c in CONTEXTS] for b in BATCHES]
        )
    assert len(times) > 17
    return times


def test_steps_take_the_time_of_their_bytes_and_flops_and_grow_with_the_work(steps):
    place = np.meshgrid(BATCHES, CONTEXTS, ROWS, indexing="ij")
    for (gpu, degree, precision, engine), seconds in steps.items():
        if precision == FP8:
            continue
        bound = Roofline(
            architecture=QWEN.architecture, peaks=find_device(gpu).peaks, count="physical",
            tensor_parallel=degree,
        )  # fmt: skip
        batch, context, rows = place
        assert np.all(seconds >= 0.98 * bound.seconds(rows, context, batch)), (gpu, degree, engine)
    # But for products: another kernel for more rows may be faster, by up to a tenth
    for place, seconds in steps.items():
        assert np.all(np.diff(seconds, axis=1) >= -1e-3 * seconds[:, 1:]), place
        assert np.all(seconds[1:] >= 0.9 * seconds[:-1]), place
        assert np.all(np.diff(seconds, axis=2) >= -0.1 * seconds[:, :, 1:]), place
    # Where keys are split; both read weights and cached keys once
    for (gpu, degree, precision, engine), seconds in steps.items():
        unsplit = engine == "vllm" and precision != FP8 and gpu[0] in "ar"
        if not unsplit:
            assert np.all(seconds[:, :, 1] <= 1.5 * seconds[:, :, 0]), (gpu, degree, engine)


def test_a_stronger_device_is_not_slower(steps):
    """Than one that is weaker in every peak, beyond 15 %; fp8 tables are of different kernels."""
    compared = 0
    for strong, weak in itertools.permutations(GPUS, 2):
        a, b = find_device(strong), find_device(weak)
        if a.peak_flops_per_s < b.peak_flops_per_s or a.peak_bytes_per_s < b.peak_bytes_per_s:
            continue
        for degree, engine in itertools.product((1, 2), ("vllm", "sglang")):
            pair = [(gpu, degree, Precision(), engine) for gpu in (strong, weak)]
            if all(place in steps for place in pair):
                compared += 1
                assert np.all(steps[pair[0]] <= 1.15 * steps[pair[1]]), (strong, weak, degree)
    assert compared >= 10


# Seconds of a layer in which the scales of blocks of the products' inputs are found, as timed.
SCALES_S = {"fp8_block": 50e-6}


@pytest.mark.parametrize(
    ("gpu", "weights"),
    [("h100-sxm", "fp8"), ("h100-sxm", "fp8_block"), ("gb300", "fp8"), ("l40s", "fp8")],
)
def test_no_forward_in_fp8_takes_longer_than_in_bfloat16(gpu, weights):
    """At any degree, rows and length of a prompt; the experts' and small products' tables do."""
    rows, contexts = np.array([1, 3, 8, 24, 192, 384, 1024]), np.array([64, 5000])
    compared = 0
    for name, degree in itertools.product(MODELS, (1, 2, 4, 8)):
        target, times = find_target(name).architecture, []
        for one in ("bfloat16", weights):
            tables = load_published(find_device(gpu), experts=bool(target.experts), weights=one)
            place = {"tables": tables, "tensor_parallel": degree}
            try:
                forward = ComposedForward(architecture=target, **place)
                steps = forward.verifying().seconds(rows, contexts)
            except RooftreeError:
                continue  # that the tables do not cover
            times.append([steps, forward.seconds([1], contexts, 96), forward.prefill_s(8 * rows)])
        compared += len(times) == 2
        for wide, narrow in zip(*times, strict=True) if len(times) == 2 else ():
            limit = wide * (1 + 1e-9) + SCALES_S.get(weights, 0.0) * target.layers
            assert np.all(narrow <= limit), (name, degree)
    assert compared >= 15


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    gpu=st.sampled_from([slug for slug in SYSTEMS if find_device(slug).fp8_flops_per_s]),
    name=st.sampled_from(sorted(load_targets())), degree=st.sampled_from((1, 2, 4, 8)),
    weights=st.sampled_from(("fp8", "fp8_dynamic", "fp8_block")), prompt=st.integers(1, 8000),
    most=st.integers(2, 256),
)  # fmt: skip
def test_fp8_and_fewer_requests_are_never_slower(gpu, name, degree, weights, prompt, most):
    """Time per token, of any target on any device with FP8 products, at any requests at once."""
    target, times = find_target(name), []
    traffic = Traffic(prompt_tokens=prompt, output_tokens=400)
    for one in ("bfloat16", weights):
        precision = Precision(weights=one)
        request = asked(target=name, gpus=(gpu,), precision=precision, traffic=traffic)
        place = {"tensor_parallel": degree, "precision": request.precision}
        try:
            forward = find_forward(find_device(gpu), target, SHIPPED, **place)
        except RooftreeError:
            return  # that no tables cover
        points = make_server(request, forward, None).points(request.traffic, most)
        times.append(np.array([point.tpot_s for point in points]))
        assert np.all(np.diff(times[-1]) >= -1e-12)
    # Where both are the same kernels; parts are weighted apart, and profiles hold six digits.
    both = max(min(map(len, times)) - 1, 0)  # without the last point, where the memory may end
    limit = times[0][:both] * (1 + 2e-3) + SCALES_S.get(weights, 0.0) * target.architecture.layers
    assert np.all(times[1][:both] <= limit)


@pytest.mark.parametrize(("gpu", "policy", "engine"), [
    ("h100-sxm", "chain:7", "vllm"), ("h100-sxm", "auto", "rooftree"), ("b200", "plain", "vllm"),
    ("b200", "chain:3", "sglang"),
])  # fmt: skip
def test_time_per_token_never_falls_with_requests_at_once(gpu, policy, engine):
    for prompt, output in ((200, 800), (3000, 300)):
        drafts = {} if policy == "plain" else {"acceptance": "0.6"}
        request = asked(
            gpus=(gpu,), engine=engine, policy=ServingPolicy.parse(policy), **drafts,
            traffic=Traffic(prompt_tokens=prompt, output_tokens=output),
        )  # fmt: skip
        acceptance = find_acceptance("0.6", request.target, 0) if drafts else None
        forward = find_forward(find_device(gpu), QWEN, SHIPPED, engine=engine)
        points = make_server(request, forward, acceptance).points(request.traffic, 256)
        assert np.all(np.diff([point.tpot_s for point in points]) >= -1e-12)

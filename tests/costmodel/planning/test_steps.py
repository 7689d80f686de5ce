"""Steps of profiles: what the files hold, and operator tables where they are installed."""

from __future__ import annotations

import numpy as np
import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.aiconfigurator import load_published
from costmodel.compose.operators import ComposedForward
from costmodel.io import shipped_directory
from costmodel.planning.exports import export_plan
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest
from costmodel.planning.search import make_server, plan_profile
from costmodel.planning.traffic import Traffic
from costmodel.profile.profile import Profile

NAME = "qwen3-8b.bfloat16.kernels.tp1.yaml"


def shipped(device: str) -> Profile:
    return Profile.from_yaml(shipped_directory() / device / NAME)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return shipped("h100-sxm")


def test_plain_steps_are_those_of_the_file(profile):
    steps, plain = TargetForward(profile), profile.stages.plain
    for batch, context, seconds in zip(plain.batch, plain.context, plain.median_s, strict=True):
        assert steps.decode(batch, context).total == pytest.approx(seconds)


def test_verifications_at_batch_1_are_those_of_the_file(profile):
    steps, surface = TargetForward(profile), profile.surface
    for rows, context, seconds in zip(surface.rows, surface.context, surface.median_s, strict=True):
        if rows > 1 and context > 64:
            assert steps.decode(1, context, rows).total == pytest.approx(seconds, rel=0.03)


def test_beyond_the_largest_batch_the_last_slope_goes_on(profile):
    steps = TargetForward(profile)
    times = [steps.decode(batch, 512).total for batch in (128, 256, 384)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])


def test_a_prompt_alone_takes_what_the_file_says(profile):
    steps, prefill = TargetForward(profile), profile.stages.prefill
    for tokens, seconds in zip(prefill.tokens, prefill.median_s, strict=True):
        assert steps.prompt(tokens, 0, 1).total == pytest.approx(seconds)


def test_a_composed_profile_says_so(profile):
    origin = TargetForward(profile).origin
    stated = profile.provenance.error_bar
    assert (origin.kind, origin.error, origin.whole_runtime) == ("composed", stated, False)
    assert TargetForward(profile).device.power_w == 700


def test_a_profile_in_float32_plans_with_values_of_four_bytes(profile):
    runtime = profile.runtime.model_copy(update={"dtype": "float32"})
    single = profile.model_copy(update={"runtime": runtime})
    request = PlanRequest(
        target=profile.target.name,
        gpus=("a.yaml",),
        traffic=Traffic(prompt_tokens=1000, output_tokens=200),
        rate=1.0,
    )
    room = [make_server(request, TargetForward(p), None) for p in (profile, single)]
    half, whole = (server.cache_tokens() for server in room)
    assert whole < half / 2
    planned = plan_profile(request, single, 4)
    assert "vllm serve" in export_plan(planned, "vllm")


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm", "l40s", "rtx-pro-6000-server"])
def test_steps_put_together_agree_with_operator_tables(device):
    """Batches x rows that the profile does not hold, against sums of operators at that batch."""
    pytest.importorskip("aiconfigurator_core", reason="the extra 'operators' is not installed")
    pytest.importorskip("pyarrow", reason="the extra 'operators' is not installed")
    made = TargetForward(shipped(device), "rooftree")
    summed = ComposedForward(
        architecture=find_target("Qwen/Qwen3-8B").architecture,
        tables=load_published(find_device(device)),
    ).verifying()
    shapes = [(b, c, r) for b in (8, 32, 128) for c in (512, 2048) for r in (4, 16, 32)]
    summed_s = [summed.seconds([r], [c], b)[0, 0] for b, c, r in shapes]
    error = np.abs(np.array([made.decode(*s).total for s in shapes]) / summed_s - 1)
    inside = np.array([b * r <= 1024 for b, _, r in shapes])
    assert np.mean(error) < 0.1
    assert np.max(error[inside]) < 0.15
    assert np.max(error) < 0.3  # at up to four times the profile's most rows

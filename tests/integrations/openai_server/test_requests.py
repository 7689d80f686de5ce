"""Floor, LM head and steps, against numbers worked out by hand."""

import math

import pytest

from costmodel.catalog import Peaks, find_target
from costmodel.errors import MeasurementError
from costmodel.roofline import Roofline
from integrations.openai_server import requests
from integrations.openai_server.requests import Floor, forward_times, lm_head_s, step_seconds
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.samples import PointSamples

SMALL = find_target("SmolLM2-135M-Instruct").architecture
HIDDEN, VOCAB = 576, 49152
# 1 TFLOP/s and 10 GB/s: one row of the LM head is bound by its weights, 1000 by its products.
ROOFLINE = Roofline(architecture=SMALL, peaks=Peaks(flops_per_s=1e12, bytes_per_s=1e10))


def swept(times: dict[Task, float]) -> SweepResult:
    samples = {task: PointSamples(seconds=(seconds,) * 3) for task, seconds in times.items()}
    return SweepResult(samples=samples, unmeasured=(), spent_s=1.0, resumed_samples=0)


@pytest.mark.parametrize(("contexts", "seconds", "base_s", "token_s", "error_s"), [
    ([100, 200, 400], [0.011, 0.012, 0.014], 0.010, 1e-5, 0.0),
    ([100, 300], [0.006, 0.004], 0.005, 0.0, 0.001),  # it never falls with the context
    ([100, 300], [-0.004, -0.002], 0.0, 0.0, 10**0.5 * 1e-3),  # nor is it negative
    ([100, 300], [0.0, 0.004], 0.0, 300 * 0.004 / (100**2 + 300**2), 0.8**0.5 * 1e-3),
])  # fmt: skip
def test_the_floor_of_requests(contexts, seconds, base_s, token_s, error_s):
    floor = Floor.fit(contexts, seconds)
    assert (floor.base_s, floor.token_s) == (pytest.approx(base_s), pytest.approx(token_s))
    assert floor.error_s == pytest.approx(error_s, abs=1e-9)
    assert floor.seconds(300) == pytest.approx(base_s + 300 * token_s)


def test_no_floor_without_a_plain_step_and_bounds_of_forward_and_lm_head():
    with pytest.raises(MeasurementError, match="no context has both"):
        forward_times(swept({Task(kind="verify", size=1, context=128): 0.02}), ROOFLINE)
    times = {
        Task(kind="verify", size=1, context=128): 0.110,
        Task(kind="plain", size=1, context=128): 0.190,
    }
    with pytest.raises(MeasurementError, match=r"server is .* times as fast as the device"):
        forward_times(swept(times), ROOFLINE)
    weights, logits = 2 * HIDDEN * VOCAB, 2 * VOCAB
    assert lm_head_s(ROOFLINE, 1) == pytest.approx((weights + logits) / 1e10)
    assert lm_head_s(ROOFLINE, 1000) == pytest.approx(2 * 1000 * HIDDEN * VOCAB / 1e12)


def test_requests_become_forwards():
    times = {
        Task(kind="verify", size=1, context=128): 0.110,
        Task(kind="plain", size=1, context=128): 0.910,  # nine steps of 0.1 and a floor of 0.01
        Task(kind="plain", size=1, context=128, batch=4): 0.120,
        Task(kind="verify", size=1, context=512): 0.114,
        Task(kind="plain", size=1, context=512): 0.946,
        Task(kind="verify", size=1000, context=128): 2.0,
        Task(kind="held_out", size=1, context=300): 0.919,
        Task(kind="held_out", size=2, context=300): 0.112,
    }
    result = forward_times(swept(times), ROOFLINE)
    median_s = {task: samples.typical_s for task, samples in result.swept.samples.items()}
    added_s = lm_head_s(ROOFLINE, 1000) - lm_head_s(ROOFLINE, 1)
    expected = {
        ("verify", 1, 128, 1): 0.100, ("verify", 1, 128, 4): 0.120, ("verify", 1, 512, 1): 0.104,
        ("verify", 1000, 128, 1): 1.990 + added_s, ("held_out", 1, 300, 1): 0.101,
        ("held_out", 2, 300, 1): 0.102 + 2 * VOCAB / 1e10,
    }  # fmt: skip
    names = ("kind", "size", "context", "batch")
    expected = {Task(**dict(zip(names, key, strict=True))): s for key, s in expected.items()}
    assert median_s == pytest.approx(expected)
    assert result.lm_head_share == pytest.approx(added_s / (1.990 + added_s))
    assert result.error_bar(0.03) == pytest.approx(math.hypot(0.03, result.lm_head_share))


def test_the_step_of_streams_and_those_that_show_none():
    assert step_seconds([[5.0, 5.1, 5.2, 5.4]], 4) == pytest.approx(0.4 / 3)
    # The first stream starts alone with steps of 0.1; together they take 0.3.
    first = [0.0, 0.1, 0.2, 0.5, 0.8]
    second = [0.2, 0.5, 0.8, 0.9, 1.0]
    assert requests.ran_together([first, second])
    assert step_seconds([first, second], 5) == pytest.approx(0.3)
    # Nine tokens in eight pieces, a token each 0.1 s.
    assert step_seconds([[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8]], 9) == pytest.approx(0.1)
    with pytest.raises(MeasurementError, match="several tokens at once"):
        step_seconds([[0.0, 0.1, 0.2]], 9)
    with pytest.raises(MeasurementError, match="2 requests at once did not run together"):
        step_seconds([[0.0, 0.1], [0.2, 0.3]], 2)
    assert not requests.ran_together([[0.0, 0.1], [0.2, 0.3]])
    even = [0.0, 0.1, 0.21, 0.3, 0.41]
    assert not requests.bunched([even, even])
    assert requests.bunched([even, [0.3, 0.3, 0.3, 0.3, 0.4]])

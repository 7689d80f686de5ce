"""Timers, stopping rules and accumulators, on clocks whose durations are known."""

import gc
import time
from itertools import cycle, repeat
from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.errors import MeasurementError
from costmodel.statistics import relative_error
from profiler.measure.instruments import CudaTimer, Guard, Instruments, WallTimer, take_sample
from profiler.measure.samples import NoiseRule, PointAccumulator, in_turn, paces, warmup_length
from tests.fake_timing import FakeTimer

QUIET = Guard()


def measured(durations_s, rule, guard=QUIET):
    each = iter(durations_s)
    return measure(lambda: None, FakeTimer(lambda _: next(each)), rule, guard)


def measure(function, timer, rule, guard=QUIET):
    tools, point = Instruments(timer=timer, rule=rule, guard=guard), PointAccumulator(rule)
    while not point.done:
        seconds, disturbance = take_sample(function, tools)
        point.add(seconds, ok=not disturbance)
    return point.samples


def test_a_point_stops_when_quiet_when_settled_or_at_its_limits():
    samples = measured([5.0, 2.0, *repeat(1.0, 20)], NoiseRule())
    assert samples.warmup == (5.0, 2.0)
    assert samples.seconds == (1.0,) * 5
    assert (samples.typical_s, samples.mad_s) == (1.0, 0.0)
    generator = np.random.default_rng(5)
    noisy_s = generator.normal(1.0, 0.05, size=1000).tolist()
    samples = measured(noisy_s, NoiseRule(target=0.001, max_samples=1000))
    assert 16 <= samples.n < 1000
    assert relative_error(samples.seconds) > 0.001
    rule = NoiseRule(target=0.01, max_samples=12, settle_samples=100)
    samples = measured([1.0, 1.4, 0.7] * 4, rule)
    assert samples.n == 12
    # MAD 0.3 of the median 1: 1.4826 x 0.3 x sqrt(pi / 2) / sqrt(12) = 0.1609.
    assert relative_error(samples.seconds) == pytest.approx(0.1609, abs=1e-4)
    samples = measured(repeat(2.0), NoiseRule(max_time_s=3.9))
    assert (samples.n, samples.mad_s) == (2, None)


def guard(disturbances):
    return SimpleNamespace(start=lambda: None, disturbance=iter(disturbances).__next__)


def test_disturbed_samples_are_set_aside_and_the_collector_held_off():
    samples = measured([1.0, 9.0] * 10, NoiseRule(), guard(cycle(["", "hot"])))
    assert samples.seconds == (1.0,) * 5
    assert samples.rejected == (9.0,) * 4
    with pytest.raises(MeasurementError, match="none of 7 samples could be used"):
        measured(repeat(1.0), NoiseRule(max_samples=7), guard(repeat("hot")))
    collecting = []

    def work():
        collecting.append(gc.isenabled())
        time.sleep(0.02)

    timer = WallTimer()
    before_s = timer.now_s()
    seconds = timer.time_s(work)
    assert 0.02 <= seconds <= timer.now_s() - before_s
    assert collecting == [False]
    assert gc.isenabled()


def test_taking_turns_changes_the_first():
    keys = [key for key, _ in in_turn({key: iter(range(3)) for key in "abc"})]
    assert "".join(keys) == "bca" + "cab" + "abc"


@pytest.mark.gpu
def test_cuda_timer_agrees_with_the_wall_clock():
    torch = pytest.importorskip("torch")
    matrix = torch.randn(4096, 4096, device="cuda")

    def work():
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()

    rule = NoiseRule(target=0.02)
    by_events, by_clock = measure(work, CudaTimer(), rule), measure(work, WallTimer(), rule)
    assert by_events.typical_s == pytest.approx(by_clock.typical_s, rel=0.1)


@pytest.mark.parametrize(("samples", "length"), [
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0),
    ([9.0, 1.0, 1.01, 1.0, 0.99, 1.0], 1),
    ([9.0, 3.0, 1.0, 1.01, 0.99, 1.0, 1.0, 1.01], 2),
    ([1.0, 9.0, 1.0, 1.0, 1.0, 1.0], 0),  # a late outlier is not warm-up
    ([1.02, 1.0, 1.0, 1.0, 1.0, 1.0], 0),  # 2 % above is within what single samples do
    ([0.5, 1.0, 1.0, 1.0, 1.0, 1.0], 0),  # rising is not warm-up
    ([9.0, 1.0, 1.0], 0),  # too few to tell
    ([6.0, 5.0, 4.0, 1.0, 1.0, 1.0], 3),  # never more than half
])  # fmt: skip
def test_warmup_length(samples, length):
    assert warmup_length(samples) == length


POINTS, PASSES = 40, 10


def mixed_order(random: np.random.Generator) -> np.ndarray:
    """Each pass samples every point once, in a fresh order."""
    return np.concatenate([random.permutation(POINTS) for _ in range(PASSES)])


def medians(seconds: np.ndarray, order: np.ndarray) -> np.ndarray:
    return np.array([np.median(seconds[order == point]) for point in range(POINTS)])


def away(found: np.ndarray, true_s: np.ndarray) -> np.ndarray:
    """Relative errors, a common factor left out."""
    ratio = np.log(found / true_s)
    return np.abs(ratio - np.median(ratio))


def test_a_steady_machine_is_left_alone_and_noise_without_spells_hardly_raised():
    """One wild sample has no say in any pace."""
    order = mixed_order(np.random.default_rng(0))
    seconds = (0.01 + 0.003 * np.arange(POINTS))[order]
    for factor in (1.0, 7.0):
        seconds[123] *= factor
        assert np.array_equal(paces(seconds, order), np.ones(len(order)))
    random = np.random.default_rng(1)
    order = mixed_order(random)
    true_s = np.exp(random.uniform(-4.0, -2.0, POINTS))
    seconds = true_s[order] * np.exp(random.normal(0.0, 0.02, len(order)))
    corrected = seconds / paces(seconds, order)
    before, after = (away(medians(given, order), true_s) for given in (seconds, corrected))
    assert after.mean() < 1.3 * before.mean()


@pytest.mark.parametrize("seed", range(5))
def test_slow_spells_are_taken_out(seed):
    """Two fifths of the time, 20 samples on end, something slows the machine by a half or so."""
    random = np.random.default_rng(seed)
    order = mixed_order(random)
    true_s = np.exp(random.uniform(-4.0, -2.0, POINTS))
    spells = np.repeat(random.permutation(len(order) // 20) < 8, 20)
    slow = np.where(spells, np.repeat(random.uniform(1.33, 1.67, len(order) // 20), 20), 1.0)
    seconds = true_s[order] * slow * np.exp(random.normal(0.0, 0.02, len(order)))
    corrected = seconds / paces(seconds, order)
    before, after = (away(medians(given, order), true_s) for given in (seconds, corrected))
    assert before.mean() > 0.03 and before.max() > 0.1
    assert after.max() < 0.05 and after.mean() < before.mean() / 3


@pytest.mark.parametrize("points", [[], [0], [0, 1], [0, 0, 1, 1, 2]])
def test_too_few_samples_say_nothing(points):
    seconds = 0.01 * (1.0 + np.arange(len(points)))
    assert np.array_equal(paces(seconds, points), np.ones(len(points)))

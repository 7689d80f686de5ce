"""Timers of forwards: the host's clock, and device events without waiting."""

import numpy as np
import pytest
import torch

from decoder.statistics import EventTimer, HostTimer, TimedForward, forward_timer
from tests.decoder.models import LatticeDrafter, decoder_of, random_model


class FakeDevice:
    """A stream whose work is done when `passes` is called; its events cannot be waited for."""

    def __init__(self):
        self.queued_ms = 0.0
        self.passed = 0
        self.recorded = []

    def event(self):
        return FakeEvent(self)

    def work(self, duration_ms):
        self.queued_ms += duration_ms

    def passes(self, events):
        self.passed = events


class FakeEvent:
    def __init__(self, device):
        self._device = device

    def record(self):
        self.at_ms = self._device.queued_ms
        self._device.recorded.append(self)

    def query(self):
        return self in self._device.recorded[: self._device.passed]

    def elapsed_time(self, end):
        assert self.query() and end.query(), "an event was read before the device had passed it"
        return end.at_ms - self.at_ms


def test_events_are_read_when_the_device_has_passed_them():
    device = FakeDevice()
    stopwatch = EventTimer(device.event)
    forwards = [TimedForward(4.0, 100, 1), TimedForward(8.0, 101, 2)]
    for forward, duration_ms in zip(forwards, (3.0, 5.0), strict=True):
        stopwatch.start()
        device.work(duration_ms)
        stopwatch.stop(forward)
        device.work(1.0)
    assert stopwatch.finished() == []
    device.passes(3)  # the second forward has begun and not ended
    assert stopwatch.finished() == [(forwards[0], 3e-3)]
    assert stopwatch.finished() == []
    device.passes(4)
    assert stopwatch.finished() == [(forwards[1], 5e-3)]


def test_the_host_knows_at_once():
    ticks = iter([1.0, 1.5, 2.0, 2.25])
    stopwatch = HostTimer(lambda: next(ticks))
    forwards = [TimedForward(1.0, 7, 1), TimedForward(2.0, 8, 1)]
    for forward in forwards:
        stopwatch.start()
        stopwatch.stop(forward)
    assert stopwatch.finished() == [(forwards[0], 0.5), (forwards[1], 0.25)]
    assert stopwatch.finished() == []
    assert isinstance(forward_timer(torch.device("cpu")), HostTimer)


class Seen:
    """A cost model that records its observations."""

    def __init__(self):
        self.cost = self
        self.drift_warning = None
        self.observed = []

    def bucket_rows(self, nodes):
        return np.asarray(nodes) + 1.0

    def verify_s(self, nodes, context, batch):
        return 1.0

    def observe(self, rows, context, seconds, batch):
        self.observed.append((rows, context, seconds, batch))


class Source:
    def __init__(self):
        self.cost = Seen()
        self.warnings = ()
        self.line = "a cost model that records"


@pytest.mark.parametrize("late", [0, 1])
def test_the_cost_model_learns_of_every_forward_with_its_own_rows(late):
    """Also where a forward's time is known one round late."""
    decoder = decoder_of(random_model("llama-gqa"), "fixed:3", LatticeDrafter(97))
    decoder.cost_source = Source()
    device = FakeDevice()
    stopwatch = EventTimer(device.event)
    decoder.timer = stopwatch
    verify = decoder.target.verify

    def timed(steps):
        logits = verify(steps)
        device.work(steps[0].tree.rows)  # as many milliseconds
        device.passes(len(device.recorded) + 1 - 2 * late)
        return logits

    decoder.target.verify = timed
    result = decoder.generate([5, 17, 3], max_new_tokens=20)
    rows = [nodes + 1 for nodes in result.stats.tree_nodes]
    observed = decoder.cost_source.cost.observed
    assert len(observed) == len(rows) - late
    for expected, (row_count, context, seconds, batch) in zip(rows, observed, strict=False):
        assert (row_count, batch) == (expected, 1) and context >= 3
        assert seconds == pytest.approx(expected * 1e-3)

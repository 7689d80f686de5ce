"""Timers of forwards: the host's clock, and device events without waiting."""

from types import SimpleNamespace

import torch

from decoder.statistics import EventTimer, HostTimer, TimedForward, forward_timer


class FakeEvent:
    """An event of a stream whose device has passed the first `passed` of those recorded."""

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
    device = SimpleNamespace(queued_ms=0.0, passed=0, recorded=[])
    stopwatch = EventTimer(lambda: FakeEvent(device))
    forwards = [TimedForward(4.0, 100, 1), TimedForward(8.0, 101, 2)]
    for forward, duration_ms in zip(forwards, (3.0, 5.0), strict=True):
        stopwatch.start()
        device.queued_ms += duration_ms
        stopwatch.stop(forward)
        device.queued_ms += 1.0
    assert stopwatch.finished() == []
    device.passed = 3  # the second forward has begun and not ended
    assert stopwatch.finished() == [(forwards[0], 3e-3)]
    assert stopwatch.finished() == []
    device.passed = 4
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

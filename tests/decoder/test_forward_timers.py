"""Timers of forwards: the host's clock, and device events without waiting."""

from types import SimpleNamespace

from decoder.statistics import ForwardTimer, HostEvent


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
    stopwatch = ForwardTimer(lambda: FakeEvent(device))
    forwards = [(4.0, 100, 1), (8.0, 101, 2)]
    for forward, duration_ms in zip(forwards, (3.0, 5.0), strict=True):
        stopwatch.start()
        device.queued_ms += duration_ms
        stopwatch.stop(forward)
        device.queued_ms += 1.0
    assert list(stopwatch.finished()) == []
    device.passed = 3  # the second forward has begun and not ended
    assert list(stopwatch.finished()) == [(forwards[0], 3e-3)]
    assert list(stopwatch.finished()) == []
    device.passed = 4
    assert list(stopwatch.finished()) == [(forwards[1], 5e-3)]


def test_the_host_knows_at_once(monkeypatch):
    ticks = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr("decoder.statistics.perf_counter", lambda: next(ticks))
    stopwatch = ForwardTimer(HostEvent)
    forwards = [(1.0, 7, 1), (2.0, 8, 1)]
    for forward in forwards:
        stopwatch.start()
        stopwatch.stop(forward)
    assert list(stopwatch.finished()) == [(forwards[0], 0.5), (forwards[1], 0.25)]
    assert list(stopwatch.finished()) == []

"""What a running decoder learns about its cost model: an affine correction, and drift."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import overload

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SLOPE_SPREAD = 0.25  # how far from 1 the slope of a borrowed profile is expected to be
_NOISE = 0.05
_CLIP = 3.0  # deviations beyond which a round counts no more
_WINDOW = 64  # rounds that count
_REFIT_ROUNDS = 8  # once the first rounds are learnt
_KEPT_AFTER_DRIFT = 8
_NOT_WORSE = 1.2  # by so much may the overlapped floor misfit more than the added one


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """seconds = max(host_s, floor_s + slope x predicted seconds)."""

    floor_s: float = 0.0
    slope: float = 1.0
    host_s: float = 0.0

    @overload
    def seconds(self, predicted_s: float) -> float: ...
    @overload
    def seconds(self, predicted_s: Array) -> Array: ...
    def seconds(self, predicted_s: Array | float) -> Array | float:
        """Corrected seconds."""
        line = self.floor_s + self.slope * predicted_s
        return max(line, self.host_s) if isinstance(line, float) else np.maximum(line, self.host_s)


class AffineCorrection:
    """Floor and slope over a borrowed profile, from the last rounds.

    A profile of another device or of kernels alone is wrong by a factor and by what the host
    does for every forward. Host time comes on top of the kernels where they wait for it, and
    hides behind them where launches run ahead; both are fitted, and the overlapped floor is
    used unless it fits worse. It is the one under which larger trees cost less, so that a
    wrong guess is found out by the very rounds that it leads to. The slope has a prior around
    1 and the floor none: rounds of one size teach the floor, rounds of several the slope.
    Nothing is ever negative.
    """

    def __init__(self) -> None:
        self.line = Line()
        self._observations = 0
        self._window: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Learn from one forward."""
        self._window.append((predicted_s, measured_s))
        self._observations += 1
        if self._observations > _WINDOW // 2 and self._observations % _REFIT_ROUNDS:
            return
        predicted, measured = np.array(self._window).T
        added = _added_floor(predicted, measured)
        overlapped = min(
            (_overlapped_floor(predicted, measured, slope) for slope in {1.0, self.line.slope}),
            key=lambda line: _misfit(line, predicted, measured),
        )
        tolerated = _NOT_WORSE * _misfit(added, predicted, measured) + 1e-4
        fits = _misfit(overlapped, predicted, measured) <= tolerated
        self.line = overlapped if fits else added

    def forget(self) -> None:
        """Make room for a changed machine: only the last few rounds count."""
        self._observations = 0
        self._window = deque(list(self._window)[-_KEPT_AFTER_DRIFT:], maxlen=_WINDOW)


def _misfit(line: Line, predicted: Array, measured: Array) -> float:
    """Mean squared relative error, wild rounds clipped, and the prior of the slope."""
    error = np.clip(line.seconds(predicted) / measured - 1, -_CLIP * _NOISE, _CLIP * _NOISE)
    prior = (_NOISE * (line.slope - 1) / _SLOPE_SPREAD) ** 2
    return float(np.mean(error**2) + prior / len(measured))


def _trust(line: Line, predicted: Array, measured: Array) -> Array:
    """Huber weights of relative errors, over the squared seconds."""
    away = np.abs(line.seconds(predicted) / measured - 1)
    trust: Array = np.minimum(1.0, 2 * _NOISE / np.maximum(away, 1e-9)) / measured**2
    return trust


def _added_floor(predicted: Array, measured: Array) -> Line:
    """floor_s + slope x predicted, by reweighted least squares."""
    prior = np.array([1e-8 / float(np.max(measured)) ** 2, (_NOISE / _SLOPE_SPREAD) ** 2])
    line = Line(floor_s=max(float(np.median(measured - predicted)), 0.0))
    for _ in range(3):
        weight = _trust(line, predicted, measured)
        design = np.stack([np.ones_like(predicted), predicted])
        information = (design * weight) @ design.T + np.diag(prior)
        moments = (design * weight) @ measured + np.array([0.0, prior[1]])
        floor_s, slope = np.linalg.solve(information, moments)
        if floor_s < 0:
            floor_s, slope = 0.0, moments[1] / information[1, 1]
        elif slope < 0:
            floor_s, slope = moments[0] / information[0, 0], 0.0
        line = Line(floor_s=float(floor_s), slope=float(slope))
    return line


def _overlapped_floor(predicted: Array, measured: Array, slope: float) -> Line:
    """max(host_s, slope x predicted), starting from a slope."""
    prior = (_NOISE / _SLOPE_SPREAD) ** 2
    line = Line(slope=slope)
    hidden = measured > (1 + 2 * _NOISE) * slope * predicted
    for _ in range(3):
        weight = _trust(line, predicted, measured) if line.host_s else 1 / measured**2
        host_s = float(np.median(measured[hidden])) if hidden.any() else 0.0
        seen = weight * ~hidden
        slope = float((seen @ (predicted * measured) + prior) / (seen @ predicted**2 + prior))
        line = Line(slope=slope, host_s=host_s)
        hidden = slope * predicted < host_s
    return line


class DriftMonitor:
    """A two-sided cumulative-sum test on log(measured / expected).

    Each side adds what exceeds half of a 20 % change and falls back to 0 otherwise; it raises
    when the sum passes a threshold that grows with the noise, which is taken from differences
    of neighbouring rounds. Single wild rounds are clipped. For normal noise of s the chance of
    a false alarm is about exp(-2 x slack x threshold / s^2) a round: below 1e-7.
    """

    SLACK = math.log(1.2) / 2
    LEAST = 0.9
    CLIP = 0.35
    NOISE_FACTOR = 100.0
    FADING = 0.02

    def __init__(self, warm_up: int = 20) -> None:
        self.raised: float | None = None
        self._waiting = warm_up
        self._above = 0.0
        self._below = 0.0
        self._variance = 0.05**2
        self._steps = 0
        self._last: float | None = None
        self._recent = 0.0

    def observe(self, log_ratio: float) -> bool:
        """Whether this round raises the alarm, which happens once."""
        clipped = min(max(log_ratio, -2 * self.CLIP), 2 * self.CLIP)
        if self._last is not None:
            step = (clipped - self._last) ** 2 / 2
            self._steps += 1
            self._variance += max(self.FADING, 1 / (3 + self._steps)) * (step - self._variance)
            self._recent += 0.1 * (clipped - self._recent)
        self._last = clipped
        if self._waiting > 0 or self.raised is not None:
            self._waiting -= 1
            return False
        clipped = min(max(log_ratio, -self.CLIP), self.CLIP)
        self._above = max(self._above + clipped - self.SLACK, 0.0)
        self._below = max(self._below - clipped - self.SLACK, 0.0)
        threshold = max(self.LEAST, self.NOISE_FACTOR * self._variance)
        if max(self._above, self._below) < threshold:
            return False
        self.raised = math.exp(self._recent)
        return True

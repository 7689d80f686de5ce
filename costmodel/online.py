"""The cost of a decoding cycle from a profile, and its correction while decoding."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Hashable
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from costmodel.calibration.points import Calibration
from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection, StagesSection
from costmodel.roofline import Roofline
from costmodel.statistics import Array, Ints

# Tokens that a cycle commits; the commit cost hardly depends on their number.
TYPICAL_COMMITTED = 4.0


class FadingMean:
    """A weighted mean whose earlier terms fade by a factor with each new one."""

    def __init__(self, fading: float) -> None:
        self._fading, self._sum, self._weight = fading, 0.0, 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a term: its value times its weight, and its weight."""
        self._sum = self._fading * self._sum + value
        self._weight = self._fading * self._weight + weight

    def mean(self) -> float | None:
        """None before the first term."""
        return self._sum / self._weight if self._weight else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CycleCost:
    """C(N, c, B) = draft + build + verify(bucket(B (N + 1)) / B) + accept + commit.

    Parts that the profile does not hold cost 0; for acceptance by sampling the argmax's serves.

    buckets         row counts that a forward is padded to; empty where it is not padded
    preferred_rows  row counts worth choosing where forwards are not padded but new row counts
                    cost extra; empty where all are alike
    uncertainty     relative, of `verify`, as the profile states it; 0 where it states none
    """

    verify: Calibration
    roofline: Roofline
    buckets: tuple[int, ...] = ()
    preferred_rows: tuple[int, ...] = ()
    stages: StagesSection = dataclasses.field(default_factory=StagesSection)
    drafter: DrafterSection | None = None
    uncertainty: float = 0.0

    @classmethod
    def from_profile(cls, profile: Profile, drafter_hash: str | None = None) -> CycleCost:
        """The costs in a profile; without `drafter_hash` drafts are free.

        Raises ProfileError where the profile has no cost of that drafter.
        """
        drafter = None
        if drafter_hash is not None:
            drafter = profile.drafters.get(drafter_hash)
            if drafter is None:
                names = ", ".join(f"{h} ({d.name})" for h, d in profile.drafters.items())
                raise ProfileError(
                    f"the profile has no draft cost of drafter {drafter_hash}"
                    f" (it has {names or 'none'})",
                    hint=f"Add it with `rooftree calibrate --target {profile.target.name}"
                    " --drafter NAME`",
                )
        return cls(
            verify=profile.verify_calibration(),
            roofline=profile.roofline("paper"),
            buckets=profile.runtime.buckets,
            preferred_rows=profile.preferred_rows,
            stages=profile.stages,
            drafter=drafter,
            uncertainty=profile.uncertainty,
        )

    @classmethod
    def from_roofline(cls, roofline: Roofline, buckets: tuple[int, ...] = ()) -> CycleCost:
        """The paper's roofline alone, for the mode `ema` without a profile."""
        paper = roofline.with_count("paper")
        return cls(verify=paper, roofline=paper, buckets=buckets)

    def bucket_rows(self, nodes: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Rows a sequence that verifying N nodes in each runs: N + 1, padded up to a bucket.

        A batch's rows are padded together. Beyond the largest bucket nothing is padded.
        """
        texts, rows = np.asarray(batch), np.asarray(nodes, dtype=np.float64) + 1.0
        if not self.buckets:
            return rows
        total = np.round(rows * texts, 6)
        edges = np.append(np.asarray(self.buckets, dtype=np.float64), np.inf)
        edge = edges[np.searchsorted(self.buckets, total)]
        return np.asarray(np.where(np.isfinite(edge), edge, total) / texts)

    def sizes(self, most: int) -> Ints:
        """Tree sizes worth scoring, 0 .. `most` nodes, ascending.

        Full buckets and `most` where forwards are padded, else those of preferred rows, else all.
        """
        edges = self.buckets or self.preferred_rows
        if not edges:
            return np.arange(most + 1)
        full = [rows - 1 for rows in edges if 1 < rows <= most + 1]
        last = [most] if self.buckets and most not in full else []
        return np.array([0, *full, *last] if most > 0 else [0], dtype=np.int64)

    def verify_s(self, nodes: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds of the target's forward over the root and N nodes."""
        return self.verify.predict_s(self.bucket_rows(nodes, batch), context, batch)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds of one plain step; where not measured, of verifying the root alone."""
        plain = self.stages.plain
        measured = plain.seconds(context, batch) if plain else None
        return float(self.verify_s(0, context, batch)) if measured is None else measured

    def draft_s(self, context: float) -> float:
        return float(self.drafter.seconds(context)) if self.drafter else 0.0

    def overhead_s(self, nodes: ArrayLike, *, sampled: bool = False) -> Array:
        """Seconds of building, accepting and committing a tree of N nodes.

        `sampled`: the target's tokens are drawn, at a temperature above 0.
        """
        counts = np.asarray(nodes, dtype=np.float64)
        total = np.zeros_like(counts)
        accept = (self.stages.accept_sampled if sampled else None) or self.stages.accept
        for stage in (self.stages.build, accept):
            if stage is not None:
                total = total + stage.seconds(counts)
        if self.stages.commit is not None:
            total = total + self.stages.commit.seconds(np.minimum(TYPICAL_COMMITTED, counts + 1))
        return total

    def cycle_s(
        self, nodes: ArrayLike, context: float, batch: int = 1, *, sampled: bool = False
    ) -> Array:
        """Seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        overhead = self.overhead_s(nodes, sampled=sampled) + self.draft_s(context)
        return np.asarray(self.verify_s(nodes, context, batch) + overhead)


_SLOPE_SPREAD = 0.25  # standard deviation of a borrowed profile's slope around 1
_NOISE = 0.05  # relative, of one round
_CLIP = 3.0  # deviations at which a round's error is clipped
_WINDOW = 64  # rounds that are fitted
_REFIT_ROUNDS = 8  # rounds between fits, once half a window is full
_KEPT_AFTER_DRIFT = 8  # rounds
_MISFIT_TOLERANCE = 1.2  # of the overlapped floor relative to the added one


Seconds = TypeVar("Seconds", float, Array)


@dataclasses.dataclass(frozen=True, slots=True)
class CorrectionLine:
    """seconds = max(host_s, floor_s + slope x predicted seconds)."""

    floor_s: float = 0.0
    slope: float = 1.0
    host_s: float = 0.0

    def seconds(self, predicted_s: Seconds) -> Seconds:
        line = self.floor_s + self.slope * predicted_s
        return max(line, self.host_s) if isinstance(line, float) else np.maximum(line, self.host_s)


class AffineCorrection:
    """Floor and slope, never negative, over a borrowed profile, from the last rounds.

    A profile of another device, or of kernels alone, is wrong by a factor and by the host time
    of each forward. Host time adds to the kernels where they wait for it, and overlaps them
    where launches run ahead. Both forms are fitted, and the overlapped floor is used unless it
    fits worse: under it larger trees cost less, so that rounds with larger trees soon correct
    a wrong choice. The slope has a prior around 1, so that rounds of one size determine the floor.
    """

    def __init__(self) -> None:
        self.line = CorrectionLine()
        self._observations = 0
        self._window: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Add one forward to the window and refit."""
        self._window.append((predicted_s, measured_s))
        self._observations += 1
        if self._observations > _WINDOW // 2 and self._observations % _REFIT_ROUNDS:
            return
        predicted, measured = np.array(self._window).T
        # floor_s + slope x predicted, by reweighted least squares.
        prior = np.array([1e-8 / float(np.max(measured)) ** 2, (_NOISE / _SLOPE_SPREAD) ** 2])
        added = CorrectionLine(floor_s=max(float(np.median(measured - predicted)), 0.0))
        for _ in range(3):
            weight = _huber_weights(added, predicted, measured)
            design = np.stack([np.ones_like(predicted), predicted])
            information = (design * weight) @ design.T + np.diag(prior)
            moments = (design * weight) @ measured + np.array([0.0, prior[1]])
            floor_s, slope = np.linalg.solve(information, moments)
            if floor_s < 0:
                floor_s, slope = 0.0, moments[1] / information[1, 1]
            elif slope < 0:
                floor_s, slope = moments[0] / information[0, 0], 0.0
            added = CorrectionLine(floor_s=float(floor_s), slope=float(slope))
        overlapped = min(
            (_overlapped_floor(predicted, measured, slope) for slope in {1.0, self.line.slope}),
            key=lambda line: _misfit(line, predicted, measured),
        )
        tolerated = _MISFIT_TOLERANCE * _misfit(added, predicted, measured) + 1e-4
        fits = _misfit(overlapped, predicted, measured) <= tolerated
        self.line = overlapped if fits else added

    def forget(self) -> None:
        """Drop all but the last few rounds, since the machine has changed."""
        self._observations = 0
        self._window = deque(list(self._window)[-_KEPT_AFTER_DRIFT:], maxlen=_WINDOW)


def _misfit(line: CorrectionLine, predicted: Array, measured: Array) -> float:
    """Mean squared relative error, clipped, plus the penalty of the slope's prior."""
    error = np.clip(line.seconds(predicted) / measured - 1, -_CLIP * _NOISE, _CLIP * _NOISE)
    prior = (_NOISE * (line.slope - 1) / _SLOPE_SPREAD) ** 2
    return float(np.mean(error**2) + prior / len(measured))


def _huber_weights(line: CorrectionLine, predicted: Array, measured: Array) -> Array:
    """Huber weights of relative errors, over the squared seconds."""
    away = np.abs(line.seconds(predicted) / measured - 1)
    return np.asarray(np.minimum(1.0, 2 * _NOISE / np.maximum(away, 1e-9)) / measured**2)


def _overlapped_floor(predicted: Array, measured: Array, slope: float) -> CorrectionLine:
    """max(host_s, slope x predicted), by alternating between host time and slope."""
    prior = (_NOISE / _SLOPE_SPREAD) ** 2
    line = CorrectionLine(slope=slope)
    hidden = measured > (1 + 2 * _NOISE) * slope * predicted
    for _ in range(3):
        weight = _huber_weights(line, predicted, measured) if line.host_s else 1 / measured**2
        host_s = float(np.median(measured[hidden])) if hidden.any() else 0.0
        seen = weight * ~hidden
        slope = float((seen @ (predicted * measured) + prior) / (seen @ predicted**2 + prior))
        line = CorrectionLine(slope=slope, host_s=host_s)
        hidden = slope * predicted < host_s
    return line


class DriftMonitor:
    """A two-sided cumulative-sum test on log(measured / expected), outliers clipped.

    Each side sums the excess over half of a 20 % change, never below 0. The alarm is raised
    when a sum passes a threshold that grows with the noise, estimated from differences of
    neighbouring rounds. For normal noise of standard deviation s the chance of a false alarm is
    about exp(-2 x slack x threshold / s^2) a round: below 1e-7.
    """

    SLACK = math.log(1.2) / 2
    LEAST = 0.9
    CLIP = 0.35
    NOISE_FACTOR = 100.0
    FADING = 0.02

    def __init__(self, warm_up: int = 20, uncertainty: float = 0.0) -> None:
        """uncertainty: relative, of the expectation; changes within it are no drift"""
        self.raised: float | None = None
        self._slack = max(self.SLACK, math.log1p(uncertainty))
        self._waiting = warm_up
        self._sums = {1: 0.0, -1: 0.0}  # of the sides above and below
        self._since: dict[int, list[float]] = {1: [], -1: []}  # a sum was last 0, as measured
        self._variance = 0.05**2
        self._steps = 0
        self._last: float | None = None

    def observe(self, log_ratio: float) -> bool:
        """Whether this round raises the alarm; it is raised once at most."""
        clipped = min(max(log_ratio, -2 * self.CLIP), 2 * self.CLIP)
        if self._last is not None:
            step = (clipped - self._last) ** 2 / 2
            self._steps += 1
            self._variance += max(self.FADING, 1 / (3 + self._steps)) * (step - self._variance)
        self._last = clipped
        if self._waiting > 0 or self.raised is not None:
            self._waiting -= 1
            return False
        clip = self.CLIP + self._slack - self.SLACK
        clipped = min(max(log_ratio, -clip), clip)
        threshold = max(self.LEAST, self.NOISE_FACTOR * self._variance)
        for side, above in self._sums.items():
            self._sums[side] = max(above + side * clipped - self._slack, 0.0)
            if self._sums[side]:
                self._since[side].append(log_ratio)
            else:
                self._since[side].clear()
            if self._sums[side] >= threshold:
                self.raised = math.exp(median(self._since[side]))
        return self.raised is not None


Mode = Literal["static", "ema", "ema+calib", "affine"]

# Rounds; drift is measured against the correction of one to two times as many rounds ago.
_LAG = 25

CONTEXT_RANGE = 32  # tokens; the costs at its middle serve the whole range
_MOST_CACHED = 4096
Cost = TypeVar("Cost")


class OnlineEstimator:
    """`CycleCost` whose verification times are corrected from observed rounds.

    mode `static`     the profile as it is
         `ema`        one multiplicative bias over the paper's bare roofline, without a profile
         `ema+calib`  one multiplicative bias over the calibrated curve
         `affine`     floor and slope over a borrowed curve, see `AffineCorrection`

    The bias follows appendix H.4 of the paper: bias <- (1 - alpha) bias + alpha x (observed /
    predicted seconds). The paper does not give its start: 1 for `ema+calib`, the first ratio
    for `ema`, since the bare roofline is wrong by a factor.

    Every mode monitors drift. The first time that verifications differ from the expectation
    by about 20 %, and by more than the cost's own uncertainty, `drift_warning` is set and the
    correction adapts faster: `static` becomes `ema+calib`, alpha triples, and the affine line
    forgets all but the last rounds.

    Costs are computed once for each short range of context: a decoder needs the same ones in many
    rounds. The decode loop sets `sampled` where the coming round draws the target's tokens.
    """

    def __init__(self, cost: CycleCost, mode: Mode = "static", alpha: float = 0.1) -> None:
        self.cost = cost
        self.mode = mode
        self.alpha = alpha
        self.sampled = False
        self.bias = 1.0
        self.affine = AffineCorrection()
        self.observations = 0
        self.drift_warning: str | None = None
        static = DriftMonitor(uncertainty=cost.uncertainty)
        self._drift = static if mode == "static" else DriftMonitor(warm_up=2 * _LAG)
        self._expected = [CorrectionLine()]
        self._ratios: list[float] = []
        # `ema` is for a target without a calibration, so measured plain steps are left out too.
        stages = cost.stages.model_copy(update={"plain": None})
        bare = dataclasses.replace(cost, verify=cost.roofline, stages=stages)
        self._uncorrected = bare if mode == "ema" else cost
        self._cache: dict[Hashable, Any] = {}

    def observe(self, rows: float, context: float, measured_s: float, batch: int = 1) -> None:
        """Learn from one verification of `rows` rows, padding included."""
        # The row counts that are usually chosen are computed together: it takes as long as one.
        usual = self._uncorrected.buckets or self._uncorrected.preferred_rows
        together = usual if rows in usual else (rows,)

        def forwards_s(middle: float) -> dict[float, float]:
            every = np.array(together, dtype=np.float64)
            seconds = self._uncorrected.verify.predict_s(every, middle, batch)
            return dict(zip(every.tolist(), seconds.tolist(), strict=True))

        predicted_s = self._cached(forwards_s, context, "forward", together, batch)[rows]
        # An earlier correction has not followed a recent change yet.
        expected_s = self._expected[0].seconds(predicted_s)
        if self._drift.observe(math.log(measured_s / expected_s)):
            self.drift_warning = (
                f"verification takes {self._drift.raised:.2f}x what was expected: the machine has"
                " changed or the profile does not fit it; `rooftree calibrate` measures it again"
            )
            self.mode = "ema+calib" if self.mode == "static" else self.mode
            self.alpha = min(3 * self.alpha, 1.0)
            self.affine.forget()
        if self.mode == "affine":
            self.affine.observe(predicted_s, measured_s)
        elif self.mode != "static":
            ratio = measured_s / predicted_s
            first = self.observations == 0 and self.mode == "ema"
            self.bias = ratio if first else (1 - self.alpha) * self.bias + self.alpha * ratio
        self.observations += 1
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) == _LAG:
            # The correction by the last rounds alone, robust to outliers.
            ema = self.mode.startswith("ema")
            recent = CorrectionLine(slope=median(self._ratios)) if ema else self._line()
            self._expected = [self._expected[-1], recent]
            self._ratios = []

    def _line(self) -> CorrectionLine:
        if self.mode == "affine":
            return self.affine.line
        return CorrectionLine(slope=1.0 if self.mode == "static" else self.bias)

    def verify_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Corrected seconds of the target's forward over the root and N nodes."""
        return self._line().seconds(self._parts_s(nodes, context, batch)[0])

    def sizes(self, most: int) -> Ints:
        """Tree sizes worth scoring; see `CycleCost.sizes`."""
        return self._cached(lambda _: self._uncorrected.sizes(most), 0, "sizes", most)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Corrected seconds of one plain step."""
        cost = self._uncorrected
        plain_s = self._cached(lambda c: cost.plain_s(c, batch), context, "plain", batch)
        return self._line().seconds(plain_s)

    def draft_s(self, context: float) -> float:
        return self._cached(self._uncorrected.draft_s, context, "draft")

    def cycle_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Corrected seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        verify_s, rest_s = self._parts_s(nodes, context, batch)
        return self._line().seconds(verify_s) + rest_s

    def _parts_s(self, nodes: ArrayLike, context: float, batch: int) -> tuple[Array, Array]:
        """Uncorrected seconds of the forward and of the rest, in the shape of `nodes`."""
        counts, cost, sampled = np.asarray(nodes, dtype=np.float64), self._uncorrected, self.sampled

        def parts_s(middle: float) -> tuple[Array, Array]:
            rest_s = cost.overhead_s(counts, sampled=sampled) + cost.draft_s(middle)
            return cost.verify_s(counts, middle, batch), rest_s

        labels = ("cycle", counts.tobytes(), counts.shape, batch, sampled)
        return self._cached(parts_s, context, *labels)

    def _cached(self, compute: Callable[[float], Cost], context: float, *labels: Hashable) -> Cost:
        """The cost at the middle of the context's range; `labels` tell costs apart."""
        index = int(context) // CONTEXT_RANGE
        key = (index, *labels)
        if key not in self._cache:
            if len(self._cache) == _MOST_CACHED:
                self._cache.clear()
            self._cache[key] = compute(CONTEXT_RANGE * (index + 0.5))
        cost: Cost = self._cache[key]
        return cost

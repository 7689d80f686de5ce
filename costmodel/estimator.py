"""Seconds of every part of a cycle, with forwards corrected while decoding."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.correction import AffineCorrection, DriftMonitor, Line
from costmodel.cycle import CycleCost
from costmodel.errors import InputError
from costmodel.nearby import NearbyCost

Array = NDArray[np.float64]
Mode = Literal["static", "ema", "ema+calib", "affine"]
MODES: tuple[Mode, ...] = ("static", "ema", "ema+calib", "affine")

# Drift is measured against the correction as it stood so many to twice as many rounds ago.
_LAG = 25


class OnlineEstimator:
    """The same questions as `CycleCost`, with verification times corrected as it runs.

    `static`: the profile as it is. `ema`: one multiplicative bias over the bare paper
    roofline, for when there is no calibration. `ema+calib`: the same bias as a residual over
    the calibrated curve (paper, appendix H.4: bias <- (1 - alpha) bias + alpha x ratio of
    observed to predicted seconds). The bias of `ema` starts at the first ratio, since the
    paper does not say and the bare roofline is off by a factor; that of `ema+calib` at 1.
    `affine`: floor and slope over a borrowed curve, see `AffineCorrection`.

    Every mode watches for drift. The first time that verifications leave what was expected
    by some 20 %, `drift_warning` says so and the correction widens: `static` becomes
    `ema+calib`, an average three times as quick, the line forgets what it learnt before.
    """

    def __init__(self, cost: CycleCost, mode: Mode = "static", alpha: float = 0.1) -> None:
        if mode not in MODES:
            raise InputError(
                f"the estimator mode must be {', '.join(MODES[:-1])} or {MODES[-1]} (is {mode!r})"
            )
        if not 0 < alpha <= 1:
            raise InputError(f"alpha must be above 0 and at most 1 (is {alpha!r})")
        self.cost = cost
        self.mode = mode
        self.alpha = alpha
        self.bias = 1.0
        self.affine = AffineCorrection()
        self.observations = 0
        self.drift_warning: str | None = None
        self._drift = DriftMonitor() if mode == "static" else DriftMonitor(warm_up=2 * _LAG)
        self._expected = [Line()]
        self._ratios: list[float] = []
        # Without a calibration, what was measured of whole plain steps says nothing either.
        bare = dataclasses.replace(cost, verify=cost.roofline, plain=None)
        self._uncorrected = NearbyCost(bare if mode == "ema" else cost)

    def observe(self, rows: float, context: float, measured_s: float, batch: int = 1) -> None:
        """Learn from one verification of `rows` rows, padding included.

        Raises InputError for a time that is not finite and above 0.
        """
        if not 0 < measured_s < float("inf"):
            raise InputError(f"measured seconds must be finite and above 0 (is {measured_s!r})")
        predicted_s = self._uncorrected.forward_s(rows, context, batch)
        self._watch(predicted_s, measured_s)
        if self.mode == "affine":
            self.affine.observe(predicted_s, measured_s)
        elif self.mode != "static":
            ratio = measured_s / predicted_s
            first = self.observations == 0 and self.mode == "ema"
            self.bias = ratio if first else (1 - self.alpha) * self.bias + self.alpha * ratio
        self.observations += 1
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) == _LAG:
            self._expected = [self._expected[-1], self._settled()]
            self._ratios = []

    def _settled(self) -> Line:
        """What the last rounds say, wild ones left out."""
        if self.mode == "affine":
            return self.affine.line
        return Line() if self.mode == "static" else Line(slope=median(self._ratios))

    def _watch(self, predicted_s: float, measured_s: float) -> None:
        """Compare with the correction of some rounds ago, which has not followed a change yet."""
        expected_s = self._expected[0].seconds(predicted_s)
        if not self._drift.observe(math.log(measured_s / expected_s)):
            return
        self.drift_warning = (
            f"verification takes {self._drift.raised:.2f}x what was expected: the machine has"
            " changed or the profile does not fit it; `rooftree calibrate` measures it again"
        )
        if self.mode == "static":
            self.mode = "ema+calib"
        self.alpha = min(3 * self.alpha, 1.0)
        self.affine.forget()

    def _line(self) -> Line:
        """The correction as it stands."""
        if self.mode == "affine":
            return self.affine.line
        return Line(slope=1.0 if self.mode == "static" else self.bias)

    def verify_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Corrected seconds of the target's forward over the root and N nodes."""
        return self._line().seconds(self._parts_s(nodes, context, batch)[0])

    def sizes(self, most: int) -> NDArray[np.int64]:
        """Tree sizes worth scoring, as `CycleCost.sizes`."""
        return self.cost.sizes(most)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Corrected seconds of one plain step."""
        return self._line().seconds(self._uncorrected.plain_s(context, batch))

    def draft_s(self, context: float) -> float:
        """Seconds of one draft."""
        return self._uncorrected.draft_s(context)

    def cycle_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Corrected seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        verify_s, rest_s = self._parts_s(nodes, context, batch)
        return self._line().seconds(verify_s) + rest_s

    def _parts_s(self, nodes: ArrayLike, context: float, batch: int) -> tuple[Array, Array]:
        """Uncorrected seconds of the forward and of the rest, in the shape of `nodes`."""
        counts = np.asarray(nodes, dtype=np.float64)
        return self._uncorrected.cycle_s(counts, context, batch)

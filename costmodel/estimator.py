"""Seconds of every part of a cycle, from a profile, and their correction while decoding."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.correction import AffineCorrection, DriftMonitor, Line
from costmodel.errors import InputError, ProfileError
from costmodel.fit import Calibration
from costmodel.profile import Profile
from costmodel.roofline import Roofline
from costmodel.stages import DrafterSection, NodesSection, PlainSection, TokensSection

Array = NDArray[np.float64]
Mode = Literal["static", "ema", "ema+calib", "affine"]
MODES: tuple[Mode, ...] = ("static", "ema", "ema+calib", "affine")

# Tokens that a cycle commits, where the caller does not say: the commit cost hardly depends on it.
TYPICAL_COMMITTED = 4.0
# Drift is measured against the correction as it stood so many to twice as many rounds ago.
_LAG = 25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CycleCost:
    """C(N, c, B) = draft + build + verify(bucket(N + 1)) + accept + commit.

    Parts that the profile did not measure cost 0. `buckets`: row counts that a forward is
    padded to; empty where it is not padded. `preferred_rows`: the only row counts worth
    choosing where nothing is padded but new ones cost more; empty where all are alike.
    """

    verify: Calibration
    roofline: Roofline
    buckets: tuple[int, ...] = ()
    preferred_rows: tuple[int, ...] = ()
    plain: PlainSection | None = None
    build: NodesSection | None = None
    accept: NodesSection | None = None
    commit: TokensSection | None = None
    drafter: DrafterSection | None = None

    @classmethod
    def from_profile(
        cls, profile: Profile, drafter_hash: str | None = None, *, sampled: bool = False
    ) -> CycleCost:
        """The costs in a profile; `sampled` takes the acceptance cost of T > 0 where measured.

        Without `drafter_hash` drafts are free. Raises ProfileError where that drafter was
        not measured.
        """
        drafter = None
        if drafter_hash is not None:
            drafter = profile.drafters.get(drafter_hash)
            if drafter is None:
                known = ", ".join(f"{h} ({d.name})" for h, d in profile.drafters.items())
                raise ProfileError(
                    f"the profile has no draft cost of drafter {drafter_hash}"
                    f" (it has {known or 'none'})",
                    hint="Add it with `rooftree calibrate --drafter`",
                )
        stages = profile.stages
        return cls(
            verify=profile.verify_calibration(),
            roofline=profile.roofline("paper"),
            buckets=profile.runtime.buckets,
            preferred_rows=_preferred_rows(profile),
            plain=stages.plain,
            build=stages.build,
            accept=(stages.accept_sampled if sampled else None) or stages.accept,
            commit=stages.commit,
            drafter=drafter,
        )

    @classmethod
    def from_roofline(cls, roofline: Roofline, buckets: tuple[int, ...] = ()) -> CycleCost:
        """The bare paper roofline and nothing else, for `ema` without any profile."""
        paper = roofline.with_count("paper")
        return cls(verify=paper, roofline=paper, buckets=buckets)

    def bucket_rows(self, nodes: ArrayLike) -> Array:
        """Rows that verifying N nodes runs: N + 1, padded up to a bucket.

        Beyond the largest bucket nothing is padded. Raises InputError for negative nodes.
        """
        rows = np.asarray(nodes, dtype=np.float64) + 1.0
        if not np.all(rows >= 1):
            raise InputError("nodes must be at least 0")
        if not self.buckets:
            return rows
        edges = np.asarray(self.buckets, dtype=np.float64)
        index = np.searchsorted(edges, rows)
        padded: Array = np.where(index < len(edges), edges[np.minimum(index, len(edges) - 1)], rows)
        return padded

    def sizes(self, most: int) -> NDArray[np.int64]:
        """Tree sizes of at most `most` nodes that are worth scoring, ascending, 0 first.

        Where forwards are padded, full buckets and `most`; else those of the preferred rows,
        or all.
        """
        edges = self.buckets or self.preferred_rows
        if not edges:
            return np.arange(most + 1)
        full = [rows - 1 for rows in edges if 1 < rows <= most + 1]
        last = [most] if self.buckets and most not in full else []
        return np.array([0, *full, *last] if most > 0 else [0], dtype=np.int64)

    def verify_s(self, nodes: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds of the target's forward over the root and N nodes."""
        return self.verify.predict_s(self.bucket_rows(nodes), context, batch)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Seconds of one plain step; a verification of the root alone where not measured."""
        measured = self.plain.seconds(context, batch) if self.plain else None
        return float(self.verify_s(0, context, batch)) if measured is None else measured

    def draft_s(self, context: float) -> float:
        """Seconds of one draft."""
        return float(self.drafter.seconds(context)) if self.drafter else 0.0

    def overhead_s(self, nodes: ArrayLike, committed: float = TYPICAL_COMMITTED) -> Array:
        """Seconds of building, accepting and committing a tree of N nodes."""
        counts = np.asarray(nodes, dtype=np.float64)
        total = np.zeros_like(counts)
        for stage in (self.build, self.accept):
            if stage is not None:
                total = total + stage.seconds(counts)
        if self.commit is not None:
            total = total + self.commit.seconds(np.minimum(committed, counts + 1))
        return total

    def cycle_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        overhead = self.overhead_s(nodes) + self.draft_s(context)
        total: Array = self.verify_s(nodes, context, batch) + overhead
        return total


def _preferred_rows(profile: Profile) -> tuple[int, ...]:
    """The measured row counts of a CPU, where products of a new shape cost their set-up."""
    if profile.device.kind != "cpu" or profile.provenance.kind != "measured":
        return ()
    return () if profile.surface is None else tuple(sorted(set(profile.surface.rows)))


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

    def observe(self, rows: float, context: float, measured_s: float, batch: int = 1) -> None:
        """Learn from one verification of `rows` rows, padding included.

        Raises InputError for a time that is not finite and above 0.
        """
        if not 0 < measured_s < float("inf"):
            raise InputError(f"measured seconds must be finite and above 0 (is {measured_s!r})")
        predicted_s = float(self._predict_s(rows, context, batch))
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
        expected_s = float(self._expected[0].seconds(predicted_s))
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

    def _predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike) -> Array:
        if self.mode == "ema":
            return self.cost.roofline.seconds(rows, context, batch)
        return self.cost.verify.predict_s(rows, context, batch)

    def _line(self) -> Line:
        """The correction as it stands."""
        if self.mode == "affine":
            return self.affine.line
        return Line(slope=1.0 if self.mode == "static" else self.bias)

    def verify_s(self, nodes: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Corrected seconds of the target's forward over the root and N nodes."""
        rows = self.cost.bucket_rows(nodes)
        return self._line().seconds(self._predict_s(rows, context, batch))

    def sizes(self, most: int) -> NDArray[np.int64]:
        """Tree sizes worth scoring, as `CycleCost.sizes`."""
        return self.cost.sizes(most)

    def plain_s(self, context: float, batch: int = 1) -> float:
        """Corrected seconds of one plain step."""
        if self.mode == "ema":
            return float(self.verify_s(0, context, batch))
        return float(self._line().seconds(self.cost.plain_s(context, batch)))

    def draft_s(self, context: float) -> float:
        """Seconds of one draft."""
        return self.cost.draft_s(context)

    def overhead_s(self, nodes: ArrayLike, committed: float = TYPICAL_COMMITTED) -> Array:
        """Seconds of building, accepting and committing a tree of N nodes."""
        return self.cost.overhead_s(nodes, committed)

    def cycle_s(self, nodes: ArrayLike, context: float, batch: int = 1) -> Array:
        """Corrected seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        overhead = self.overhead_s(nodes) + self.draft_s(context)
        total: Array = self.verify_s(nodes, context, batch) + overhead
        return total

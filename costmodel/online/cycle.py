"""The cost of a decoding cycle from a profile."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from costmodel.calibration.points import Calibration
from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection, NodesSection, PlainSection, TokensSection
from costmodel.roofline import Roofline
from costmodel.statistics import Array, Ints

# Default number of tokens that a cycle commits; the commit cost hardly depends on it.
TYPICAL_COMMITTED = 4.0


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
    plain: PlainSection | None = None
    build: NodesSection | None = None
    accept: NodesSection | None = None
    accept_sampled: NodesSection | None = None
    commit: TokensSection | None = None
    drafter: DrafterSection | None = None
    uncertainty: float = 0.0

    @classmethod
    def from_profile(cls, profile: Profile, drafter_hash: str | None = None) -> CycleCost:
        """The costs in a profile.

        drafter_hash  the drafter; without one, drafts are free
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
        stages = profile.stages
        return cls(
            verify=profile.verify_calibration(),
            roofline=profile.roofline("paper"),
            buckets=profile.runtime.buckets,
            preferred_rows=profile.preferred_rows,
            plain=stages.plain,
            build=stages.build,
            accept=stages.accept,
            accept_sampled=stages.accept_sampled,
            commit=stages.commit,
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
        total, last = np.round(rows * texts, 6), len(self.buckets) - 1
        index = np.searchsorted(self.buckets, total)
        edges = np.asarray(self.buckets, dtype=np.float64)[np.minimum(index, last)]
        padded: Array = np.where(index <= last, edges, total) / texts
        return padded

    def sizes(self, most: int) -> Ints:
        """Tree sizes worth scoring, 0 .. `most` nodes, ascending.

        Full buckets and `most` where forwards are padded, else the sizes of the preferred rows
        where there are some, else all.
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
        measured = self.plain.seconds(context, batch) if self.plain else None
        return float(self.verify_s(0, context, batch)) if measured is None else measured

    def draft_s(self, context: float) -> float:
        return float(self.drafter.seconds(context)) if self.drafter else 0.0

    def overhead_s(
        self, nodes: ArrayLike, committed: float = TYPICAL_COMMITTED, *, sampled: bool = False
    ) -> Array:
        """Seconds of building, accepting and committing a tree of N nodes.

        sampled  whether the target's tokens are drawn, at a temperature above 0
        """
        counts = np.asarray(nodes, dtype=np.float64)
        total = np.zeros_like(counts)
        accept = (self.accept_sampled if sampled else None) or self.accept
        for stage in (self.build, accept):
            if stage is not None:
                total = total + stage.seconds(counts)
        if self.commit is not None:
            total = total + self.commit.seconds(np.minimum(committed, counts + 1))
        return total

    def cycle_s(
        self, nodes: ArrayLike, context: float, batch: int = 1, *, sampled: bool = False
    ) -> Array:
        """Seconds of a whole cycle with N nodes, in the shape of `nodes`."""
        overhead = self.overhead_s(nodes, sampled=sampled) + self.draft_s(context)
        total: Array = self.verify_s(nodes, context, batch) + overhead
        return total

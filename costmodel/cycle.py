"""Seconds of every part of a cycle, from a profile."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import InputError, ProfileError
from costmodel.fit import Calibration
from costmodel.profile import Profile
from costmodel.roofline import Roofline
from costmodel.stages import DrafterSection, NodesSection, PlainSection, TokensSection

Array = NDArray[np.float64]

# Tokens that a cycle commits, where the caller does not say: the commit cost hardly depends on it.
TYPICAL_COMMITTED = 4.0


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

"""Which cost model the decoder starts with: a profile, a quick probe, or the bare roofline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.errors import ProfileError
from costmodel.estimator import CycleCost, OnlineEstimator
from costmodel.profile import Profile
from costmodel.registry import LookupResult, ProfileStore
from costmodel.roofline import Roofline
from decoder.drafters.base import Drafter
from decoder.probe import quick_profile, time_drafter, time_forward
from decoder.profiles import find_peaks, profile_key, roofline_of, soft_key
from decoder.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """How the decoder finds its cost model.

    path       this profile file and no other
    calibrate  probe for a few seconds when no profile is found; otherwise start from
               the bare roofline and learn one factor while decoding (the paper's `ema`)
    require    make it an error when no profile is found
    """

    path: Path | None = None
    calibrate: bool = True
    require: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSource:
    """The cost model in use, and what to tell the user about it.

    `online`: verification times are observed while decoding.
    """

    cost: OnlineEstimator
    line: str
    warnings: tuple[str, ...] = ()
    profile: Profile | None = None

    @property
    def online(self) -> bool:
        return self.cost.mode != "static"


def find_cost(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    """Find, probe or do without a profile. Raises ProfileError as `choice` asks."""
    if choice.path is not None:
        return _from_lookup(target, drafter, _given(choice.path, target))
    store = ProfileStore()
    try:
        found = store.find(profile_key(target), soft_key(target))
    except ProfileError:
        if choice.require:
            raise
        if choice.calibrate:
            return _probed(target, drafter, store)
        return _bare_roofline(target, drafter)
    return _from_lookup(target, drafter, found)


def _given(path: Path, target: Target) -> LookupResult:
    """The named file, whose hard keys must all agree."""
    profile = Profile.from_yaml(path)
    wanted = profile_key(target)
    different = profile.key.differences(wanted)
    if different:
        name = different[0]
        raise ProfileError(
            f"{path} does not fit: its {name} is {getattr(profile.key, name)}, "
            f"here it is {getattr(wanted, name)}",
            hint="Leave --profile out, or measure one with `rooftree calibrate`",
        )
    soft = profile.soft_key.differences(soft_key(target))
    return LookupResult(
        profile=profile,
        path=path,
        warnings=tuple(f"{name} differs from when {path.name} was made" for name in soft),
        online_correction=bool(soft),
    )


def _from_lookup(target: Target, drafter: Drafter, found: LookupResult) -> CostSource:
    profile = found.profile
    if drafter.architecture_hash not in profile.drafters:
        profile = profile.with_drafter(drafter.architecture_hash, time_drafter(drafter))
    cost = CycleCost.from_profile(profile, drafter.architecture_hash)
    estimator = OnlineEstimator(cost, "ema+calib" if found.online_correction else "static")
    if found.needs_floor_probe:
        rows, context = 1, min(256, target.max_context - 1)
        estimator.observe(rows, context, median(time_forward(target, rows, context)))
    made = profile.provenance
    line = f"profile {found.path} ({made.kind}, {made.created_utc[:10]})"
    return CostSource(cost=estimator, line=line, warnings=found.warnings, profile=profile)


def _probed(target: Target, drafter: Drafter, store: ProfileStore) -> CostSource:
    profile = quick_profile(target, drafter)
    try:
        saved = f"saved as {store.save(profile)}"
    except ProfileError as error:
        saved = f"not saved: {error.problem}"
    line = (
        f"no profile for this device and target: probed {profile.provenance.points} points in "
        f"{profile.provenance.duration_s:.1f} s ({saved}); `rooftree calibrate --target "
        f"{target.loaded.name}` measures a full one"
    )
    cost = CycleCost.from_profile(profile, drafter.architecture_hash)
    return CostSource(cost=OnlineEstimator(cost, "static"), line=line, profile=profile)


def _bare_roofline(target: Target, drafter: Drafter) -> CostSource:
    """The paper's `ema`: one factor over the roofline, learnt from each verification."""
    roofline = roofline_of(target, find_peaks(target))
    cost = CycleCost(verify=_Bare(roofline), roofline=roofline, drafter=time_drafter(drafter))
    line = "no profile, and calibration is off: the bare roofline, corrected while decoding"
    return CostSource(cost=OnlineEstimator(cost, "ema"), line=line)


@dataclass(frozen=True, slots=True)
class _Bare:
    """The roofline in the place of a calibration."""

    roofline: Roofline

    def predict_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> NDArray[np.float64]:
        return self.roofline.seconds(rows, context, batch)

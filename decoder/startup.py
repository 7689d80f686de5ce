"""Which cost model the decoder starts with: a profile, a quick probe, or the bare roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.cycle import CycleCost
from costmodel.errors import ProfileError
from costmodel.estimator import Mode, OnlineEstimator
from costmodel.fit import Calibration
from costmodel.profile import Profile
from costmodel.registry import LookupResult, ProfileStore
from costmodel.stages import DrafterSection
from decoder.drafters.base import Drafter
from decoder.drafters.replay import ReplayDrafter
from decoder.drafters.timing import time_drafter
from decoder.policies.base import CostKind
from decoder.probe import quick_profile, time_forward
from decoder.profiles import find_peaks, now_utc, profile_key, roofline_of, soft_key
from decoder.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """How the decoder finds its cost model.

    path       this profile file and no other
    calibrate  probe for a few seconds when no profile is found; otherwise start from
               the bare roofline and learn one factor while decoding (the paper's `ema`)
    require    make it an error when no profile is found
    estimator  how verification times correct the costs while decoding; None leaves it to
               the profile: `static` for a measured one of this very machine
    drafts     draft costs that this process knows already, by the drafter's hash; they are
               taken where the profile lacks them
    probed     what this process probed before, which may not have been saved; taken in place
               of another probe, so that decoders which are compared go by one profile
    """

    path: Path | None = None
    calibrate: bool = True
    require: bool = False
    estimator: Mode | None = None
    drafts: Mapping[str, DrafterSection] = field(default_factory=dict)
    probed: Profile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSource:
    """The cost model in use, and what to tell the user about it.

    `online`: verification times correct it while decoding; they are watched for drift in
    any case.
    """

    cost: OnlineEstimator
    line: str
    warnings: tuple[str, ...] = ()
    profile: Profile | None = None

    @property
    def online(self) -> bool:
        return self.cost.mode != "static"


def find_cost(
    target: Target, drafter: Drafter, choice: ProfileChoice, kind: CostKind = "best"
) -> CostSource:
    """Find, probe or do without a profile. Raises ProfileError as `choice` asks.

    kind  `linear` takes the profile's linear calibration instead of its selected one
    """
    found = _find(target, drafter, choice)
    source = target.ranks.decide(lambda: found)  # else ranks would choose trees of their own
    cost, mode = source.cost.cost, choice.estimator or source.cost.mode
    if kind == "linear" and source.profile is not None:
        cost = replace(cost, verify=source.profile.linear_calibration())
        mode = choice.estimator or "static"
    return replace(source, cost=OnlineEstimator(cost, mode))


def _find(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    store = ProfileStore()
    key, soft = profile_key(target), soft_key(target)
    if choice.path is not None:
        return _from_lookup(target, drafter, store.open(choice.path, key, soft), choice)
    try:
        found = store.find(key, soft)
    except ProfileError:
        if choice.require:
            raise
        make = _probed if choice.calibrate else _bare
        source = make(target, drafter, choice)
        return replace(source, warnings=_left_out(store, key.device_name))
    return _from_lookup(target, drafter, found, choice)


def _left_out(store: ProfileStore, device_name: str) -> tuple[str, ...]:
    return tuple(
        f"left out a profile that cannot be used: {stored.problem}"
        for stored in store.unusable(device_name)
    )


def _from_lookup(
    target: Target, drafter: Drafter, found: LookupResult, choice: ProfileChoice
) -> CostSource:
    profile, note = _with_draft_cost(target, drafter, found, choice)
    cost = CycleCost.from_profile(profile, drafter.architecture_hash)
    # Padding is this decoder's; a profile summed from kernels has none.
    cost = replace(cost, buckets=target.runtime.buckets)
    if found.needs_floor_probe:
        cost = _with_floor(cost, target)
    made = profile.provenance
    estimator = OnlineEstimator(cost, _mode(found))
    line = f"profile {found.path} ({made.kind}, {made.created_utc[:10]}){note}"
    return CostSource(cost=estimator, line=line, warnings=found.warnings, profile=profile)


def _with_draft_cost(
    target: Target, drafter: Drafter, found: LookupResult, choice: ProfileChoice
) -> tuple[Profile, str]:
    """The profile with this drafter's cost, and what to say of one that is not its own.

    A cost that neither the profile nor this process knows is timed, and kept for the next
    start. Ranks time it all or not at all, since a draft may need them all.
    """
    name = drafter.architecture_hash
    known = target.ranks.decide(lambda: found.profile.drafters.get(name) or choice.drafts.get(name))
    if known is None:
        timed = time_drafter(drafter, target)
        timed = timed.model_copy(update={"kind": "quick", "created_utc": now_utc()})
        note = target.ranks.decide(lambda: _keep(drafter, timed, found))
        return found.profile.with_drafter(name, timed), f"; draft cost of {drafter.name} {note}"
    profile = found.profile.with_drafter(name, known)
    if known.created_utc is None:
        return profile, ""
    how = "timed at a start" if known.kind == "quick" else "measured"
    return profile, f"; draft cost of {drafter.name} {how} on {known.created_utc[:10]}"


def _keep(drafter: Drafter, timed: DrafterSection, found: LookupResult) -> str:
    """Add the cost to the user's profile where that is sound; returns what was done."""
    if isinstance(drafter, ReplayDrafter):
        return "timed now, not kept: it only stands for a drafter"
    try:
        ProfileStore().add_drafter(found, drafter.architecture_hash, timed)
    except ProfileError as error:
        return f"timed now, not kept: {error.problem}"
    return "timed now and kept there"


def _mode(found: LookupResult) -> Mode:
    """How to correct: floor and slope where the curve is borrowed, else one factor."""
    if not found.online_correction:
        return "static"
    borrowed = found.profile.provenance.kind in ("composed", "transferred", "datasheet")
    return "affine" if borrowed else "ema+calib"


def _probed(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    name = drafter.architecture_hash
    known = choice.drafts.get(name)
    if choice.probed is None:
        profile = quick_profile(target, drafter, known)
        try:
            saved = f"saved as {ProfileStore().save(profile)}" if target.ranks.first else ""
        except ProfileError as error:
            saved = f"not saved: {error.problem}"
    else:
        profile = choice.probed.with_drafter(name, known or time_drafter(drafter, target))
        saved = "once for all"
    line = (
        f"no profile for this device and target: probed {profile.provenance.points} points in "
        f"{profile.provenance.duration_s:.1f} s ({saved}); `rooftree calibrate --target "
        f"{target.loaded.name}` measures a full one"
    )
    cost = CycleCost.from_profile(profile, name)
    return CostSource(cost=OnlineEstimator(cost, "static"), line=line, profile=profile)


def _bare(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    """The paper's `ema`: one factor over the roofline, learnt from each verification."""
    known = choice.drafts.get(drafter.architecture_hash)
    cost = replace(
        CycleCost.from_roofline(
            roofline_of(target, find_peaks(target)), buckets=target.runtime.buckets
        ),
        drafter=known or time_drafter(drafter, target),
    )
    line = "no profile, and calibration is off: the bare roofline, corrected while decoding"
    return CostSource(cost=OnlineEstimator(cost, "ema"), line=line)


def _with_floor(cost: CycleCost, target: Target) -> CycleCost:
    """Costs that count the host: no forward takes less than a plain step takes here.

    A profile summed from kernel times knows nothing of the host, which launches them one by
    one under `eager`.
    """
    context = min(256, target.max_context - 1)
    floor_s = median(time_forward(target, rows=1, context=context))
    return replace(cost, verify=_Floored(cost.verify, floor_s), plain=None)


@dataclass(frozen=True, slots=True)
class _Floored:
    """A calibration that never predicts less than the floor."""

    calibration: Calibration
    floor_s: float

    def predict_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> NDArray[np.float64]:
        return np.maximum(self.calibration.predict_s(rows, context, batch), self.floor_s)

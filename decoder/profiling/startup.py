"""The cost model that a decoder starts with: a profile, a quick probe, or the bare roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.calibration.points import Calibration
from costmodel.errors import ProfileError
from costmodel.io import now_utc
from costmodel.online import CycleCost, Mode, OnlineEstimator
from costmodel.profile.grade import grade
from costmodel.profile.profile import Profile
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import LookupResult, ProfileStore
from decoder.arguments import path_of
from decoder.device import default_dtype
from decoder.drafters.base import Drafter
from decoder.extensions import DRAFTERS, is_installed
from decoder.model.making import runtime_kind
from decoder.model.target import Target
from decoder.policies.base import Fit
from decoder.profiling.measured_profile import peaks_of, profile_key, subject_of
from decoder.profiling.probe import quick_profile, time_drafter, time_forward

FLOOR_CONTEXT = 256  # cached tokens of the plain step that gives the host's floor


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """The user's choices of a cost model.

    path       read this profile file and no other
    calibrate  without a profile, probe for a few seconds; if false, start from the bare
               roofline and learn one factor while decoding (the paper's `ema`)
    require    raise an error if there is no profile
    estimator  how verification times correct the costs while decoding; None: as the profile needs
    drafts     draft costs timed earlier in this process, by the drafter's hash
    probed     profile probed earlier in this process, so that compared decoders share it
    """

    path: Path | None = None
    calibrate: bool = True
    require: bool = False
    estimator: Mode | None = None
    drafts: Mapping[str, DrafterSection] = field(default_factory=dict)
    probed: Profile | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", path_of("path", self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSource:
    """The cost model in use, and the lines about it for the user.

    profile  the profile it comes from; None for the bare roofline
    """

    cost: OnlineEstimator
    line: str
    warnings: tuple[str, ...] = ()
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class FlooredCalibration:
    calibration: Calibration
    floor_s: float

    def predict_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> NDArray[np.float64]:
        return np.maximum(self.calibration.predict_s(rows, context, batch), self.floor_s)


def calibrate_command(target: Target) -> str:
    """The command that measures a profile for the target as it runs here."""
    key, loaded = profile_key(target), target.loaded
    # A folder's name alone finds no folder.
    name = loaded.name if "/" in loaded.name else loaded.source or loaded.name
    command = f"rooftree calibrate --target {name}"
    if loaded.int8:
        command += " --dtype int8"
    elif target.dtype != default_dtype(target.device):
        command += f" --dtype {key.dtype}"
    if key.runtime != runtime_kind("auto", target.device):
        command += f" --runtime {key.runtime}"
    return command


def find_cost(
    target: Target, drafter: Drafter, choice: ProfileChoice, fit: Fit | None = None
) -> CostSource:
    """The cost model for a target and a drafter.

    fit  gives another calibration of the profile than its selected one; it is priced without
         padding, since rules over such a fit stop at the first drop, which a stair would be
    Raises ProfileError for a profile that cannot be read, lacks the calibration, or is required
    and not there.
    """
    store, key = ProfileStore(), profile_key(target)
    if choice.path is not None:
        source = _from_profile(target, drafter, store.open(choice.path, key), choice)
    else:
        try:
            lookup = store.find(key)
        except ProfileError as error:
            if choice.require:
                hint = f"Measure one with `{calibrate_command(target)}`"
                raise ProfileError(error.problem, hint=hint) from None
            make = _from_probe if choice.calibrate else _from_roofline
            unusable = store.unusable(key.device_name)
            lines = (f"left out a profile that cannot be used: {one.problem}" for one in unusable)
            source = replace(make(target, drafter, choice), warnings=tuple(lines))
        else:
            source = _from_profile(target, drafter, lookup, choice)
    cost, mode = source.cost.cost, choice.estimator or source.cost.mode
    if fit is None:
        return replace(source, cost=OnlineEstimator(cost, mode))
    cost, warnings = replace(cost, buckets=()), source.warnings
    if source.profile is None:
        warnings += (
            "the policy's own fit needs a profile and is not used: its rule is priced by"
            f" the bare roofline; measure one with `{calibrate_command(target)}`",
        )
    else:
        cost, mode = replace(cost, verify=fit(source.profile)), choice.estimator or "static"
    return replace(source, cost=OnlineEstimator(cost, mode), warnings=warnings)


def _from_profile(
    target: Target, drafter: Drafter, lookup: LookupResult, choice: ProfileChoice
) -> CostSource:
    """The profile with this drafter's cost, which is timed and kept where it is not known."""
    name, profile, note = drafter.architecture_hash, lookup.profile, ""
    section = profile.drafters.get(name) or choice.drafts.get(name)
    if section is None:
        section = time_drafter(drafter, target)
        section = section.model_copy(update={"kind": "quick", "created_utc": now_utc()})
        if drafter.simulated:
            how = "timed now, not kept: it only stands for a drafter"
        elif not is_storable(drafter):
            how = "timed now, not kept: its package is not installed"
        else:
            try:
                ProfileStore().add_drafter(lookup, name, section)
                how = "timed now and kept there"
            except ProfileError as error:
                how = f"timed now, not kept: {error.problem}"
        note = f"; draft cost of {drafter.name} {how}"
    elif section.created_utc is not None:
        how = "timed at a start" if section.kind == "quick" else "measured"
        note = f"; draft cost of {drafter.name} {how} on {section.created_utc[:10]}"
    profile = profile.with_drafter(name, section)
    cost = CycleCost.from_profile(profile, name)
    # Padding is that of this decoder; a profile summed from kernels has none.
    cost = replace(cost, buckets=target.runtime.buckets)
    if lookup.needs_floor_probe:
        # A profile summed from kernel times does not include the host, which under `eager`
        # launches them one by one: no forward takes less than a plain step measured here.
        context = min(FLOOR_CONTEXT, target.max_context - 1)
        floor_s = median(time_forward(target, rows=1, context=context))
        stages = cost.stages.model_copy(update={"plain": None})
        cost = replace(cost, verify=FlooredCalibration(cost.verify, floor_s), stages=stages)
    provenance = profile.provenance
    mode: Mode = "static"
    if lookup.online_correction:  # floor and slope for a curve of another machine, else one factor
        mode = "affine" if provenance.borrowed else "ema+calib"
    return CostSource(
        cost=OnlineEstimator(cost, mode),
        line=f"profile {lookup.path} ({provenance.kind}, {provenance.created_utc[:10]}, grade: "
        f"{grade(lookup.profile).word}){note}",
        warnings=lookup.warnings,
        profile=profile,
    )


def is_storable(drafter: Drafter) -> bool:
    """Whether a drafter's cost may be stored: one that is not installed may change any time."""
    return is_installed(drafter, DRAFTERS) and all(map(is_storable, drafter.members))


def _from_probe(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    """A quick profile: that of an earlier probe of this process, or a new one, saved."""
    name = drafter.architecture_hash
    section = choice.drafts.get(name)
    if choice.probed is None:
        profile = stored = quick_profile(target, drafter, section)
        if not is_storable(drafter):
            stored = profile.model_copy(update={"drafters": {}})
        try:
            saved = f"saved as {ProfileStore().save(stored)}"
        except ProfileError as error:
            saved = f"not saved: {error.problem}"
    else:
        profile = choice.probed.with_drafter(name, section or time_drafter(drafter, target))
        saved = "once for all"
    line = (
        f"no profile for this device and target: probed {profile.provenance.points} points in "
        f"{profile.provenance.duration_s:.1f} s ({saved}); `{calibrate_command(target)}` measures "
        "a full one"
    )
    cost = CycleCost.from_profile(profile, name)
    return CostSource(cost=OnlineEstimator(cost, "static"), line=line, profile=profile)


def _from_roofline(target: Target, drafter: Drafter, choice: ProfileChoice) -> CostSource:
    """The paper's `ema`: one factor over the roofline, learnt from each verification."""
    roofline = subject_of(target).roofline(peaks_of(target.device, target.dtype))
    section = choice.drafts.get(drafter.architecture_hash) or time_drafter(drafter, target)
    cost = CycleCost.from_roofline(roofline, buckets=target.runtime.buckets)
    return CostSource(
        cost=OnlineEstimator(replace(cost, drafter=section), "ema"),
        line="no profile, and calibration is off: the bare roofline, corrected while decoding",
    )

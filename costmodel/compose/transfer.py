"""A profile scaled to a sibling device by what the data sheets say of both."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.compose.profiles import ProfileParts, assemble, now_utc
from costmodel.device import DeviceSpec, Peaks, device_by_name
from costmodel.errors import InputError
from costmodel.points import Points
from costmodel.profile import Profile
from costmodel.roofline import Roofline
from costmodel.stages import PlainSection, StagesSection, TokensSection

Array = NDArray[np.float64]

# Of a change in time, the share that may be wrong: clocks, caches and processor counts differ
# in other proportions than bandwidth and FLOPs do.
SCALING_DOUBT = 0.3
# A sibling has other clocks under another power limit, whatever its data sheet says.
LEAST_DOUBT = 0.05
# Error bar of a source that does not state one.
UNKNOWN_ERROR = 0.1
# The sharpness of the bend between both branches: where they are equal, a forward takes
# 2 ** (1 / 4) = 1.19 times either.
_SHARPNESS = 4.0
# Profiles keep six digits: what is at the bound must not be rounded below it.
_ROUNDING = 1.0 + 1e-5


def transfer_profile(
    profile: Profile, device: DeviceSpec, *, created_utc: str | None = None
) -> Profile:
    """The profile on another device: every time scaled by the ratio of the two rooflines.

    The roofline is the physical one with a smooth bend, (memory^4 + compute^4)^(1/4), so that
    the memory-bound part scales by bandwidth and the compute-bound part by FLOPs. Verification
    points, plain steps and prompts are scaled; what the host does and drafters are left out.
    Raises InputError for an eager profile (it is mostly the host's time), one without points,
    a CPU's, or the same device.
    """
    _check(profile, device)
    if profile.surface is None:
        raise InputError("this profile has no points to transfer")
    before = profile.roofline("physical")
    after = Roofline(
        architecture=before.architecture,
        peaks=device.peaks,
        element_bytes=before.element_bytes,
        count="physical",
        tensor_parallel=before.tensor_parallel,
    )
    source = profile.surface.points()
    ratio = _ratio(before, after, source.rows, source.context, source.batch)
    bound = _ROUNDING * after.seconds(source.rows, source.context, source.batch)
    points = Points(
        rows=source.rows,
        context=source.context,
        batch=source.batch,
        seconds=np.maximum(source.seconds * ratio, bound),
    )
    bar = profile.provenance.error_bar
    doubt = max(LEAST_DOUBT, SCALING_DOUBT * float(np.mean(np.abs(np.log(ratio)))))
    stated = UNKNOWN_ERROR if bar is None else bar
    made = profile.provenance
    return assemble(
        ProfileParts(
            kind="transferred",
            device=device,
            architecture=profile.target.architecture,
            points=points,
            provenance={
                "created_utc": created_utc or now_utc(),
                "source": f"{made.kind} profile of {profile.device.name}"
                + (f" ({made.source})" if made.source else ""),
                "error_bar": round(float(np.hypot(stated, doubt)), 3),
                "note": _note(profile, device.peaks),
            },
            runtime=profile.runtime.model_copy(
                update={"torch": None, "transformers": None, "python": None}
            ),
            roofline=after.with_count("paper"),
            stages=_stages(profile, before, after),
        )
    )


def _check(profile: Profile, device: DeviceSpec) -> None:
    if profile.device.kind != "cuda" or profile.device.mig is not None:
        raise InputError("only the profile of a whole GPU can be transferred")
    if profile.device.name == device.name:
        raise InputError(f"this profile is of {device.name} already")
    if profile.runtime.kind == "eager":
        raise InputError(
            "an eager profile is mostly the host's time, which does not scale with the GPU",
            hint="Measure the device with `rooftree calibrate`",
        )
    if device_by_name(profile.device.name) is None and profile.peaks.source != "datasheet":
        raise InputError(f"the data sheet of {profile.device.name} is not known")


def _smooth(roofline: Roofline, rows: ArrayLike, context: ArrayLike, batch: ArrayLike) -> Array:
    compute_s, memory_s = roofline.branches_s(rows, context, batch)
    seconds: Array = (compute_s**_SHARPNESS + memory_s**_SHARPNESS) ** (1 / _SHARPNESS)
    return seconds


def _ratio(
    before: Roofline, after: Roofline, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> Array:
    return _smooth(after, rows, context, batch) / _smooth(before, rows, context, batch)


def _stages(profile: Profile, before: Roofline, after: Roofline) -> StagesSection:
    plain, prefill = profile.stages.plain, profile.stages.prefill
    if plain is not None:
        ratio = _ratio(before, after, 1, plain.context, plain.batch)
        seconds = np.maximum(
            np.array(plain.median_s) * ratio,
            _ROUNDING * after.seconds(1, plain.context, plain.batch),
        )
        plain = PlainSection(
            context=plain.context,
            batch=plain.batch,
            median_s=tuple(float(x) for x in seconds),
            mad_s=(None,) * len(seconds),
            n=(1,) * len(seconds),
        )
    if prefill is not None:
        ratio = _ratio(before, after, prefill.tokens, 0)
        prefill = TokensSection(
            tokens=prefill.tokens,
            median_s=tuple(float(x) for x in np.array(prefill.median_s) * ratio),
            mad_s=(None,) * len(ratio),
            n=(1,) * len(ratio),
        )
    return StagesSection(plain=plain, prefill=prefill)


def _note(profile: Profile, peaks: Peaks) -> str:
    bandwidth = peaks.bytes_per_s / profile.peaks.bytes_per_s
    flops = peaks.flops_per_s / profile.peaks.flops_per_s
    text = (
        f"scaled from {profile.device.name}: memory-bound time by bandwidth (x {bandwidth:.3f}),"
        f" compute-bound time by FLOPs (x {flops:.3f}), with a smooth bend between them"
    )
    return f"{text}; source: {profile.provenance.note}"[:2000]

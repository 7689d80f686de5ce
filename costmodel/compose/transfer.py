"""Profiles scaled to another device by the ratio of both data sheets, and the errors of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from costmodel.calibration.points import Points
from costmodel.catalog import DeviceSpec, device_by_name, load_devices
from costmodel.compose.operators import ROUNDING
from costmodel.compose.profiles import assemble
from costmodel.compose.tables import product_peaks
from costmodel.errors import InputError
from costmodel.io import now_utc, read_yaml, shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PlainSection, StagesSection, TokensSection
from costmodel.roofline import Roofline
from costmodel.statistics import Array
from costmodel.weights import WEIGHT_BYTES, weights_label

# Least error of a transfer: the clocks under another power limit are not in a data sheet.
LEAST_ERROR = 0.05
# Least ratio of the 16-bit rates of devices of one chip that are taken as alike: an L40S scaled to
# an RTX 4090, at 0.46 of its rate, is 18 % off.
_EQUAL_RATES = 0.7
# Relative error of a profile that states none.
UNKNOWN_ERROR = 0.1
# Sharpness of the bend between memory and compute time: where they are equal, a forward takes
# 2 ** (1 / 4) = 1.19 times either of them.
_SHARPNESS = 4.0
# Largest share of a time that is taken as fixed.
_LARGEST_FIXED_SHARE = 0.5


def transfer_profile(
    profile: Profile, device: DeviceSpec, *, created_utc: str | None = None
) -> Profile:
    """The profile on another device, with all but a fixed time a layer scaled by the rooflines.

    The roofline is the physical one with a smooth bend, (memory^4 + compute^4)^(1/4): memory-bound
    time scales by bandwidth and compute-bound time by FLOPs. The fixed time and the error bar come
    from a study of all device pairs at hand (`transfer_errors`). Verification points, plain steps
    and prompts are scaled; host times and drafters are left out. Raises InputError for a profile
    that is eager (mostly host time), without points, of a CPU, or of the same device.
    """
    if profile.device.kind != "cuda" or profile.device.mig is not None:
        raise InputError("only the profile of a whole GPU can be transferred")
    if profile.device.slug == device.slug:
        raise InputError(f"this profile is of {device.name} already")
    label = weights_label(profile.runtime.quantization) or "bfloat16"
    weights = next((weights for weights in WEIGHT_BYTES if weights == label), None)
    if weights is None:  # whose rate no data sheet states
        raise InputError(f"a profile of {label} weights is not transferred")
    if profile.runtime.kind == "eager":
        raise InputError(
            "an eager profile is mostly the host's time, which does not scale with the GPU",
            hint="Measure the device with `rooftree calibrate`",
        )
    if device_by_name(profile.device.name) is None and profile.peaks.source != "datasheet":
        raise InputError(f"the data sheet of {profile.device.name} is not known")
    if profile.surface is None:
        raise InputError("this profile has no points to transfer")
    before = profile.roofline("physical")
    peaks = product_peaks(device, weights)
    after = dataclasses.replace(before, peaks=peaks)
    made, scales = profile.provenance, profile.calibration.stairs
    dtype = profile.runtime.dtype
    return assemble(
        device,
        scaled_points(profile.surface.points(), before, after),
        after.with_count("paper"),
        {
            "kind": "transferred",
            "created_utc": created_utc or now_utc(),
            "source": f"{made.kind} profile of {profile.device.name}"
            + (f" ({made.source})" if made.source else ""),
            "error_bar": transferred_error(profile, device),
            "experts": made.experts,
            "note": _note(profile, device),
        },
        scales=scales if scales and scales.exact else None,
        runtime=profile.runtime.model_copy(
            update={
                **dict.fromkeys(("torch", "transformers", "python")),
                # A device without bfloat16 runs float16, in as many bytes.
                "dtype": device.dtype if dtype == "bfloat16" else dtype,
            }
        ),
        stages=_stages(profile, before, after),
    )


def transferred_error(profile: Profile, device: DeviceSpec) -> float:
    """The error bar that `transfer_profile` states: the profile's own and that of the study."""
    stated = profile.provenance.error_bar
    own = UNKNOWN_ERROR if stated is None else stated
    scaling, _ = transfer_errors().expected(profile.device.slug, device.slug)
    return round(float(np.hypot(own, scaling)), 3)


def scaled_points(
    points: Points, before: Roofline, after: Roofline, fixed_s_per_layer: float | None = None
) -> Points:
    """The points on the device of another roofline; the fixed time is by default the study's."""
    place = points.rows, points.context, points.batch
    seconds = np.maximum(
        _scaled(points.seconds, (before, after), place, fixed_s_per_layer),
        ROUNDING * after.seconds(*place),
    )
    return Points(rows=points.rows, context=points.context, batch=points.batch, seconds=seconds)


def _scaled(
    seconds: ArrayLike,
    rooflines: tuple[Roofline, Roofline],
    place: tuple[ArrayLike, ArrayLike, ArrayLike],
    fixed_s_per_layer: float | None = None,
) -> Array:
    """Times with all but the fixed part scaled, at rows, contexts and batches `place`."""

    def smooth_s(roofline: Roofline) -> Array:
        compute_s, memory_s = roofline.branches_s(*place)
        bent: Array = (compute_s**_SHARPNESS + memory_s**_SHARPNESS) ** (1 / _SHARPNESS)
        return bent

    before, after = rooflines
    if fixed_s_per_layer is None:
        fixed_s_per_layer = transfer_errors().fixed_s_per_layer
    times = np.asarray(seconds, dtype=np.float64)
    fixed = np.minimum(fixed_s_per_layer * before.architecture.layers, _LARGEST_FIXED_SHARE * times)
    ratio = smooth_s(after) / smooth_s(before)
    return np.asarray(fixed + (times - fixed) * ratio, dtype=np.float64)


def _stages(profile: Profile, before: Roofline, after: Roofline) -> StagesSection:
    plain, prefill = profile.stages.plain, profile.stages.prefill
    if plain is not None:
        axes = {"context": plain.context, "batch": plain.batch}
        steps = scaled_points(Points(rows=1, seconds=plain.median_s, **axes), before, after)
        plain = PlainSection.model_validate(axes | {"median_s": steps.seconds, "n": 1})
    if prefill is not None:
        prompts = _scaled(prefill.median_s, (before, after), (prefill.tokens, 0, 1))
        prefill = TokensSection.model_validate(
            {"tokens": prefill.tokens, "median_s": prompts, "n": 1}
        )
    return StagesSection(plain=plain, prefill=prefill)


def _note(profile: Profile, device: DeviceSpec) -> str:
    bandwidth = device.peak_bytes_per_s / profile.peaks.bytes_per_s
    flops = device.peak_flops_per_s / profile.peaks.flops_per_s
    study = transfer_errors()
    text = (
        f"scaled from {profile.device.name}: memory-bound time by bandwidth (x {bandwidth:.3f}),"
        f" compute-bound time by FLOPs (x {flops:.3f}), with a smooth bend between them;"
        f" {1e6 * study.fixed_s_per_layer:.0f} us a layer kept;"
        f" {study.text(profile.device.slug, device.slug)}"
    )
    return f"{text}; source: {profile.provenance.note}"[:2000]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferErrors:
    """Mean relative errors of forwards scaled from one device to another.

    pairs              {(source, device): error}, by slug
    deviations         {slug: how far its times are from what its data sheet says of others'}
    chips              {slug: (generation with its vendor, chip)}
    fixed_s_per_layer  seconds of a layer that no peak shortens: launches, ramps, waits
    """

    pairs: Mapping[tuple[str, str], float]
    deviations: Mapping[str, float]
    chips: Mapping[str, tuple[str, str]]
    fixed_s_per_layer: float

    def expected(self, source: str, device: str) -> tuple[float, str]:
        """The expected error of a transfer, at least LEAST_ERROR, and what it rests on.

        Devices of one chip at about the same rate have the mean error of such pairs, others of one
        vendor both deviations (the largest of all for an unknown device), added in squares.
        """
        relation = self._relation(source, device)
        if (source, device) in self.pairs:
            errors, basis = [self.pairs[source, device]], "measured for this pair"
        elif relation == "chip":
            chips: dict[str, list[float]] = {}
            for (one, other), error in self.pairs.items():
                if self._relation(one, other) == "chip":
                    chips.setdefault(self.chips[other][1], []).append(error)
            errors = [float(np.mean(of_chip)) for of_chip in chips.values()]
            errors = errors or list(self.pairs.values())
            basis = f"the mean over pairs within {len(errors)} chips"
        elif relation == "vendor":
            largest = max(self.deviations.values())
            first, second = (self.deviations.get(slug, largest) for slug in (source, device))
            errors = [float(np.hypot(first, second))]
            basis = "from how far devices are from data sheets"
        else:
            errors, basis = [max(self.pairs.values())], "the largest of all pairs"
        return max(LEAST_ERROR, float(np.mean(errors))), basis

    def text(self, source: str, device: str) -> str:
        """What a transfer crosses, its expected error and the basis of that, for people."""
        error, basis = self.expected(source, device)
        (old, chip), (new, other) = (
            self.chips.get(slug, ("an unknown generation", slug)) for slug in (source, device)
        )
        if chip == other:
            crossing = f"one chip, {chip}"
            crossing += "" if _equal_rates(source, device) else " at another 16-bit rate"
        elif old == new:
            crossing = f"within {old}, {chip} to {other}"
        else:
            crossing = f"across generations, {old} to {new}"
            if old.split()[0] != new.split()[0]:
                crossing = f"across vendors, {old} to {new}, which nobody measured"
        return f"{crossing}; error of such transfers {error:.1%}, {basis}"

    def _relation(self, source: str, device: str) -> str:
        first, second = self.chips.get(source), self.chips.get(device)
        if first is None or second is None:
            return "unknown"
        if first[1] == second[1] and _equal_rates(source, device):
            return "chip"
        return "vendor" if first[0].split()[0] == second[0].split()[0] else "unknown"


def _equal_rates(source: str, device: str) -> bool:
    """Whether the 16-bit rates differ by less than 30 %, or either is not known."""
    known = load_devices()
    rates = [known[slug].peak_flops_per_s for slug in (source, device) if slug in known]
    return len(rates) < 2 or min(rates) > _EQUAL_RATES * max(rates)


@cache
def transfer_errors() -> TransferErrors:
    table = read_yaml(shipped_directory() / "transfers.yaml")
    return TransferErrors(
        pairs={
            (source, device): float(error)
            for source, errors in table["errors"].items()
            for device, error in errors.items()
        },
        deviations={slug: float(deviation) for slug, deviation in table["deviations"].items()},
        chips={
            slug: (generation, chip)
            for generation, chips in table["generations"].items()
            for chip, slugs in chips.items()
            for slug in slugs
        },
        fixed_s_per_layer=float(table["fixed_us_per_layer"]) * 1e-6,
    )

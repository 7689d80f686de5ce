"""A calibration profile: the measured costs of one device, target and runtime, and its keys.

`Profile.from_yaml` reads one and `to_yaml` writes it; docs/profile-format.md explains the fields.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.physical import PhysicalCalibration
from costmodel.calibration.points import Calibration
from costmodel.calibration.stairs import MIN_POINTS, build_stairs
from costmodel.catalog import DeviceFingerprint, device_by_name
from costmodel.errors import ProfileError
from costmodel.fields import Hash, Section
from costmodel.io import parse_yaml, read_bytes, write_atomic
from costmodel.profile import schema
from costmodel.profile.text import describe_error, dump_yaml, shown
from costmodel.roofline import Roofline

# Cards with error correction switched on report up to 7 % less than they have (A6000, L40S).
MEMORY_TOLERANCE = 0.08
_TOLERANCES = {"memory_bytes": MEMORY_TOLERANCE, "power_limit_w": 0.01}
SOFT_KEYS = ("driver", "torch", "transformers", "cuda", "power_limit_w")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The keys of a profile. One that differs in a hard key is never used silently.

    `threads` and `instruction_set` are those of a CPU, else None. `quantization` is None for
    weights that are not quantised. From `engine_version` on the keys are those of a serving engine,
    else None. The last five, SOFT_KEYS, are soft: a difference gives a warning and online
    correction, and None is unknown.
    """

    device_name: str
    memory_bytes: int
    architecture_hash: str
    dtype: str
    runtime: str
    attention: str
    mig: str | None = None
    threads: int | None = None
    instruction_set: str | None = None
    quantization: str | None = None
    tensor_parallel: int = 1
    engine_version: str | None = None
    compilation: str | None = None
    graphs: str | None = None
    executor: str | None = None
    max_num_seqs: int | None = None
    driver: str | None = None
    torch: str | None = None
    transformers: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None

    @classmethod
    def of(
        cls, device: DeviceFingerprint, architecture_hash: str, runtime: schema.RuntimeSection
    ) -> ProfileKey:
        """The key of a target with these sizes in a runtime on a device."""
        engine = dict(runtime.engine or ())
        values: dict[str, Any] = {**dict(device), **dict(runtime), **engine}
        if device.kind != "cpu":
            values |= {"threads": None, "instruction_set": None}
        values |= {
            "device_name": device.name,
            "architecture_hash": architecture_hash,
            "runtime": runtime.kind,
            "engine_version": engine.get("version"),
        }
        keys: Any = {field.name: values.get(field.name) for field in dataclasses.fields(cls)}
        return cls(**keys)

    def differences(self, other: ProfileKey) -> list[str]:
        """Names of the keys that differ, the hard ones first.

        Memory agrees within 8 %, power within 1 %, a device by any known name, and a soft key
        with one that is unknown.
        """

        def agree(name: str, one: Any, another: Any) -> bool:
            if one == another or one is None or another is None:
                return bool(one == another) or name in SOFT_KEYS
            if name in _TOLERANCES:
                return bool(abs(one - another) <= _TOLERANCES[name] * max(one, another))
            spec = device_by_name(one) if name == "device_name" else None
            return spec is not None and spec is device_by_name(another)

        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [name for name in mine if not agree(name, mine[name], theirs[name])]

    def hard_differences(self, other: ProfileKey) -> list[str]:
        return [name for name in self.differences(other) if name not in SOFT_KEYS]


SCHEMA_VERSION = 2
_HINT = "Correct the file, or measure again with `rooftree calibrate`"


class Profile(Section):
    """One calibration profile. It is frozen; `with_drafter` makes a changed one."""

    schema_version: Literal[2] = 2
    provenance: schema.ProvenanceSection
    device: DeviceFingerprint
    target: schema.TargetSection
    runtime: schema.RuntimeSection
    peaks: schema.PeaksSection
    calibration: schema.CalibrationSection
    surface: schema.SurfaceSection | None = None
    held_out: schema.HeldOutSection | None = None
    regret: schema.RegretSection | None = None
    stages: schema.StagesSection = Field(default_factory=schema.StagesSection)
    drafters: dict[Hash, schema.DrafterSection] = Field(default_factory=dict)
    engine_drafters: dict[Hash, schema.EngineDrafterSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Profile:
        if self.device.kind == "cpu" and self.device.threads is None:
            raise ValueError("device.threads is missing, which a CPU needs")
        stairs = self.calibration.selected == "stairs"
        if self.surface is None and (stairs or not self.provenance.borrowed):
            raise ValueError("the section surface is missing")
        rows = () if self.surface is None else self.surface.rows
        if stairs and (len(set(rows)) < 2 or len(rows) < MIN_POINTS):
            raise ValueError(
                f"surface needs at least {MIN_POINTS} points and 2 row counts for stairs"
                " to be selected"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read and check a profile. Raises ProfileError, one line: file, field, problem and what to
        do.
        """
        return cls.from_bytes(read_bytes(Path(path)), str(path))

    @classmethod
    def from_bytes(cls, raw: bytes, label: str) -> Profile:
        """`from_yaml` for bytes already read; errors name `label` as their origin."""
        data = parse_yaml(raw, label)
        if not isinstance(data, dict):
            raise ProfileError(f"{label}: is not a profile (no fields)", hint=_HINT)
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ProfileError(
                f"{label}: schema_version: must be {SCHEMA_VERSION} (is {shown(version)})",
                hint="Use the version of rooftree that wrote it, or measure again"
                " with `rooftree calibrate`",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as failure:
            raise _profile_error(label, failure) from None

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The profile as YAML text, numbers with 6 significant digits; with `path` also written
        there.

        Raises ProfileError where it does not read back as the same, or cannot be written.
        """
        text = dump_yaml(self.as_dict())
        if path is not None:
            again = type(self).from_bytes(text.encode(), f"{path}, not written")
            if again.to_yaml() != text:
                raise ProfileError(f"{path}: not written, since it would read back as another")
            write_atomic(Path(path), text)
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the order of the file, without empty fields."""
        data = self.model_dump(exclude_none=True, exclude={"target": {"architecture"}})
        sizes = self.target.architecture.to_dict()
        del sizes["name"]
        data["target"]["architecture"] = sizes
        return _without_empty(data)

    @property
    def key(self) -> ProfileKey:
        return ProfileKey.of(self.device, self.target.architecture_hash, self.runtime)

    def roofline(self, count: Literal["paper", "physical"] = "paper") -> Roofline:
        return self.runtime.roofline(self.target.architecture, self.peaks).with_count(count)

    @property
    def uncertainty(self) -> float:
        """The largest relative error of a verification that the profile states, or 0.

        Where the machine's pace varied, it is twice that spread at times.
        """
        stated = [self.provenance.error_bar, 2 * (self.provenance.pace_spread or 0.0)]
        if self.held_out is not None:
            stated += [self.held_out.error.p95, self.held_out.repeat_noise]
        return max(one or 0.0 for one in stated)

    @property
    def preferred_rows(self) -> tuple[int, ...]:
        """The measured row counts on a CPU, where products of a new shape cost their set-up."""
        if self.device.kind != "cpu" or self.provenance.kind != "measured":
            return ()
        return () if self.surface is None else tuple(sorted(set(self.surface.rows)))

    def linear_calibration(self) -> LinearCalibration:
        return self.calibration.linear.over(self.roofline())

    def verify_calibration(self) -> Calibration:
        """The selected calibration, with `predict_s(rows, context, batch)`."""
        fits, roofline = self.calibration, self.roofline()
        if fits.selected == "stairs" and fits.stairs and fits.physical and self.surface:
            try:
                return build_stairs(
                    self.surface.points(), fits.physical.over(roofline), fits.stairs
                )
            except np.linalg.LinAlgError:
                problem = "calibration: the scales of stairs give no usable covariance"
                raise ProfileError(problem, hint=_HINT) from None
        selected: LinearCalibration | PhysicalCalibration = getattr(fits, fits.selected)
        return selected.over(roofline)

    def drafter_origin(self, architecture_hash: str) -> tuple[schema.ProvenanceKind, str]:
        """Provenance and time of a drafter's cost: (kind, created_utc)."""
        drafter = self.drafters[architecture_hash]
        whole = self.provenance
        return drafter.kind or whole.kind, drafter.created_utc or whole.created_utc

    def with_drafter(self, architecture_hash: str, drafter: schema.DrafterSection) -> Profile:
        """The same profile with one drafter added or replaced. Raises ProfileError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        drafters = self.drafters | {architecture_hash: drafter}
        try:
            return type(self)(**(fields | {"drafters": drafters}))
        except ValidationError as failure:
            raise _profile_error("the changed profile", failure) from None


def _without_empty(data: dict[str, Any]) -> dict[str, Any]:
    """Without empty texts, lists and sections, which read back as their defaults."""
    pruned = {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in data.items()
    }
    return {key: value for key, value in pruned.items() if value not in ("", (), {})}


def _profile_error(label: str, failure: ValidationError) -> ProfileError:
    errors = failure.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return ProfileError(f"{label}: {describe_error(errors[0])}{more}", hint=_HINT)

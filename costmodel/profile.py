"""A calibration profile: one (device, target, runtime) and what its forwards cost.

Read with `Profile.from_yaml`, written with `to_yaml`; docs/profile-format.md explains each field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from costmodel.calibration_sections import (
    CalibrationSection,
    LinearSection,
    SurfaceOptionsSection,
)
from costmodel.errors import InputError, ProfileError
from costmodel.files import parse_yaml, read_bytes, write_atomic
from costmodel.fit import Calibration
from costmodel.linear import LinearCalibration
from costmodel.profile_yaml import dump_yaml
from costmodel.registry_key import ProfileKey, SoftKey
from costmodel.roofline import Roofline
from costmodel.schema import (
    Count,
    Counts,
    CountsOrZero,
    DeviceSection,
    ErrorSection,
    Hash,
    NotNegative,
    PeaksSection,
    ProvenanceKind,
    ProvenanceSection,
    RuntimeSection,
    SecondsList,
    Section,
    SurfaceSection,
    TargetSection,
    check_lengths,
)
from costmodel.schema_errors import describe_error
from costmodel.stages import DrafterSection, StagesSection
from costmodel.stairs import MIN_POINTS

__all__ = [
    "CalibrationSection",
    "HeldOutSection",
    "LinearSection",
    "Profile",
    "RegretSection",
    "SurfaceOptionsSection",
]

SCHEMA_VERSION = 1
_HINT = "Correct the file, or measure again with `rooftree calibrate`"


class HeldOutSection(Section):
    """The selected calibration against points drawn beforehand that no fit has seen.

    `repeat_noise` is the median relative difference between repeats of one point. The points
    themselves may be kept as arrays of one length.
    """

    error: ErrorSection
    linear_error: ErrorSection | None = None
    repeat_noise: NotNegative | None = None
    rows: Counts = ()
    context: CountsOrZero = ()
    batch: Counts = ()
    measured_s: SecondsList = ()
    predicted_s: SecondsList = ()

    @model_validator(mode="after")
    def _check(self) -> HeldOutSection:
        names = ("rows", "context", "batch", "measured_s", "predicted_s")
        if any(getattr(self, name) for name in names):
            check_lengths(self, names)
        return self


class RegretSection(Section):
    """Share of tokens/s lost by choosing N from this profile instead of from the truth."""

    mean: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    worst: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
    curves: Count
    contexts: CountsOrZero

    @model_validator(mode="after")
    def _check(self) -> RegretSection:
        if self.mean > self.worst:
            raise ValueError("mean must not exceed worst")
        return self


class Profile(Section):
    """One calibration profile. Frozen; make a changed one with the `with_...` methods."""

    schema_version: Literal[1] = 1
    provenance: ProvenanceSection
    device: DeviceSection
    target: TargetSection
    runtime: RuntimeSection
    peaks: PeaksSection
    calibration: CalibrationSection
    surface: SurfaceSection | None = None
    held_out: HeldOutSection | None = None
    regret: RegretSection | None = None
    stages: StagesSection = Field(default_factory=StagesSection)
    drafters: dict[Hash, DrafterSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Profile:
        if self.device.kind == "cpu" and self.device.threads is None:
            raise ValueError("device.threads is missing, which a CPU needs")
        selected = self.calibration.selected
        timed = self.provenance.kind in ("measured", "quick")
        needed = timed or selected in ("surface", "stairs")
        if needed and self.surface is None:
            raise ValueError("the section surface is missing")
        if self.surface is not None and selected in ("surface", "stairs"):
            least = 4 if selected == "surface" else MIN_POINTS
            if len(set(self.surface.rows)) < 2 or len(self.surface.rows) < least:
                raise ValueError(
                    f"surface needs at least {least} points and 2 row counts for {selected}"
                    " to be selected"
                )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> Profile:
        """Read and check a profile; nothing in the file is ever executed.

        Raises ProfileError, one line: the file, the field's path, what is wrong, what to do.
        """
        return cls.from_bytes(read_bytes(Path(path)), str(path))

    @classmethod
    def from_bytes(cls, raw: bytes, label: str) -> Profile:
        """`from_yaml` for bytes already read; `label` names them in errors."""
        data = parse_yaml(raw, label)
        if not isinstance(data, dict):
            raise ProfileError(f"{label}: is not a profile (no fields)", hint=_HINT)
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ProfileError(
                f"{label}: schema_version: must be {SCHEMA_VERSION} (is {version!r})",
                hint="Use the version of rooftree that wrote it, or measure again"
                " with `rooftree calibrate`",
            )
        try:
            return cls.model_validate(data)
        except ValidationError as failure:
            raise _profile_error(label, failure) from None

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The profile as YAML text, numbers with 6 significant digits.

        With `path` it is also written there in one step. Raises ProfileError where it cannot.
        """
        text = dump_yaml(self.as_dict())
        if path is not None:
            write_atomic(Path(path), text)
        return text

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the order of the file; what is absent or empty is left out."""
        data = self.model_dump(exclude_none=True, exclude={"target": {"architecture"}})
        sizes = self.target.architecture.to_dict()
        del sizes["name"]
        data["target"]["architecture"] = sizes
        return _filled(data)

    @property
    def key(self) -> ProfileKey:
        """The hard keys that this profile is looked up by."""
        return ProfileKey(
            device_name=self.device.name,
            memory_bytes=self.device.memory_bytes,
            mig=self.device.mig,
            threads=self.device.threads if self.device.kind == "cpu" else None,
            instruction_set=self.device.instruction_set if self.device.kind == "cpu" else None,
            architecture_hash=self.target.architecture_hash,
            dtype=self.runtime.dtype,
            quantization=self.runtime.quantization,
            runtime=self.runtime.kind,
            attention=self.runtime.attention,
            tensor_parallel=self.runtime.tensor_parallel,
        )

    @property
    def soft_key(self) -> SoftKey:
        """What may differ from here at the price of a warning."""
        return SoftKey(
            driver=self.device.driver,
            torch=self.runtime.torch,
            transformers=self.runtime.transformers,
            cuda=self.device.cuda,
            power_limit_w=self.device.power_limit_w,
        )

    def differences(self, key: ProfileKey, soft: SoftKey) -> list[str]:
        """Names of the hard and soft keys that differ: none where times are comparable."""
        return self.key.differences(key) + self.soft_key.differences(soft)

    def roofline(self, count: Literal["paper", "physical"] = "paper") -> Roofline:
        """The roofline of this device and target."""
        return Roofline(
            architecture=self.target.architecture,
            peaks=self.peaks.peaks(),
            element_bytes=self.runtime.element_bytes,
            count=count,
            tensor_parallel=self.runtime.tensor_parallel,
        )

    def linear_calibration(self) -> LinearCalibration:
        """The paper's calibration, which every profile has."""
        return LinearCalibration(
            roofline=self.roofline("paper"), **self.calibration.linear.model_dump()
        )

    def verify_calibration(self) -> Calibration:
        """The selected calibration, with `predict_s(rows, context, batch)`."""
        if self.calibration.selected == "linear":
            return self.linear_calibration()
        points = None if self.surface is None else self.surface.points()
        try:
            return self.calibration.build(points, self.roofline())
        except InputError as failure:
            raise ProfileError(f"calibration: {failure.problem}", hint=_HINT) from None

    def drafter_origin(self, architecture_hash: str) -> tuple[ProvenanceKind, str]:
        """How and when the cost of one of its drafters was timed: (kind, created_utc)."""
        drafter = self.drafters[architecture_hash]
        made = self.provenance
        return drafter.kind or made.kind, drafter.created_utc or made.created_utc

    def with_drafter(self, architecture_hash: str, drafter: DrafterSection) -> Profile:
        """The same profile with one drafter added or replaced. Raises ProfileError."""
        return self._changed(drafters=self.drafters | {architecture_hash: drafter})

    def _changed(self, **sections: Any) -> Profile:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        try:
            return type(self)(**(fields | sections))
        except ValidationError as failure:
            raise _profile_error("the changed profile", failure) from None


def _filled(data: dict[str, Any]) -> dict[str, Any]:
    """Without empty texts, lists and sections, which read back as their defaults."""
    kept = {
        key: _filled(value) if isinstance(value, dict) else value for key, value in data.items()
    }
    return {key: value for key, value in kept.items() if value not in ("", (), {})}


def _profile_error(label: str, failure: ValidationError) -> ProfileError:
    errors = failure.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    line = " ".join(describe_error(errors[0]).split())
    return ProfileError(f"{label}: {line}{more}", hint=_HINT)

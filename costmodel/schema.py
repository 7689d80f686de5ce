"""The sections of a calibration profile (docs/profile-format.md) and what they must satisfy.

Every section is frozen and refuses unknown fields, wrong types, NaN and infinity. Lists are
kept as tuples; numpy arrays are accepted when a profile is made in Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, model_validator

from costmodel.architecture import ModelArchitecture
from costmodel.device import DeviceFingerprint, Peaks
from costmodel.errors import InputError
from costmodel.points import ErrorSummary, Points

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

ProvenanceKind = Literal["measured", "quick", "composed", "transferred", "datasheet"]
RuntimeKind = Literal["eager", "graphs", "kernels"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]

Text = Annotated[str, Field(strict=True, min_length=1, max_length=500)]
AnyText = Annotated[str, Field(strict=True, max_length=2000)]
Hash = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9._:-]{1,80}$")]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _as_tuple(value: Any) -> Any:
    """Lists and numpy arrays become tuples (NaN: None); a set or a text is left to fail."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
        value = [None if isinstance(x, float) and np.isnan(x) else x for x in value]
    return tuple(value) if isinstance(value, list) else value


_Listed = BeforeValidator(_as_tuple)
# Strict tuples: without it a YAML set would pass, in any order.
_TUPLE = Field(strict=True, max_length=20_000)
Counts = Annotated[tuple[Count, ...], _TUPLE, _Listed]
CountsOrZero = Annotated[tuple[CountOrZero, ...], _TUPLE, _Listed]
SecondsList = Annotated[tuple[Positive, ...], _TUPLE, _Listed]
SpreadList = Annotated[tuple[NotNegative | None, ...], _TUPLE, _Listed]
Utc = Annotated[str, Field(strict=True, pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Texts = Annotated[tuple[Text, ...], _TUPLE, _Listed]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProvenanceSection(Section):
    """Where the numbers come from."""

    kind: ProvenanceKind
    created_utc: Utc
    tool_version: Text
    source: AnyText | None = None
    points: CountOrZero = 0
    samples: CountOrZero = 0
    discarded_samples: CountOrZero = 0
    duration_s: NotNegative | None = None
    sm_clock_hz: Positive | None = None
    memory_clock_hz: Positive | None = None
    temperature_c: Number | None = None
    power_w: Positive | None = None
    clock_reasons: Texts = ()
    ecc: bool | None = None
    busy_processes: Texts = ()
    error_bar: NotNegative | None = None
    note: AnyText = ""


class DeviceSection(Section):
    """The device that was measured; see `DeviceFingerprint`."""

    kind: Literal["cuda", "cpu"]
    name: Text
    memory_bytes: Count
    mig: Text | None = None
    threads: Count | None = None
    instruction_set: Text | None = None
    driver: Text | None = None
    cuda: Text | None = None
    power_limit_w: Positive | None = None

    @classmethod
    def of(cls, fingerprint: DeviceFingerprint) -> DeviceSection:
        """The section for a device that is here."""
        return cls(**{name: getattr(fingerprint, name) for name in cls.model_fields})

    def fingerprint(self) -> DeviceFingerprint:
        """The same figures as a `DeviceFingerprint`."""
        return DeviceFingerprint(**self.model_dump())


def _architecture(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    try:
        return ModelArchitecture.from_dict(value)
    except InputError as failure:
        raise ValueError(failure.problem) from None


class TargetSection(Section):
    """The target: a label, its sizes, and the hash of the sizes."""

    name: Text
    architecture_hash: Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{12}$")]
    architecture: Annotated[InstanceOf[ModelArchitecture], BeforeValidator(_architecture)]

    @classmethod
    def of(cls, architecture: ModelArchitecture, name: str | None = None) -> TargetSection:
        """The section for a target; `name` defaults to the architecture's own."""
        label = name or architecture.name
        return cls(
            name=label,
            architecture_hash=architecture.hash,
            architecture=dataclasses.replace(architecture, name=label),
        )

    @model_validator(mode="before")
    @classmethod
    def _name_architecture(cls, data: Any) -> Any:
        """The sizes in a file carry no name of their own: give them the target's."""
        if not isinstance(data, Mapping) or not isinstance(data.get("architecture"), Mapping):
            return data
        name = data.get("name")
        label = name if isinstance(name, str) and name else "-"
        return dict(data) | {"architecture": {"name": label} | dict(data["architecture"])}

    @model_validator(mode="after")
    def _check_hash(self) -> TargetSection:
        if self.architecture_hash != self.architecture.hash:
            raise ValueError(
                f"architecture_hash is {self.architecture_hash}, but the sizes under"
                f" architecture hash to {self.architecture.hash}: one of them was changed"
            )
        return self


class RuntimeSection(Section):
    """How the target ran. `buckets`: the row counts that forwards are padded to; none if empty."""

    kind: RuntimeKind
    dtype: Dtype
    quantization: Text | None = None
    attention: Text
    tensor_parallel: Count = 1
    buckets: Counts = ()
    torch: Text | None = None
    transformers: Text | None = None
    python: Text | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return ELEMENT_BYTES[self.dtype]

    @model_validator(mode="after")
    def _check_buckets(self) -> RuntimeSection:
        check_ascending("buckets", self.buckets)
        return self


class PeaksSection(Section):
    """The peaks that the rooflines use, where from, and what was measured."""

    source: Literal["datasheet", "measured"]
    flops_per_s: Positive
    bytes_per_s: Positive
    measured_flops_per_s: Positive | None = None
    measured_bytes_per_s: Positive | None = None
    measured_copy_bytes_per_s: Positive | None = None

    def peaks(self) -> Peaks:
        """The peaks that the rooflines use."""
        return Peaks(flops_per_s=self.flops_per_s, bytes_per_s=self.bytes_per_s)


class ErrorSection(Section):
    """Relative errors over some points, as fractions."""

    points: Count
    mape: NotNegative
    median: NotNegative
    p95: NotNegative
    worst: NotNegative

    @classmethod
    def of(cls, summary: ErrorSummary) -> ErrorSection:
        """The section for an error summary."""
        return cls(**{name: getattr(summary, name) for name in cls.model_fields})

    @model_validator(mode="after")
    def _check(self) -> ErrorSection:
        if not self.median <= self.p95 <= self.worst or self.mape > self.worst:
            raise ValueError("median, p95 and worst must ascend, and mape not exceed worst")
        return self


class SurfaceSection(Section):
    """The measured points: arrays of one length, ascending by batch, then context, then rows.

    `mad_s` is null where a point had too few samples.
    """

    rows: Counts
    context: CountsOrZero
    batch: Counts
    median_s: SecondsList
    mad_s: SpreadList
    n: Counts

    @classmethod
    def of(cls, points: Points) -> SurfaceSection:
        """The section for measured points, in the order of a profile."""
        p = points.sorted()
        columns = {name: getattr(p, name).astype(int) for name in ("rows", "context", "batch", "n")}
        return cls.model_validate(columns | {"median_s": p.seconds, "mad_s": p.mad_s})

    def points(self) -> Points:
        """The same points for fitting."""
        return Points(
            rows=self.rows,
            context=self.context,
            batch=self.batch,
            seconds=self.median_s,
            mad_s=[np.nan if value is None else value for value in self.mad_s],
            n=self.n,
        )

    @model_validator(mode="after")
    def _check(self) -> SurfaceSection:
        check_lengths(self, ("rows", "context", "batch", "median_s", "mad_s", "n"))
        check_ascending("batch, then context, then rows", self.batch, self.context, self.rows)
        return self


def check_lengths(section: Section, names: tuple[str, ...]) -> None:
    """Raise ValueError unless the named arrays have one common length above 0."""
    first = len(getattr(section, names[0]))
    if first == 0:
        raise ValueError(f"{names[0]} is empty")
    for name in names[1:]:
        length = len(getattr(section, name))
        if length != first:
            raise ValueError(f"{name} has {length} entries, but {names[0]} has {first}")


def check_ascending(name: str, *columns: tuple[int, ...]) -> None:
    """Raise ValueError unless the columns, compared entry by entry in this order, ascend."""
    entries = list(zip(*columns, strict=True))
    for index, (one, other) in enumerate(pairwise(entries), start=1):
        if one >= other:
            raise ValueError(
                f"entries must ascend by {name}, without repeats (entry {index} does not)"
            )

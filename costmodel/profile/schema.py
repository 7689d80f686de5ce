"""The sections of a calibration profile (docs/profile-format.md) and what they must satisfy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, InstanceOf, ValidationInfo, field_validator, model_validator

from costmodel import fields
from costmodel.architecture import ModelArchitecture
from costmodel.calibration.choices import Regret
from costmodel.calibration.linear import LinearCalibration
from costmodel.calibration.physical import PhysicalCalibration
from costmodel.calibration.points import CalibrationName, ErrorSummary, Points
from costmodel.calibration.selection import Selection
from costmodel.calibration.stairs import StairsScales
from costmodel.catalog import Peaks
from costmodel.errors import InputError
from costmodel.profile.text import ColumnsSection
from costmodel.roofline import Roofline
from costmodel.statistics import Array, extend_linear

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

ProvenanceKind = Literal["measured", "quick", "imported", "transferred", "composed", "datasheet"]
PROVENANCE_RANKING: tuple[ProvenanceKind, ...] = get_args(ProvenanceKind)  # the best first
# Not measured on this device with this runtime: a prior, corrected while decoding.
BORROWED: tuple[ProvenanceKind, ...] = ("imported", "transferred", "composed", "datasheet")
RuntimeKind = Literal["eager", "packed", "graphs", "kernels", "external", "vllm", "url"]
ENGINES: tuple[RuntimeKind, ...] = ("vllm",)  # runtimes that are not this project's own
UNCAPTURED: tuple[RuntimeKind, ...] = ("eager", "packed")  # times include the host's of each call
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class ProvenanceSection(fields.Section):
    """Provenance of the numbers: how, when and under which conditions they were obtained.

    `experts`: what the experts' times are of, where no sound table has those of their own weights.
    """

    kind: ProvenanceKind
    created_utc: fields.Utc
    tool_version: fields.Text
    source: fields.AnyText | None = None
    points: fields.CountOrZero = 0
    samples: fields.CountOrZero = 0
    discarded_samples: fields.CountOrZero = 0
    pace_spread: fields.Statistic | None = None
    duration_s: fields.SecondsOrZero | None = None
    sm_clock_hz: fields.Hertz | None = None
    memory_clock_hz: fields.Hertz | None = None
    temperature_c: fields.Celsius | None = None
    power_w: fields.Watts | None = None
    clock_reasons: fields.Texts = ()
    ecc: bool | None = None
    busy_processes: fields.Texts = ()
    error_bar: fields.ErrorBar | None = None
    experts: fields.AnyText = ""
    note: fields.AnyText = ""

    @property
    def rank(self) -> int:
        """Place of the kind in PROVENANCE_RANKING: 0 is the best."""
        return PROVENANCE_RANKING.index(self.kind)

    @property
    def borrowed(self) -> bool:
        return self.kind in BORROWED


class TargetSection(fields.Section):
    """The target: its name as a label, its sizes, and their hash."""

    name: fields.Text
    architecture_hash: Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{12}$")]
    architecture: InstanceOf[ModelArchitecture]

    @classmethod
    def of(cls, architecture: ModelArchitecture, name: str | None = None) -> TargetSection:
        label = name or architecture.name
        return cls(
            name=label,
            architecture_hash=architecture.hash,
            architecture=dataclasses.replace(architecture, name=label),
        )

    @field_validator("architecture", mode="before")
    @classmethod
    def _read_architecture(cls, value: Any, info: ValidationInfo) -> Any:
        """The sizes in a file have no name: they get that of the target."""
        if not isinstance(value, Mapping):
            return value
        try:
            return ModelArchitecture.from_dict({"name": info.data.get("name", "-"), **value})
        except InputError as failure:
            raise ValueError(failure.problem) from None

    @model_validator(mode="after")
    def _check_hash(self) -> TargetSection:
        if self.architecture_hash != self.architecture.hash:
            raise ValueError(
                f"architecture_hash is {self.architecture_hash}, but the sizes under"
                f" architecture hash to {self.architecture.hash}: one of them was changed"
            )
        return self


class PeaksSection(fields.Section):
    """The peaks of the rooflines, their source, and measured peaks."""

    source: Literal["datasheet", "measured"]
    flops_per_s: fields.FlopsPerS
    bytes_per_s: fields.BytesPerS
    measured_flops_per_s: fields.FlopsPerS | None = None
    measured_bytes_per_s: fields.BytesPerS | None = None
    measured_copy_bytes_per_s: fields.BytesPerS | None = None

    def peaks(self) -> Peaks:
        return Peaks(flops_per_s=self.flops_per_s, bytes_per_s=self.bytes_per_s)


class EngineSection(fields.Section):
    """A serving engine, as far as its configuration decides what a step costs.

    compilation, graphs  the engine's own names of its modes
    executor             its name of what runs its workers, in its own process or others
    host_s               the host's part of a step, where the surface holds the device's alone
    """

    version: fields.Text
    compilation: fields.Text
    graphs: fields.Text
    executor: fields.Text
    max_num_seqs: fields.Count
    host_s: fields.SecondsOrZero | None = None


class RuntimeSection(fields.Section):
    """The runtime.

    weight_bytes  bytes that it reads of one weight of the layers' matrices; None: the dtype's
    head_bytes    the same of embedding and LM head
    cache_bytes   bytes of one cached value, where the cache is quantised
    buckets       row counts that forwards are padded to; empty: not padded
    engine        the serving engine, where the runtime is one
    """

    kind: RuntimeKind
    dtype: Dtype
    quantization: fields.Text | None = None
    weight_bytes: fields.WeightBytes | None = None
    head_bytes: fields.WeightBytes | None = None
    cache_bytes: fields.WeightBytes | None = None
    attention: fields.Text
    tensor_parallel: fields.Count = 1
    buckets: fields.Counts = ()
    torch: fields.Text | None = None
    transformers: fields.Text | None = None
    python: fields.Text | None = None
    engine: EngineSection | None = None

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def roofline(self, architecture: ModelArchitecture, peaks: PeaksSection) -> Roofline:
        return Roofline(
            architecture=architecture,
            peaks=peaks.peaks(),
            element_bytes=self.element_bytes,
            weight_bytes=self.weight_bytes,
            head_bytes=self.head_bytes,
            cache_bytes=self.cache_bytes,
            tensor_parallel=self.tensor_parallel,
        )

    @model_validator(mode="after")
    def _check_buckets(self) -> RuntimeSection:
        fields.check_ascending("buckets", self.buckets)
        if (self.kind in ENGINES) != (self.engine is not None):
            raise ValueError(
                f"engine belongs to the runtimes {', '.join(ENGINES)}, and to no other"
            )
        return self


class SampledSection(ColumnsSection):
    """Medians of samples, ascending by the axes in their order.

    `mad_s` is null where a point had too few samples.
    """

    median_s: fields.SecondsList
    mad_s: fields.SpreadList
    n: fields.Counts

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields.check_lengths(self, (*self.axes, *self.values))
        # Times are above 0, so half of the samples lie between 0 and the median.
        for index, (median, spread) in enumerate(zip(self.median_s, self.mad_s, strict=True)):
            if spread is not None and spread > median:
                raise ValueError(f"mad_s exceeds median_s (entry {index})")
        fields.check_ascending(
            ", then ".join(self.axes), *(getattr(self, axis) for axis in self.axes)
        )
        return self


class SurfaceSection(SampledSection):
    """The measured points."""

    axes = ("batch", "context", "rows")

    rows: fields.Counts
    context: fields.CountsOrZero
    batch: fields.Counts

    @classmethod
    def of(cls, points: Points) -> SurfaceSection:
        p = points.sorted()
        columns = {name: getattr(p, name).astype(int) for name in ("rows", "context", "batch", "n")}
        return cls.model_validate(columns | {"median_s": p.seconds, "mad_s": p.mad_s})

    def points(self) -> Points:
        return Points(
            rows=self.rows,
            context=self.context,
            batch=self.batch,
            seconds=self.median_s,
            mad_s=[np.nan if value is None else value for value in self.mad_s],
            n=self.n,
        )


class CalibrationSection(fields.Section):
    """The calibrations, the name of the selected one, and the cross-validated error of each.

    `cross_validated_regret` is the mean decision regret of the same predictions. `warnings` name
    steps of the points that the selected one smooths over.
    """

    selected: CalibrationName
    linear: LinearCalibration
    physical: PhysicalCalibration | None = None
    stairs: StairsScales | None = None
    cross_validated: dict[CalibrationName, ErrorSummary] = Field(default_factory=dict)
    cross_validated_regret: dict[CalibrationName, fields.Share] = Field(default_factory=dict)
    warnings: fields.Texts = ()

    @classmethod
    def of(cls, selection: Selection) -> CalibrationSection:
        stairs = selection.stairs
        return cls(
            selected=selection.selected,
            linear=selection.linear,
            physical=selection.physical,
            stairs=None if stairs is None else stairs.scales,
            cross_validated=selection.cross_validated,
            cross_validated_regret={name: regret.mean for name, regret in selection.regret.items()},
            warnings=selection.warnings,
        )

    @model_validator(mode="after")
    def _check(self) -> CalibrationSection:
        if getattr(self, self.selected) is None:
            raise ValueError(f"selected is {self.selected}, but the field is missing")
        if self.stairs is not None and self.physical is None:
            raise ValueError("stairs needs the field physical, which is missing")
        return self


class HeldOutSection(ColumnsSection):
    """Error of the selected calibration at points drawn beforehand and left out of all fits.

    `repeat_noise` is the median relative difference between repeats of a point. The points
    may be stored too.
    """

    axes = ("rows", "context", "batch")
    values = ("measured_s", "predicted_s")

    error: ErrorSummary
    linear_error: ErrorSummary | None = None
    repeat_noise: fields.Statistic | None = None
    rows: fields.Counts = ()
    context: fields.CountsOrZero = ()
    batch: fields.Counts = ()
    measured_s: fields.SecondsList = ()
    predicted_s: fields.SecondsList = ()

    @model_validator(mode="after")
    def _check(self) -> HeldOutSection:
        if any(getattr(self, name) for name in (*self.axes, *self.values)):
            fields.check_lengths(self, (*self.axes, *self.values))
        return self


class RegretSection(Regret):
    """The regret of choosing N from this profile; the noise of the held-out times is taken out."""

    curves: fields.Count
    contexts: fields.CountsOrZero


class LineSection(SampledSection):
    """Medians of samples along one axis."""

    def seconds(self, at: ArrayLike) -> Array:
        """Linear interpolation; beyond the last point the last slope, but never a falling one."""
        return extend_linear(getattr(self, self.axes[0]), self.median_s, at)


class NodesSection(LineSection):
    """Cost by the number of drafted nodes N: building or accepting a tree."""

    axes = ("nodes",)
    nodes: fields.CountsOrZero


class TokensSection(LineSection):
    """Cost by the number of tokens: of the prompt in prefill, committed ones in commit."""

    axes = ("tokens",)
    tokens: fields.Counts


class DrafterSection(LineSection):
    """Cost of one draft of one drafter, by context.

    `kind` and `created_utc` are present where it was not timed with the rest of the profile:
    `quick` by a decoder at its start, `measured` by an earlier calibration.
    """

    axes = ("context",)
    name: fields.Text
    kind: Literal["measured", "quick"] | None = None
    created_utc: fields.Utc | None = None
    context: fields.CountsOrZero


class EngineDrafterSection(SampledSection):
    """Cost of one draft inside an engine: a full grid over batch, draft length and context.

    With 0 tokens it is what the drafter costs in a step that drafts nothing.
    """

    axes = ("batch", "tokens", "context")
    name: fields.Text
    batch: fields.Counts
    tokens: fields.CountsOrZero
    context: fields.CountsOrZero

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        shape = [len(set(axis)) for axis in (self.batch, self.tokens, self.context)]
        if np.prod(shape) != len(self.batch):
            raise ValueError("batch, tokens and context are not a full grid")
        return self

    def seconds(self, tokens: ArrayLike, context: float, batch: float) -> Array:
        """Of each length in `tokens`: linear along each axis, beyond its end as `extend_linear`."""
        axes = [np.unique(axis) for axis in (self.batch, self.tokens, self.context)]
        values = np.reshape(self.median_s, [len(axis) for axis in axes])
        of_context = np.apply_along_axis(lambda v: extend_linear(axes[2], v, context), -1, values)
        of_batch = np.apply_along_axis(lambda v: extend_linear(axes[0], v, batch), 0, of_context)
        return extend_linear(axes[1], of_batch, tokens)


class PlainSection(SampledSection):
    """The decoder's plain step: one row a sequence."""

    axes = ("batch", "context")
    context: fields.CountsOrZero
    batch: fields.Counts

    def seconds(self, context: float, batch: int = 1) -> float | None:
        """Seconds of a plain step; None where this batch was not measured."""
        pairs = zip(self.batch, self.context, self.median_s, strict=True)
        points = [(c, t) for b, c, t in pairs if b == batch]
        if not points:
            return None
        contexts, times_s = zip(*points, strict=True)
        return float(extend_linear(contexts, times_s, context))


class StagesSection(fields.Section):
    """Costs of a cycle other than draft and verification; None: not measured.

    `accept` is acceptance by the target's argmax, `accept_sampled` acceptance by sampling.
    """

    plain: PlainSection | None = None
    prefill: TokensSection | None = None
    build: NodesSection | None = None
    accept: NodesSection | None = None
    accept_sampled: NodesSection | None = None
    commit: TokensSection | None = None

"""The calibration section of a profile: coefficients as stored, and calibrations from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from costmodel.errors import InputError
from costmodel.fit import Calibration, CalibrationName, Selection
from costmodel.linear import LinearCalibration
from costmodel.physical import COEFFICIENTS, PhysicalCalibration
from costmodel.points import Points
from costmodel.roofline import Roofline
from costmodel.schema import Count, ErrorSection, NotNegative, Number, Positive, Section
from costmodel.stairs import StairsCalibration, build_stairs
from costmodel.stairs_kernel import Scales
from costmodel.surface import SurfaceOptions, build_surface
from costmodel.two_branch import TwoBranchCalibration

Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class LinearSection(Section):
    """The paper's calibration; see `LinearCalibration`."""

    slope: NotNegative
    intercept_s: Number
    slope_se: NotNegative
    intercept_se_s: NotNegative
    rmse_before_s: NotNegative
    rmse_after_s: NotNegative
    mape_before: NotNegative
    mape_after: NotNegative

    @classmethod
    def of(cls, calibration: LinearCalibration) -> LinearSection:
        """The section for a fitted calibration."""
        return cls(**{name: getattr(calibration, name) for name in cls.model_fields})


class TwoBranchSection(Section):
    """The slower of two lines; see `TwoBranchCalibration`. Errors are null where unknown."""

    memory_slope: NotNegative
    memory_floor_s: NotNegative
    compute_slope: NotNegative
    compute_floor_s: NotNegative
    memory_slope_se: NotNegative | None = None
    memory_floor_se_s: NotNegative | None = None
    compute_slope_se: NotNegative | None = None
    compute_floor_se_s: NotNegative | None = None

    @classmethod
    def of(cls, calibration: TwoBranchCalibration) -> TwoBranchSection:
        """The section for a fitted calibration."""
        names = ("memory_slope_se", "memory_floor_se_s", "compute_slope_se", "compute_floor_se_s")
        return cls(
            memory_slope=calibration.memory_slope,
            memory_floor_s=calibration.memory_floor_s,
            compute_slope=calibration.compute_slope,
            compute_floor_s=calibration.compute_floor_s,
            **dict(zip(names, calibration.standard_errors, strict=True)),
        )

    @model_validator(mode="after")
    def _check(self) -> TwoBranchSection:
        slopes, floors_s = (
            (self.memory_slope, self.compute_slope),
            (self.memory_floor_s, self.compute_floor_s),
        )
        if not max(*slopes, *floors_s) > 0:
            raise ValueError("at least one of the coefficients must be above 0")
        return self

    def calibration(self, roofline: Roofline) -> TwoBranchCalibration:
        """The calibration."""
        return TwoBranchCalibration(
            roofline=roofline.with_count("paper"),
            memory_slope=self.memory_slope,
            memory_floor_s=self.memory_floor_s,
            compute_slope=self.compute_slope,
            compute_floor_s=self.compute_floor_s,
            standard_errors=(
                self.memory_slope_se,
                self.memory_floor_se_s,
                self.compute_slope_se,
                self.compute_floor_se_s,
            ),
        )


class PhysicalSection(Section):
    """Coefficients over the work at the peaks; see `PhysicalCalibration`."""

    floor: NotNegative
    weights: NotNegative
    matrix_flops: NotNegative
    kv_read: NotNegative
    attention_flops: NotNegative
    activations: NotNegative
    floor_se: NotNegative | None = None
    weights_se: NotNegative | None = None
    matrix_flops_se: NotNegative | None = None
    kv_read_se: NotNegative | None = None
    attention_flops_se: NotNegative | None = None
    activations_se: NotNegative | None = None
    tile_rows: Count
    attention_rows: Count
    noise: NotNegative
    points: Count

    @classmethod
    def of(cls, calibration: PhysicalCalibration) -> PhysicalSection:
        """The section for a fitted calibration."""
        fields: dict[str, Any] = {
            "tile_rows": calibration.tile_rows,
            "attention_rows": calibration.attention_rows,
            "noise": calibration.noise,
            "points": calibration.points,
        }
        for index, name in enumerate(COEFFICIENTS):
            fields[name] = calibration.coefficients[index]
            fields[f"{name}_se"] = calibration.standard_errors[index]
        return cls(**fields)

    @model_validator(mode="after")
    def _check(self) -> PhysicalSection:
        if not max(self.floor, self.weights, self.matrix_flops) > 0:
            raise ValueError("floor, weights or matrix_flops must be above 0")
        return self

    def calibration(self, roofline: Roofline) -> PhysicalCalibration:
        """The calibration."""
        return PhysicalCalibration(
            roofline=roofline,
            coefficients=tuple(getattr(self, name) for name in COEFFICIENTS),
            standard_errors=tuple(getattr(self, f"{name}_se") for name in COEFFICIENTS),
            tile_rows=self.tile_rows,
            attention_rows=self.attention_rows,
            noise=self.noise,
            points=self.points,
        )


class StairsSection(Section):
    """Standard deviations of the correction over `physical`; see `StairsCalibration`."""

    step: Positive
    tile: Positive
    context: NotNegative
    noise: Positive

    @classmethod
    def of(cls, calibration: StairsCalibration) -> StairsSection:
        """The section for a fitted calibration."""
        return cls(**{name: getattr(calibration.scales, name) for name in cls.model_fields})

    def scales(self) -> Scales:
        """The scales to condition with."""
        return Scales(**self.model_dump())


class SurfaceOptionsSection(Section):
    """How the measured surface is interpolated; see `SurfaceOptions`."""

    rows: Literal["work", "log"]
    context: Literal["exact", "line", "mean"]

    @classmethod
    def of(cls, options: SurfaceOptions) -> SurfaceOptionsSection:
        """The section for chosen options."""
        return cls(rows=options.rows, context=options.context)


class CalibrationSection(Section):
    """The calibrations, which one predicts best, and each one's cross-validated error.

    `cross_validated_regret` is the mean decision regret of the same predictions.
    """

    selected: CalibrationName
    linear: LinearSection
    two_branch: TwoBranchSection | None = None
    physical: PhysicalSection | None = None
    surface: SurfaceOptionsSection | None = None
    stairs: StairsSection | None = None
    cross_validated: dict[CalibrationName, ErrorSection] = Field(default_factory=dict)
    cross_validated_regret: dict[CalibrationName, Share] = Field(default_factory=dict)

    @classmethod
    def of(cls, selection: Selection) -> CalibrationSection:
        """The section for fitted calibrations."""
        s = selection
        return cls(
            selected=s.selected,
            linear=LinearSection.of(s.linear),
            two_branch=None if s.two_branch is None else TwoBranchSection.of(s.two_branch),
            physical=None if s.physical is None else PhysicalSection.of(s.physical),
            surface=None if s.surface is None else SurfaceOptionsSection.of(s.surface.options),
            stairs=None if s.stairs is None else StairsSection.of(s.stairs),
            cross_validated={
                name: ErrorSection.of(error) for name, error in s.cross_validated.items()
            },
            cross_validated_regret={name: regret.mean for name, regret in s.regret.items()},
        )

    @model_validator(mode="after")
    def _check(self) -> CalibrationSection:
        if getattr(self, self.selected) is None:
            raise ValueError(f"selected is {self.selected}, but the field is missing")
        if self.stairs is not None and self.physical is None:
            raise ValueError("stairs needs the field physical, which is missing")
        return self

    def build(self, points: Points | None, roofline: Roofline) -> Calibration:
        """The selected calibration; `points` are those that surface and stairs interpolate.

        Raises InputError where points are missing or too few.
        """
        if self.selected == "linear":
            return LinearCalibration(
                roofline=roofline.with_count("paper"), **self.linear.model_dump()
            )
        if self.selected == "two_branch" and self.two_branch is not None:
            return self.two_branch.calibration(roofline)
        if self.selected == "physical" and self.physical is not None:
            return self.physical.calibration(roofline)
        if points is None:
            raise InputError("the profile has no surface")
        if self.selected == "surface" and self.surface is not None:
            return build_surface(points, roofline, SurfaceOptions(**self.surface.model_dump()))
        if self.stairs is None or self.physical is None:  # validation forbids it
            raise InputError(f"the coefficients of {self.selected} are missing")
        physical = self.physical.calibration(roofline)
        try:
            return build_stairs(points, physical, self.stairs.scales())
        except np.linalg.LinAlgError:
            raise InputError("the scales of stairs give no usable covariance") from None

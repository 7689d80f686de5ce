"""The protocol between a calibration and the thing that it measures, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from costmodel.errors import InputError
from costmodel.profile.schema import PeaksSection
from decoder.model.loading import Weights
from decoder.model.making import Quantization
from decoder.model.runtime.eager import RuntimeChoice
from decoder.profiling.measured_profile import MeasuredSubject
from profiler.calibrate.sweep import SweepResult, Task, TimedCalls
from profiler.measure.instruments import Instruments


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """Settings of a calibration; None takes the default of the source and its device.

    target         folder, hub id or name of a known target
    weights        `auto` takes local weights where there are some, else random ones
    drafter        drafter whose cost is measured too, as in `rooftree generate`
    device         `cpu`, `cuda` or `cuda:N`
    dtype          `bfloat16`, `float16` or `float32`
    contexts       cached tokens at which to measure
    max_nodes      nodes of the largest draft tree
    batches        batch sizes
    time_budget_s  time to measure. None: a default, which begins when the target is loaded
    output         YAML file of the profile; None: the user's profile directory
    replace        a stored profile that is better, which stays otherwise
    seed           of the held-out points
    """

    target: str | None = None
    weights: Weights = "auto"
    drafter: str = "ngram"
    device: str | None = None
    dtype: str | None = None
    runtime: RuntimeChoice = "auto"
    quantization: Quantization | None = None
    contexts: tuple[int, ...] | None = None
    max_nodes: int | None = None
    batches: tuple[int, ...] | None = None
    time_budget_s: float | None = None
    output: Path | None = None
    replace: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("contexts", self.contexts), ("batches", self.batches)):
            if values is not None and (not values or min(values) < 1):
                raise InputError(f"{name} must be whole numbers of 1 or more, got {values}")
        if self.contexts is not None and len(set(self.contexts)) < 2:
            raise InputError("a calibration needs two contexts or more", hint="As 256,1024.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSource:
    """What a source has prepared to be timed.

    subject       device, architecture and runtime that the profile is of
    grid          points of the surface, of which the sweep chooses some
    fixed         points that are measured in any case
    held_out      the points that no fit uses, where trees have up to so many rows; None: they are
                  among the fixed ones, and every row count of the grid matters
    journal       what the journal's header says of this run besides its subject
    limit_s       default of the most time to measure
    loaded_s      when the target was loaded, by time.perf_counter
    forwards      the samples as those of forwards, where the calls time something more
    warnings      what the user should know, beside the state of the machine
    """

    subject: MeasuredSubject
    peaks: PeaksSection
    grid: list[Task]
    fixed: list[Task]
    workload: TimedCalls
    instruments: Instruments
    journal: Mapping[str, Any]
    limit_s: float
    loaded_s: float
    held_out: Callable[[int], Sequence[Task]] | None = None
    forwards: Callable[[SweepResult], SweepResult] = lambda swept: swept
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a source adds to the profile of its samples.

    sections    parts of the profile, by their field
    provenance  fields of its provenance
    error_bar   from the mean held-out error, where that is not all of the error
    warnings    what went wrong while it was measured
    """

    subject: MeasuredSubject
    sections: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error_bar: Callable[[float], float] | None = None


class CalibrationSource(Protocol):
    """Whatever can be calibrated: this decoder, an engine in this process, or a server.

    lock        label of the device that one calibration uses at a time
    cuda_index  the GPU of this machine that is measured; None: it is no GPU of this machine
    """

    lock: str
    cuda_index: int | None

    def prepare(self, say: Callable[[str], None]) -> PreparedSource:
        """Load or ask what is measured, and plan its points."""

    def additions(self, swept: SweepResult) -> Additions:
        """The parts of the profile that this source alone has."""

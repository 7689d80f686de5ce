"""Overheads of serving engines, fitted to measured servers in a closed loop.

A closed loop keeps C requests in flight. B of them run at once, fewer than C where the cache does
not hold all. `costmodel/planning/batching.py` has the formula; `lab/studies/capacity_accuracy.py`
fits and stores the coefficients.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.batching import (
    FACTORS,
    OVERHEADS,
    SERVED,
    SHARED,
    Cycle,
    Overheads,
    TokenWork,
    cycle_work,
    seconds_per_token,
    work_columns,
)
from costmodel.planning.engines import (
    EngineRules,
    MemoryRule,
    ValueBytes,
    cache_bytes_per_token,
    weight_bytes,
)
from costmodel.planning.forwards import TargetForward
from costmodel.planning.traffic import Traffic
from costmodel.statistics import Array, Bools

# Seconds of one unit of each fitted overhead: about its expected size.
_UNIT_S = {
    "layer_s": 1e-5, "prompt_layer_s": 1e-4, "step_s": 1e-3, "sequence_s": 1e-5, "device_s": 1e-3,
    "logits": 100.0,
}  # fmt: skip
# Weights of the priors, in log errors a unit for 500 rows: factors are near 1, overheads are hardly
# known, and engines differ from one another by about a third of a unit.
_FACTOR_WEIGHT, _SHARED_WEIGHT, _ENGINE_WEIGHT = 2.0, 0.1, 0.3
_PRIOR_ROWS = 500.0
# What these servers are fitted; SERVED is of the rows that `served_rows.py` plans.
FITTED = (*FACTORS, *OVERHEADS)
# Beyond a log error of this size rows count less and less.
_OUTLIER = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A closed loop of equal requests: mean prompt and answer tokens, requests in flight."""

    prompt_tokens: float
    output_tokens: float
    concurrency: float

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens", "concurrency"):
            value = getattr(self, field)
            if not 1 <= value < math.inf:
                raise InputError(f"{field} must be a number of at least 1 (is {value!r})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """One measured time per output token, and the work that explains it."""

    engine: str
    overlaps_host: bool
    work: TokenWork
    seconds: float


def cache_tokens(
    rule: MemoryRule,
    architecture: ModelArchitecture,
    value: ValueBytes,
    memory_bytes: float,
    tensor_parallel: int = 1,
    step_tokens: int = 8192,
) -> float:
    """Tokens that fit into the cache. Raises InputError where the weights do not fit."""
    weights = weight_bytes(architecture, value, tensor_parallel)
    beside = rule.activation_bytes(architecture, step_tokens, tensor_parallel)
    free = rule.free_bytes(memory_bytes, weights + beside)
    if free <= 0:
        raise InputError(
            f"{architecture.name} does not fit: {weights / 1e9:.1f} GB of weights on each of"
            f" {tensor_parallel} device(s) with {memory_bytes / 1e9:.1f} GB",
            hint="Use more devices (tensor parallelism) or a smaller precision",
        )
    return free / cache_bytes_per_token(architecture, value, tensor_parallel)


def largest_concurrency(tokens: float, tokens_held: float) -> float:
    """Requests of `tokens_held` tokens that run at once in a cache of `tokens`; at least 1."""
    return max(tokens / tokens_held, 1.0)


def steady_work(forward: TargetForward, rules: EngineRules, load: ServerLoad) -> TokenWork:
    """Work of one token in steady state. Raises InputError where the weights do not fit."""
    traffic = Traffic(prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens)
    tokens = cache_tokens(
        rules.memory, forward.architecture, forward.value_bytes, forward.device.memory_bytes,
        forward.tensor_parallel, rules.step_tokens,
    )  # fmt: skip
    tokens_held = rules.memory.tokens_held(load.prompt_tokens, load.output_tokens)
    running = min(load.concurrency, largest_concurrency(tokens, tokens_held))
    return cycle_work(forward, rules, traffic, running, Cycle())


def write_overheads(fitted: Mapping[str, Mapping[str, float]]) -> None:
    """Put fitted numbers into the lines of engines in calibrations/engines.yaml."""
    path = shipped_directory() / "engines.yaml"
    text, table = path.read_text(encoding="utf-8"), read_yaml(path)
    for engine, numbers in fitted.items():
        row = ", ".join(f"{name}: {value:.4g}" for name, value in (table[engine] | numbers).items())
        text = re.sub(rf"^{re.escape(engine)}: .*", f"{engine}: {{{row}}}", text, flags=re.M)
    path.write_text(text, encoding="utf-8")


def fit_overheads(rows: Sequence[MeasuredServer]) -> dict[str, Overheads]:
    """Overheads of each engine, and `shared` ones for an engine without rows.

    Robust least squares of log errors. Factors are shared by all engines; each overhead is a
    shared one plus the engine's difference, which a prior keeps small. Raises InputError for no
    rows.
    """
    if not rows:
        raise InputError("there are no measured servers to fit overheads to")
    engines = sorted({row.engine for row in rows})
    columns = work_columns([row.work for row in rows])
    overlaps = np.array([row.overlaps_host for row in rows])
    measured_s = np.array([row.seconds for row in rows])
    engine_index = np.array([engines.index(row.engine) for row in rows])
    layout = _Layout(engines=len(engines))
    scale = np.sqrt(len(rows) / _PRIOR_ROWS)

    def residuals(x: Array) -> Array:
        predicted_s = seconds_per_token(columns, layout.coefficients(x)[engine_index], overlaps)
        robust = np.arcsinh(np.log(predicted_s / measured_s) / _OUTLIER) * _OUTLIER
        return np.concatenate([robust, scale * layout.weights * (x - layout.prior)])

    start = np.where(layout.prior > 0, 1.0, 0.2)
    x = least_squares(residuals, start, bounds=(layout.lower, np.inf)).x
    coefficients = layout.coefficients(x)
    fitted = {name: _overheads(coefficients[i]) for i, name in enumerate(engines)}
    shared = layout.coefficients(np.where(layout.differences, 0.0, x))[0]
    return fitted | {SHARED: _overheads(shared)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The fitted vector: factors, shared overheads, then each engine's differences, in units."""

    engines: int

    @property
    def differences(self) -> Bools:
        shared = len(FITTED)
        return np.arange(shared + self.engines * len(OVERHEADS)) >= shared

    @property
    def prior(self) -> Array:
        return np.where(np.arange(len(self.differences)) < len(FACTORS), 1.0, 0.0)

    @property
    def weights(self) -> Array:
        weights = np.where(self.differences, _ENGINE_WEIGHT, _SHARED_WEIGHT)
        return np.where(self.prior > 0, _FACTOR_WEIGHT, weights)

    @property
    def lower(self) -> Array:
        return np.where(self.differences, -5.0, 0.0)

    def coefficients(self, x: Array) -> Array:
        """Factors and overheads in seconds [engines, COEFFICIENTS]."""
        count, units_s = len(FACTORS), np.array([_UNIT_S[name] for name in OVERHEADS])
        shared = x[count : len(FITTED)]
        differences = x[len(FITTED) :].reshape(self.engines, len(OVERHEADS))
        factors = np.broadcast_to(x[:count], (self.engines, count))
        none = np.zeros((self.engines, len(SERVED)))
        # Only a layer may take less than its operators.
        least = np.where(np.array(OVERHEADS) == "layer_s", -np.inf, 0.0)
        own = np.maximum(shared + differences, least)
        return np.concatenate([factors, own * units_s, none], axis=1)


def _overheads(coefficients: Array) -> Overheads:
    return Overheads(**dict(zip(FITTED, map(float, coefficients), strict=False)))

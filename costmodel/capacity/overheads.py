"""What a serving engine adds to kernel times, fitted on measured servers.

    device = products + attention + all-reduces + prompts, each x a factor near 1,
             + layers x (layer + prompt steps x prompt layer)
    host   = step + running x sequence + log2(devices) x device
    time per token = sqrt(device^2 + host^2) where the engine prepares a step while the device
                     runs the one before it (a smooth maximum), else device + host

Norms, rotary embeddings, activations and gaps between kernels are in `layer`; a step with a prompt
in it runs outside of a captured graph, which `prompt layer` pays for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from costmodel.capacity.steady import TokenWork
from costmodel.errors import InputError

Array = NDArray[np.float64]

FACTORS = ("products", "attention", "all_reduce", "prompts")
DEVICE_SECONDS = ("layer_s", "prompt_layer_s")
HOST_SECONDS = ("step_s", "sequence_s", "device_s")
OVERHEADS = (*DEVICE_SECONDS, *HOST_SECONDS)
# Seconds that one unit of a fitted overhead stands for: about what each is expected to be.
_UNIT_S = {
    "layer_s": 1e-5,
    "prompt_layer_s": 1e-4,
    "step_s": 1e-3,
    "sequence_s": 1e-5,
    "device_s": 1e-3,
}
# Weights of the priors, in log errors a unit for 500 rows: factors are near 1, overheads are hardly
# known, and engines differ from one another by about a third of a unit.
_FACTOR_WEIGHT, _SHARED_WEIGHT, _ENGINE_WEIGHT = 2.0, 0.1, 0.3
_PRIOR_ROWS = 500.0
# Beyond a log error of this size rows count less and less.
_OUTLIER = 0.1
_LEAST_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """One engine's coefficients; the defaults are kernel times and nothing else."""

    products: float = 1.0
    attention: float = 1.0
    all_reduce: float = 1.0
    prompts: float = 1.0
    layer_s: float = 0.0
    prompt_layer_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    device_s: float = 0.0

    def time_per_token_s(self, work: TokenWork, *, overlaps_host: bool) -> float:
        """Seconds between two tokens of one answer in steady state."""
        values = np.array([getattr(self, name) for name in (*FACTORS, *OVERHEADS)])
        return float(_seconds(_columns([work]), values, np.array([overlaps_host]))[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredServer:
    """One measured time per output token and the work that it should be explained by."""

    engine: str
    overlaps_host: bool
    work: TokenWork
    seconds: float


def fit_overheads(rows: Sequence[MeasuredServer]) -> dict[str, Overheads]:
    """Each engine's overheads, `shared` for an engine without rows.

    Robust least squares of log errors; factors are shared by all engines, every overhead is a
    shared one plus an engine's own difference, which a prior keeps small. Raises InputError for
    no rows.
    """
    from scipy.optimize import least_squares

    if not rows:
        raise InputError("there are no measured servers to fit overheads to")
    engines = sorted({row.engine for row in rows})
    columns = _columns([row.work for row in rows])
    overlaps = np.array([row.overlaps_host for row in rows])
    measured = np.array([row.seconds for row in rows])
    which = np.array([engines.index(row.engine) for row in rows])
    layout = _Layout(engines=len(engines))
    scale = np.sqrt(len(rows) / _PRIOR_ROWS)

    def residuals(x: Array) -> Array:
        error = np.log(_seconds(columns, layout.values(x)[which], overlaps) / measured)
        robust = np.arcsinh(error / _OUTLIER) * _OUTLIER
        return np.concatenate([robust, scale * layout.weights * (x - layout.prior)])

    start = np.where(layout.prior > 0, 1.0, 0.2)
    found = least_squares(residuals, start, bounds=(layout.lower, np.inf)).x
    values = layout.values(found)
    result = {name: _overheads(values[i]) for i, name in enumerate(engines)}
    result["shared"] = _overheads(layout.values(np.where(layout.own, 0.0, found))[0])
    return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The fitted vector: factors, shared overheads, then each engine's differences, in units."""

    engines: int

    @property
    def own(self) -> NDArray[np.bool_]:
        shared = len(FACTORS) + len(OVERHEADS)
        return np.arange(shared + self.engines * len(OVERHEADS)) >= shared

    @property
    def prior(self) -> Array:
        return np.where(np.arange(len(self.own)) < len(FACTORS), 1.0, 0.0)

    @property
    def weights(self) -> Array:
        weights = np.where(self.own, _ENGINE_WEIGHT, _SHARED_WEIGHT)
        return np.where(self.prior > 0, _FACTOR_WEIGHT, weights)

    @property
    def lower(self) -> Array:
        return np.where(self.own, -5.0, 0.0)

    def values(self, x: Array) -> Array:
        """Coefficients in seconds, [engines, factors and overheads]."""
        count, units = len(FACTORS), np.array([_UNIT_S[name] for name in OVERHEADS])
        shared = x[count : count + len(OVERHEADS)]
        own = x[count + len(OVERHEADS) :].reshape(self.engines, len(OVERHEADS))
        overheads = (shared + own) * units
        factors = np.broadcast_to(x[:count], (self.engines, count))
        return np.concatenate([factors, overheads], axis=1)


def _columns(work: Sequence[TokenWork]) -> dict[str, Array]:
    fields = [field.name for field in dataclasses.fields(TokenWork)]
    return {name: np.array([float(getattr(w, name)) for w in work]) for name in fields}


def _seconds(work: Mapping[str, Array], values: Array, overlaps: Array) -> Array:
    """Seconds a token [rows] from coefficients [rows or 1, factors and overheads]."""
    names = (*FACTORS, *OVERHEADS)
    c = {name: values[..., i] for i, name in enumerate(names)}
    device = (
        c["products"] * work["products_s"]
        + c["attention"] * work["attention_s"]
        + c["all_reduce"] * work["all_reduce_s"]
        + c["prompts"] * work["prompts_s"]
        + work["layers"] * (c["layer_s"] + work["prompt_steps"] * c["prompt_layer_s"])
    )
    host = (
        c["step_s"]
        + work["running"] * c["sequence_s"]
        + np.log2(work["devices"]) * c["device_s"]
        + work["host_s"]
    )
    device, host = np.maximum(device, _LEAST_S), np.maximum(host, 0.0)
    return np.where(overlaps, np.hypot(device, host), device + host)


def _overheads(values: Array) -> Overheads:
    names = (*FACTORS, *OVERHEADS)
    return Overheads(**{name: float(v) for name, v in zip(names, values, strict=True)})

"""Operator tables at the precision of a server, with the fastest kernels of all engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from costmodel.catalog import DeviceSpec, Peaks
from costmodel.compose.aiconfigurator import (
    ENGINES,
    all_reduce_curves,
    attention_of,
    attention_table,
    data_folder,
    find_system,
    matmul_shapes,
    newest_version,
    read_table,
)
from costmodel.compose.attention import Attention
from costmodel.compose.matmul import MatmulTable
from costmodel.errors import DeviceError, InputError

Array = NDArray[np.float64]
Curve = tuple[Array, Array]
Shapes = dict[tuple[int, int], Curve]
Weights = Literal["bfloat16", "fp8", "fp8_dynamic", "fp8_block", "nvfp4"]
Cache = Literal["bfloat16", "fp8"]

# Bytes of a weight; nvfp4 has one 8-bit scale per 16 values.
WEIGHT_BYTES: Mapping[Weights, float] = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_dynamic": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
}
CACHE_BYTES: Mapping[Cache, float] = {"bfloat16": 2.0, "fp8": 1.0}
# Dense rate as a multiple of bfloat16's (NVIDIA data sheets of Hopper and Blackwell).
_SPEEDUP = {"bfloat16": 1.0, "fp8": 2.0, "fp8_dynamic": 2.0, "fp8_block": 2.0, "nvfp4": 4.0}
# Largest share of a product's time that is attributed to finding the scales of its input.
_LARGEST_SCALE_SHARE = 0.6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Types of weights and of cached keys and values; the LM head stays in bfloat16.

    `fp8`: one scale per tensor, stored in the checkpoint; `fp8_dynamic`: one per tensor, computed
    for every product; `fp8_block`: one per block. Raises InputError for an unknown type.
    """

    weights: Weights = "bfloat16"
    cache: Cache = "bfloat16"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_BYTES:
            raise InputError(
                f"no weights are called '{self.weights}'",
                hint=f"Use one of: {', '.join(WEIGHT_BYTES)}",
            )
        if self.cache not in CACHE_BYTES:
            raise InputError(
                f"no cache is called '{self.cache}'", hint=f"Use one of: {', '.join(CACHE_BYTES)}"
            )

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, scales included."""
        return WEIGHT_BYTES[self.weights]

    @property
    def cache_bytes(self) -> float:
        """Bytes of one cached value."""
        return CACHE_BYTES[self.cache]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingTables:
    """Measured operators of one device, with one engine's attention, at one precision.

    `products` and `head` hold one table per measured engine; the engines call the same libraries,
    so the fastest time is used. `all_reduce` has one (values, seconds) curve per engine, by number
    of devices.
    """

    device: DeviceSpec
    source: str
    precision: Precision
    head_dim: int
    products: tuple[MatmulTable, ...]
    head: tuple[MatmulTable, ...]
    attention: Attention
    all_reduce: Mapping[int, tuple[Curve, ...]]

    def product_s(self, rows: Array, n: int, k: int) -> Array:
        """Seconds [rows] of a quantised product y[rows, n] = x[rows, k] w[n, k]."""
        return _fastest([table.seconds(rows, n, k) for table in self.products])

    def head_s(self, rows: Array, n: int, k: int) -> Array:
        """Seconds [rows] of the LM head's product."""
        return _fastest([table.seconds(rows, n, k) for table in self.head])

    def all_reduce_s(self, values: Array, devices: int) -> Array:
        """Seconds [values] of one all-reduce of `values` bfloat16 values. Raises InputError."""
        if devices == 1:
            return np.zeros_like(values)
        if devices not in self.all_reduce:
            raise InputError(
                f"all-reduces of {devices} {self.device.name} were not measured",
                hint=f"Measured: {', '.join(str(n) for n in sorted(self.all_reduce))}",
            )
        times = [
            np.interp(values, size, seconds) * np.maximum(values / size[-1], 1.0)
            for size, seconds in self.all_reduce[devices]
        ]
        return _fastest(times)

    @property
    def read_bytes_per_s(self) -> float:
        """Best rate at which weights were read."""
        return max(table.read_bytes_per_s for table in self.products)


def load_serving(
    device: DeviceSpec,
    engine: str,
    precision: Precision,
    *,
    head_dim: int = 128,
    splits_keys: bool = True,
) -> ServingTables:
    """The newest sound tables of one device.

    With `splits_keys` all processors share the keys of a verification; otherwise its attention
    takes the form of the tables' kernel for prompts.

    Raises InputError for an engine or precision, and DeviceError for a device, without tables.
    """
    system = find_system(device, engine)
    data = data_folder() / system
    folder = data / "attention" / engine / newest_version(data, system, engine)
    curves = [all_reduce_curves(data, name) for name in ENGINES]
    attention = _attention(folder, device, head_dim, precision.cache)
    return ServingTables(
        device=device,
        source=f"aiconfigurator-core (NVIDIA, Apache-2.0), {system}, {folder.name} of {engine}",
        precision=precision,
        head_dim=head_dim,
        products=_products(data, device, precision.weights),
        head=_products(data, device, "bfloat16"),
        attention=attention.splitting_keys() if splits_keys else attention,
        all_reduce={
            count: tuple(
                _rising(*engine_curves[count]) for engine_curves in curves if count in engine_curves
            )
            for count in sorted(set().union(*curves))
        },
    )


def _fastest(times: list[Array]) -> Array:
    return np.asarray(np.min(times, axis=0), dtype=np.float64)


def _products(data: Path, device: DeviceSpec, weights: Weights) -> tuple[MatmulTable, ...]:
    """One table per engine with these weights. Raises InputError where there is none."""
    tables = []
    dtype = "fp8" if weights == "fp8_dynamic" else weights
    for engine in ENGINES:
        try:
            version = newest_version(data, data.name, engine)
        except DeviceError:
            continue
        shapes = matmul_shapes(data / "gemm" / engine / version, dtype)
        if weights == "fp8":
            shapes = _without_scales(shapes, _scale_times(data / "quantize" / engine))
        if shapes:
            tables.append(
                _table({place: _rising(*s) for place, s in shapes.items()}, device, weights)
            )
    if not tables:
        raise InputError(f"there are no products of {weights} weights on {device.name}")
    return tuple(tables)


def _table(shapes: Shapes, device: DeviceSpec, weights: Weights) -> MatmulTable:
    peaks = Peaks(
        flops_per_s=device.peak_flops_per_s * _SPEEDUP[weights], bytes_per_s=device.peak_bytes_per_s
    )
    return MatmulTable(
        shapes=shapes,
        peaks=peaks,
        l2_bytes=device.l2_bytes,
        element_bytes=WEIGHT_BYTES[weights],
    )


def _rising(size: Array, seconds: Array) -> Curve:
    """The curve without upward outliers: no time exceeds that of more work."""
    return size, np.minimum.accumulate(seconds[::-1])[::-1]


def _scale_times(folder: Path) -> dict[int, Curve]:
    """{k: (m, seconds)} of computing the scale of x[m, k]; empty where it was not measured."""
    paths = sorted(folder.glob("*/computescale_perf.parquet"))
    if not paths:
        return {}
    table = read_table(paths[0], ("m", "k", "latency"))
    times = {}
    for k in np.unique(table["k"]):
        here = table["k"] == k
        m, first = np.unique(table["m"][here], return_index=True)
        times[int(k)] = _rising(m.astype(float), table["latency"][here][first] * 1e-3)
    return times


def _without_scales(shapes: Shapes, scale_s: dict[int, Curve]) -> Shapes:
    """Products without the time of computing their input's scale, which static scales save."""
    if not scale_s:
        return shapes
    sizes = np.array(sorted(scale_s))
    static = {}
    for (n, k), (m, seconds) in shapes.items():
        nearest = int(sizes[np.argmin(np.abs(np.log(sizes / k)))])
        saved = np.interp(m, *scale_s[nearest])
        static[n, k] = (m, seconds - np.minimum(saved, _LARGEST_SCALE_SHARE * seconds))
    return static


def _attention(folder: Path, device: DeviceSpec, head_dim: int, cache: Cache) -> Attention:
    """Attention of decoding steps, and of prompts without cached tokens."""
    generation, _ = attention_table(folder, "generation", head_dim, ("bfloat16", cache))
    context, kernel = _context(folder, head_dim, cache)
    return attention_of(generation, context, kernel, device, head_dim)


def _context(
    folder: Path, head_dim: int, cache: Cache
) -> tuple[Mapping[tuple[int, int], Mapping[tuple[int, int], float]], str]:
    """Attention of prompts in the cache's type, where a kernel for it was measured."""
    for dtypes in [("fp8", "fp8"), ("bfloat16", "fp8")] if cache == "fp8" else []:
        try:
            return attention_table(folder, "context", head_dim, dtypes)
        except InputError:
            continue
    return attention_table(folder, "context", head_dim)

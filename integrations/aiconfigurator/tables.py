"""Operator tables of the PyPI package aiconfigurator-core (NVIDIA, Apache-2.0).

The package is the optional extra `operators`. None of its code runs; only its parquet tables
under `systems/data/<system>/<operator>/<engine>/<version>/` are read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from costmodel.catalog import DeviceSpec
from costmodel.compose.attention import (
    Attention,
    AttentionTable,
    LatentTable,
    TileForm,
    checked,
    rising,
)
from costmodel.compose.matmul import MatmulTable
from costmodel.compose.tables import (
    BytesAtBandwidth,
    OperatorTables,
    PublishedTables,
    RecurrentTable,
    product_peaks,
)
from costmodel.errors import DeviceError, InputError
from costmodel.statistics import Array
from costmodel.weights import WEIGHT_BYTES, Cache, Weights
from integrations.aiconfigurator.experts import all_experts
from integrations.aiconfigurator.package import (
    ENGINES,
    SYSTEMS,
    Columns,
    data_folder,
    engines_from,
    find_system,
    is_installed,
    newest_version,
    package_version,
    read_table,
    version_key,
    without_outliers,
)

_PLAIN_PRODUCTS = ("bfloat16", "mxfp4")  # weights whose products, experts apart, are of bfloat16
Curve = tuple[Array, Array]
Shapes = dict[tuple[int, int], Curve]

# Tiling of each prompt kernel. Chunked measurements show that of FlashAttention 2 on other devices.
KERNELS = {
    "vllm_flash_attn": TileForm(tile_rows=64),
    "vllm_flash_attn_fa2": TileForm(tile_rows=64),
    "vllm_flash_attn_fa3": TileForm(tile_rows=128, splits_keys=True),
    "fa3": TileForm(tile_rows=128, splits_keys=True),
    "vllm_flashinfer_trtllmprefill": TileForm(tile_rows=256),
}
_ATTENTION_LABELS = ("kernel_source", "head_dim", "attn_dtype", "kv_cache_dtype", "window_size")
UNKNOWN_KERNEL = TileForm(tile_rows=128)
_BF16 = "bfloat16"
_SCALED = (_BF16, "fp8_block")  # products that may take longer than in 16 bits: see `_products`
_PHASES = ("generation", "context")  # of one row, of several
# Ranks and heads' sizes of the latent attention whose kernels were timed, and of models whose
# layers were timed with an indexer, which chooses 2,048 tokens.
_LATENT = (512, 64, 192, 128)
_CHOOSING = {
    "deepseek-ai/DeepSeek-V3.2": (512, 64, 192, 128, 128, 2048),
    "zai-org/GLM-5": (512, 64, 256, 256, 64, 2048),
    "zai-org/GLM-5-FP8": (512, 64, 256, 256, 64, 2048),
    "nvidia/GLM-5.2-NVFP4": (512, 64, 256, 256, 64, 2048),
}
_LEAP = 4.0
# Largest share of a product's time that is attributed to finding the scales of its input.
_LARGEST_SCALE_SHARE = 0.6
_HOST_TIMED = 3.0  # times another engine's smallest product


def load_published(
    device: DeviceSpec,
    engine: str = "vllm",
    *,
    head_dim: int = 128,
    experts: bool = False,
    weights: Weights = "bfloat16",
    cache: Cache = "bfloat16",
) -> OperatorTables:
    """The newest sound tables of one device, engine and precision.

    Products, experts and all-reduces that the engine's tables lack are those of another engine,
    which calls the same libraries. Raises InputError where the extra is not installed or the
    engine or precision is unknown, and DeviceError where the device has no tables.
    """
    system = find_system(device, engine)
    data = data_folder() / system
    version = newest_version(data, system, engine)
    head = _products(data, device, engine, "bfloat16")
    attention = _attention(data / "attention" / engine / version, device, head_dim, cache)
    other: Weights = "fp8" if weights == _BF16 else "bfloat16"
    curves: dict[int, Curve] = {}
    for name in engines_from(engine):
        curves = all_reduce_curves(data, name) | curves
    return OperatorTables(
        device=device,
        engine=engine,
        source=f"aiconfigurator-core {package_version()} (NVIDIA, Apache-2.0), {system},"
        f" {engine} {version}",
        matmul=head if weights in _PLAIN_PRODUCTS else _products(data, device, engine, weights),
        attention=attention,
        small=BytesAtBandwidth(launch_s=head.smallest_s(), device=device),
        head_dim=head_dim,
        experts=all_experts(data, device, engine, weights) if experts else {},
        other_experts=all_experts(data, device, engine, other) if experts else {},
        recurrent=_recurrent(data / "linear_attention" / engine),
        latent=functools.partial(_latent, data, engine, weights, cache),
        all_reduce=curves,
        weights=weights,
        cache=cache,
        head=head,
    )


@functools.cache
def _products_table(folder: Path) -> Columns:
    return read_table(folder / "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k", "latency"))


def matmul_shapes(folder: Path, dtype: str) -> Shapes:
    """{(n, k): (ascending m, seconds)} of one type of weights; empty where there are none."""
    table = _products_table(folder)
    wanted = table["gemm_dtype"] == dtype
    if not wanted.any():
        return {}
    m, n, k = (table[name][wanted].astype(int) for name in ("m", "n", "k"))
    seconds = table["latency"][wanted] * 1e-3
    shapes = {}
    order = np.lexsort((m, k, n))
    m, n, k, seconds = m[order], n[order], k[order], seconds[order]
    edges = np.flatnonzero((np.diff(n) != 0) | (np.diff(k) != 0)) + 1
    for part in np.split(np.arange(len(m)), edges):
        rows, first = np.unique(m[part], return_index=True)
        shapes[int(n[part[0]]), int(k[part[0]])] = (rows.astype(float), seconds[part][first])
    return shapes


@functools.cache
def _products(data: Path, device: DeviceSpec, engine: str, weights: Weights) -> MatmulTable:
    """Products with these weights: the engine's, else another's. Raises InputError.

    An engine finds the scales of each block of an input, which was timed with the product; small
    ones take longer than in 16 bits, by 5 us of 9 (n 2048, k 7168, SGLang on a B200), and servers
    show it: DeepSeek-R1 in blocks is planned 8 % too fast with that time, 13 % without.

    Those of quantised weights, whose tables are noisy, without times above those of more rows; and
    another's where the engine's smallest product takes over three times its: the host that starts
    it was timed, as by vLLM 0.24 with blocks (81 to 161 us of 8), which a captured step leaves out.
    """
    tables: list[MatmulTable] = []
    dtype = "fp8" if weights == "fp8_dynamic" else weights
    for name in engines_from(engine):
        try:
            version = newest_version(data, data.name, name)
        except DeviceError:
            continue
        shapes = matmul_shapes(data / "gemm" / name / version, dtype)
        if weights == "fp8":
            shapes = _without_scales(shapes, _scale_times(data / "quantize" / name))
        if weights != _BF16:
            shapes = {
                place: (m, without_outliers(seconds)) for place, (m, seconds) in shapes.items()
            }
        if not shapes:
            continue
        table = MatmulTable(
            shapes=shapes,
            peaks=product_peaks(device, weights),
            l2_bytes=device.l2_bytes,
            element_bytes=WEIGHT_BYTES[weights],
            wider=None if weights in _SCALED else _products(data, device, engine, _BF16),
        )
        if weights == _BF16:
            return table
        tables.append(table)
    if not tables:
        raise InputError(f"there are no products of {weights} weights on {device.name}")
    least_s = min(table.smallest_s() for table in tables)
    return next(table for table in tables if table.smallest_s() <= _HOST_TIMED * least_s)


@functools.cache
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
        seconds = table["latency"][here][first] * 1e-3
        times[int(k)] = m.astype(float), without_outliers(seconds)
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


def _context_table(folder: Path, head_dim: int, cache: Cache) -> tuple[AttentionTable, str]:
    """Attention of prompts in the cache's type, where a kernel for it was measured."""
    for dtypes in [("fp8", "fp8"), (_BF16, "fp8")] if cache == "fp8" else []:
        with contextlib.suppress(InputError):
            return attention_table(folder, "context", head_dim, dtypes)
    return attention_table(folder, "context", head_dim)


@functools.cache
def _attention(folder: Path, device: DeviceSpec, head_dim: int, cache: Cache) -> Attention:
    """Attention from tables of one row and of prompts, with the tiling of the prompts' kernel."""
    generation, _ = attention_table(folder, "generation", head_dim, (_BF16, cache))
    context, kernel = _context_table(folder, head_dim, cache)
    form = KERNELS.get(kernel, UNKNOWN_KERNEL)
    key_s, busy_key_s = measure_keys(context, form, device.sm_count, head_dim)
    return Attention(
        generation=generation,
        context=context,
        form=form,
        sm_count=device.sm_count,
        key_s=key_s,
        busy_key_s=busy_key_s,
    )


def attention_table(
    folder: Path, kind: str, head_dim: int, dtypes: tuple[str, str] = (_BF16, _BF16)
) -> tuple[AttentionTable, str]:
    """{(heads, kv_heads): {(batch, tokens): seconds}} of the most frequent kernel, and its name.

    `kind` is `context` or `generation`; `dtypes` are those of attention and cache. Raises
    InputError where the table has no such rows.
    """
    heads = ("num_heads", "num_key_value_heads")
    columns = ("batch_size", "isl", "step", "latency", *heads, *_ATTENTION_LABELS)
    table = read_table(folder / f"{kind}_attention_perf.parquet", columns)
    wanted = (table["attn_dtype"] == dtypes[0]) & (table["kv_cache_dtype"] == dtypes[1])
    wanted &= table["head_dim"] == head_dim
    if "window_size" in table:
        wanted &= table["window_size"] == 0
    if not wanted.any():
        raise InputError(
            f"the attention tables have no heads of size {head_dim} in {dtypes[0]} with a cache"
            f" in {dtypes[1]}"
        )
    sources = table["kernel_source"].astype(str)
    kernels, counts = np.unique(sources[wanted], return_counts=True)
    kernel = str(kernels[np.argmax(counts)])
    wanted &= sources == kernel
    # A generation row attends to `step` cached tokens and to itself.
    tokens = "isl" if kind == "context" else "step"
    pairs = np.stack([table[name] for name in heads], axis=1).astype(int)
    tables = {
        (query, cached): _shortest(table, wanted & (pairs == (query, cached)).all(axis=1), tokens)
        for query, cached in np.unique(pairs[wanted], axis=0).tolist()
    }
    return checked(tables), kernel


def measure_keys(
    context: AttentionTable, form: TileForm, sm_count: int, head_dim: int
) -> tuple[float, float]:
    """(key_s, busy_key_s) of a device, from attention with an empty cache.

    key_s is the median over prompts of at least 1024 tokens whose tiles all run at once; busy_key_s
    comes from the largest measured case. Raises InputError where the table is too small for either.
    """
    alone, largest, busy = [], 0.0, 0.0
    for (heads, kv_heads), table in context.items():
        start = min((s for (b, n), s in table.items() if b == 1 and n <= 64), default=0.0)
        for (batch, rows), seconds in table.items():
            if batch != 1 or rows < 1024 or seconds <= start:
                continue
            tiles = float(form.tiles(rows, heads, kv_heads))
            if tiles <= sm_count:
                splits = max(1.0, np.floor(sm_count / tiles)) if form.splits_keys else 1.0
                alone.append((seconds - start) * splits / rows)
            work = heads * rows * (rows + form.tile_rows) / 2 / form.tile_rows
            if work > largest:
                largest, busy = work, (seconds - start) * sm_count / work
    if not alone or not busy:
        raise InputError(
            f"the context attention table (head size {head_dim}) has no long prompt of few heads"
        )
    return float(np.median(alone)), float(busy)


@functools.cache
def _recurrent(folder: Path) -> dict[tuple[int, ...], RecurrentTable]:
    """The gated delta rules in an engine's newest table, by heads, dimensions and convolution."""
    paths = list(folder.glob("*/gdn_perf.parquet"))
    if not paths:
        return {}
    newest = max(paths, key=lambda path: version_key(path.parent.name))
    sizes = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "d_conv")
    names = ("phase", "kernel_source", "batch_size", "seq_len", "latency")
    table = read_table(newest, names + sizes)
    convolves = np.char.startswith(table["kernel_source"].astype(str), "causal_conv1d")
    shapes = np.stack([table[name] for name in sizes], axis=1).astype(int)

    def summed(here: NDArray[np.bool_]) -> dict[tuple[int, int], float]:
        """Convolution and rule together, where both were measured."""
        convolution, rule = (_shortest(table, here & part) for part in (convolves, ~convolves))
        return {place: convolution[place] + rule[place] for place in convolution if place in rule}

    tables = {}
    for shape in np.unique(shapes, axis=0):
        here = np.all(shapes == shape, axis=1)
        plain, several = (summed(here & (table["phase"] == kind)) for kind in _PHASES)
        if plain and several:
            tables[tuple(shape.tolist())] = RecurrentTable(plain=plain, several=several)
    return tables


@functools.cache
def _latent(
    data: Path, engine: str, weights: Weights, cache: Cache
) -> dict[tuple[int, ...], LatentTable]:
    """Latent attention: its kernels, or the whole layer of models whose indexer chooses tokens.

    Kernels and products add up to TensorRT-LLM's whole layers within a tenth. vLLM's whole layers
    were timed with their host (an H200's at one row: 91 us, TensorRT-LLM's 52), so it takes another
    engine's kernels, and all take SGLang's layers with an indexer. None takes longer than with a
    cache of 16 bits, as SGLang's kernel with 8 does on Hopper.
    """
    types = {"kv_cache_dtype": [cache, _BF16]}
    tables: dict[tuple[int, ...], LatentTable] = {}
    for name in reversed(engines_from(engine)):
        kernels = {kind: _by_heads(data / "mla" / name, f"{kind}_mla", types) for kind in _PHASES}
        if all(kernels.values()):
            tables[_LATENT] = LatentTable(**kernels, projects=False, source=f"{name}'s kernels")
    folder, forms = data / "sparse_attention" / "sglang", ["fp8_block", _BF16]
    for form, (model, shape) in itertools.product(
        forms if weights == "fp8_block" else reversed(forms), _CHOOSING.items()
    ):
        layers = {
            kind: _by_heads(folder, f"dsa_{kind}_module", types | {
                "model": [model], "gemm_type": [form], "op_name": [f"dsa_{kind}_module"]})
            for kind in _PHASES
        }  # fmt: skip
        if shape not in tables and all(layers.values()):
            tables[shape] = LatentTable(**layers, projects=True, source="SGLang's whole layer")
    return tables


def _by_heads(
    folder: Path, name: str, wanted: dict[str, list[str]]
) -> dict[int, dict[tuple[int, int], float]]:
    """{heads: {(batch, tokens): seconds}} of the wanted rows in an engine's newest table.

    Without the batches whose shortest time leaps, which were not captured.
    """
    paths = list(folder.glob(f"*/{name}_perf.parquet"))
    if not paths:
        return {}
    table = _latent_table(max(paths, key=lambda path: version_key(path.parent.name)))
    tokens, other, count = ("isl", "step", 0) if "context" in name else ("step", "isl", 1)
    here = table[other] == count
    for column, values in wanted.items():
        here &= np.isin(table[column].astype(str), values)
    heads = {}
    for count in np.unique(table["num_heads"][here]).tolist():
        cells = _shortest(table, here & (table["num_heads"] == count), tokens)
        least = {batch: min(s for (b, _), s in cells.items() if b == batch) for batch, _ in cells}
        pairs = itertools.pairwise(sorted(least))
        most = next((b for a, b in pairs if least[b] > _LEAP * least[a]), math.inf)
        heads[count] = {place: s for place, s in cells.items() if place[0] < most}
    return heads


@functools.cache
def _latent_table(path: Path) -> Columns:
    names = ("num_heads", "batch_size", "isl", "step", "latency", "kv_cache_dtype")
    return read_table(path, (*names, "model", "gemm_type", "op_name"))


def _shortest(
    table: Columns, here: NDArray[np.bool_], tokens: str = "seq_len"
) -> dict[tuple[int, int], float]:
    """{(sequences, rows): seconds} of one kernel, the shortest of equal shapes."""
    cells: dict[tuple[int, int], float] = {}
    columns = (table[name][here].tolist() for name in ("batch_size", tokens, "latency"))
    for batch, rows, milliseconds in zip(*columns, strict=True):
        cells[batch, rows] = min(milliseconds * 1e-3, cells.get((batch, rows), np.inf))
    return rising(cells)


@functools.cache
def all_reduce_curves(data: Path, engine: str) -> dict[int, Curve]:
    """(values, seconds) by number of devices, from the newest table of captured all-reduces.

    `message_size` counts values, not bytes: taken as bytes of bfloat16, two H100s would reach
    165 GB/s of NVLink's 450 at the largest size, and eight 234; taken as values 331 and 470.
    """
    paths = sorted(
        (data / "comm" / engine).glob("*/custom_allreduce_perf.parquet"),
        key=lambda path: version_key(path.parent.name),
    )
    if not paths:
        return {}
    names = ("num_gpus", "message_size", "latency", "kernel_source", "allreduce_dtype")
    table = read_table(paths[-1], names)
    captured = ~np.char.endswith(table["kernel_source"].astype(str), "eager")
    curves = {}
    for count in np.unique(table["num_gpus"][captured]):
        of_count = captured & (table["num_gpus"] == count)
        size, first = np.unique(table["message_size"][of_count], return_index=True)
        curves[int(count)] = (size.astype(float), table["latency"][of_count][first] * 1e-3)
    return curves


TABLES = PublishedTables(
    engines=ENGINES, devices=tuple(SYSTEMS), is_installed=is_installed, load=load_published
)

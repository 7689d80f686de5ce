"""Operator tables of the PyPI package aiconfigurator-core (NVIDIA, Apache-2.0).

The package is the optional extra `operators`; nothing of it is executed, only its parquet
tables under `systems/data/<system>/<operator>/<engine>/<version>/` are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.compose.attention import Attention, AttentionTable, TileForm, measure_keys
from costmodel.compose.matmul import MatmulTable
from costmodel.compose.operators import BytesAtBandwidth, ExpertTable, OperatorTables
from costmodel.device import DeviceSpec
from costmodel.errors import DeviceError, InputError

Array = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]

ENGINES = ("vllm", "sglang", "trtllm")
SYSTEMS = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx-pro-6000-server": "rtx_pro_6000_server",
}
# Tables with outliers of up to 2.7 times (data notes of this project); later versions are sound.
UNSOUND = {("rtx_pro_6000_server", "vllm", "0.19.0"), ("rtx_pro_6000_server", "sglang", "0.5.10")}
# Kernels whose tiles are known; `verified` ones were seen in chunked measurements.
KERNELS = {
    # A100 only: the same library, but nobody published chunked measurements on that generation.
    "vllm_flash_attn": TileForm(tile_rows=64),
    "vllm_flash_attn_fa2": TileForm(tile_rows=64, verified=True),
    "vllm_flash_attn_fa3": TileForm(tile_rows=128, splits_keys=True, packs_groups=True),
    "fa3": TileForm(tile_rows=128, splits_keys=True, packs_groups=True),
    "vllm_flashinfer_trtllmprefill": TileForm(tile_rows=256),
}
UNKNOWN_KERNEL = TileForm(tile_rows=128)
_BF16 = ("bfloat16",)


def load_published(
    device: DeviceSpec, engine: str = "vllm", *, head_dim: int = 128, experts: bool = False
) -> OperatorTables:
    """The newest sound tables of one device and engine, in bfloat16.

    Raises InputError where the extra is not installed or the engine is unknown, DeviceError
    where the device has no tables.
    """
    if engine not in ENGINES:
        raise InputError(
            f"no engine is called '{engine}'", hint=f"Use one of: {', '.join(ENGINES)}"
        )
    system = SYSTEMS.get(device.slug)
    if system is None:
        raise DeviceError(
            f"there are no published operator tables of {device.name}",
            hint=f"There are for: {', '.join(SYSTEMS)}; from a sibling use `rooftree transfer`",
        )
    data = data_folder() / system
    version = newest_version(data, system, engine)
    matmul = _matmul(data / "gemm" / engine / version, device)
    attention = _attention(data / "attention" / engine / version, device, head_dim)
    return OperatorTables(
        device=device,
        engine=engine,
        source=f"aiconfigurator-core {_version()} (NVIDIA, Apache-2.0), {system},"
        f" {engine} {version}",
        matmul=matmul,
        attention=attention,
        small=BytesAtBandwidth(launch_s=matmul.smallest_s(), device=device),
        head_dim=head_dim,
        experts=_experts(data, system, engine) if experts else {},
        all_reduce=all_reduce_curves(data, engine),
    )


def data_folder() -> Path:
    """The folder of the package's tables. Raises InputError where the extra is missing."""
    found = importlib.util.find_spec("aiconfigurator_core")
    missing = [] if found else ["aiconfigurator-core"]
    if importlib.util.find_spec("pyarrow") is None:
        missing.append("pyarrow")
    if missing or found is None or found.origin is None:
        raise InputError(
            f"composing needs the operator tables, and {' and '.join(missing)} is not installed",
            hint="Install them with `pip install 'rooftree[operators]'`, or give --operators DIR",
        )
    return Path(found.origin).parent / "systems" / "data"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return "of unknown version"


def newest_version(data: Path, system: str, engine: str) -> str:
    """The newest version that has both products and attention, without the unsound ones."""
    folders = [
        {path.name for path in (data / operator / engine).glob("*") if path.is_dir()}
        for operator in ("gemm", "attention")
    ]
    versions = [v for v in folders[0] & folders[1] if (system, engine, v) not in UNSOUND]
    if not versions:
        raise DeviceError(
            f"there are no sound {engine} tables of {system}", hint="Try another --engine"
        )
    return max(versions, key=_version_key)


def _version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def read_table(path: Path, columns: tuple[str, ...]) -> Columns:
    """Columns of a parquet file as arrays; absent ones are left out. Raises InputError."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        present = [name for name in columns if name in parquet.read_schema(path).names]
        table = parquet.read_table(path, columns=present)
    except (OSError, ValueError) as failure:
        raise InputError(f"{path.name} cannot be read ({failure})") from None
    return {name: table.column(name).to_numpy() for name in present}


def _matmul(folder: Path, device: DeviceSpec) -> MatmulTable:
    shapes = matmul_shapes(folder, _BF16[0])
    return MatmulTable(shapes=shapes, peaks=device.peaks, l2_bytes=device.l2_bytes)


def matmul_shapes(folder: Path, dtype: str) -> dict[tuple[int, int], tuple[Array, Array]]:
    """{(n, k): (ascending m, seconds)} of one type of weights; empty where there is none."""
    table = read_table(folder / "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k", "latency"))
    kept = table["gemm_dtype"] == dtype
    if not kept.any():
        return {}
    m, n, k = (table[name][kept].astype(int) for name in ("m", "n", "k"))
    seconds = table["latency"][kept] * 1e-3
    shapes = {}
    order = np.lexsort((m, k, n))
    m, n, k, seconds = m[order], n[order], k[order], seconds[order]
    edges = np.flatnonzero((np.diff(n) != 0) | (np.diff(k) != 0)) + 1
    for part in np.split(np.arange(len(m)), edges):
        rows, first = np.unique(m[part], return_index=True)
        shapes[int(n[part[0]]), int(k[part[0]])] = (rows.astype(float), seconds[part][first])
    return shapes


def _attention(folder: Path, device: DeviceSpec, head_dim: int) -> Attention:
    generation, _ = attention_table(folder, "generation", head_dim)
    context, kernel = attention_table(folder, "context", head_dim)
    return attention_of(generation, context, kernel, device, head_dim)


def attention_of(
    generation: AttentionTable,
    context: AttentionTable,
    kernel: str,
    device: DeviceSpec,
    head_dim: int,
) -> Attention:
    """Attention from tables of one row and of prompts, in the form of the prompts' kernel."""
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
    folder: Path, kind: str, head_dim: int, dtypes: tuple[str, str] = (_BF16[0], _BF16[0])
) -> tuple[AttentionTable, str]:
    """{(heads, kv_heads): {(batch, tokens): seconds}} and the kernel of most of its rows.

    `kind` is context or generation; `dtypes` are the attention's and the cache's. Raises
    InputError where the table has none of these.
    """
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "latency")
    labels = ("kernel_source", "head_dim", "attn_dtype", "kv_cache_dtype", "window_size")
    table = read_table(folder / f"{kind}_attention_perf.parquet", names + labels)
    kept = (table["attn_dtype"] == dtypes[0]) & (table["kv_cache_dtype"] == dtypes[1])
    kept &= table["head_dim"] == head_dim
    if "window_size" in table:
        kept &= table["window_size"] == 0
    if not kept.any():
        raise InputError(
            f"the attention tables have no heads of size {head_dim} in {dtypes[0]} with a cache"
            f" in {dtypes[1]}"
        )
    kernels, counts = np.unique(table["kernel_source"][kept].astype(str), return_counts=True)
    kernel = str(kernels[np.argmax(counts)])
    kept &= table["kernel_source"] == kernel
    # A generation row attends to `step` cached tokens and to itself.
    tokens = table["isl"] if kind == "context" else table["step"]
    tables: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    for index in np.flatnonzero(kept):
        pair = int(table["num_heads"][index]), int(table["num_key_value_heads"][index])
        place = int(table["batch_size"][index]), int(tokens[index])
        cell = tables.setdefault(pair, {})
        seconds = float(table["latency"][index]) * 1e-3
        cell[place] = min(seconds, cell.get(place, seconds))
    return tables, kernel


def _experts(data: Path, system: str, engine: str) -> dict[tuple[int, int, int, int], ExpertTable]:
    """Each shape's newest measurement in bfloat16 on one device, balanced where there is one."""
    found: dict[tuple[int, int, int, int], ExpertTable] = {}
    folders = [path for path in (data / "moe" / engine).glob("*") if path.is_dir()]
    folders = [path for path in folders if (system, engine, path.name) not in UNSOUND]
    sizes = ("hidden_size", "inter_size", "topk", "num_experts")
    names = ("moe_dtype", "moe_tp_size", "moe_ep_size", "distribution", "num_tokens", "latency")
    for folder in sorted(folders, key=lambda path: _version_key(path.name)):
        if not (folder / "moe_perf.parquet").is_file():
            continue
        table = read_table(folder / "moe_perf.parquet", names + sizes)
        kept = np.isin(table["moe_dtype"], _BF16)
        kept &= (table["moe_tp_size"] == 1) & (table["moe_ep_size"] == 1)
        shapes = np.stack([table[name] for name in sizes], axis=1).astype(int)
        for shape in np.unique(shapes[kept], axis=0):
            mine = kept & np.all(shapes == shape, axis=1)
            for skew in ("power_law_1.01", "balanced"):
                part = mine & (table["distribution"] == skew)
                if part.any():
                    tokens, first = np.unique(table["num_tokens"][part], return_index=True)
                    h, f, active, count = (int(x) for x in shape)
                    found[h, f, active, count] = ExpertTable(
                        tokens=tokens.astype(float),
                        seconds_measured=table["latency"][part][first] * 1e-3,
                        balanced=skew == "balanced",
                    )
    return found


def all_reduce_curves(data: Path, engine: str) -> dict[int, tuple[Array, Array]]:
    """(values, seconds) by number of devices: the newest table of captured all-reduces.

    `message_size` counts values, not bytes: read as bytes of bfloat16, two H100s would reach
    165 GB/s of NVLink's 450 at the largest size and eight 234; read as values 331 and 470.
    """
    paths = sorted(
        (data / "comm" / engine).glob("*/custom_allreduce_perf.parquet"),
        key=lambda path: _version_key(path.parent.name),
    )
    if not paths:
        return {}
    names = ("num_gpus", "message_size", "latency", "kernel_source", "allreduce_dtype")
    table = read_table(paths[-1], names)
    kept = ~np.char.endswith(table["kernel_source"].astype(str), "eager")
    curves = {}
    for count in np.unique(table["num_gpus"][kept]):
        mine = kept & (table["num_gpus"] == count)
        size, first = np.unique(table["message_size"][mine], return_index=True)
        curves[int(count)] = (size.astype(float), table["latency"][mine][first] * 1e-3)
    return curves

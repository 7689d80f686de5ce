"""Experts' times in aiconfigurator-core's tables, in a form of their weights that is sound."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from costmodel.catalog import DeviceSpec
from costmodel.compose.tables import ExpertTable
from costmodel.weights import WEIGHT_BYTES, Weights
from integrations.aiconfigurator.package import (
    UNSOUND,
    Columns,
    engines_from,
    read_table,
    version_key,
    without_outliers,
)

# The names of types of experts in the tables, the first that is there; else the weights' own.
_EXPERT_TYPES: dict[Weights, tuple[str, ...]] = {
    "fp8_dynamic": ("fp8",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
}
# Where the device has products of 4-bit weights, engines multiply these by inputs in 8 bits.
_NATIVE_TYPES: dict[Weights, tuple[str, ...]] = {"mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")}
# The other forms of a type whose tables may take its place.
_OTHER_FORMS: dict[Weights, tuple[Weights, ...]] = {
    "fp8": ("fp8_block",), "fp8_dynamic": ("fp8_block",), "fp8_block": ("fp8",),
}  # fmt: skip

Experts = dict[tuple[int, ...], ExpertTable]
_BF16, _SKEWED = "bfloat16", "power_law_1.01"


@functools.cache
def all_experts(data: Path, device: DeviceSpec, engine: str, weights: Weights) -> Experts:
    """The engine's tables, and others' of what it lacks; none takes longer than in bfloat16.

    A table that is slower than the same experts in bfloat16 is of a kernel that was not tuned, as
    the fp8 of vLLM 0.24 (3,421 us of Scout's experts at 128 tokens, 1,423 in bfloat16); one that is
    faster than the memory was not timed right, as its fp8 on B200 (41 us at any number of tokens).
    The next form takes its place, then another engine's table.
    """
    names = engines_from(engine)

    def merged(form: Weights) -> Experts:
        types = (_NATIVE_TYPES if device.fp4_flops_per_s else _EXPERT_TYPES).get(form, (form,))
        tables = [
            _experts(data, data.name, name, dtype)
            for dtype, name in itertools.product(reversed(types), reversed(names))
        ]
        return {place: table for one in tables for place, table in one.items()}

    if weights == _BF16:
        return merged(weights)
    forms = (weights, *_OTHER_FORMS.get(weights, ()))
    wider = all_experts(data, device, engine, _BF16)
    given: list[tuple[Weights, str, Experts]] = [(form, form, merged(form)) for form in forms]
    for form, name in itertools.product(forms, names[1:]):
        (dtype,) = _EXPERT_TYPES.get(form, (form,))[:1]
        given.append((form, f"{form} of {name}", _experts(data, data.name, name, dtype)))
    tables: Experts = {}
    for place in {place for *_, one in given for place in one}:
        here = [(form, text, one[place]) for form, text, one in given if place in one]
        sound = [
            dataclasses.replace(table, form=text if text != weights else "")
            for form, text, table in here
            if _sound(place, table, wider.get(place), WEIGHT_BYTES[form], device)
        ]
        table = sound[0] if sound else dataclasses.replace(here[0][-1], form=_BF16)
        tables[place] = dataclasses.replace(table, wider=wider.get(place))
    return tables


def _sound(
    place: tuple[int, ...],
    table: ExpertTable,
    wider: ExpertTable | None,
    value_bytes: float,
    device: DeviceSpec,
) -> bool:
    """Whether a table is not slower than the wider type's on average, nor faster than memory.

    Experts have two or three matrices: at least two are read, unless all fit into the L2.
    """
    hidden, width, active, experts, *split = place
    used = np.minimum(table.tokens * active, experts) / math.prod(split)
    moved = 2 * hidden * width * value_bytes * used
    least_s = np.where(moved > 3 * device.l2_bytes, moved / device.peak_bytes_per_s, 0.0)
    if table.balanced and np.any(table.seconds_measured < least_s):
        return False
    ratio = table.seconds_measured / (wider or table).measured_at(table.tokens)
    return float(np.mean(np.log(ratio))) <= 0.0


@functools.cache
def _experts(
    data: Path, system: str, engine: str, dtype: str = "bfloat16"
) -> dict[tuple[int, ...], ExpertTable]:
    """The newest table of each shape and split on one device, with the skewed one where it exists.

    Routers spread tokens by a power law: few reach fewer experts, of many the fullest one decides.
    """
    experts: dict[tuple[int, ...], ExpertTable] = {}
    folders = [path for path in (data / "moe" / engine).glob("*") if path.is_dir()]
    folders = [path for path in folders if (system, engine, path.name) not in UNSOUND]
    sizes = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    names = ("moe_dtype", "distribution", "num_tokens", "latency")
    for folder in sorted(folders, key=lambda path: version_key(path.name)):
        if not (folder / "moe_perf.parquet").is_file():
            continue
        table = read_table(folder / "moe_perf.parquet", names + sizes)
        even, skewed = (
            _expert_tables(table, (table["moe_dtype"] == dtype) & chosen, sizes, balanced=even)
            for even in (True, False)
            for chosen in [table["distribution"] == ("balanced" if even else _SKEWED)]
        )
        experts |= skewed
        for place, one in even.items():
            experts[place] = dataclasses.replace(one, skewed=skewed.get(place))
    return experts


def _expert_tables(
    table: Columns, usable: NDArray[np.bool_], sizes: tuple[str, ...], *, balanced: bool
) -> dict[tuple[int, ...], ExpertTable]:
    """The usable rows by their sizes, the first of those with as many tokens."""
    if not usable.any():
        return {}
    columns = [table[name][usable].astype(int) for name in (*sizes, "num_tokens")]
    order = np.lexsort(columns[::-1])
    places, seconds = np.stack(columns, axis=1)[order], table["latency"][usable][order] * 1e-3
    first = np.diff(places, axis=0, prepend=-1).any(axis=1)
    places, seconds = places[first], seconds[first]
    edges = np.flatnonzero(np.diff(places[:, :-1], axis=0).any(axis=1)) + 1
    parts = zip(np.split(places, edges), np.split(seconds, edges), strict=True)
    return {
        tuple(part[0, :-1].tolist()): ExpertTable(
            tokens=part[:, -1].astype(float),
            seconds_measured=without_outliers(measured_s),
            balanced=balanced,
        )
        for part, measured_s in parts
        if len(part) > 1  # one number of tokens tells nothing of others
    }

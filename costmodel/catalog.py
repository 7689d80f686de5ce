"""Known devices and targets: from a name to the figures of a device or the sizes of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.fields import Bytes, Count, Section, Text, Watts
from costmodel.hf_config import hub_config, is_hub_id, positions_of, text_fields
from costmodel.io import folder_of, read_json, read_yaml, shipped_directory
from costmodel.statistics import Array
from costmodel.weights import checkpoint_name, stored_weights, with_quantization

# The letters of layers in targets.yaml, as in Nemotron-H's patterns.
LAYERS = {
    "S": "sliding_attention", "C": "chunked_attention", "*": "full_attention", "V": "conv",
    "M": "linear_attention", "-": "mlp", "E": "moe",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The highest rates of a device, from a data sheet or measured."""

    flops_per_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device in devices.yaml; `source` says where its figures are from.

    `name` is what the driver reports. `peak_flops_per_s` is the dense rate of 16-bit products in
    `dtype`; other rates are None where it has or states none.
    """

    slug: str
    name: str
    aliases: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    peak_flops_per_s: float
    peak_bytes_per_s: float
    memory_bytes: int
    l2_bytes: int
    sm_count: int
    tdp_w: float
    confidence: Literal["corroborated", "recalled"]
    source: str
    note: str = ""
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    int8_ops_per_s: float | None = None

    @property
    def peaks(self) -> Peaks:
        return Peaks(flops_per_s=self.peak_flops_per_s, bytes_per_s=self.peak_bytes_per_s)


class DeviceFingerprint(Section):
    """A device as its runtime reports it, and as a profile stores it.

    `mig` names a MIG slice; `threads` and `instruction_set` are of a CPU. None: unknown, not
    applicable.
    """

    kind: Literal["cuda", "cpu"]
    name: Text
    memory_bytes: Bytes
    mig: Text | None = None
    threads: Count | None = None
    instruction_set: Text | None = None
    driver: Text | None = None
    cuda: Text | None = None
    power_limit_w: Watts | None = None

    @property
    def slug(self) -> str:
        return device_slug(self.name)


def slugify(text: str) -> str:
    """Lower case; a run of characters other than letters, digits, `.` and `_` becomes one `-`."""
    slug = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.")
    return slug[:80] or "unnamed"


def device_slug(name: str) -> str:
    """The slug of a known device, else one made from the reported name."""
    spec = device_by_name(name)
    return spec.slug if spec else slugify(name)


# The columns of devices.yaml in other units than our fields.
_RATES: Mapping[str, tuple[str, float]] = {
    "bf16_tflops": ("peak_flops_per_s", 1e12), "fp16_tflops": ("peak_flops_per_s", 1e12),
    "fp8_tflops": ("fp8_flops_per_s", 1e12), "fp4_tflops": ("fp4_flops_per_s", 1e12),
    "int8_tops": ("int8_ops_per_s", 1e12), "memory_gb_per_s": ("peak_bytes_per_s", 1e9),
    "memory_gib": ("memory_bytes", 2**30), "l2_mib": ("l2_bytes", 2**20), "tdp_w": ("tdp_w", 1.0),
}  # fmt: skip


@cache
def load_devices() -> Mapping[str, DeviceSpec]:
    table = read_yaml(shipped_directory() / "devices.yaml")
    devices = {}
    for slug, row in table.items():
        fields = {"dtype": "bfloat16" if "bf16_tflops" in row else "float16", "slug": slug, **row}
        fields["aliases"] = tuple(fields.get("aliases", ()))
        for name in _RATES.keys() & row.keys():
            field, unit = _RATES[name]
            fields[field] = fields.pop(name) * unit
        devices[slug] = DeviceSpec(**fields)
    return devices


@cache
def _by_label() -> dict[str, DeviceSpec]:
    return {
        _label(name): spec
        for spec in load_devices().values()
        for name in (spec.slug, spec.name, *spec.aliases)
    }


@cache
def device_by_name(name: str) -> DeviceSpec | None:
    """The device that a driver reports under exactly this name, or None."""
    devices = load_devices().values()
    return next((spec for spec in devices if name in (spec.name, *spec.aliases)), None)


# Libraries change the protocol of an all-reduce with the size of the message: one-shot exchanges of
# small ones, two-shot ones, then NCCL's rings and trees. Within one the time is a line over the
# bytes. communication.yaml has lines that were fitted to published measurements
# (aiconfigurator-core, NVIDIA, Apache-2.0): the least bytes, seconds, and seconds a byte of each.
LinkProtocol = tuple[float, float, float]


def all_reduce_s(protocols: Sequence[LinkProtocol], message_bytes: ArrayLike) -> Array:
    """Seconds of one all-reduce of messages [n]; `protocols` ascend from 0 bytes."""
    size = np.asarray(message_bytes, dtype=np.float64)
    from_bytes, latency_s, byte_s = np.array(protocols, dtype=np.float64).T
    index = np.clip(np.searchsorted(from_bytes, size, side="right") - 1, 0, None)
    return np.asarray(latency_s[index] + byte_s[index] * size, dtype=np.float64)


@cache
def protocols_of(slug: str, devices: int) -> tuple[LinkProtocol, ...]:
    """The shipped protocols among `devices` of a kind; empty where none were measured."""
    if devices <= 1:
        return ()
    table = read_yaml(shipped_directory() / "communication.yaml")
    return tuple(map(tuple, table.get(slug, {}).get(devices, ())))


def find_device(query: str) -> DeviceSpec:
    """The known device with this slug, name or alias; case, and `-` for a space, do not matter.

    A part of a name may be another device's and finds nothing. Raises InputError with the nearest.
    """
    spec = _by_label().get(_label(query))
    if spec is not None:
        return spec
    near = nearest_names(_label(query), {label: spec.slug for label, spec in _by_label().items()})
    raise InputError(
        f"no known device is called '{query}'",
        hint=f"Nearest: {', '.join(near)}; `rooftree devices` lists all",
    )


def nearest_names(wanted: str, labels: Mapping[str, str], count: int = 5) -> list[str]:
    """Up to `count` different values of `labels` whose keys are nearest to `wanted`, best first."""

    def likeness(label: str) -> float:
        part = bool(wanted) and (wanted in label or label in wanted)
        return difflib.SequenceMatcher(None, wanted, label).ratio() + part

    ordered = sorted(labels, key=lambda label: (-likeness(label), label))
    return list(dict.fromkeys(labels[label] for label in ordered))[:count]


def _label(name: str) -> str:
    """A name without regard to case and to `-`, `_` or blanks between its words."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetEntry:
    """A target by name: its sizes and its Hugging Face config.

    `hf_config` is a config of transformers, or of a known target the fields that
    `AutoConfig.for_model(**hf_config)` takes. `weights` is the type that the published checkpoint
    stores, as operator tables call it, or its label.
    """

    name: str
    architecture: ModelArchitecture
    hf_config: Any
    weights: str = "bfloat16"

    @property
    def positions(self) -> int | None:
        """The longest text that the target can hold; None where its config does not say."""
        return positions_of(text_fields(self.hf_config))


@cache
def load_targets() -> Mapping[str, TargetEntry]:
    table = read_yaml(shipped_directory() / "targets.yaml")
    targets = {}
    for name, row in table.items():
        config = {**table.get(row.get("like"), {}), **row}
        _, _, weights = (config.pop(label, None) for label in ("like", "parameters", "weights"))
        if letters := config.get("layer_types"):
            kinds = itertools.cycle(LAYERS[letter] for letter in letters)
            config["layer_types"] = list(itertools.islice(kinds, config["num_hidden_layers"]))
        architecture = ModelArchitecture.from_hf_config(config, name=name)
        targets[name] = TargetEntry(
            name=name, architecture=architecture, hf_config=config, weights=weights or "bfloat16"
        )
    return targets


def resolve_target(name: str, *, hub: bool = False, approximate: bool = False) -> TargetEntry:
    """The target called `name`: a model folder, a config file, a known target, or a hub id.

    hub          read the config of any other owner/model from the hub (`costmodel.hf_config`)
    approximate  take kinds whose parts are not all counted by the usual names of their sizes
    A known name needs no transformers. Raises InputError where nothing has this name or its config
    cannot be read.
    """
    if name.endswith(".json") and Path(name).name != "config.json" and os.path.isfile(name):
        return _target_of(Path(name).stem, read_json(Path(name), finite=False))
    place = name.removesuffix("config.json") if Path(name).name == "config.json" else name
    folder = folder_of(place or ".") if name.strip() else None
    if folder is None:
        try:
            return find_target(name)
        except InputError:
            label = name.strip()
            base, weights = checkpoint_name(label)
            if weights is not None:  # a known target's quantised checkpoint
                with contextlib.suppress(InputError):
                    known = find_target(base.rpartition("/")[2])
                    sizes = dataclasses.replace(known.architecture, name=label)
                    return dataclasses.replace(
                        known, name=label, architecture=sizes, weights=weights
                    )
            if not (hub and is_hub_id(label)):
                raise
        entry = _target_of(label, hub_config(label))
        if entry.weights == "bfloat16" and weights:  # which the config does not say
            return dataclasses.replace(entry, weights=weights)
        return entry
    where = folder / "config.json"
    if not where.is_file():
        raise InputError(f"{name} holds no config.json", hint="Give a Hugging Face model folder.")
    fields = read_json(where, finite=False)  # recurrent models' have `Infinity`
    try:
        return _target_of(folder.resolve().name, fields, folder, approximate=approximate)
    except InputError as failure:
        raise InputError(f"{where}: {failure.problem}", hint=failure.hint) from None


def _target_of(
    label: str, fields: Any, folder: Path | None = None, *, approximate: bool = False
) -> TargetEntry:
    # By name: this package imports no model library, and a known target needs none.
    reader, fields = importlib.import_module("decoder.configs"), with_quantization(fields, folder)
    weights = stored_weights(fields)
    config, architecture = reader.read_model(fields, label, approximate=approximate)
    positions_of(text_fields(config))  # raises where they are no number
    return TargetEntry(name=label, architecture=architecture, hf_config=config, weights=weights)


def find_target(name: str) -> TargetEntry:
    """The known target called `name`: in full, or its last part, upper or lower case.

    Raises InputError that lists the nearest names, or the several that match.
    """
    targets = load_targets()
    if name in targets:
        return targets[name]
    wanted = name.strip().lower()
    matches = [
        entry
        for full, entry in targets.items()
        if wanted in (full.lower(), full.lower().rpartition("/")[2])
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(entry.name for entry in matches)
        raise InputError(f"the target name '{name}' is ambiguous", hint=f"Use one of: {names}")
    last_parts = {full.lower().rpartition("/")[2]: full for full in targets}
    near = nearest_names(wanted.rpartition("/")[2], last_parts)
    raise InputError(
        f"no known target is called '{name}'",
        hint=f"Nearest: {', '.join(near)}; `rooftree targets` lists all; or name a model folder"
        " or its config.json",
    )

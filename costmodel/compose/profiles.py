"""Profiles composed from operator tables, with an error bar."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.linear import fit_linear
from costmodel.calibration.physical import fit_physical
from costmodel.calibration.points import Points
from costmodel.calibration.stairs import StairsScales, fit_stairs
from costmodel.catalog import DeviceFingerprint, DeviceSpec, find_device
from costmodel.compose.attention import TileForm
from costmodel.compose.operators import CHUNK_ROWS, ComposedForward
from costmodel.compose.tables import folder_tables, published_tables
from costmodel.errors import InputError, RooftreeError
from costmodel.io import now_utc, tool_version
from costmodel.profile import schema
from costmodel.profile.profile import Profile
from costmodel.roofline import Roofline
from costmodel.statistics import Array
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, Cache, layer_bytes, quantization

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Mean error of a composed profile on the one device with measured forwards (RTX PRO 6000 Blackwell
# Server, up to 256 rows and 4096 cached tokens): lab/studies/results/compose_*.json.
CHECKED_ERROR = 0.025
# Share of the difference between the form of verifications and that of prompts that is doubted: no
# verification of the former was published.
FORM_DOUBT = 0.5
# Relative error of the parts that are estimated from bytes and FLOPs.
ESTIMATE_ERROR = 0.4
# That of experts with the times of another form: sound tables of fp8 and of blocks differ by 5 % at
# 32 tokens and 30 % at 4096 (Qwen3-30B-A3B, H100).
FORM_ERROR = 0.2
_CHECKED_ROWS = tuple(rows for rows in ROWS if rows <= 256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """Expected relative error of a composed forward of 1 to 256 rows over the profile's contexts.

    `sums`: error against measured forwards of another device. `tables`: mean disagreement with
    other tables of the same device, or of the table with itself when a shape is left out.
    `attention`: doubt that the keys of a verification are split over idle multiprocessors.
    `estimated`: that of the parts that no table was read of, or one of other weights, by their
    share.
    """

    sums: float = CHECKED_ERROR
    tables: float = 0.0
    attention: float = 0.0
    estimated: float = 0.0

    @property
    def total(self) -> float:
        return math.hypot(*dataclasses.astuple(self))

    @property
    def text(self) -> str:
        """The parts and their sources, for people."""
        sources = {
            "sums": "composed forwards differ from measured ones elsewhere",
            "tables": "operator tables of this device differ",
            "attention": "splitting keys in a verification is unverified",
            "estimated": "parts are estimated or of other weights",
        }
        parts = dataclasses.asdict(self)
        return "; ".join(f"{parts[name]:.1%} as {why}" for name, why in sources.items()
                         if parts[name])  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComposeOptions:
    """The input of `compose`; `device_name` may be left out where `operators` names a folder.

    weights  a type of `costmodel.weights.WEIGHT_BYTES`
    """

    target: ModelArchitecture
    device_name: str | None = None
    engine: str = "vllm"
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    weights: str = "bfloat16"
    cache: Cache = "bfloat16"
    operators: Path | None = None
    source: str = ""

    @property
    def shares_experts(self) -> bool:
        return self.data_parallel > 1 or self.expert_parallel


def compose(options: ComposeOptions) -> Profile:
    """The profile composed from published tables, or from those in the folder `operators`.

    Raises InputError or DeviceError.
    """
    if (folder := options.operators) is not None:
        tables = folder_tables(folder, options.source)
        named = tables.device if options.device_name is None else find_device(options.device_name)
        if named.slug != tables.device.slug:
            raise InputError(
                f"{folder} holds operators of {tables.device.name}, not of {named.name}"
            )
        summed = ComposedForward(
            architecture=options.target, tables=tables, tensor_parallel=options.tensor_parallel
        )
        return composed_profile(summed, error_bar(summed))
    if options.device_name is None:
        raise InputError("say which GPU", hint="Give --device, such as --device h100-sxm")
    device, target = find_device(options.device_name), options.target
    published = published_tables()

    def forward(engine: str) -> ComposedForward:
        tables = published.load(
            device,
            engine,
            head_dim=table_heads(target),
            experts=bool(target.experts),
            weights=options.weights,
            cache=options.cache,
        )
        return ComposedForward(
            architecture=target,
            tables=tables,
            tensor_parallel=options.tensor_parallel,
            data_parallel=options.data_parallel,
            expert_parallel=options.expert_parallel,
        )

    chosen, others = forward(options.engine), []
    for engine in published.engines:
        # Tables that lack an operator say nothing on the error bar.
        with contextlib.suppress(RooftreeError):
            others += [forward(engine)] if engine != options.engine else []
    return composed_profile(chosen, error_bar(chosen, others))


def table_heads(architecture: ModelArchitecture) -> int:
    """The size of heads of the attention tables to read; for latent ones it does not matter."""
    return 128 if architecture.latent_rank else architecture.head_dim


def error_bar(forward: ComposedForward, others: Sequence[ComposedForward] = ()) -> ErrorBar:
    """The error bar of a forward; `others` are the same forward from other tables."""

    def without_attention_s(one: ComposedForward) -> Array:
        return one.linear_s(rows) + one.lm_head_s(rows) + one.recurrent_s(rows)

    rows = np.array(_CHECKED_ROWS, dtype=np.float64)
    contexts = np.array(CONTEXTS, dtype=np.float64)
    seconds = without_attention_s(forward)
    gaps = [float(np.mean(np.abs(np.log(without_attention_s(one) / seconds)))) for one in others]
    if not others:
        matmul = forward.tables.matmul
        interpolated = any((n, k) not in matmul.shapes for _, n, k in forward.products())
        gaps = [matmul.left_out_error()] if interpolated else []
    estimated, parts = 0.0, set(forward.estimated)
    if parts:  # their mean share of the time
        estimated_s = np.zeros((len(rows), len(contexts)))
        if parts - {"recurrent layers", "experts"}:
            estimated_s += [forward.attention_s(count, contexts) for count in _CHECKED_ROWS]
        if "recurrent layers" in parts:
            estimated_s += forward.recurrent_s(rows)[:, None]
        if "experts" in parts:
            estimated_s += forward.experts_s(rows)[:, None]
        share = float(np.mean(estimated_s / forward.seconds(rows, contexts)))
        estimated = ESTIMATE_ERROR * share
    if forward.experts_form and "experts" not in parts:
        estimated += FORM_ERROR * float(np.mean(forward.experts_s(rows) / seconds))
    # The mean share of time that verifications take less than where no tile shares its keys.
    attention = forward.tables.attention
    unsplit = dataclasses.replace(attention, form=TileForm(tile_rows=attention.form.tile_rows))
    tables = dataclasses.replace(forward.tables, attention=unsplit)
    slower_s = dataclasses.replace(forward, tables=tables).seconds(rows[1:], contexts)
    split_s = forward.verifying().seconds(rows[1:], contexts)
    return ErrorBar(
        tables=float(np.mean(gaps)) if gaps else 0.0,
        attention=FORM_DOUBT * float(np.mean(np.maximum(1 - split_s / slower_s, 0.0))),
        estimated=estimated,
    )


def composed_profile(
    forward: ComposedForward, bar: ErrorBar, *, created_utc: str | None = None
) -> Profile:
    """The profile of a composed forward: a surface, plain steps by batch, and prompts.

    Verifications split their keys, whatever the tables' own kernel for prompts does. Raises
    InputError where the target's shapes are too far from the tables.
    """
    forward = forward.verifying()
    seconds = _rising(forward.seconds(ROWS, CONTEXTS))
    rows, contexts = np.meshgrid(ROWS, CONTEXTS, indexing="ij")
    points = Points(rows=rows.ravel(), context=contexts.ravel(), seconds=seconds.ravel())
    tables = forward.tables
    weight_bytes = None if tables.weights == "bfloat16" else _weight_bytes(forward)
    return assemble(
        tables.device,
        points,
        forward.roofline(),
        {
            "kind": "composed",
            "created_utc": created_utc or now_utc(),
            "source": tables.source,
            "error_bar": round(bar.total, 3),
            "experts": forward.experts_form,
            "note": _note(forward, bar),
        },
        runtime=schema.RuntimeSection(
            kind="kernels",
            dtype="bfloat16",
            quantization=quantization(tables.weights, tables.cache),
            weight_bytes=weight_bytes,
            cache_bytes=None if tables.cache == "bfloat16" else CACHE_BYTES[tables.cache],
            attention=tables.engine,
            tensor_parallel=forward.tensor_parallel,
        ),
        stages=_stages(forward),
    )


def assemble(
    device: DeviceSpec,
    points: Points,
    roofline: Roofline,
    provenance: dict[str, Any],
    *,
    scales: StairsScales | None = None,
    **sections: Any,
) -> Profile:
    """The profile of points that were not measured; its calibration passes through all of them.

    provenance  fields of its section but tool_version and points
    scales      those of a calibration whose points were scaled, which are not chosen again
    sections    the runtime and the stages
    """
    physical = fit_physical(points, roofline)
    return Profile(
        provenance=schema.ProvenanceSection(
            tool_version=tool_version(), points=len(points), **provenance
        ),
        device=DeviceFingerprint(kind="cuda", name=device.name, memory_bytes=device.memory_bytes),
        target=schema.TargetSection.of(roofline.architecture),
        peaks=schema.PeaksSection(source="datasheet", **dataclasses.asdict(roofline.peaks)),
        calibration=schema.CalibrationSection(
            selected="stairs",
            linear=fit_linear(points, roofline),
            physical=physical,
            stairs=scales or fit_stairs(points, physical, exact=True).scales,
        ),
        surface=schema.SurfaceSection.of(points),
        **sections,
    )


def _stages(forward: ComposedForward) -> schema.StagesSection:
    steps: list[tuple[int, int, float]] = []
    a, device = forward.group, forward.tables.device
    token_bytes = CACHE_BYTES[forward.tables.cache] * a.token_values
    # Beside the weights, in the devices' memory.
    room = 0.95 * device.memory_bytes * forward.tensor_parallel
    room -= _weight_bytes(forward) * a.parameters
    for b in BATCHES:
        fits = [b * (token_bytes * c + a.state_bytes()) <= room for c in CONTEXTS]
        contexts = [c for c, fit in zip(CONTEXTS, fits, strict=True) if b == 1 or fit]
        if contexts:
            seconds = _rising(forward.seconds([1], contexts, b))[0]
            steps.extend((b, c, float(t)) for c, t in zip(contexts, seconds, strict=True))
    plain = dict(zip(("batch", "context", "median_s"), zip(*steps, strict=True), strict=True))
    prefill = {"tokens": PROMPTS, "median_s": forward.prefill_s(PROMPTS)}
    return schema.StagesSection.model_validate(
        {"plain": plain | {"n": 1}, "prefill": prefill | {"n": 1}}
    )


def _rising(seconds: Array) -> Array:
    """Seconds [rows, contexts] without the tables' noise: none exceeds that of more context."""
    return np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]


def _weight_bytes(forward: ComposedForward) -> float:
    weights = forward.tables.weights
    return layer_bytes(forward.architecture, weights) or WEIGHT_BYTES[weights]


def _note(forward: ComposedForward, bar: ErrorBar) -> str:
    a, tables = forward.architecture, forward.tables
    parts = [
        "sum of kernel times, no host time and no gaps",
        f"attention over cached tokens: tiles of {tables.attention.form.tile_rows} rows, keys split"
        " over idle processors, as this decoder and engines' decoding kernels do",
        f"error bar (to {_CHECKED_ROWS[-1]} rows and {CONTEXTS[-1]} cached tokens): {bar.text}",
    ]
    if not tables.fused:
        parts.append("norms, rotary and activation as single operators, slower than fused ones")
    outside = forward.extrapolated()
    if outside:
        parts.append(f"utilisation carried beyond the tables: {', '.join(outside)}")
    if forward.estimated:
        parts.append(f"estimated from bytes and FLOPs: {', '.join(forward.estimated)}")
    if tables.weights == "fp8_block":
        parts.append("products: with the scales of their inputs' blocks, as timed; small ones take"
                     " longer than in 16 bits")  # fmt: skip
    if forward.latent is not None:
        parts.append(f"latent attention: {forward.latent.source}")
    if a.recurrent:
        parts.append(
            "recurrent layers: the chunk rule's kernel, which moves each state twice; of trees up"
            f" to {CHUNK_ROWS} rows, beyond which the times are those of a chain"
        )
    if a.experts:
        spread = "expected distinct" if forward.experts_balanced else "skewed as measured"
        parts.append(f"experts: {spread}")
    if forward.devices > 1 and not {forward.devices, forward.tensor_parallel} <= {
        1, *tables.all_reduce,
    }:  # fmt: skip
        parts.append("communication between devices is left out")
    return "; ".join(parts)

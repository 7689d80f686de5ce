"""A composed forward as a calibration profile, with an error bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.architecture import ModelArchitecture
from costmodel.compose.forward import ComposedForward
from costmodel.device import DeviceSpec
from costmodel.linear import fit_linear
from costmodel.points import Points
from costmodel.profile import CalibrationSection, LinearSection, Profile, SurfaceOptionsSection
from costmodel.roofline import Roofline
from costmodel.schema import (
    DeviceSection,
    PeaksSection,
    ProvenanceKind,
    ProvenanceSection,
    RuntimeSection,
    SurfaceSection,
    TargetSection,
)
from costmodel.stages import PlainSection, StagesSection, TokensSection
from costmodel.surface import SurfaceOptions

Array = NDArray[np.float64]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Mean error of a composed profile against the one device with measured forwards (RTX PRO 6000
# Blackwell Server, up to 256 rows and 4096 cached tokens): benchmarks/results/compose_*.json.
CHECKED_ERROR = 0.025
# Doubt in what cached tokens add under a kernel whose chunked form nobody has published.
FORM_DOUBT = 0.5
_CHECKED_ROWS = tuple(rows for rows in ROWS if rows <= 256)
_CHECKED_CONTEXTS = tuple(context for context in CONTEXTS if context <= 4096)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBar:
    """Expected relative error of a composed forward, 1 to 256 rows on at most 4096 tokens.

    `sums`: against measured forwards of another device. `tables`: mean disagreement with other
    tables of the same device, or of the table with itself when a shape is left out.
    `attention`: doubt in attention over cached tokens where its form is not verified.
    """

    sums: float = CHECKED_ERROR
    tables: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """The three as independent errors."""
        return float(np.sqrt(self.sums**2 + self.tables**2 + self.attention**2))

    @property
    def text(self) -> str:
        """How it came about."""
        parts = [f"{self.sums:.1%} as composed forwards differ from measured ones elsewhere"]
        if self.tables:
            parts.append(f"{self.tables:.1%} as operator tables of this device differ")
        if self.attention:
            parts.append(f"{self.attention:.1%} for unverified attention over cached tokens")
        return "; ".join(parts)


def error_bar(forward: ComposedForward, others: Sequence[ComposedForward] = ()) -> ErrorBar:
    """The error bar of one forward; `others` are the same forward from other tables."""
    rows = np.array(_CHECKED_ROWS, dtype=np.float64)
    mine = forward.linear_s(rows) + forward.lm_head_s(rows)
    gaps = [
        float(np.mean(np.abs(np.log((other.linear_s(rows) + other.lm_head_s(rows)) / mine))))
        for other in others
    ]
    if not others:
        new = [
            name for name, n, k in forward.products() if (n, k) not in forward.tables.matmul.shapes
        ]
        gaps = [forward.tables.matmul.left_out_error()] if new else []
    doubt = 0.0
    if not forward.tables.attention.form.verified:
        doubt = FORM_DOUBT * _cached_share(forward)
    return ErrorBar(tables=float(np.mean(gaps)) if gaps else 0.0, attention=doubt)


def _cached_share(forward: ComposedForward) -> float:
    """Share of time that cached tokens add, if no tile shares its keys: the dearer form."""
    a, tp, attention = forward.architecture, forward.tensor_parallel, forward.tables.attention
    alone = dataclasses.replace(
        attention, form=dataclasses.replace(attention.form, splits_keys=False)
    )
    contexts = np.array(_CHECKED_CONTEXTS, dtype=np.float64)
    added = np.stack(
        [
            a.layers * alone.per_key_s(rows, 1, a.heads // tp, a.kv_heads // tp) * contexts
            for rows in _CHECKED_ROWS[1:]
        ]
    )
    return float(np.mean(added / (forward.seconds(_CHECKED_ROWS[1:], contexts) + added)))


def composed_profile(
    forward: ComposedForward, bar: ErrorBar, *, created_utc: str | None = None
) -> Profile:
    """The profile of a composed forward: rows x contexts, plain steps by batch, prompts.

    Raises InputError where the target's shapes lie too far from the tables.
    """
    seconds = forward.seconds(ROWS, CONTEXTS)
    rows, contexts = np.meshgrid(ROWS, CONTEXTS, indexing="ij")
    points = Points(rows=rows.ravel(), context=contexts.ravel(), seconds=seconds.ravel())
    tables = forward.tables
    roofline = Roofline(
        architecture=forward.architecture,
        peaks=tables.device.peaks,
        tensor_parallel=forward.tensor_parallel,
    )
    return assemble(
        ProfileParts(
            kind="composed",
            device=tables.device,
            architecture=forward.architecture,
            points=points,
            provenance={
                "created_utc": created_utc or now_utc(),
                "source": tables.source,
                "error_bar": round(bar.total, 3),
                "note": _note(forward, bar),
            },
            runtime=RuntimeSection(
                kind="kernels",
                dtype="bfloat16",
                attention=tables.engine,
                tensor_parallel=forward.tensor_parallel,
            ),
            roofline=roofline,
            stages=_stages(forward),
        )
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileParts:
    """What a profile that was not measured is put together from.

    `provenance` holds the fields of the section beside kind, version and count.
    """

    kind: ProvenanceKind
    device: DeviceSpec
    architecture: ModelArchitecture
    points: Points
    provenance: dict[str, Any]
    runtime: RuntimeSection
    roofline: Roofline
    stages: StagesSection


def assemble(parts: ProfileParts) -> Profile:
    """A profile of points that are not measurements: a surface through all of them."""
    device, points = parts.device, parts.points
    return Profile(
        provenance=ProvenanceSection(
            kind=parts.kind, tool_version=tool_version(), points=len(points), **parts.provenance
        ),
        device=DeviceSection(kind="cuda", name=device.name, memory_bytes=device.memory_bytes),
        target=TargetSection.of(parts.architecture),
        runtime=parts.runtime,
        peaks=PeaksSection(
            source="datasheet",
            flops_per_s=device.peak_flops_per_s,
            bytes_per_s=device.peak_bytes_per_s,
        ),
        calibration=CalibrationSection(
            selected="surface",
            linear=LinearSection.of(fit_linear(points, parts.roofline)),
            surface=SurfaceOptionsSection.of(SurfaceOptions(rows="work", context="exact")),
        ),
        surface=SurfaceSection.of(points),
        stages=parts.stages,
    )


def now_utc() -> str:
    """The time as profiles write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tool_version() -> str:
    """The installed version of rooftree."""
    try:
        return version("rooftree")
    except PackageNotFoundError:
        return "unknown"


def _stages(forward: ComposedForward) -> StagesSection:
    steps = [
        (b, c, forward.seconds([1], [c], b)[0, 0])
        for b in BATCHES
        for c in CONTEXTS
        if b == 1 or _fits(forward, b, c)
    ]
    prompts = forward.prefill_s(PROMPTS)
    return StagesSection(
        plain=PlainSection(
            batch=tuple(b for b, _, _ in steps),
            context=tuple(c for _, c, _ in steps),
            **_columns([float(t) for _, _, t in steps]),
        ),
        prefill=TokensSection(tokens=PROMPTS, **_columns([float(t) for t in prompts])),
    )


def _fits(forward: ComposedForward, batch: int, context: int) -> bool:
    """Whether weights and cache of so many sequences fit into the devices' memory, in bfloat16."""
    a = forward.architecture
    cache = 2 * a.layers * a.kv_width * context * batch
    memory = forward.tables.device.memory_bytes * forward.tensor_parallel
    return 2 * (a.parameters + cache) <= 0.95 * memory


def _columns(seconds: list[float]) -> dict[str, Any]:
    return {"median_s": seconds, "mad_s": [None] * len(seconds), "n": [1] * len(seconds)}


def _note(forward: ComposedForward, bar: ErrorBar) -> str:
    a, tables = forward.architecture, forward.tables
    form = tables.attention.form
    kind = "form verified on chunked measurements" if form.verified else "form not verified"
    parts = [
        "sum of kernel times, no host time and no gaps",
        f"attention over cached tokens: tiles of {form.tile_rows} rows,"
        f" {'keys split over idle processors, ' if form.splits_keys else ''}{kind}",
        f"error bar (to 256 rows and 4096 cached tokens): {bar.text}",
    ]
    if not tables.fused:
        parts.append("norms, rotary and activation as single operators, slower than fused ones")
    outside = forward.extrapolated()
    if outside:
        parts.append(f"utilisation carried beyond the tables: {', '.join(outside)}")
    if a.experts:
        spread = "expected distinct" if tables.expert_table(a).balanced else "skewed as measured"
        parts.append(f"experts: {spread}")
    if forward.tensor_parallel > 1 and forward.tensor_parallel not in tables.all_reduce:
        parts.append("communication between devices is left out")
    return "; ".join(parts)

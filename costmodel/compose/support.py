"""Times that are known of each target on each device, from stored profiles or operator tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, device_slug, load_devices, load_targets
from costmodel.compose.aiconfigurator import (
    SYSTEMS,
    measured_experts,
    measured_heads,
    measured_products,
)
from costmodel.compose.matmul import reaches
from costmodel.errors import RooftreeError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import ProvenanceKind
from costmodel.profile.store import ProfileStore

DEGREES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShapes:
    """What was measured of a device: attention heads by size, products by engine, and experts."""

    heads: Mapping[int, set[tuple[int, int]]]
    products: Sequence[set[tuple[int, int]]]
    experts: set[tuple[int, int, int, int]] = dataclasses.field(default_factory=set)

    def cover(self, architecture: ModelArchitecture, degree: int) -> bool:
        """Whether they hold, or nearly, what one of `degree` devices runs."""
        a = architecture
        if a.experts:
            return degree == 1 and a.expert_shape in self.experts
        if a.heads % degree or a.kv_heads % degree or a.ffn % degree:
            return False
        heads, kv_heads = a.heads // degree, a.kv_heads // degree
        query, key, ffn = a.query_width // degree, a.kv_width // degree, a.ffn // degree
        shapes = (
            (query + 2 * key, a.hidden),
            (a.hidden, query),
            ((a.ffn_matrices - 1) * ffn, a.hidden),
            (a.hidden, ffn),
            (a.vocab // degree, a.hidden),
        )
        return any(h >= heads and kv >= kv_heads for h, kv in self.heads.get(a.head_dim, ())) and (
            all(reaches(measured, n, k) for measured in self.products for n, k in shapes)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One target on one device.

    provenance  that of the best profile; `operators` where there is none, but operator tables of
                which a plan composes one; None without any
    degrees     tensor-parallel degrees of the profiles, or those that the tables cover
    error_bar   relative, of the best profile, where it states one
    reason      why there are no times, and what gives some
    """

    device: str
    target: str
    provenance: ProvenanceKind | Literal["operators"] | None
    degrees: tuple[int, ...] = ()
    error_bar: float | None = None
    reason: str = ""


def supported(store: ProfileStore | None = None) -> list[Support]:
    """Every known target on every known device, and whatever else has a profile."""
    profiles: dict[tuple[str, str], list[Profile]] = {}
    for stored in (store or ProfileStore()).list():
        if stored.profile is not None:
            profile = stored.profile
            place = device_slug(profile.device.name), profile.target.architecture_hash
            profiles.setdefault(place, []).append(profile)
    devices, targets = (
        load_devices(),
        {name: entry.architecture for name, entry in load_targets().items()},
    )
    hashes = {architecture.hash for architecture in targets.values()}
    for group in profiles.values():
        target = group[0].target
        if target.architecture_hash not in hashes:
            targets.setdefault(target.name, target.architecture)
    slugs = [*devices, *sorted({slug for slug, _ in profiles} - devices.keys())]
    return [row for slug in slugs for row in _rows(slug, devices.get(slug), targets, profiles)]


def _rows(
    slug: str,
    device: DeviceSpec | None,
    targets: Mapping[str, ModelArchitecture],
    profiles: Mapping[tuple[str, str], list[Profile]],
) -> Iterator[Support]:
    tables, problem = _tables(device)
    for name, architecture in targets.items():
        group = profiles.get((slug, architecture.hash), [])
        if group:
            best = min(group, key=lambda profile: profile.provenance.rank)
            yield Support(
                device=slug,
                target=name,
                provenance=best.provenance.kind,
                degrees=tuple(sorted({p.runtime.tensor_parallel for p in group})),
                error_bar=best.provenance.error_bar,
            )
            continue
        reason = architecture.beyond_tables or problem
        degrees: tuple[int, ...] = ()
        if tables and not reason:
            degrees = tuple(n for n in DEGREES if tables.cover(architecture, n))
            why = (
                "its experts were not"
                if architecture.experts
                else f"nothing as large as {name} was"
            )
            reason = "" if degrees else f"{why} measured"
        yield Support(
            device=slug,
            target=name,
            provenance="operators" if degrees else None,
            degrees=degrees,
            reason=reason,
        )


def _tables(device: DeviceSpec | None) -> tuple[MeasuredShapes | None, str]:
    """The tables of a device; the reason where there are none."""
    if device is None or device.slug not in SYSTEMS:
        return None, "no operator tables of this device; scale a profile with `rooftree transfer`"
    try:
        return MeasuredShapes(
            heads=measured_heads(device),
            products=measured_products(device),
            experts=measured_experts(device),
        ), ""
    except RooftreeError as failure:
        return None, failure.problem

"""Times that are known of each target on each device, from stored profiles or operator tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, device_slug, load_devices, load_targets
from costmodel.compose.operators import ComposedForward
from costmodel.compose.profiles import table_heads
from costmodel.compose.tables import OperatorTables, published_tables
from costmodel.compose.transfer import transfer_errors, transferred_error
from costmodel.errors import RooftreeError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import ProvenanceKind
from costmodel.profile.store import ProfileStore
from costmodel.weights import Weights, label_bytes, weights_label

DEGREES = (1, 2, 4, 8)
_TRIED = 3  # devices with operator tables, from which a profile is composed and scaled
_NO_TABLES = "no operator tables of this device; `rooftree plan` scales what another one has"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One target on one device, with plain weights or quantised ones.

    weights     the label of quantised weights, or the published checkpoint's; None for plain ones
    provenance  that of the best profile; `operators` where there is none, but operator tables of
                which a plan composes one; `scaled` where a plan scales those of another device;
                None without any
    degrees     tensor-parallel degrees of the profiles, or those that the tables cover
    error_bar   relative, of the best profile, where it states one
    reason      why there are no times, and what gives some; or why those are not planned with
    """

    device: str
    target: str
    weights: str | None = None
    provenance: ProvenanceKind | Literal["operators", "scaled"] | None
    degrees: tuple[int, ...] = ()
    error_bar: float | None = None
    reason: str = ""


def supported(store: ProfileStore | None = None) -> list[Support]:
    """Every known target on every known device, and whatever else has a profile."""
    profiles: dict[str, dict[str, list[Profile]]] = {}  # by the target's hash, then by device
    for profile in (stored.profile for stored in (store or ProfileStore()).list()):
        if profile is not None:
            same = profiles.setdefault(profile.target.architecture_hash, {})
            same.setdefault(device_slug(profile.device.name), []).append(profile)
    devices = load_devices()
    targets: dict[str, tuple[ModelArchitecture, Any]] = {
        name: (entry.architecture, entry.weights) for name, entry in load_targets().items()
    }
    hashes = {name: architecture.hash for name, (architecture, _) in targets.items()}
    catalogued = set(hashes.values())
    for made, places in profiles.items():
        if made in catalogued:
            continue
        target = next(iter(places.values()))[0].target
        targets.setdefault(target.name, (target.architecture, "bfloat16"))
        hashes.setdefault(target.name, made)
    rows = []
    for slug in (*devices, *sorted(set().union(*profiles.values()) - devices.keys())):
        for name, (architecture, weights) in targets.items():
            same = profiles.get(hashes[name], {})
            labels = {profile.runtime.quantization for profile in same.get(slug, ())}
            rows += [_stored(slug, name, same[slug], one) for one in sorted(filter(None, labels))]
            if None in labels:
                rows.append(_stored(slug, name, same[slug], None))
                continue
            label = None if weights == "bfloat16" else weights
            found: dict[str, Any] = {"provenance": None, "reason": _NO_TABLES}
            if slug in devices and slug in published_tables().devices:
                found = _composed(slug, architecture, weights)
            elif slug in devices:
                found = _scaled(devices[slug], architecture, weights, same) or found
            rows.append(Support(device=slug, target=name, weights=label, **found))
    return rows


def can_be_scaled(profile: Profile) -> bool:
    """Whether a profile may be scaled to another GPU: that of a whole GPU, without host times."""
    whole = profile.device.kind == "cuda" and profile.device.mig is None
    made = profile.provenance.kind
    return whole and profile.runtime.kind != "eager" and made not in ("transferred", "quick")


def _scaled(
    device: DeviceSpec,
    architecture: ModelArchitecture,
    weights: Weights,
    profiles: Mapping[str, list[Profile]],
) -> dict[str, Any]:
    """Fields of a row where a plan scales another device's times (`planning.sources`), else none.

    profiles  of the target, by their devices' slugs
    """
    plain = {
        slug: [one for one in group if one.runtime.quantization is None]
        for slug, group in profiles.items()
    }
    composed = (slug for slug in nearest_systems(device.slug) if not plain.get(slug))
    degrees = {n for slug in composed for n in _composed(slug, architecture, weights)["degrees"]}
    stored = itertools.chain(*plain.values()) if weights == "bfloat16" else ()
    usable = [one for one in stored if can_be_scaled(one)]
    degrees |= {one.runtime.tensor_parallel for one in usable}
    single = [one for one in usable if one.runtime.tensor_parallel == 1]
    error = min((transferred_error(one, device) for one in single), default=None)
    found = {"provenance": "scaled", "degrees": tuple(sorted(degrees)), "error_bar": error}
    return found if degrees else {}


def nearest_systems(slug: str) -> list[str]:
    """The devices with operator tables whose composed profiles are tried to be scaled to this."""
    errors, devices = transfer_errors(), published_tables().devices
    return sorted(devices, key=lambda one: errors.expected(one, slug)[0])[:_TRIED]


def composes(
    device: DeviceSpec, architecture: ModelArchitecture, degree: int, weights: Weights = "bfloat16"
) -> str:
    """The reason why no profile of this degree is composed; empty where one is."""
    tables = _tables(device, table_heads(architecture), bool(architecture.experts), weights)
    if isinstance(tables, RooftreeError):
        return tables.problem
    try:
        forward = ComposedForward(architecture=architecture, tables=tables, tensor_parallel=degree)
        one = np.ones(1)
        forward.linear_s(one)
        forward.lm_head_s(one)
        forward.attention_s(1, one)
        forward.recurrent_s(one)
    except RooftreeError as failure:
        return failure.problem
    return ""


def _stored(device: str, target: str, group: list[Profile], label: str | None) -> Support:
    """The row of the profiles in a group whose weights have this label."""
    fitting = [profile for profile in group if profile.runtime.quantization == label]
    best = min(fitting, key=lambda profile: profile.provenance.rank)
    weights = weights_label(label)
    reason = (
        ""
        if device in load_devices()
        else (f"{device} is no known device: plans take the path of its profile")
    )
    if weights and not best.runtime.weight_bytes and label_bytes(weights) is None:
        reason = f"not planned, as the bytes of weights '{weights}' are not known"
    return Support(
        device=device,
        target=target,
        weights=label,
        provenance=best.provenance.kind,
        degrees=tuple(sorted({profile.runtime.tensor_parallel for profile in fitting})),
        error_bar=best.provenance.error_bar,
        reason=reason,
    )


@cache
def _tables(
    device: DeviceSpec, head_dim: int, experts: bool, weights: Weights
) -> OperatorTables | RooftreeError:
    try:
        return published_tables().load(device, head_dim=head_dim, experts=experts, weights=weights)
    except RooftreeError as failure:
        return failure


@cache
def _composed(slug: str, architecture: ModelArchitecture, weights: Weights) -> dict[str, Any]:
    """Fields of a row of a device with operator tables, of which a plan composes profiles."""
    device = load_devices()[slug]
    reasons = {n: composes(device, architecture, n, weights) for n in DEGREES}
    degrees = tuple(n for n, reason in reasons.items() if not reason)
    reason = "" if degrees else reasons[DEGREES[0]]
    return {"provenance": "operators" if degrees else None, "degrees": degrees, "reason": reason}

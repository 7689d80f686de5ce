"""Look-up of a plan's target, devices and forward times."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, TargetEntry, device_by_name, find_device, slugify
from costmodel.compose.aiconfigurator import SYSTEMS, measured_experts
from costmodel.compose.serving_tables import Precision, load_serving
from costmodel.compose.transfer import transferred_error
from costmodel.compose.transfer_errors import transfer_errors
from costmodel.compose.unsplit import leaves_keys_unsplit
from costmodel.errors import InputError, ProfileError, RooftreeError
from costmodel.io import read_bytes
from costmodel.planning.engines import ValueBytes, weight_bytes
from costmodel.planning.forwards import (
    ProfileForward,
    ServingForward,
    TargetForward,
    refuse_beyond_tables,
)
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore


def find_forward(
    device: DeviceSpec,
    target: TargetEntry,
    store: ProfileStore,
    *,
    tensor_parallel: int = 1,
    precision: Precision | None = None,
    engine: str = "vllm",
) -> TargetForward:
    """Forwards from a profile of this degree in bfloat16, else from operator tables.

    Raises InputError, DeviceError, or ProfileError with the command that makes a profile.
    """
    precision = precision or Precision()
    unsplit = leaves_keys_unsplit(engine, device, precision.cache)
    if precision == Precision():
        profile = _profile(device, target.architecture, store, tensor_parallel)
        if profile is not None:
            return ProfileForward(profile=profile, unsplit=unsplit)
    needs_profile = target.architecture.experts and not target.architecture.latent_rank
    if device.slug in SYSTEMS and operators_installed() and not needs_profile:
        refuse_beyond_tables(target.architecture)
        tables = load_serving(
            device,
            engine if engine != "rooftree" else "vllm",
            precision,
            head_dim=target.architecture.head_dim,
            splits_keys=not unsplit,
        )
        return ServingForward(
            architecture=target.architecture, tables=tables, tensor_parallel=tensor_parallel
        )
    raise _missing(device, target, (tensor_parallel, precision), store)


def forward_of_profile(path: Path, target: TargetEntry, engine: str = "vllm") -> ProfileForward:
    """Forwards from the profile at a path. Raises InputError for a profile of another target."""
    profile = Profile.from_yaml(path)
    if profile.target.architecture_hash != target.architecture.hash:
        raise InputError(f"{path} is a profile of {profile.target.name}, another target")
    unsplit = leaves_keys_unsplit(engine, device_by_name(profile.device.name))
    return ProfileForward(profile=profile, unsplit=unsplit)


def operators_installed() -> bool:
    """Whether the extra `operators` is installed."""
    return all(
        importlib.util.find_spec(name) is not None for name in ("aiconfigurator_core", "pyarrow")
    )


def _profile(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, degree: int
) -> Profile | None:
    """The profile of the best provenance in the first folder that has one; None without any.

    Eager profiles are skipped: they hold mostly host time.
    """
    for folder in store.directories:
        candidates = []
        for path in sorted((folder / device.slug).glob("*.yaml")):
            try:
                raw = read_bytes(path)
                if architecture.hash.encode() not in raw:
                    continue
                profile = Profile.from_bytes(raw, str(path))
            except ProfileError:
                continue  # `rooftree profiles list` says what is wrong with it
            runtime = profile.runtime
            fits = profile.target.architecture_hash == architecture.hash
            fits = fits and runtime.tensor_parallel == degree and runtime.quantization is None
            if fits and runtime.element_bytes == 2 and runtime.kind != "eager":
                candidates.append(profile)
        if candidates:
            return min(candidates, key=lambda p: (p.provenance.kind == "quick", p.provenance.rank))
    return None


def _missing(
    device: DeviceSpec, target: TargetEntry, choice: tuple[int, Precision], store: ProfileStore
) -> ProfileError:
    """The error that no profile exists, whether the target could fit, and how to get one."""
    name, (degree, precision) = target.architecture.name, choice
    problem = f"no profile of {name} on {device.slug}, tp {degree}"
    if precision != Precision():
        problem += f", weights {precision.weights}, cache {precision.cache}"
    value = ValueBytes(weight=precision.weight_bytes, cached=precision.cache_bytes)
    weights = weight_bytes(target.architecture, value, degree)
    if weights > device.memory_bytes:
        problem += (
            f"; its weights alone are {weights / 1e9:.0f} GB on each device, which has"
            f" {device.memory_bytes / 1e9:.0f} GB"
        )
    experts = bool(target.architecture.experts)
    if precision != Precision() and (experts or device.slug not in SYSTEMS):
        hint = "Leave out --weights and --cache: other precisions than bfloat16 are planned only"
        return ProfileError(problem, hint=f"{hint} for dense targets on {', '.join(SYSTEMS)}")
    if device.slug not in SYSTEMS:
        hint = _transfer_hint(device, target.architecture, store, degree)
        return ProfileError(problem, hint=hint)
    if experts:
        if degree == 1 and _composable(device.slug, target.architecture):
            return ProfileError(
                problem, hint=f"Run `rooftree compose --device {device.slug} --target {name}`"
            )
        return ProfileError(problem, hint=_measure_hint(device, target.architecture, degree))
    hint = "`pip install 'rooftree[operators]'` is enough"
    if precision == Precision():
        hint += f", or `rooftree compose --device {device.slug} --target {name} --tp {degree}`"
    return ProfileError(problem, hint=hint)


def _measure_hint(device: DeviceSpec, architecture: ModelArchitecture, degree: int) -> str:
    source, degrees = "", ""
    if degree > 1:
        source, degrees = " vllm", f" --tensor-parallel-size {degree}"
    command = f"rooftree calibrate{source} --target {architecture.name}{degrees}"
    return f"Measure it with `{command}` on {device.name}"


def _transfer_hint(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, degree: int
) -> str:
    """The transfer of smallest error bar, by command; how to measure where there is none."""
    sources = _transfer_sources(device, architecture, store, degree)
    if not sources:
        return _compose_hint(device, architecture, degree)
    bar, best, profile = sources[0]
    hint = (
        f"Scale the one of {best}, error bar {bar:.1%}: `rooftree transfer {best}/{profile} --to"
        f" {device.slug}`"
    )
    others = [f"{slug} {other:.1%}" for other, slug, _ in sources[1:4]]
    return hint + (f"; from others: {', '.join(others)}" if others else "")


def _compose_hint(device: DeviceSpec, architecture: ModelArchitecture, degree: int) -> str:
    """How to get a first profile of a target: composed where it can be, and then scaled."""
    slugs = [slug for slug in SYSTEMS if _composable(slug, architecture)]
    if not slugs or (degree > 1 and architecture.experts):
        return _measure_hint(device, architecture, degree)
    errors, name = transfer_errors(), architecture.name
    best = min(slugs, key=lambda slug: errors.expected(slug, device.slug)[0])
    composed, shared = slugify(name.rpartition("/")[2]), ""
    if degree > 1:
        composed, shared = f"{composed}.bfloat16.kernels.tp{degree}", f" --tp {degree}"
    return (
        f"Compose one for a GPU with operator tables, `rooftree compose --device {best} --target"
        f" {name}{shared}`, and scale it: `rooftree transfer {best}/{composed} --to {device.slug}`"
    )


def _composable(slug: str, architecture: ModelArchitecture) -> bool:
    """Whether `rooftree compose` has the operators of a target, as far as can be told here."""
    if architecture.latent_rank:
        return False
    if not architecture.experts or not operators_installed():
        return True
    try:
        return architecture.expert_shape in measured_experts(find_device(slug))
    except RooftreeError:
        return False  # the device has tables of other engines only


def _transfer_sources(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, degree: int
) -> list[tuple[float, str, str]]:
    """(error bar, slug, profile's name) of devices that a profile can be scaled from, best first.

    Transferred, eager and quantised profiles do not count.
    """
    bars: dict[str, tuple[float, str, str]] = {}
    for folder in store.directories:
        for path in folder.glob("*/*.yaml"):
            try:
                if architecture.hash.encode() not in read_bytes(path):
                    continue
                profile = Profile.from_yaml(path)
            except ProfileError:
                continue  # `rooftree profiles list` says what is wrong with it
            if _is_source(profile, architecture, degree):
                name = path.stem if degree > 1 else path.stem.rsplit(".", 3)[0]
                source = transferred_error(profile, device), path.parent.name, name
                bars[path.parent.name] = min(source, bars.get(path.parent.name, source))
    return sorted(bars.values())


def _is_source(profile: Profile, architecture: ModelArchitecture, degree: int) -> bool:
    runtime = profile.runtime
    return (
        profile.target.architecture_hash == architecture.hash
        and profile.device.kind == "cuda"
        and profile.provenance.kind != "transferred"
        and runtime.kind != "eager"
        and (runtime.tensor_parallel, runtime.quantization) == (degree, None)
    )

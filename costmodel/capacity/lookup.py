"""Which device, target and step times a plan is made of."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

from costmodel.architecture import ModelArchitecture
from costmodel.capacity.forward import ServingForward
from costmodel.capacity.memory import weight_bytes
from costmodel.capacity.steps import ProfileForward, StepModel
from costmodel.compose.published import SYSTEMS
from costmodel.compose.serving_tables import Precision, load_serving
from costmodel.device import DeviceSpec, find_device, load_devices, slugify
from costmodel.errors import DeviceError, InputError, ProfileError
from costmodel.profile import Profile
from costmodel.registry import ProfileStore
from costmodel.targets import find_target

_PREFERENCE = ("measured", "transferred", "composed", "quick", "datasheet")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model: its sizes, and the longest text that it can hold; None where not known."""

    architecture: ModelArchitecture
    positions: int | None = None


def find_plan_target(name: str) -> Target:
    """A known target, or the config.json of a model folder. Raises InputError."""
    config = Path(name).expanduser() / "config.json"
    if not config.is_file():
        entry = find_target(name)
        return Target(
            architecture=entry.architecture,
            positions=entry.hf_config.get("max_position_embeddings"),
        )
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"{config} cannot be read ({failure})") from None
    return Target(
        architecture=ModelArchitecture.from_hf_config(fields, name=Path(name).resolve().name),
        positions=fields.get("max_position_embeddings"),
    )


def find_card(query: str, store: ProfileStore) -> DeviceSpec:
    """A known device; of several that fit a short name the one that profiles exist for.

    Raises DeviceError.
    """
    try:
        return find_device(query)
    except DeviceError:
        part = slugify(query)
        fits = [
            spec
            for spec in load_devices().values()
            if part in spec.slug
            and any(list((folder / spec.slug).glob("*.yaml")) for folder in store.directories)
        ]
        if len(fits) == 1:
            return fits[0]
        raise


def find_steps(
    device: DeviceSpec,
    target: Target,
    store: ProfileStore,
    *,
    tensor_parallel: int = 1,
    precision: Precision | None = None,
    engine: str = "vllm",
) -> StepModel:
    """Step times: a profile of this degree in bfloat16, else operator tables.

    Raises InputError, DeviceError or ProfileError that says how to get what is missing.
    """
    wanted = precision or Precision()
    plain = wanted == Precision()
    if plain:
        found = _profile(device, target.architecture, store, tensor_parallel)
        if found is not None:
            return ProfileForward(profile=found)
    if device.slug in SYSTEMS and operators_installed():
        tables = load_serving(
            device,
            engine if engine != "rooftree" else "vllm",
            wanted,
            head_dim=target.architecture.head_dim,
        )
        return ServingForward(
            architecture=target.architecture, tables=tables, tensor_parallel=tensor_parallel
        )
    raise _missing(device, target, (tensor_parallel, wanted), store)


def profile_steps(path: Path, target: Target) -> ProfileForward:
    """Step times of a profile that is named. Raises InputError for another target's."""
    profile = Profile.from_yaml(path)
    if profile.target.architecture_hash != target.architecture.hash:
        raise InputError(f"{path} is a profile of {profile.target.name}, another target")
    return ProfileForward(profile=profile)


def operators_installed() -> bool:
    """Whether the extra `operators` can be used."""
    return all(
        importlib.util.find_spec(name) is not None for name in ("aiconfigurator_core", "pyarrow")
    )


def _profile(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, degree: int
) -> Profile | None:
    """The first folder's; there the best provenance. An eager one is of the host, not the GPU."""
    for folder in store.directories:
        found = []
        for path in sorted((folder / device.slug).glob("*.yaml")):
            if architecture.hash.encode() not in path.read_bytes():
                continue
            try:
                profile = Profile.from_yaml(path)
            except ProfileError:
                continue  # `rooftree profiles list` says what is wrong with it
            runtime = profile.runtime
            fits = profile.target.architecture_hash == architecture.hash
            fits = fits and runtime.tensor_parallel == degree and runtime.quantization is None
            if fits and runtime.element_bytes == 2 and runtime.kind != "eager":
                found.append(profile)
        if found:
            return min(found, key=lambda p: _PREFERENCE.index(p.provenance.kind))
    return None


def _missing(
    device: DeviceSpec, target: Target, choice: tuple[int, Precision], store: ProfileStore
) -> ProfileError:
    """What there is no profile of, whether it could fit at all, and how to get one."""
    name, (degree, precision) = target.architecture.name, choice
    what = f"no profile of {name} on {device.slug}, tp {degree}"
    if precision != Precision():
        what += f", weights {precision.weights}, cache {precision.cache}"
    weights = weight_bytes(target.architecture, precision, degree)
    if weights > device.memory_bytes:
        what += (
            f"; its weights alone are {weights / 1e9:.0f} GB on each device, which has"
            f" {device.memory_bytes / 1e9:.0f} GB"
        )
    if device.slug not in SYSTEMS:
        known = _known_on(target.architecture, store)
        example = f"{known[0]}/{slugify(name.rpartition('/')[2])}" if known else "PROFILE"
        hint = f"Scale that of a similar GPU: `rooftree transfer {example} --to {device.slug}`"
        if len(known) > 1:
            hint += f"; there are profiles on {', '.join(known)}"
        return ProfileError(what, hint=hint)
    hint = "`pip install 'rooftree[operators]'` is enough"
    if precision == Precision():
        hint += f", or `rooftree compose --device {device.slug} --target {name} --tp {degree}`"
    return ProfileError(what, hint=hint)


def _known_on(architecture: ModelArchitecture, store: ProfileStore) -> list[str]:
    """Devices that have a profile of this target which is not itself a transferred one, by slug."""
    found = set()
    for folder in store.directories:
        for path in folder.glob("*/*.yaml"):
            text = path.read_bytes()
            if architecture.hash.encode() in text and b"kind: transferred" not in text:
                found.add(path.parent.name)
    return sorted(found)

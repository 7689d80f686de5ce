"""The profile that a plan takes its times from: a stored one, else one composed on the spot."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, TargetEntry, find_device, slugify
from costmodel.compose.aiconfigurator import SYSTEMS
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.compose.support import composes
from costmodel.compose.transfer import transferred_error
from costmodel.compose.transfer_errors import transfer_errors
from costmodel.errors import InputError, ProfileError
from costmodel.planning.engines import ValueBytes, weight_bytes
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest, Precision
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, readable_profiles
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, label_bytes, quantization, weights_label


def forward_for(
    request: PlanRequest, target: TargetEntry, choice: tuple[str, int], store: ProfileStore
) -> TargetForward:
    """Forward times of one (GPU slug or profile path, tensor-parallel degree).

    Raises InputError, DeviceError or ProfileError.
    """
    gpu, degree = choice
    if not is_file(gpu):
        return find_forward(
            find_device(gpu),
            target,
            store,
            tensor_parallel=degree,
            precision=request.precision,
            engine=request.engine,
        )
    profile = Profile.from_yaml(Path(gpu))
    if profile.target.architecture_hash != target.architecture.hash:
        raise InputError(f"{gpu} is a profile of {profile.target.name}, another target")
    if profile.runtime.tensor_parallel != degree:
        raise InputError(f"is a profile of tp {profile.runtime.tensor_parallel}, not {degree}")
    wanted = quantization(request.precision.weights, request.precision.cache)
    if wanted not in (None, profile.runtime.quantization):
        held = profile.runtime.quantization or profile.runtime.dtype
        raise InputError(f"is a profile of {held}, not {wanted}")
    return TargetForward(profile, request.engine)


def is_file(gpu: str) -> bool:
    """Whether a GPU of a request is the path of a profile."""
    return gpu.endswith((".yaml", ".yml"))


def find_forward(
    device: DeviceSpec,
    target: TargetEntry,
    store: ProfileStore,
    *,
    tensor_parallel: int = 1,
    precision: Precision | None = None,
    engine: str = "vllm",
) -> TargetForward:
    """Forwards from a stored profile of this degree and precision, else from a composed one.

    Labels of quantised checkpoints are planned from stored profiles only. Raises InputError,
    DeviceError, or ProfileError with the command that makes a profile.
    """
    architecture, precision = target.architecture, precision or Precision()
    profile = _stored(device, architecture, store, (tensor_parallel, precision))
    if profile is None:
        weights = next((name for name in WEIGHT_BYTES if name == precision.weights), None)
        if weights is None or device.slug not in SYSTEMS or not operators_installed():
            raise _missing(device, architecture, store, (tensor_parallel, precision))
        profile = _composed(
            ComposeOptions(
                target=architecture,
                device_name=device.slug,
                engine="vllm" if engine == "rooftree" else engine,
                tensor_parallel=tensor_parallel,
                weights=weights,
                cache=precision.cache,
            )
        )
    return TargetForward(profile, engine)


@cache
def _composed(options: ComposeOptions) -> Profile:
    return compose(options)


def operators_installed() -> bool:
    """Whether the extra `operators` is installed."""
    return all(
        importlib.util.find_spec(name) is not None for name in ("aiconfigurator_core", "pyarrow")
    )


def _stored(
    device: DeviceSpec,
    architecture: ModelArchitecture,
    store: ProfileStore,
    choice: tuple[int, Precision],
) -> Profile | None:
    """The profile of the best provenance in the first folder that has one; None without any.

    Eager profiles are skipped: they hold mostly host time.
    """
    degree, precision = choice
    wanted = degree, quantization(precision.weights, precision.cache), 2
    for folder in store.directories:
        candidates = []
        for _, profile in readable_profiles(folder, f"{device.slug}/*.yaml", architecture.hash):
            runtime = profile.runtime
            key = runtime.tensor_parallel, runtime.quantization, runtime.element_bytes
            if key == wanted and runtime.kind != "eager":
                candidates.append(profile)
        if candidates:
            return min(candidates, key=lambda p: (p.provenance.kind == "quick", p.provenance.rank))
    return None


def _missing(
    device: DeviceSpec,
    architecture: ModelArchitecture,
    store: ProfileStore,
    choice: tuple[int, Precision],
) -> ProfileError:
    """The error that no profile exists, whether the target could fit, and how to get one."""
    degree, precision = choice
    problem = f"no profile of {architecture.name} on {device.slug}, tp {degree}"
    if precision != Precision():
        problem += f", weights {precision.weights}, cache {precision.cache}"
    one = label_bytes(precision.weights)
    value = ValueBytes(weight=one or 0.0, cached=CACHE_BYTES[precision.cache])
    weights = weight_bytes(architecture, value, degree)
    if one and weights > device.memory_bytes:
        problem += (
            f"; its weights alone are {weights / 1e9:.0f} GB on each device, which has"
            f" {device.memory_bytes / 1e9:.0f} GB"
        )
    if precision.weights not in WEIGHT_BYTES:
        labels = _labels(device, architecture, store)
        hint = f"There are profiles of {labels}; or measure" if labels else "Measure"
        return ProfileError(
            problem, hint=f"{hint} such a checkpoint with `rooftree calibrate` on {device.name}"
        )
    if device.slug in SYSTEMS:
        return ProfileError(problem, hint="`pip install 'rooftree[operators]'` is enough")
    if precision != Precision():
        hint = "Leave out --weights and --cache: other precisions than bfloat16 are planned only on"
        return ProfileError(problem, hint=f"{hint} {', '.join(SYSTEMS)}")
    return ProfileError(problem, hint=_transfer_hint(device, architecture, store, degree))


def _labels(device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore) -> str:
    """The labels of quantised weights that profiles of a target on a device have."""
    stored = (
        weights_label(profile.runtime.quantization)
        for folder in store.directories
        for _, profile in readable_profiles(folder, f"{device.slug}/*.yaml", architecture.hash)
    )
    return ", ".join(dict.fromkeys(label for label in stored if label))


def _transfer_hint(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, degree: int
) -> str:
    """The transfer of smallest error bar, by command; how to get a first profile without any."""
    bars: dict[str, tuple[float, str, str]] = {}
    for folder in store.directories:
        for path, profile in readable_profiles(folder, "*/*.yaml", architecture.hash):
            if _is_source(profile, degree):
                slug = path.parent.name
                name = path.stem if degree > 1 else path.stem.rsplit(".", 3)[0]
                source = transferred_error(profile, device), slug, name
                bars[slug] = min(source, bars.get(slug, source))
    sources = sorted(bars.values())
    if not sources:
        return _compose_hint(device, architecture, degree)
    bar, best, name = sources[0]
    hint = (
        f"Scale the one of {best}, error bar {bar:.1%}: `rooftree transfer {best}/{name} --to"
        f" {device.slug}`"
    )
    others = [f"{slug} {other:.1%}" for other, slug, _ in sources[1:4]]
    return hint + (f"; from others: {', '.join(others)}" if others else "")


def _is_source(profile: Profile, degree: int) -> bool:
    runtime = profile.runtime
    return (
        profile.device.kind == "cuda"
        and profile.provenance.kind != "transferred"
        and runtime.kind != "eager"
        and (runtime.tensor_parallel, runtime.quantization) == (degree, None)
    )


def _compose_hint(device: DeviceSpec, architecture: ModelArchitecture, degree: int) -> str:
    """How to get a first profile of a target: composed where it can be, and then scaled."""
    slugs = [slug for slug in SYSTEMS if _composable(slug, architecture, degree)]
    if not slugs:
        source, degrees = "", ""
        if degree > 1:
            source, degrees = " vllm", f" --tensor-parallel-size {degree}"
        command = f"rooftree calibrate{source} --target {architecture.name}{degrees}"
        return f"Measure it with `{command}` on {device.name}"
    errors, name = transfer_errors(), architecture.name
    best = min(slugs, key=lambda slug: errors.expected(slug, device.slug)[0])
    composed, shared = slugify(name.rpartition("/")[2]), ""
    if degree > 1:
        composed, shared = f"{composed}.bfloat16.kernels.tp{degree}", f" --tp {degree}"
    return (
        f"Compose one for a GPU with operator tables, `rooftree compose --device {best} --target"
        f" {name}{shared}`, and scale it: `rooftree transfer {best}/{composed} --to {device.slug}`"
    )


def _composable(slug: str, architecture: ModelArchitecture, degree: int) -> bool:
    """Whether a profile can be composed, as far as can be told here."""
    if not operators_installed():
        return not architecture.beyond_tables and (degree == 1 or not architecture.experts)
    return not composes(find_device(slug), architecture, degree)

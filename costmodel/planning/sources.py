"""The profile that a plan takes its times from: a stored one, else one composed on the spot."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec, TargetEntry, find_device
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.compose.support import can_be_scaled, nearest_systems
from costmodel.compose.tables import published_tables
from costmodel.compose.transfer import transfer_profile, transferred_error
from costmodel.errors import InputError, ProfileError, RooftreeError
from costmodel.planning.engines import ValueBytes, weight_bytes
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest, Precision
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, readable_profiles
from costmodel.weights import (
    CACHE_BYTES,
    WEIGHT_BYTES,
    Weights,
    layer_bytes,
    quantization,
    weights_label,
)


def forward_for(
    request: PlanRequest, target: TargetEntry, choice: tuple[str, int], store: ProfileStore
) -> TargetForward:
    """Forward times of one (GPU slug or profile path, tensor-parallel degree).

    Those of a GPU are from a stored profile of this degree and precision, else from a composed or
    scaled one; labels of quantised checkpoints are planned from stored profiles only. Raises
    InputError, DeviceError, or ProfileError with the command that makes a profile.
    """
    gpu, degree = choice
    if not is_file(gpu):
        several = degree * request.data_parallel > 1
        place = _Choice(
            degree=degree,
            groups=request.data_parallel,
            whole_experts=request.expert_parallel and several,
            precision=request.precision.of(target),
            engine=request.engine,
        )
        device, architecture = find_device(gpu), target.architecture
        stored = _stored(device, architecture, store, place) if place.storable else None
        composes = device.slug in published_tables().devices and place.weights
        if stored is None and composes and operators_installed():
            stored = _composed(_options(device.slug, architecture, place))
        elif stored is None:
            stored = _transferred(device, architecture, store, place)
        return TargetForward(stored, request.engine, place.groups)
    profile = Profile.from_yaml(Path(gpu))
    if profile.target.architecture_hash != target.architecture.hash:
        raise InputError(f"{gpu} is a profile of {profile.target.name}, another target")
    if profile.runtime.tensor_parallel != degree:
        raise InputError(f"is a profile of tp {profile.runtime.tensor_parallel}, not {degree}")
    precision = request.precision
    wanted = quantization(precision.weights or "bfloat16", precision.cache)
    if wanted not in (None, profile.runtime.quantization):
        held = profile.runtime.quantization or profile.runtime.dtype
        raise InputError(f"is a profile of {held}, not {wanted}")
    return TargetForward(profile, request.engine)


def is_file(gpu: str) -> bool:
    """Whether a GPU of a request is the path of a profile."""
    return gpu.endswith((".yaml", ".yml"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a profile must be of, beside device and target.

    `groups` of data-parallel devices; `whole_experts`: a device has whole ones.
    """

    degree: int
    precision: Precision
    groups: int
    whole_experts: bool
    engine: str

    @property
    def storable(self) -> bool:
        """Whether profiles of this choice are stored: those of one group that splits experts."""
        return self.groups == 1 and not self.whole_experts

    @property
    def weights(self) -> Weights | None:
        """The weights as operator tables call them; None for a checkpoint's label."""
        return next((name for name in WEIGHT_BYTES if name == self.precision.weights), None)


def _options(slug: str, architecture: ModelArchitecture, choice: _Choice) -> ComposeOptions:
    return ComposeOptions(
        target=architecture,
        device_name=slug,
        engine="vllm" if choice.engine == "rooftree" else choice.engine,
        tensor_parallel=choice.degree,
        data_parallel=choice.groups,
        expert_parallel=choice.whole_experts,
        weights=choice.weights or "bfloat16",
        cache=choice.precision.cache,
    )


def _transferred(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, choice: _Choice
) -> Profile:
    """A profile of another device, scaled: the stored one of the smallest error bar, else one
    composed where there are tables, of the smallest error of the scaling. Raises ProfileError.
    """
    wanted = choice.degree, quantization(choice.precision.weights or "", choice.precision.cache)
    sources = [
        profile
        for folder in (store.directories if choice.storable and choice.weights else ())
        for _, profile in readable_profiles(folder, "*/*.yaml", architecture.hash)
        if (profile.runtime.tensor_parallel, profile.runtime.quantization) == wanted
        and can_be_scaled(profile)
    ]
    if sources:
        return transfer_profile(min(sources, key=lambda p: transferred_error(p, device)), device)
    if choice.weights is None or not operators_installed():
        raise _missing(device, architecture, store, choice)
    reason = ""
    for slug in nearest_systems(device.slug):
        try:
            return transfer_profile(_composed(_options(slug, architecture, choice)), device)
        except RooftreeError as failure:
            reason = reason or failure.problem
    raise _missing(device, architecture, store, choice, reason)


@cache
def _composed(options: ComposeOptions) -> Profile:
    return compose(options)


def operators_installed() -> bool:
    return published_tables().is_installed()


def _stored(
    device: DeviceSpec, architecture: ModelArchitecture, store: ProfileStore, choice: _Choice
) -> Profile | None:
    """The profile of the best provenance in the first folder that has one; None without any.

    Eager profiles are skipped: they hold mostly host time.
    """
    degree, precision = choice.degree, choice.precision
    wanted = degree, quantization(precision.weights or "bfloat16", precision.cache), 2
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
    choice: _Choice,
    reason: str = "",
) -> ProfileError:
    """The error that no profile exists, whether the target could fit, and how to get one."""
    degree, precision = choice.degree, choice.precision
    problem = f"no profile of {architecture.name} on {device.slug}, tp {degree}"
    if precision != Precision(weights="bfloat16"):
        problem += f", weights {precision.weights}, cache {precision.cache}"
    one = layer_bytes(architecture, precision.weights or "bfloat16")
    value = ValueBytes(weight=one or 0.0, cached=CACHE_BYTES[precision.cache])
    weights = weight_bytes(architecture, value, degree)
    if one and weights > device.memory_bytes:
        problem += (
            f"; its weights alone are {weights / 1e9:.0f} GB on each device, which has"
            f" {device.memory_bytes / 1e9:.0f} GB"
        )
    problem += f"; none is composed elsewhere and scaled: {reason}" if reason else ""
    if choice.weights is None:
        stored = (
            weights_label(profile.runtime.quantization)
            for folder in store.directories
            for _, profile in readable_profiles(folder, f"{device.slug}/*.yaml", architecture.hash)
        )
        labels = ", ".join(dict.fromkeys(label for label in stored if label))
        hint = f"There are profiles of {labels}; or measure" if labels else "Measure"
        return ProfileError(
            problem, hint=f"{hint} such a checkpoint with `rooftree calibrate` on {device.name}"
        )
    if not operators_installed():
        return ProfileError(problem, hint="`pip install 'rooftree[operators]'` is enough")
    command = f"rooftree calibrate --target {architecture.name}"
    if degree > 1:
        command = f"rooftree calibrate vllm --target {architecture.name}"
        command += f" --engine-option tensor_parallel_size={degree}"
    return ProfileError(problem, hint=f"Measure it with `{command}` on {device.name}")

"""The profile that a plan takes its times from: a stored one, else one composed on the spot."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from costmodel.catalog import DeviceSpec, TargetEntry, find_device
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.compose.support import can_be_scaled, nearest_systems
from costmodel.compose.tables import published_tables
from costmodel.compose.transfer import transfer_profile, transferred_error
from costmodel.errors import InputError, ProfileError, RooftreeError
from costmodel.planning.engines import ValueBytes, weight_bytes
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, readable_profiles
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, layer_bytes, quantization, weights_label


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
        device, precision = find_device(gpu), request.precision.of(target)
        several = degree * request.data_parallel > 1
        wanted = ComposeOptions(
            target=target.architecture,
            device_name=device.slug,
            engine="vllm" if request.engine == "rooftree" else request.engine,
            tensor_parallel=degree,
            data_parallel=request.data_parallel,
            expert_parallel=request.expert_parallel and several,
            weights=precision.weights or "bfloat16",
            cache=precision.cache,
        )
        stored = _stored(wanted, store)
        composes = device.slug in published_tables().devices and wanted.weights in WEIGHT_BYTES
        if stored is None and composes and operators_installed():
            stored = _composed(wanted)
        elif stored is None:
            stored = _transferred(device, wanted, store)
        return TargetForward(stored, request.engine, wanted.data_parallel)
    profile = Profile.from_yaml(Path(gpu))
    if profile.target.architecture_hash != target.architecture.hash:
        raise InputError(f"{gpu} is a profile of {profile.target.name}, another target")
    if profile.runtime.tensor_parallel != degree:
        raise InputError(f"is a profile of tp {profile.runtime.tensor_parallel}, not {degree}")
    precision = request.precision
    label = quantization(precision.weights or "bfloat16", precision.cache)
    if label not in (None, profile.runtime.quantization):
        held = profile.runtime.quantization or profile.runtime.dtype
        raise InputError(f"is a profile of {held}, not {label}")
    return TargetForward(profile, request.engine)


def is_file(gpu: str) -> bool:
    """Whether a GPU of a request is the path of a profile."""
    return gpu.endswith((".yaml", ".yml"))


def _transferred(device: DeviceSpec, wanted: ComposeOptions, store: ProfileStore) -> Profile:
    """A profile of another device, scaled: the stored one of the smallest error bar, else one
    composed where there are tables, of the smallest error of the scaling. Raises ProfileError.
    """
    plans, reason = wanted.weights in WEIGHT_BYTES, ""
    key = wanted.tensor_parallel, quantization(wanted.weights, wanted.cache)
    sources = [
        profile
        for folder in (store.directories if plans and not wanted.shares_experts else ())
        for _, profile in readable_profiles(folder, "*/*.yaml", wanted.target.hash)
        if (profile.runtime.tensor_parallel, profile.runtime.quantization) == key
        and can_be_scaled(profile)
    ]
    if sources:
        return transfer_profile(min(sources, key=lambda p: transferred_error(p, device)), device)
    for slug in nearest_systems(device.slug) if plans and operators_installed() else ():
        try:
            composed = _composed(dataclasses.replace(wanted, device_name=slug))
            return transfer_profile(composed, device)
        except RooftreeError as failure:
            reason = reason or failure.problem
    raise _missing(device, wanted, store, reason)


@cache
def _composed(options: ComposeOptions) -> Profile:
    return compose(options)


def operators_installed() -> bool:
    return published_tables().is_installed()


def _stored(wanted: ComposeOptions, store: ProfileStore) -> Profile | None:
    """The profile of the best provenance in the first folder that has one; None without any.

    Eager profiles are skipped: they hold mostly host time.
    """
    key = wanted.tensor_parallel, quantization(wanted.weights, wanted.cache), 2

    def fits(profile: Profile) -> bool:
        runtime = profile.runtime
        here = runtime.tensor_parallel, runtime.quantization, runtime.element_bytes
        return here == key and runtime.kind != "eager"

    if wanted.shares_experts:  # of which nothing is stored
        return None
    return store.best(str(wanted.device_name), wanted.target.hash, fits, quick_last=True)


def _missing(
    device: DeviceSpec, wanted: ComposeOptions, store: ProfileStore, reason: str
) -> ProfileError:
    """The error that no profile exists, whether the target could fit, and how to get one."""
    degree, architecture = wanted.tensor_parallel, wanted.target
    problem = f"no profile of {architecture.name} on {device.slug}, tp {degree}"
    if (wanted.weights, wanted.cache) != ("bfloat16", "bfloat16"):
        problem += f", weights {wanted.weights}, cache {wanted.cache}"
    one = layer_bytes(architecture, wanted.weights)
    value = ValueBytes(weight=one or 0.0, cached=CACHE_BYTES[wanted.cache])
    weights = weight_bytes(architecture, value, degree)
    if one and weights > device.memory_bytes:
        problem += (
            f"; its weights alone are {weights / 1e9:.0f} GB on each device, which has"
            f" {device.memory_bytes / 1e9:.0f} GB"
        )
    problem += f"; none is composed elsewhere and scaled: {reason}" if reason else ""
    if wanted.weights not in WEIGHT_BYTES:
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

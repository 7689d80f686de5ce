"""Composing a profile from operator tables, and where composed profiles are written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from costmodel.architecture import ModelArchitecture
from costmodel.compose.folder import folder_subject, load_folder
from costmodel.compose.forward import ComposedForward
from costmodel.compose.profiles import composed_profile, error_bar
from costmodel.compose.published import ENGINES, load_published
from costmodel.device import find_device
from costmodel.errors import InputError, RooftreeError
from costmodel.profile import Profile
from costmodel.registry import ProfileStore
from costmodel.targets import find_target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComposeOptions:
    """What to compose; `device_name` may be left out where `operators` names a folder."""

    target_name: str
    device_name: str | None = None
    engine: str = "vllm"
    tensor_parallel: int = 1
    operators: Path | None = None
    source: str = ""


def compose(options: ComposeOptions) -> Profile:
    """The composed profile. Raises InputError, DeviceError."""
    architecture = target_architecture(options.target_name)
    if options.operators is not None:
        return _from_folder(options, architecture, options.operators)
    if options.device_name is None:
        raise InputError("say which GPU", hint="Give --device, such as --device h100-sxm")
    device = find_device(options.device_name)

    def forward(engine: str) -> ComposedForward:
        tables = load_published(
            device, engine, head_dim=architecture.head_dim, experts=bool(architecture.experts)
        )
        return ComposedForward(
            architecture=architecture, tables=tables, tensor_parallel=options.tensor_parallel
        )

    chosen = forward(options.engine)
    others = []
    for engine in ENGINES:
        if engine == options.engine:
            continue
        try:
            others.append(forward(engine))
        except RooftreeError:
            continue  # an engine without this operator has no say in the error bar
    return composed_profile(chosen, error_bar(chosen, others))


def _from_folder(options: ComposeOptions, architecture: ModelArchitecture, folder: Path) -> Profile:
    device, _, _ = folder_subject(folder)
    wanted = find_device(options.device_name) if options.device_name else device
    if wanted.slug != device.slug:
        raise InputError(f"{folder} holds operators of {device.name}, not of {wanted.name}")
    chosen = ComposedForward(
        architecture=architecture,
        tables=load_folder(folder, options.source),
        tensor_parallel=options.tensor_parallel,
    )
    return composed_profile(chosen, error_bar(chosen))


def target_architecture(name: str) -> ModelArchitecture:
    """A known target, or the config.json of a model folder. Raises InputError."""
    config = Path(name).expanduser() / "config.json"
    if not config.is_file():
        return find_target(name).architecture
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"{config} cannot be read ({failure})") from None
    return ModelArchitecture.from_hf_config(fields, name=Path(name).resolve().name)


def store(profile: Profile, output: Path | None) -> Path:
    """Write to a `.yaml` file, into a folder of profiles, or into the user's directory."""
    if output is None:
        return ProfileStore().save(profile)
    if output.suffix in (".yaml", ".yml") and not output.is_dir():
        profile.to_yaml(output)
        return output
    return ProfileStore([output]).save(profile)

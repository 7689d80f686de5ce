"""Profiles by the names of a device and a target, for code that runs on neither."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from costmodel.catalog import (
    device_slug,
    find_device,
    find_target,
    load_devices,
    nearest_names,
    resolve_target,
    slugify,
)
from costmodel.errors import InputError, ProfileError
from costmodel.io import expanded
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore


def load_profile(path: str | Path) -> Profile:
    """The profile in a YAML file. Raises ProfileError where it cannot be read or is not valid."""
    return Profile.from_yaml(expanded(path, ProfileError))


def find_profile(
    device: str,
    target: str,
    *,
    dtype: str = "bfloat16",
    runtime: str | None = None,
    tensor_parallel: int = 1,
    store: ProfileStore | None = None,
) -> Profile:
    """The stored profile of a target on a device, with plain weights of `dtype`.

    device   a known device by slug, name or alias; of another device the name that it reports,
             or the name of its folder
    target   a known target such as `qwen3-8b`, or a model folder; only the architecture counts
    runtime  `graphs`, `eager` or `kernels`; None takes any
    store    what to search [default: the user's profiles, then the shipped ones]

    The first folder with a profile that fits is taken, and in it the best provenance; a decoder
    follows stricter rules (`ProfileStore.find`). Raises InputError for an unknown device or target,
    ProfileError, which lists the profiles of the device, where nothing fits.
    """
    profiles = store or ProfileStore()
    folders, wanted = profiles.directories, (None, dtype, tensor_parallel)
    slug = _folder_name(device, folders)

    def fits(profile: Profile) -> bool:
        one = profile.runtime
        key = one.quantization, one.dtype, one.tensor_parallel
        return key == wanted and runtime in (None, one.kind)

    if best := profiles.best(slug, resolve_target(target).architecture.hash, fits):
        return best
    names = [path.stem for folder in folders for path in sorted((folder / slug).glob("*.yaml"))]
    raise ProfileError(
        f"no profile of {target} on {device} in {dtype}, tensor-parallel degree {tensor_parallel}"
        + (f", runtime {runtime}" if runtime else ""),
        hint=f"This device has {', '.join(names)}" if names else "This device has no profile",
    )


def named_profile(name: str, store: ProfileStore | None = None) -> tuple[Path, Profile]:
    """The profile at the path `name`, or the stored one that is called so.

    name   `DEVICE/TARGET`: a device as in `find_profile`, and a target in full, by its last part,
           or as far into the file's name as needed (`qwen3-8b.bfloat16.kernels.tp2`); `DEVICE`
           alone where it has one profile. A file of the same name in an earlier folder hides
           those after it, a target without a degree means degree 1 where there is one, and of
           several folders with a profile of the target the first counts.
    store  what to search [default: the user's profiles, then the shipped ones]

    Raises ProfileError when the profile cannot be used, InputError when none or several fit.
    """
    path = expanded(name)
    if os.path.isfile(path):
        return path, Profile.from_yaml(path)
    folders = (store or ProfileStore()).directories
    device, slash, target = name.strip().partition("/")
    absent = InputError(f"{name}: there is no such file", hint="Check the path")
    problem = f"no stored profile is called '{name}', and there is no such file"
    is_path = path.suffix in (".yaml", ".yml")
    if is_path and name.count("/") > 1:
        raise absent
    try:
        device_folder = _folder_name(device, folders)
    except InputError:
        if is_path:
            raise absent from None
        if slash:
            raise
        every = [file for folder in folders for file in sorted(folder.glob("*/*.yaml"))]
        stored = {file: f"{file.parent.name}/{file.stem.rsplit('.', 3)[0]}" for file in every}
        near = list(dict.fromkeys(stored[file] for file in every if _is_of(file.stem, name)))[:5]
        near = near or nearest_names(name.lower(), {label: label for label in stored.values()})
        makes = "`rooftree calibrate` makes one"
        hint = f"Name DEVICE/TARGET, as {', '.join(near)}" if near else makes
        raise InputError(problem, hint=hint) from None
    files: dict[str, Path] = {}
    for folder in folders:
        for file in sorted((folder / device_folder).glob("*.yaml")):
            files.setdefault(file.name, file)
    fitting = [file for file in files.values() if not slash or _is_of(file.stem, target)]
    if slash:
        single = [file for file in fitting if re.search(r"\.tp1(-\d+)?$", file.stem)]
        fitting = single or fitting
        fitting = [file for file in fitting if file.parents[1] == fitting[0].parents[1]]
    if len(fitting) == 1:
        return fitting[0], Profile.from_yaml(fitting[0])
    if fitting:
        names = ", ".join(f"{file.parent.name}/{file.stem}" for file in fitting[:5])
        names += ", ..." if fitting[5:] else ""
        raise InputError(f"'{name}' fits {len(fitting)} profiles: {names}", hint="Name one of them")
    there = ", ".join(file.stem for file in files.values())
    raise InputError(
        problem,
        hint=f"This device has {there}" if there else "`rooftree profiles list` shows them all",
    )


def _is_of(stem: str, target: str) -> bool:
    """Whether a file's name, `<target>.<dtype>.<runtime>.tp<n>`, begins with these whole parts."""
    parts = stem.rsplit(".", 3)
    names = {".".join(parts[: count + 1]) for count in range(len(parts))}
    if target.lower().removesuffix(".yaml") in names:
        return True
    try:
        return slugify(find_target(target).name.rpartition("/")[2]) in names
    except InputError:
        return False


def _folder_name(device: str, folders: Sequence[Path]) -> str:
    """The folder of a known device, or of another one that has profiles. Raises InputError."""
    try:
        return find_device(device).slug
    except InputError:
        slug = device_slug(device)
        if slug in load_devices() or not any((folder / slug).is_dir() for folder in folders):
            raise
        return slug

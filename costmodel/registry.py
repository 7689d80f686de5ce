"""Where profiles live, which one fits, and how one is stored.

A profile lies under `<device slug>/<target>.<dtype>.<runtime>.tp<n>.yaml` in the user's
directory or in the shipped one, searched in that order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from costmodel.device import device_slug, slugify
from costmodel.errors import ProfileError
from costmodel.files import folder_lock, read_bytes, shipped_directory
from costmodel.profile import Profile
from costmodel.registry_key import ProfileKey, SoftKey
from costmodel.stages import DrafterSection

__all__ = [
    "LookupResult",
    "ProfileKey",
    "ProfileStore",
    "SoftKey",
    "StoredProfile",
    "profile_file_name",
    "shipped_directory",
    "user_directory",
]

# Not measured on this device with this runtime: a prior, corrected while decoding.
BORROWED = ("composed", "transferred", "datasheet")
_PREFERENCE = ("measured", "quick", "transferred", "composed", "datasheet")


def user_directory() -> Path:
    """`$ROOFTREE_HOME`, else the platform's data directory for rooftree."""
    home = os.environ.get("ROOFTREE_HOME", "").strip()
    if home:
        return Path(home).expanduser()
    return Path(platformdirs.user_data_dir("rooftree", appauthor=False))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A file in a profile folder: its profile, or what is wrong with it."""

    path: Path
    profile: Profile | None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The profile that fits.

    `warnings`: what differs that may differ, one line each. `online_correction`: the times
    may be off here, so correct them while decoding. `needs_floor_probe`: the profile has no
    host time, so measure the floor of a forward first. `same`: all keys agree, hard and soft,
    so that times taken here may be added to it.
    """

    profile: Profile
    path: Path
    warnings: tuple[str, ...] = ()
    online_correction: bool = False
    needs_floor_probe: bool = False
    same: bool = False


class ProfileStore:
    """Profiles in folders; the first folder is the one that is written to."""

    def __init__(self, directories: Sequence[str | Path] | None = None) -> None:
        folders = (user_directory(), shipped_directory()) if directories is None else directories
        self.directories = tuple(Path(folder) for folder in folders)
        if not self.directories:
            raise ProfileError("a profile store needs at least one directory")

    def list(self) -> tuple[StoredProfile, ...]:
        """Every profile in every folder, also those that cannot be read."""
        paths = [path for folder in self.directories for path in sorted(folder.glob("*/*.yaml"))]
        return tuple(_read(path) for path in paths)

    def unusable(self, device_name: str) -> tuple[StoredProfile, ...]:
        """The files of one device that cannot be read, each with its problem."""
        paths = [path for folder in self.directories for path in _device_files(folder, device_name)]
        return tuple(stored for stored in map(_read, paths) if stored.profile is None)

    def find(self, key: ProfileKey, soft: SoftKey | None = None) -> LookupResult:
        """The profile for `key`: the first folder that has one; there the best provenance.

        Only files of this device that name the architecture are parsed. Raises ProfileError
        that lists what exists and which keys differ.
        """
        for folder in self.directories:
            fits: list[StoredProfile] = []
            broken: list[str] = []
            for path in _device_files(folder, key.device_name):
                if not _names(path, key.architecture_hash):
                    continue
                stored = _read(path)
                if stored.profile is None:
                    broken.append(f"left out a profile that cannot be used: {stored.problem}")
                elif _serves(stored.profile, key):
                    fits.append(stored)
            if fits:
                return _result(min(fits, key=_rank), key, soft or SoftKey(), tuple(broken))
        raise self._nothing_found(key)

    @staticmethod
    def open(path: Path, key: ProfileKey, soft: SoftKey | None = None) -> LookupResult:
        """The profile in a file that the user names, under the same rules as one found.

        Raises ProfileError where it cannot be read or a hard key differs, naming each.
        """
        stored = StoredProfile(path=path, profile=Profile.from_yaml(path))
        if stored.profile is not None and not _serves(stored.profile, key):
            raise ProfileError(
                f"this profile is not for this device, target and runtime: {_why_not(stored, key)}",
                hint="Leave --profile out, or measure one with `rooftree calibrate`",
            )
        return _result(stored, key, soft or SoftKey(), ())

    def save(self, profile: Profile) -> Path:
        """Write the profile into the first folder in one step; returns its path.

        It replaces a profile with the same key; one with another key under the same name
        stays, and a number is added to the new file's name. An unusable file is replaced too,
        but not by a `quick` profile. Raises ProfileError.
        """
        folder = self.directories[0] / device_slug(profile.device.name)
        stem = profile_file_name(profile).removesuffix(".yaml")
        path, number = folder / f"{stem}.yaml", 1
        with folder_lock(folder):
            while not _replaceable(path, profile):
                number += 1
                path = folder / f"{stem}-{number}.yaml"
            profile.to_yaml(path)
        return path

    def add_drafter(
        self, found: LookupResult, architecture_hash: str, drafter: DrafterSection
    ) -> None:
        """Keep a draft cost that was timed here in the profile that was found.

        The file is read again first: it keeps whatever was written to it meanwhile, a cost of
        this very drafter too. Raises ProfileError, saying why, where it is none of the first
        folder's, differs in a key, or cannot be written.
        """
        own = self.directories[0]
        if not found.path.resolve().is_relative_to(own.resolve()):
            raise ProfileError(f"the profile is none of your own in {own}")
        if not found.same:
            raise ProfileError("the profile is not of exactly this device, runtime and versions")
        with folder_lock(found.path.parent):
            stored = Profile.from_yaml(found.path)
            if stored.differences(found.profile.key, found.profile.soft_key):
                raise ProfileError(f"another profile has taken the place of {found.path}")
            if architecture_hash not in stored.drafters:
                stored.with_drafter(architecture_hash, drafter).to_yaml(found.path)

    def _nothing_found(self, key: ProfileKey) -> ProfileError:
        wanted = (
            f"no profile for architecture {key.architecture_hash} on {key.device_name}"
            f" ({key.quantization or key.dtype}, {key.runtime}, {key.attention},"
            f" tp{key.tensor_parallel})"
        )
        found = []
        for folder in self.directories:
            for path in _device_files(folder, key.device_name):
                found.append(_why_not(_read(path), key))
        if found:
            shown = "; ".join(found[:6]) + (f"; and {len(found) - 6} more" if found[6:] else "")
            problem = f"{wanted}; this device has {shown}"
        else:
            places = ", ".join(str(folder) for folder in self.directories)
            problem = f"{wanted}; there is none for this device in {places}"
        return ProfileError(problem, hint="Measure one with `rooftree calibrate`")


def profile_file_name(profile: Profile) -> str:
    """`<target>.<dtype>.<runtime>.tp<n>.yaml`."""
    runtime = profile.runtime
    target = slugify(profile.target.name.rstrip("/").rpartition("/")[2])
    weights: str = runtime.dtype
    if runtime.quantization is not None:
        weights += "-" + slugify(runtime.quantization).replace(".", "-")
    return f"{target}.{weights}.{runtime.kind}.tp{runtime.tensor_parallel}.yaml"


def _device_files(folder: Path, device_name: str) -> Sequence[Path]:
    return sorted((folder / device_slug(device_name)).glob("*.yaml"))


def _read(path: Path) -> StoredProfile:
    try:
        return StoredProfile(path=path, profile=Profile.from_bytes(read_bytes(path), str(path)))
    except ProfileError as failure:
        return StoredProfile(path=path, profile=None, problem=failure.problem)


def _names(path: Path, architecture_hash: str) -> bool:
    """Whether the text contains the hash at all: a search of bytes, far quicker than parsing."""
    try:
        return architecture_hash.encode() in read_bytes(path)
    except ProfileError:
        return True  # reading it again reports why


def _differences(profile: Profile, key: ProfileKey) -> Sequence[str]:
    """Hard keys in the way. A borrowed profile has no runtime and attention of its own."""
    different = profile.key.differences(key)
    borrowed = profile.provenance.kind in BORROWED and profile.runtime.kind != "eager"
    return [name for name in different if not (borrowed and name in ("runtime", "attention"))]


def _serves(profile: Profile, key: ProfileKey) -> bool:
    return not _differences(profile, key)


def _rank(stored: StoredProfile) -> tuple[int, str]:
    kind = stored.profile.provenance.kind if stored.profile else _PREFERENCE[-1]
    return _PREFERENCE.index(kind), str(stored.path)


def _result(
    stored: StoredProfile, key: ProfileKey, soft: SoftKey, broken: tuple[str, ...]
) -> LookupResult:
    profile = stored.profile
    if profile is None:
        raise ProfileError(stored.problem)
    warnings = [
        f"{name} is {_shown(soft, name)} here, but was {_shown(profile.soft_key, name)} when"
        f" {stored.path.name} was made; times are corrected while decoding"
        for name in profile.soft_key.differences(soft)
    ]
    borrowed = profile.provenance.kind in BORROWED
    if borrowed:
        warnings.append(
            f"{stored.path.name} is {profile.provenance.kind}, not measured here; times are"
            " corrected while decoding (`rooftree calibrate` measures them)"
        )
    return LookupResult(
        profile=profile,
        path=stored.path,
        warnings=(*warnings, *broken),
        online_correction=bool(warnings),
        needs_floor_probe=borrowed and key.runtime == "eager",
        same=not profile.differences(key, soft),
    )


def _replaceable(path: Path, profile: Profile) -> bool:
    if not path.exists():
        return True
    stored = _read(path)
    if stored.profile is None:
        # A measurement was asked for; a probe was not, and leaves the file to be mended.
        return profile.provenance.kind != "quick"
    return not stored.profile.key.differences(profile.key)


def _why_not(stored: StoredProfile, key: ProfileKey) -> str:
    if stored.profile is None:
        return f"{stored.path.name} (cannot be used: {stored.problem})"
    reasons = [
        f"{name} {_shown(stored.profile.key, name)}, here {_shown(key, name)}"
        for name in _differences(stored.profile, key)
    ]
    return f"{stored.path.name} ({'; '.join(reasons)})"


def _shown(key: ProfileKey | SoftKey, name: str) -> str:
    value = getattr(key, name)
    if name == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    return "none" if value is None else str(value)

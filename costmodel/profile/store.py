"""Folders of profiles: lookup of the one that fits a device and target, and writing.

A profile lies under `<device slug>/<target>.<dtype>.<runtime>.tp<n>.yaml` in the user's
directory or in the shipped one, searched in that order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import platformdirs

from costmodel.catalog import device_slug, slugify
from costmodel.errors import ProfileError
from costmodel.io import expanded, folder_lock, read_bytes, shipped_directory
from costmodel.profile.grade import objection
from costmodel.profile.profile import SOFT_KEYS, Profile, ProfileKey
from costmodel.profile.schema import UNCAPTURED, DrafterSection

ASIDE = "aside"  # folder of profiles that no lookup reads


def user_directory() -> Path:
    """`$ROOFTREE_HOME`, else the platform's data directory for rooftree."""
    home = os.environ.get("ROOFTREE_HOME", "").strip()
    if home:
        return expanded(home, ProfileError)
    return Path(platformdirs.user_data_dir("rooftree", appauthor=False))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A file in a profile folder: its profile, or the problem with it."""

    path: Path
    profile: Profile | None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The profile that fits, and how to use it here.

    warnings           soft keys that differ and files that cannot be used, one line each
    online_correction  the times may be wrong here: correct them while decoding
    needs_floor_probe  the profile has no host time: measure the floor of a forward first
    same               all hard and soft keys agree: times measured here may be added to it
    """

    profile: Profile
    path: Path
    warnings: tuple[str, ...] = ()
    online_correction: bool = False
    needs_floor_probe: bool = False
    same: bool = False


class ProfileStore:
    """Profiles in folders, searched in order; the first folder is written to."""

    def __init__(self, directories: Sequence[str | Path] | None = None) -> None:
        folders = (user_directory(), shipped_directory()) if directories is None else directories
        self.directories = tuple(Path(folder) for folder in folders)

    def list(self) -> tuple[StoredProfile, ...]:
        """Every file in every folder, unreadable ones included."""
        paths = [path for folder in self.directories for path in sorted(folder.glob("*/*.yaml"))]
        return tuple(_read(path) for path in paths)

    def unusable(self, device_name: str) -> tuple[StoredProfile, ...]:
        """The files of one device that cannot be read, each with its problem."""
        paths = [path for folder in self.directories for path in _device_files(folder, device_name)]
        return tuple(stored for stored in map(_read, paths) if stored.profile is None)

    def find(self, key: ProfileKey) -> LookupResult:
        """The profile for `key` with the best provenance, of the first folder that has one.

        Raises ProfileError that lists the existing profiles and the keys that differ.
        """
        for folder in self.directories:
            files = _device_files(folder, key.device_name)
            stored = [_read(path) for path in files if _mentions(path, key.architecture_hash)]
            problems = tuple(
                f"left out a profile that cannot be used: {one.problem}"
                for one in stored
                if one.profile is None
            )
            fitting = [
                (one.profile.provenance.rank, str(one.path), one.path, one.profile)
                for one in stored
                if one.profile is not None and not _hard_differences(one.profile, key)
            ]
            if fitting:
                _, _, path, profile = min(fitting, key=lambda place: place[:2])
                return _result(path, profile, key, problems)
        wanted = (
            f"no profile for architecture {key.architecture_hash} on {key.device_name}"
            f" ({key.quantization or key.dtype}, {key.runtime}, {key.attention},"
            f" tp{key.tensor_parallel})"
        )
        existing = [
            _mismatch(_read(path), key)
            for folder in self.directories
            for path in _device_files(folder, key.device_name)
        ]
        places = ", ".join(str(folder) for folder in self.directories)
        problem = f"{wanted}; there is none for this device in {places}"
        if existing:
            listed = "; ".join(existing[:6])
            listed += f"; and {len(existing) - 6} more" if existing[6:] else ""
            problem = f"{wanted}; this device has {listed}"
        raise ProfileError(problem, hint="Measure one with `rooftree calibrate`")

    def best(
        self,
        slug: str,
        architecture_hash: str,
        fits: Callable[[Profile], bool],
        *,
        quick_last: bool = False,
    ) -> Profile | None:
        """The profile of the best provenance that fits, of the first folder that has one; or None.

        slug        the name of the device's folder
        quick_last  a quick probe is worse than what was not measured here
        """
        for folder in self.directories:
            readable = readable_profiles(folder, f"{slug}/*.yaml", architecture_hash)
            if fitting := [profile for _, profile in readable if fits(profile)]:
                places = ((quick_last and p.provenance.kind == "quick", p) for p in fitting)
                return min(places, key=lambda place: (place[0], place[1].provenance.rank))[1]
        return None

    @staticmethod
    def open(path: Path, key: ProfileKey) -> LookupResult:
        """The profile in a file that the user names, under the same rules as `find`."""
        profile = Profile.from_yaml(path)
        if _hard_differences(profile, key):
            mismatch = _mismatch(StoredProfile(path=path, profile=profile), key)
            raise ProfileError(
                f"this profile is not for this device, target and runtime: {mismatch}",
                hint="Leave --profile out, or measure one with `rooftree calibrate`",
            )
        return _result(path, profile, key, ())

    def put(
        self, profile: Profile, output: Path | None = None, *, replace: bool = False
    ) -> tuple[Path, str]:
        """Write the profile, unless one of its key is better: (path, why it was put aside).

        One that is put aside lies in the folder `aside` beside the better one, where no lookup
        finds it. Raises ProfileError. `output` is a YAML file; None: where the lookup finds it.
        `replace`: whatever is better.
        """
        place, stored, reason = output or self._place(profile), None, ""
        if not replace and output is None:
            with contextlib.suppress(ProfileError):
                stored = self.find(profile.key).profile
        elif not replace and os.path.lexists(place):
            stored = _read(place).profile
        if stored is not None and not _hard_differences(stored, profile.key):
            reason = objection(stored, profile)
        if reason:
            folder = place.parent / ASIDE
            with folder_lock(folder):
                path = next(p for p in _numbered(folder / place.name) if not os.path.lexists(p))
                profile.to_yaml(path)
            return path, reason
        if output is None:
            return self.save(profile), ""
        there = _read(output).profile if os.path.lexists(output) else None
        if there is not None and there.provenance.rank < profile.provenance.rank:
            raise ProfileError(
                f"{output}: not written, since it holds a profile that is"
                f" {there.provenance.kind} and this one is {profile.provenance.kind}",
                hint="Choose another --output, or move that file away",
            )
        profile.to_yaml(output)
        return output, ""

    def save(self, profile: Profile) -> Path:
        """Write the profile into the first folder in one step; returns its path. Raises
        ProfileError.

        A profile with the same key is replaced, unless its provenance is better. Such a one stays,
        as does one with another key under the same name, and the new file's name gets a number. An
        unusable file may be a measured profile with a slip of the pen: only another measured one
        replaces it.
        """

        def replaceable(path: Path) -> bool:
            if not os.path.lexists(path):
                return True
            stored, rank = _read(path).profile, profile.provenance.rank
            if stored is None:
                return rank == 0
            return not stored.key.hard_differences(profile.key) and rank <= stored.provenance.rank

        place = self._place(profile)
        with folder_lock(place.parent):
            path = next(filter(replaceable, _numbered(place)))
            profile.to_yaml(path)
        return path

    def _place(self, profile: Profile) -> Path:
        return self.directories[0] / device_slug(profile.device.name) / profile_file_name(profile)

    def better(self, profile: Profile) -> Path | None:
        """A better profile of the same target, device, degree and weights; None without.

        Measured ones by provenance, others by the error bar.
        """

        def place(one: Profile) -> tuple[bool, float]:
            made = one.provenance
            return made.borrowed, (made.error_bar or 0.0) if made.borrowed else made.rank

        def key(one: Profile) -> tuple[int, str | None]:
            return one.runtime.tensor_parallel, one.runtime.quantization

        slug, architecture_hash = profile.device.slug, profile.target.architecture_hash
        for folder in self.directories:
            for path, stored in readable_profiles(folder, f"{slug}/*.yaml", architecture_hash):
                usable = key(stored) == key(profile) and stored.runtime.kind != "eager"
                if usable and place(stored) < place(profile):
                    return path
        return None

    def add_drafter(
        self, lookup: LookupResult, architecture_hash: str, drafter: DrafterSection
    ) -> None:
        """Add a draft cost measured here to the profile that a lookup gave.

        The file is read again first, so that what another process wrote meanwhile stays. Raises
        ProfileError where it is outside the first folder, differs in a key, or cannot be written.
        """
        folder = self.directories[0]
        if not lookup.path.resolve().is_relative_to(folder.resolve()):
            raise ProfileError(f"the profile is none of your own in {folder}")
        if not lookup.same:
            raise ProfileError("the profile is not of exactly this device, runtime and versions")
        with folder_lock(lookup.path.parent):
            stored = Profile.from_yaml(lookup.path)
            if stored.key.differences(lookup.profile.key):
                raise ProfileError(f"another profile has taken the place of {lookup.path}")
            if architecture_hash not in stored.drafters:
                stored.with_drafter(architecture_hash, drafter).to_yaml(lookup.path)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_stem(f"{path.stem}-{number}")


def profile_file_name(profile: Profile) -> str:
    """`<target>.<dtype>.<runtime>.tp<n>.yaml`."""
    runtime = profile.runtime
    target = slugify(profile.target.name.rstrip("/").rpartition("/")[2])
    weights: str = runtime.dtype
    if runtime.quantization is not None:
        weights += "-" + slugify(runtime.quantization).replace(".", "-")
    return f"{target}.{weights}.{runtime.kind}.tp{runtime.tensor_parallel}.yaml"


def readable_profiles(
    folder: Path, pattern: str, architecture_hash: str
) -> Iterator[tuple[Path, Profile]]:
    """The profiles of a target that can be read; `rooftree profiles list` shows the others."""
    for path in sorted(folder.glob(pattern)):
        profile = _read(path).profile if _mentions(path, architecture_hash) else None
        if profile is not None and profile.target.architecture_hash == architecture_hash:
            yield path, profile


def _device_files(folder: Path, device_name: str) -> Sequence[Path]:
    return sorted((folder / device_slug(device_name)).glob("*.yaml"))


def _read(path: Path) -> StoredProfile:
    try:
        return StoredProfile(path=path, profile=Profile.from_bytes(read_bytes(path), str(path)))
    except ProfileError as failure:
        return StoredProfile(path=path, profile=None, problem=failure.problem)


def _mentions(path: Path, architecture_hash: str) -> bool:
    """Whether the file contains the hash: a search of bytes, far quicker than parsing."""
    try:
        return architecture_hash.encode() in read_bytes(path)
    except ProfileError:
        return True  # reading it again reports why


def _hard_differences(profile: Profile, key: ProfileKey) -> Sequence[str]:
    """Hard keys that differ; a borrowed profile fits any runtime and attention but eager."""
    different = profile.key.hard_differences(key)
    borrowed = profile.provenance.borrowed and profile.runtime.kind not in UNCAPTURED
    return [name for name in different if not (borrowed and name in ("runtime", "attention"))]


def _result(
    path: Path, profile: Profile, key: ProfileKey, unusable: tuple[str, ...]
) -> LookupResult:
    different = profile.key.differences(key)
    warnings = [
        f"{name} is {_text(key, name)} here, but was {_text(profile.key, name)} when"
        f" {path.name} was made; times are corrected while decoding"
        for name in different
        if name in SOFT_KEYS
    ]
    borrowed = profile.provenance.borrowed
    if borrowed:
        warnings.append(
            f"{path.name} is {profile.provenance.kind}, not measured here; times are"
            " corrected while decoding (`rooftree calibrate` measures them)"
        )
    return LookupResult(
        profile=profile,
        path=path,
        warnings=(*warnings, *unusable),
        online_correction=bool(warnings),
        needs_floor_probe=borrowed and key.runtime in UNCAPTURED,
        same=not different,
    )


def _mismatch(stored: StoredProfile, key: ProfileKey) -> str:
    if stored.profile is None:
        return f"{stored.path.name} (cannot be used: {stored.problem})"
    reasons = [
        f"{name} {_text(stored.profile.key, name)}, here {_text(key, name)}"
        for name in _hard_differences(stored.profile, key)
    ]
    return f"{stored.path.name} ({'; '.join(reasons)})"


def _text(key: ProfileKey, name: str) -> str:
    value = getattr(key, name)
    if name == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    return "none" if value is None else str(value)

"""Where a calibration's profile, picture and raw samples are written."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from costmodel.errors import InputError
from costmodel.files import replacing
from costmodel.profile import Profile
from costmodel.registry import ProfileStore, user_directory
from profiler.journal import Journal


def check_writable(output: Path | None) -> None:
    """Raise InputError before measuring when the profile could not be written afterwards."""
    folder = user_directory() if output is None else output.absolute().parent
    if output is not None and (output.is_dir() or output.suffix != ".yaml"):
        raise InputError(
            f"the profile cannot be written to {output}",
            hint="Give --output a file name ending in .yaml.",
        )
    probe = folder / ".rooftree-writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint="Choose another --output, or set ROOFTREE_HOME to a folder you can write to.",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where it could not be made it is not there
            probe.unlink()


def keep_samples(journal: Journal, path: Path) -> None:
    """The raw samples go beside the profile, as `<profile>.samples.jsonl`, whole or not at all."""
    journal.close()
    try:
        with replacing(path.with_suffix(".samples.jsonl")) as part:
            shutil.copyfile(journal.path, part)
        journal.delete()
    except OSError as error:
        raise InputError(
            f"the profile {path} is written, but not its raw samples: {error.strerror or error}",
            hint="Free some space and run the same command again; nothing is measured anew.",
        ) from error


def store(profile: Profile, output: Path | None) -> Path:
    """Write the profile to `output`, or where the lookup finds it; returns its path."""
    if output is None:
        return ProfileStore().save(profile)
    profile.to_yaml(output)
    return output


def draw(profile: Profile, path: Path) -> Path:
    """Draw the profile's picture beside it; returns its path."""
    from profiler.report import plot_profile

    return plot_profile(profile, path.with_suffix(".png"))

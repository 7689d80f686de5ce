"""A file that is replaced holds the old content or the new, never a part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.files import replacing

WRITER = """
import os, signal, sys
from pathlib import Path
from costmodel.files import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_text("half of the ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_appears_whole_with_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b" / "file.bin"
    with replacing(place) as part:
        assert part.parent == place.parent  # a rename between file systems would copy
        part.write_bytes(b"new")
        assert not place.exists()
    assert place.read_bytes() == b"new"
    assert names(place.parent) == ["file.bin"]


@pytest.mark.parametrize("failure", [OSError, ValueError, KeyboardInterrupt])
def test_a_body_that_fails_changes_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    with pytest.raises(failure), replacing(place) as part:
        part.write_text("half of the ne")
        raise failure
    assert place.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_killed_writer_leaves_the_old_content(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("old")
    ended = subprocess.run([sys.executable, "-c", WRITER, str(place)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert place.read_text() == "old"
    with replacing(place) as part:
        part.write_text("new")
    assert place.read_text() == "new"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    place = tmp_path / "file"
    with replacing(place) as first:
        first.write_text("the first, ")
        with replacing(place) as second:
            second.write_text("second")
        assert place.read_text() == "second"
        with first.open("a") as file:
            file.write("whole")
    assert place.read_text() == "the first, whole"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("again", [False, True])
def test_what_is_renamed_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The very file that gets the name is synced, also where the body makes it anew."""
    seen: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        seen.append(("fsync", os.fstat(handle).st_ino))
        fsync(handle)

    def renamed(source: Path, place: Path) -> None:
        seen.append(("replace", os.stat(source).st_ino))
        replace(source, place)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with replacing(tmp_path / "file") as part:
        if again:
            other = tmp_path / "other"
            other.write_text("new")
            other.rename(part)
        else:
            part.write_text("new")
    written, folder = (tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino
    assert seen == [("fsync", written), ("replace", written), ("fsync", folder)]

"""A file that is replaced holds the old content or the new, never a part."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from costmodel.errors import InputError, ProfileError, RooftreeError
from costmodel.io import read_bytes, replacing, write_atomic

WRITER = """
import os, signal, sys
from pathlib import Path
from costmodel.io import replacing
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


def test_files_get_their_names_in_one_place() -> None:
    """`replacing` alone writes a part and renames it; the demo model's whole folder is renamed."""
    root, renaming = Path(__file__).parents[2], set()
    for package in ("costmodel", "decoder", "integrations", "profiler"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                words = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if re.search(r"^(os\.(replace|renames?)|shutil\.move)$|\.rename$", words):
                    renaming.add(str(path.relative_to(root)))
    assert renaming == {"costmodel/io.py", "decoder/model/demo_model.py"}


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "file"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", WRITER, str(place)], check=False)
    assert len(names(tmp_path)) == 1  # that of the last one
    other = tmp_path / "other"
    with replacing(other) as part:
        assert names(tmp_path) == [part.name]
        part.write_text("whole")
    assert names(tmp_path) == ["other"]


def test_only_left_parts_of_ones_own_are_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".rooftree-a.tmp").symlink_to(victim)
    os.mkfifo(tmp_path / ".rooftree-b.tmp")
    (tmp_path / ".rooftree-c.tmp").mkdir()
    (tmp_path / ".rooftree-d.tmp").write_text("left")
    (tmp_path / ".other-e.tmp").write_text("not ours")
    write_atomic(tmp_path / "file", "new")
    kept = [".other-e.tmp", ".rooftree-a.tmp", ".rooftree-b.tmp", ".rooftree-c.tmp"]
    assert names(tmp_path) == [*kept, "file", "victim"]
    assert victim.read_text() == "precious"


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    place.symlink_to(victim)
    write_atomic(place, b"new")
    assert (victim.read_text(), place.read_text()) == ("precious", "new")
    assert not place.is_symlink()


def test_names_of_any_length_that_a_folder_takes(tmp_path: Path) -> None:
    """The temporary file's name does not grow with that of the file."""
    place = tmp_path / ("x" * 255)
    write_atomic(place, "new")
    assert place.read_text() == "new"


@pytest.mark.parametrize("error", [ProfileError, InputError])
def test_a_full_disk_is_the_caller_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RooftreeError]
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(error, match=r"file: not written, the disk is full\. Free some space"):
        write_atomic(tmp_path / "file", "text", error)
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "folder", "\0"])
def test_only_regular_files_are_read(tmp_path: Path, place: str) -> None:
    path = tmp_path / "odd"
    if place == "pipe":
        os.mkfifo(path)
    elif place == "folder":
        path.mkdir()
    elif place == "\0":
        path = Path("a\0b")
    else:
        path.symlink_to(place)
    with pytest.raises(InputError, match=r"not a regular file|is not a path") as caught:
        read_bytes(path, InputError)
    assert str(caught.value).isprintable()


def test_no_more_is_read_than_wanted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1001)
    assert len(read_bytes(path, most_bytes=1001)) == 1001
    with pytest.raises(ProfileError, match="larger than"):
        read_bytes(path, most_bytes=1000)


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    """Nor is a device: an administrator's `--output /dev/full` would replace it for everybody."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InputError, match=f"{name}: not written \\(it is no regular file"):
            write_atomic(tmp_path / name, b"new", InputError)
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["folder", "pipe"]

"""Files are read within bounds; one that is replaced holds the old content or the new."""

import json
import os
from pathlib import Path

import pytest

from costmodel import io
from costmodel.errors import InputError, ProfileError
from costmodel.io import json_lines, parse_json, read_bytes, read_json, replacing, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_appears_whole_with_its_folder_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b" / "file.bin"
    with replacing(place) as part:
        assert part.parent == place.parent  # a rename between file systems would copy
        part.write_bytes(b"new")
        assert not place.exists()
    with pytest.raises(KeyboardInterrupt), replacing(place) as part:
        part.write_text("half of the ne")
        raise KeyboardInterrupt
    assert place.read_bytes() == b"new"
    assert names(place.parent) == ["file.bin"]
    place = place.with_name("file")
    with replacing(place) as first:
        first.write_text("the first, ")
        with replacing(place) as second:
            second.write_text("second")
        assert place.read_text() == "second"
        with first.open("a") as file:
            file.write("whole")
    assert place.read_text() == "the first, whole"
    assert names(place.parent) == ["file", "file.bin"]


def test_what_is_renamed_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    write_atomic(tmp_path / "file", "new")
    written = (tmp_path / "file").stat().st_ino
    assert seen == [("fsync", written), ("replace", written)]


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
    whole = tmp_path / "file"
    whole.write_bytes(b"x" * 1001)
    assert len(read_bytes(whole, most_bytes=1001)) == 1001
    with pytest.raises(ProfileError, match="larger than"):
        read_bytes(whole, most_bytes=1000)


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    """Nor is a device: an administrator's `--output /dev/full` would replace it for everybody."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InputError, match=f"{name}: not written \\(it is no regular file"):
            write_atomic(tmp_path / name, b"new", InputError)
    assert (tmp_path / "pipe").is_fifo() and names(tmp_path) == ["folder", "pipe"]


@pytest.mark.parametrize(("text", "reason"), [
    ("NaN", "not finite"), ("[1, -Infinity]", "not finite"), ("1e999", "not finite"),
    ("1" + "0" * 5000, "too many digits"), ("[" * 100_000, "too deeply"),
    ("{'a': 1}", "in line 1"), ("[1,\n2", "in line 2"), ("", "line 1"), (b"\xff[]", "UTF-8"),
])  # fmt: skip
def test_json_that_nothing_can_use_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(io.NotJson, match=reason) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200


def test_json_is_read_as_python_does_and_errors_name_file_and_line(tmp_path: Path) -> None:
    value = {"a": [1, -2.5e-300, None, True, "\u00e9\U0001f600"], "b": {"c": {}}, "": 2**63 - 1}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert parse_json(text) == value
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]  # with a byte order mark
    assert parse_json("[Infinity]", finite=False) == [float("inf")]
    place = tmp_path / "a.json"
    place.write_text('{"a": NaN}')
    with pytest.raises(InputError, match=r"a\.json cannot be read as JSON: .* not finite"):
        read_json(place)
    with pytest.raises(InputError, match=r"none\.json: there is no such file"):
        read_json(tmp_path / "none.json")
    lines = b'\xef\xbb\xbf{"a": "x\xe2\x80\xa8y"}\r\n\n[1, 2]\n'
    assert list(json_lines(place, lines)) == [(1, {"a": "x\u2028y"}), (3, [1, 2])]
    with pytest.raises(InputError, match=r"json, line 2 cannot be read as JSON: .*UTF-8"):
        list(json_lines(place, b"1\n\xff"))

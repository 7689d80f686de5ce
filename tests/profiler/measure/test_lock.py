"""The device lock between two real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from costmodel.errors import DeviceError
from profiler.measure.lock import device_lock, lock_directory

ROOT = Path(__file__).parents[3]


@contextmanager
def holder(device: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input closes."""
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from profiler.measure.lock import device_lock
        with device_lock({device!r}, Path({str(directory)!r})):
            print("held", flush=True)
            sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.communicate()


def test_the_second_process_fails_at_once_and_names_the_first(tmp_path):
    """Other devices are free meanwhile, and this one is when its holder was killed."""
    with holder("NVIDIA H200", tmp_path) as other:
        with pytest.raises(DeviceError) as failure, device_lock("NVIDIA H200", tmp_path):
            pytest.fail("two processes hold one lock")
        expected = (
            rf"another measurement of NVIDIA H200 is running \(process {other.pid}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"
        )
        assert re.fullmatch(expected, failure.value.problem)
        assert failure.value.exit_code == 4
        with device_lock("cuda:1", tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with device_lock("NVIDIA H200", tmp_path):
            pass


def test_a_directory_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot lock cpu"), device_lock("cpu", tmp_path / "file"):
        pytest.fail("locked without a directory")


@pytest.fixture
def two_places(monkeypatch, tmp_path):
    """A data directory and a folder of temporary files of one's own; returns the latter."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shared", ["data directory", "folder of temporary files"])
def test_either_place_in_common_is_enough(two_places, monkeypatch, tmp_path, shared):
    """One data directory under two TMPDIRs, and two data directories of one machine."""
    (tmp_path / "other").mkdir()
    with device_lock("cpu"):
        if shared == "data directory":
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
        else:
            monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "other"))
        with pytest.raises(DeviceError, match=rf"is running \(process {os.getpid()}, since"):
            device_lock("cpu").__enter__()
    with device_lock("cpu"):
        pass


def test_no_lock_is_written_through_a_planted_link(two_places):
    """Another user can make names in a shared folder of temporary files before this one does."""
    victim = two_places / "victim"
    victim.write_text("precious")
    with device_lock("cpu"):
        pass
    for lock in [*two_places.rglob("*.lock")]:
        for planted in (lock, lock.with_suffix(".owner")):
            planted.unlink(missing_ok=True)
            planted.symlink_to(victim)
            with contextlib.suppress(DeviceError), device_lock("cpu"):
                pass
            planted.unlink()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("how", ["link", "loose", "another owner", "file"])
def test_a_folder_that_others_could_write_into_is_refused(two_places, monkeypatch, tmp_path, how):
    folder = lock_directory()
    if how == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        if how == "loose":
            folder.chmod(0o777)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DeviceError, match="cannot lock cpu in"), device_lock("cpu"):
        pytest.fail("locked in a folder of others")
    assert [*tmp_path.rglob("*.lock")] == []

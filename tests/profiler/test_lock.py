"""The device lock between two real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from costmodel.errors import DeviceError
from profiler.lock import device_lock, lock_directory

ROOT = Path(__file__).parents[2]


@contextmanager
def holder(device: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input closes."""
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from profiler.lock import device_lock
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


def test_the_second_process_fails_at_once_and_names_the_first(tmp_path: Path) -> None:
    with holder("NVIDIA H200", tmp_path) as other:
        with pytest.raises(DeviceError) as failure, device_lock("NVIDIA H200", tmp_path):
            pytest.fail("two processes hold one lock")
        expected = (
            rf"another measurement of NVIDIA H200 is running \(process {other.pid}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"
        )
        assert re.fullmatch(expected, failure.value.problem)
        assert failure.value.exit_code == 4
    with device_lock("NVIDIA H200", tmp_path):
        pass


def test_other_devices_are_not_locked(tmp_path: Path) -> None:
    with holder("cuda:0", tmp_path), device_lock("cuda:1", tmp_path):
        pass


def test_a_killed_holder_leaves_the_lock_free(tmp_path: Path) -> None:
    with holder("cpu", tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        with device_lock("cpu", tmp_path):
            pass


def test_an_error_in_the_body_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), device_lock("cpu", tmp_path):
        _ = 1 / 0
    with holder("cpu", tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot lock cpu"), device_lock("cpu", tmp_path / "file"):
        pytest.fail("locked without a directory")


def test_the_lock_does_not_depend_on_where_profiles_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = lock_directory()
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    assert lock_directory() == before

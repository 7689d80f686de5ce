"""The device lock between two real processes."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from costmodel.errors import DeviceError
from profiler.measure.lock import device_lock, lock_directory


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch, tmp_path):
    """A folder of temporary files of one's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_second_process_fails_at_once_and_names_the_first(tmp_path):
    """Or says so and waits. Other devices are free, and this one is when its holder was killed."""
    program = textwrap.dedent("""
        import sys
        from profiler.measure.lock import device_lock
        with device_lock("NVIDIA H200"):
            print("held", flush=True)
            sys.stdin.read()
    """)
    place = {"cwd": Path(__file__).parents[3], "env": os.environ | {"TMPDIR": str(tmp_path)}}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **place, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DeviceError) as failure, device_lock("NVIDIA H200"):
            pytest.fail("two processes hold one lock")
        expected = (
            rf"another measurement of NVIDIA H200 is running \(process {other.pid}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)"
        )
        assert re.fullmatch(expected, failure.value.problem)
        assert failure.value.exit_code == 4
        with device_lock("cuda:1"):
            pass
        said: list[str] = []
        with device_lock("NVIDIA H200", lambda line: (said.append(line), other.kill())):
            assert said == [f"{failure.value.problem}: waiting for its end"]
        with device_lock("NVIDIA H200"):
            pass


def test_no_lock_is_written_through_a_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with device_lock("cpu"):
        pass
    (lock,) = tmp_path.rglob("*.lock")
    lock.unlink(missing_ok=True)
    lock.symlink_to(victim)
    with contextlib.suppress(DeviceError), device_lock("cpu"):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("how", ["link", "loose", "another owner", "file"])
def test_a_folder_that_others_could_write_into_is_refused(monkeypatch, tmp_path, how):
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

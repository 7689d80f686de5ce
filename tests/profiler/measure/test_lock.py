"""The device lock between two real processes."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from costmodel.errors import DeviceError
from profiler.measure.lock import device_lock


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch, tmp_path):
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

"""What a command can refuse before it imports torch, which takes seconds, it refuses before."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from decoder.names import check_target
from profiler.measure.lock import device_lock

PROGRAM = """
import json, sys
from profiler.cli import run
codes = [run(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([codes, "torch" in sys.modules]))
"""
NOWHERE = "/dev/null/out.yaml"  # below a file
MODEL, OUTPUT = ("--target", "qwen3-8b"), ("--output", NOWHERE)
REFUSED = [
    (2, "no known target is called 'qwen3-8x'", "calibrate", "--target", "qwen3-8x"),
    (2, "no known target is called 'qwen3-8x'", "bench", "--target", "qwen3-8x"),
    (2, "there is no folder ./no", "generate", "--target", "./no", "--prompt", "a"),
    (2, "there is no folder ./no", "train-drafter", "--target", "./no", "--output", "."),
    (2, "'fastest' is not a policy", "generate", "--policy", "fastest", "--prompt", "a"),
    (2, "'fixed:x' is not a policy", "bench", "--policy", "fixed:x@ngram"),
    (4, "'tpu' is not a device", "calibrate", "--device", "tpu"),
    (4, "'tpu' is not a device", "bench", "--device", "tpu"),
    (6, "cannot write to /dev/null", "calibrate", "--output", NOWHERE),
    (6, "cannot write to /dev/null", "bench", "--output", NOWHERE),
    (6, "cannot write to /dev/null/out", "train-drafter", "--output", "/dev/null/out"),
    (6, "cannot write to /dev/null", "fit", "a.csv", "--device", "cpu", *MODEL, *OUTPUT),
    (6, "cannot write to /dev/null", "compose", *MODEL, "--output", NOWHERE),
    (6, "cannot write to /dev/null", "transfer", "a", "l40s", "--output", NOWHERE),
    (6, "cannot write to /dev/null", "profiles", "plot", "h100-sxm/qwen3-8b", "/dev/null/a.png"),
    (4, "another measurement of Some-CPU-cpu is running (process ", "calibrate", "--device", "cpu"),
]


def test_it_is_refused_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with device_lock("Some CPU cpu"):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([words for _, _, *words in REFUSED])],
            capture_output=True, text=True, check=True,
            env=os.environ | {"ROOFTREE_HOME": str(tmp_path / "home")},
        )  # fmt: skip
    codes, torch_imported = json.loads(result.stdout)
    assert codes == [code for code, *_ in REFUSED]
    lines = result.stderr.splitlines()
    assert len(lines) == len(REFUSED)
    for line, (_, message, *_) in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"rooftree: {message}")
    assert not torch_imported


@pytest.mark.parametrize("name", ["owner/model", "qwen3-8b", "."])
def test_a_name_that_may_be_a_target_passes(name):
    check_target(name)

"""A real vLLM server on a CPU, measured over HTTP in a small form."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from costmodel.profile.profile import Profile
from lab.studies.vllm_server import vllm_server
from profiler import cli
from tests.conftest import CALIBRATED

SERVER_ARGUMENTS = (
    "--enforce-eager", "--enable-prefix-caching", "--disable-uvicorn-access-log",
    "--max-model-len", "2432", "--max-num-seqs", "8",
)  # fmt: skip
PYTHON = os.environ.get("ROOFTREE_VLLM_PYTHON") or (sys.executable if find_spec("vllm") else "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="vLLM is neither installed (docs/engines.md) nor in ROOFTREE_VLLM_PYTHON"
    ),
]


def test_a_vllm_server(smollm2_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    arguments = "--device cpu --contexts 128,512 --batch 1,2 --time-budget 20s --json"
    path = tmp_path / "served.yaml"
    model, log = str(smollm2_folder), tmp_path / "server.log"
    with vllm_server(Path(PYTHON), model, SERVER_ARGUMENTS, log) as (url, _):
        code = cli.run(["calibrate", "url", url, *arguments.split(), "--output", str(path)])
    captured = capsys.readouterr()
    assert code in CALIBRATED, captured.err
    assert json.loads(captured.out)["path"] == str(path)
    profile = Profile.from_yaml(path)
    assert (profile.runtime.kind, profile.runtime.attention) == ("url", "vllm-0.32.0")
    assert profile.target.architecture.layers == 30
    assert set(profile.surface.batch) == {1, 2}
    assert profile.held_out is not None
    physical = profile.roofline("physical")
    points = profile.surface.points()
    bound_s = physical.seconds(points.rows, points.context, points.batch)
    assert (points.seconds >= bound_s * (1 - 1e-5)).all()

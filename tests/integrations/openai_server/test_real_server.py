"""A real vLLM server on a CPU, measured over HTTP in a small form."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from costmodel.profile.profile import Profile
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


@contextlib.contextmanager
def server(model: str, log: Path):
    """The address of a vLLM server, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", host, "--port", str(port)]
    usual, openmp = {"VLLM_CPU_KVCACHE_SPACE": "2"}, Path(PYTHON).parents[1] / "lib/libiomp5.so"
    usual |= {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *SERVER_ARGUMENTS], env=usual | os.environ, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://{host}:{port}"
    try:
        while not ready(url):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).is_success
    return False


def test_a_vllm_server(smollm2_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    arguments = "--device cpu --contexts 128,512 --batch 1,2 --time-budget 20s --json"
    path = tmp_path / "served.yaml"
    model, log = str(smollm2_folder), tmp_path / "server.log"
    with server(model, log) as url:
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

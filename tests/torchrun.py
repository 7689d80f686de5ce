"""Starting a module of the tests as several processes, with the torchrun that a user has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 900  # a hang, not a slow machine


def torchrun(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes of `python -m module`, one thread each; returned when both have ended.

    They compile nothing: the trees of tests are built sooner than the compiler is loaded.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    place = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    fixed = {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*launcher, *place, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | fixed | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun alone would leave its processes behind
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

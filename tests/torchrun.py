"""Starting a module of the tests as several processes, as torchrun does for a user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 240


def torchrun(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes of `python -m module`, one thread each; returned when both have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    place = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return subprocess.run(
        [*launcher, *place, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

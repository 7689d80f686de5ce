"""The cores that a benchmark's server leaves to vLLM's workers."""

from __future__ import annotations

import os
import subprocess
import sys

from lab.studies.vllm_server import worker_cores

WORKER = """
import os
open("/proc/self/comm", "w").write("VLLM::Worker_TP0")
os.sched_setaffinity(0, {%d})
print("ready", flush=True)
input()
"""


def test_worker_cores_are_those_of_the_group() -> None:
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", WORKER % core],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        found = worker_cores(worker.pid)
        elsewhere = worker_cores(os.getpid())
        worker.stdin.close()
    assert found == {core}
    assert elsewhere == set()

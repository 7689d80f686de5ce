"""A vLLM server of this machine, for as long as a benchmark needs it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

START_S = 300.0


def vllm_environment(python: Path) -> dict[str, str]:
    """The environment of a vLLM on a CPU: this one's, with what vLLM needs where it lacks it."""
    usual = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    if openmp.is_file():
        usual["LD_PRELOAD"] = str(openmp)
    return usual | os.environ


@contextlib.contextmanager
def vllm_server(
    python: Path, model: str, arguments: Sequence[str], log: Path
) -> Iterator[tuple[str, frozenset[int]]]:
    """Start a server, stop it at the end; gives its address and the cores of its HTTP side.

    python     interpreter that has vLLM
    arguments  further ones of vLLM's server
    log        file of what the server says

    The HTTP server and the calling thread, which is the client, keep to the cores that vLLM's
    workers leave. vLLM reserves one for them but lets them run on the workers' too, which
    makes a step up to 5 % longer on two cores (docs/LOG.md). No cores are given where the
    workers leave none. Raises SystemExit where the server does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    own_cores = os.sched_getaffinity(0)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            env=vllm_environment(python),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        cores = own_cores - worker_cores(process.pid)
        if cores:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)
            os.sched_setaffinity(0, cores)
        yield url, frozenset(cores)
    finally:
        os.sched_setaffinity(0, own_cores)
        stop(process)


def worker_cores(group: int) -> set[int]:
    """Cores that the workers of a process group may use."""
    cores: set[int] = set()
    for folder in Path("/proc").iterdir():
        # a process may end between two of these lines
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name)
            name = (folder / "comm").read_text(encoding="utf-8")
            if os.getpgid(number) == group and name.startswith("VLLM::Worker"):
                cores |= os.sched_getaffinity(number)
    return cores


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"the server stopped at its start:\n{said[-3000:]}")
        with contextlib.suppress(OSError):
            read_url(f"{url}/health")
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not answer within {START_S:g} s; see {log}")


def read_url(url: str) -> str:
    """The text at a URL, whatever proxies this machine's environment names; OSError on failure."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=10.0) as answer:
        return str(answer.read().decode())


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine's processes, which are in its group."""
    for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)

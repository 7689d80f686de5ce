"""A vLLM server of this machine, for as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

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
            command, env=vllm_environment(python), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
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


PERCENTS = (50, 90, 95, 99)
TIMEOUT_S = 300.0
LEAST_RATE = 1e-6  # acceptance data has rates above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Token ids to send `arrival_s` after the start; exactly `output_tokens` answer them."""

    arrival_s: float
    prompt: Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """When a request was sent, and when how many tokens arrived: [(seconds, tokens)]."""

    arrival_s: float
    sent_s: float
    prompt_tokens: int
    events: Sequence[tuple[float, int]]

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.events)

    @property
    def ttft_s(self) -> float:
        """From the arrival, so that a late client does not hide waiting."""
        return self.events[0][0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first ones; None for an answer in one piece."""
        further = self.output_tokens - self.events[0][1]
        return (self.events[-1][0] - self.events[0][0]) / further if further else None


def tokens_of_line(line: str) -> int:
    """Tokens that one line of the event stream brings; 0 for lines without any.

    Raises ValueError for an error that the server sent instead.
    """
    if not line.startswith("data:") or line == "data: [DONE]":
        return 0
    data = json.loads(line[5:])
    if "error" in data:
        raise ValueError(f"the server answered with an error: {data['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in data.get("choices", ()))


def events_of_stream(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """When how many tokens arrived, from [(seconds, bytes)]; a line arrives with its end."""
    events, unfinished = [], b""
    for seconds, piece in pieces:
        *lines, unfinished = (unfinished + piece).split(b"\n")
        if tokens := sum(tokens_of_line(line.decode()) for line in lines):
            events.append((seconds, tokens))
    return events


async def send(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, start_s: float
) -> Answer:
    """One request at its time; raises SystemExit where the answer is not of the length asked."""
    await asyncio.sleep(max(start_s + request.arrival_s - time.perf_counter(), 0.0))
    sent_s = time.perf_counter() - start_s
    body = {
        "model": model, "prompt": list(request.prompt), "max_tokens": request.output_tokens,
        "temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    pieces: list[tuple[float, bytes]] = []  # read at the end: meanwhile the server has the cores
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            text = (await response.read()).decode(errors="replace")
            raise SystemExit(f"{url} refused a request ({response.status}): {text[:300]}")
        async for piece in response.content.iter_any():
            pieces.append((time.perf_counter() - start_s, piece))
    answer = Answer(arrival_s=request.arrival_s, sent_s=sent_s,
                    prompt_tokens=len(request.prompt), events=events_of_stream(pieces))  # fmt: skip
    if answer.output_tokens != request.output_tokens:
        raise SystemExit(
            f"an answer has {answer.output_tokens} tokens instead of {request.output_tokens}:"
            " the server's stream cannot be counted"
        )
    return answer


async def _load(url: str, model: str, requests: Sequence[Request]) -> list[Answer]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()
        return await asyncio.gather(
            *(send(session, url, model, request, start_s) for request in requests)
        )


def load(url: str, model: str, requests: Sequence[Request]) -> tuple[list[Answer], float]:
    """Send all requests at their times, whatever the server's state, and wait for all answers.

    Also returns the share of one core that the client used.
    """
    start_s, used_s = time.perf_counter(), _cpu_s()
    try:
        answers = asyncio.run(_load(url, model, requests))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SystemExit(f"{url} broke off: {error or type(error).__name__}") from error
    return answers, (_cpu_s() - used_s) / (time.perf_counter() - start_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Means and percentiles; tokens a second from the first arrival to the last token."""
    end_s = max(answer.events[-1][0] for answer in answers)
    start_s = min(answer.arrival_s for answer in answers)
    return {
        "requests": len(answers),
        "tokens_per_s": sum(answer.output_tokens for answer in answers) / (end_s - start_s),
        "ttft_s": spread([answer.ttft_s for answer in answers]),
        "tpot_s": spread([a.tpot_s for a in answers if a.tpot_s is not None]),
        "latest_send_s": max(answer.sent_s - answer.arrival_s for answer in answers),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and PERCENTS; empty without values."""
    if not len(values):
        return {}
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTS}
    return {"mean": float(np.mean(values))} | percentiles


def metrics(text: str) -> dict[str, float]:
    """Sums over all labels but `position` of the counters in a Prometheus text."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        head, _, labels = name.partition("{")
        position = labels.partition('position="')[2].partition('"')[0]
        key = f"{head}[{position}]" if position else head
        sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def acceptance(
    before: Mapping[str, float], after: Mapping[str, float], longest: int
) -> dict[str, Any]:
    """Rates at depths 1 .. `longest` and the share of rounds with a draft, by vLLM's counters.

    A round of one request commits its accepted tokens and one more; the first token of an answer
    comes from its prompt.
    """

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts = grown("vllm:spec_decode_num_drafts_total")
    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    answers = grown("vllm:request_success_total")
    rounds = grown("vllm:generation_tokens_total") - answers - accepted
    if drafts <= 0 or rounds <= 0:
        raise SystemExit("the server's metrics count no drafts: does it speculate?")
    rates, reached = [], drafts
    for depth in range(longest):
        here = grown(f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{depth}]")
        rates.append(max(min(here / reached, 1.0), LEAST_RATE) if reached else LEAST_RATE)
        reached = here
    return {
        "by_depth": rates, "rounds": round(rounds), "drafted_share": min(drafts / rounds, 1.0),
        "drafter": "ngram", "drafter_kind": "ngram",
        "drafted": grown("vllm:spec_decode_num_draft_tokens_total"), "accepted": accepted,
    }  # fmt: skip

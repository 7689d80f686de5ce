"""Commands on a tiny target in forked processes: quick to start, and free to be killed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

from costmodel.catalog import Peaks
from lab.studies.faults.formats import make_times
from profiler import cli
from profiler.measure.machine import Activity
from tests.tiny_folder import fake_clock

FAULT_EXIT = cli.EXIT_INTERNAL
LONGEST_LINE = 700
LIMIT_CPU_S = 300.0  # of the command: a busy machine makes no hang
LIMIT_WALL_S = 1800.0  # for what waits without computing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended; a negative exit code is a signal's, None a hang."""

    exit_code: int | None
    stdout: bytes
    stderr: str
    cpu_s: float

    @property
    def fault(self) -> str:
        """What is wrong with how it ended; empty for success and for an error of one line."""
        if self.exit_code is None:
            return "hang"
        if self.exit_code in (FAULT_EXIT, 1) or "Traceback" in self.stderr:
            return f"exit {self.exit_code}: {self.last_line[:200]}"
        if len(self.last_line) > LONGEST_LINE:
            return f"a line of {len(self.last_line)} letters"
        return ""

    @property
    def last_line(self) -> str:
        lines = self.stderr.strip().splitlines()
        return lines[-1] if lines else ""


def run_forked(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    kill_after_cpu_s: float | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> Ended:
    """Run `rooftree` with these arguments in a fork of this process.

    kill_after_cpu_s  kill it once it has computed for so long, on a busy machine too
    prepare           runs in the fork first, as to close its streams
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        exit_code, cpu_s = _run(arguments, environment, kill_after_cpu_s, prepare, (out, errors))
        out.seek(0)
        errors.seek(0)
        text = errors.read().decode("utf-8", errors="replace")
        return Ended(exit_code=exit_code, stdout=out.read(), stderr=text, cpu_s=cpu_s)


def _run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    kill_after_cpu_s: float | None,
    prepare: Callable[[], None],
    streams: tuple[IO[bytes], IO[bytes]],
) -> tuple[int | None, float]:
    """The exit code and the computing time of a fork; its output is in the streams."""
    out, errors = streams
    child = os.fork()
    if child == 0:
        _become(arguments, environment, out.fileno(), errors.fileno(), prepare)
    ended = _wait(child, LIMIT_CPU_S if kill_after_cpu_s is None else kill_after_cpu_s)
    if ended is None:
        os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        exit_code = None if kill_after_cpu_s is None else os.waitstatus_to_exitcode(status)
        return exit_code, used.ru_utime + used.ru_stime
    return ended


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: int,
    errors: int,
    prepare: Callable[[], None],
) -> None:
    """Run the command in place of this process; does not return."""
    code = FAULT_EXIT
    try:
        os.dup2(out, 1)
        os.dup2(errors, 2)
        prepare()  # before the streams, which ask their files once whether they can seek
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        os.environ.update(environment)
        tempfile.tempdir = environment.get("TMPDIR", tempfile.gettempdir())
        code = cli.run(list(arguments))
    finally:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            code = FAULT_EXIT
        os._exit(code)


def _wait(child: int, limit_cpu_s: float) -> tuple[int, float] | None:
    """The exit code and the computing time of a process; None once it is beyond a limit."""
    deadline_s, process = time.perf_counter() + LIMIT_WALL_S, psutil.Process(child)
    while time.perf_counter() < deadline_s:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        so_far = process.cpu_times()
        if so_far.user + so_far.system >= limit_cpu_s:
            return None
        time.sleep(0.005)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder with a tiny target, a data directory and locks of its own."""

    folder: Path
    target: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def environment(self) -> dict[str, str]:
        return {"ROOFTREE_HOME": str(self.home), "TMPDIR": str(self.folder / "tmp")}

    def make(self) -> Place:
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "count {n} {n} {n}"}}\n' for n in range(5)))
        make_times(self.folder)
        return self

    def warm_up(self) -> None:
        """Compile and import, in this process, what every fork would else do by itself."""
        silence = contextlib.ExitStack()
        with silence, pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            patch.setattr(tempfile, "tempdir", self.environment["TMPDIR"])
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                silence.enter_context(redirect(io.StringIO()))
            # Training is left out: autograd does not work in a fork of a process that used it.
            for command in ("calibrate", "generate", "bench"):
                cli.run([command, *self.arguments(command)])
            importlib.import_module("lab.training.recipe")

    def run(
        self,
        command: str,
        *more: str,
        kill_after_cpu_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        **environment: str,
    ) -> Ended:
        """Run one of `ARGUMENTS` here."""
        arguments = [command, *self.arguments(command), *more]
        given = self.environment | environment
        return run_forked(arguments, given, kill_after_cpu_s=kill_after_cpu_s, prepare=prepare)

    def arguments(self, command: str) -> list[str]:
        here = {"target": str(self.target), "folder": str(self.folder)}
        return [word.format(**here) for word in ARGUMENTS[command]]


@contextlib.contextmanager
def made_up_clock() -> Iterator[None]:
    """Calibrations in the body take times of a made-up clock, so that each lasts a second."""
    peaks = Peaks(flops_per_s=1e11, bytes_per_s=1e10)
    quiet = Activity(processes=(), steal_share=0.0)
    with pytest.MonkeyPatch.context() as patch:
        fake_clock(patch)
        module = "decoder.profiling.measured_profile"
        patch.setattr(f"{module}.measure_peaks", lambda device, dtype: peaks)
        patch.setattr("profiler.calibrate.calibrate.observe", lambda: quiet)
        yield


_ON_CPU = ("--target", "{target}", "--device", "cpu", "--dtype", "float32")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "calibrate": (*_ON_CPU, "--contexts", "32,64", "--max-nodes", "7", "--time-budget", "4"),
    "bench": (
        *_ON_CPU, "--prompts", "{folder}/prompts.jsonl", "--raw", "--drafter", "ngram",
        "--policy", "fixed:4", "--peers", "none", "--new-tokens", "12",
        "--output", "{folder}/result.json",
    ),
    "train-drafter": (
        "--target", "{target}", "--device", "cpu", "--output", "{folder}/trained",
        "--texts", "64", "--steps", "8", "--layers", "1", "--block-size", "4",
    ),
    "train-blockpilot": (
        "--target", "{target}", "--device", "cpu", "--drafter", "{target}/dflash",
        "--prompts", "{folder}/prompts.jsonl", "--output", "{folder}/trained",
        "--max-new-tokens", "24", "--hidden", "8", "--epochs", "30", "--radius", "1",
    ),
    "fit": (
        "{folder}/times.csv", "--target", "qwen3-8b", "--device", "h100-sxm",
        "--source", "a made-up engine 1.0", "--output", "{folder}/home/fitted.yaml",
    ),
    "generate": (*_ON_CPU, "--prompt", "hello", "--max-new-tokens", "8"),
}  # fmt: skip

"""Engines as arms of a benchmark: checked, given a model, started, and closed at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

import torch

from costmodel.errors import InputError
from decoder.device import dtype_name
from decoder.drafters.factory import DEMO_DRAFTER
from decoder.model.target import Target
from lab.bench.arms.base import ArmDecoding, ArmRunner, Details, PeerFailure, Put
from lab.bench.engines import worker
from lab.bench.engines.model_file import check_model, engine_model, precision
from lab.bench.engines.requested import InstalledEngine, RequestedEngine, engine_arms, look_into
from lab.bench.record import Arm, EngineInfo

SPARE_TOKENS = 64  # of the longest text, for drafts beyond its end
_UNKNOWN = -1
Say = Callable[[str], None]


def engine_info(engine: InstalledEngine, dtype: str) -> EngineInfo:
    """The engine for a result."""
    requested = engine.requested
    return EngineInfo(
        name=requested.name,
        versions=engine.versions,
        precision=precision(requested, dtype),
        model="" if requested.model is None else Path(requested.model).name,
        options={
            name: value if isinstance(value, str | int | float | bool | None) else str(value)
            for name, value in requested.arguments.items()
        },
    )


def check_engines(
    engines: Sequence[RequestedEngine], target: str, *, greedy: bool, pretrained: bool, device: str
) -> list[InstalledEngine]:
    """Look into each engine's environment, before a model is loaded. Raises InputError."""
    if engines and not greedy:
        raise InputError("engines decode at temperature 0", hint="Leave out --temperature.")
    if engines and not pretrained:
        raise InputError("engines run the target's own weights", hint="Leave out --dtype int8.")
    installed: list[InstalledEngine] = []
    for engine in engines:
        if device != "cpu" and engine.name != "vllm":
            raise InputError(
                f"{engine.name} runs on a CPU here, and the target on {device}",
                hint="Give --device cpu.",
            )
        installed.append(look_into(engine))
        check_model(installed[-1], target)
    return installed


@contextmanager
def engine_runners(
    engines: Sequence[InstalledEngine], target: Target, ends: Iterable[int], say: Say
) -> Iterator[list[ArmRunner]]:
    """The arms of all engines, whose processes end with the context.

    ends  token ids that end a text
    """
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rooftree-engines-")))
        runners = [arm for engine in engines for arm in _runners(engine, target, work, ends, say)]
        for runner in runners:
            stack.callback(runner.close)
        yield list(runners)


def _runners(
    engine: InstalledEngine, target: Target, work: Path, ends: Iterable[int], say: Say
) -> list[EngineArm]:
    requested, loaded, dtype = engine.requested, target.loaded, dtype_name(target.dtype)
    if requested.model is None and requested.kind.model:
        say(f"converting {loaded.name} for {requested.name}")
    options = {
        "model": engine_model(engine, loaded.source, dtype, work),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "ends": sorted(ends),
        "drafter": str(DEMO_DRAFTER),
        "arguments": dict(requested.arguments),
    }
    return [
        EngineArm(arm, engine, options | {"mode": requested.mode(arm.policy)}, say)
        for arm in engine_arms(requested)
    ]


class EngineArm(ArmRunner):
    """One way of decoding of one engine, in a process of its own."""

    def __init__(
        self, arm: Arm, engine: InstalledEngine, options: dict[str, Any], say: Say
    ) -> None:
        self.arm = arm
        self._engine, self._options, self._say = engine, options, say
        self._process: EngineProcess | None = None

    def prepare(self, tokens: int) -> None:
        """Start the engine. Raises PeerFailure where it does not start."""
        self._say(f"starting {self.arm.name}")
        # vLLM's own advice on a CPU: other OpenMP libraries make single steps slow at times.
        library = self._engine.prefix / "lib" / "libiomp5.so"
        preload = self.arm.engine == "vllm" and library.is_file()
        options = self._options | {"context": tokens + SPARE_TOKENS}
        variables = {"LD_PRELOAD": str(library)} if preload else {}
        name = self._engine.requested.name
        self._process = EngineProcess(self._engine.python, name, options, variables)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> EngineArmDecoding:
        return EngineArmDecoding(self._process, list(ids), new_tokens)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class EngineArmDecoding(ArmDecoding):
    """One text of an engine."""

    def __init__(self, process: EngineProcess | None, ids: list[int], new_tokens: int) -> None:
        self._process, self._ids, self._new_tokens = process, ids, new_tokens
        self._text: list[int] | None = None

    def steps(self, put: Put) -> Iterator[None]:
        """Decode. Raises PeerFailure where the engine ends, or its text before the limit."""
        if self._process is None:
            raise PeerFailure("it was not started")
        wanted, tokens = True, 0
        for new in self._process.decode(self._ids, self._new_tokens):
            if isinstance(new, dict):
                self._text = new.get("text")
                break
            tokens += len(new)
            wanted = put([_UNKNOWN if token is None else token for token in new])
        if wanted:
            raise PeerFailure(
                f"its text ended after {tokens} of {self._new_tokens} tokens without an end token"
            )
        yield from ()

    def details(self) -> Details:
        """The text where ids came late; engines report no rounds."""
        return Details(text=None if self._text is None else tuple(self._text))


START_LIMIT_S = 1800.0  # compilation of a model included
ANSWER_LIMIT_S = 600.0  # between tokens
_LONGEST_REASON = 200


class EngineProcess:
    """A started engine. Raises PeerFailure where it ends, or does not answer in time."""

    def __init__(
        self, python: str, engine: str, options: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        """environ  added to this process's environment"""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            [python, worker.__file__, engine, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | environ,
            start_new_session=True,  # so that its own processes end with it
        )
        self._answers: Queue[str | None] = Queue()
        Thread(target=_forward, args=(self._process.stdout, self._answers), daemon=True).start()
        try:
            self._answer(START_LIMIT_S)
        except PeerFailure:
            self.close()
            raise

    def decode(self, ids: Sequence[int], new_tokens: int) -> Iterator[Any]:
        """Lists of new tokens as they come, None for an id that is not known yet.

        Then an object, which holds the whole `text` where there were such ids.
        """
        try:
            request = json.dumps({"ids": list(ids), "new_tokens": new_tokens})
            self._process.stdin.write(f"{request}\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        while isinstance(answer := self._answer(ANSWER_LIMIT_S), list):
            yield answer
        yield answer

    def close(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _answer(self, limit_s: float) -> Any:
        try:
            line = self._answers.get(timeout=limit_s)
        except Empty:
            raise PeerFailure(f"no answer within {limit_s:g} s") from None
        if line is None:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> PeerFailure:
        """The end of the process, with the last line of its log."""
        code = self._process.wait()
        if code < 0:
            return PeerFailure(f"its process was ended by {signal.Signals(-code).name}")
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        last = lines[-1][:_LONGEST_REASON] if lines else "no message"
        return PeerFailure(f"its process ended with exit code {code}: {last}")


def _forward(stream: IO[str], answers: Queue[str | None]) -> None:
    """Put every line into the queue, and None at the end."""
    for line in stream:
        answers.put(line)
    answers.put(None)

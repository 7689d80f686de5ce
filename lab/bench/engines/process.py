"""A worker process, asked by lines on its standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

from lab.bench.arms.base import PeerFailure
from lab.bench.engines import worker

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
        assert self._process.stdout is not None
        Thread(target=_forward, args=(self._process.stdout, self._answers), daemon=True).start()
        try:
            self._answer(START_LIMIT_S)
        except PeerFailure:
            self.close()
            raise

    def decode(
        self, ids: Sequence[int], new_tokens: int
    ) -> Generator[list[int | None], None, list[int] | None]:
        """New tokens as they come, None for an id that is not known yet.

        Returns the whole text where there were such ids, else None.
        """
        assert self._process.stdin is not None
        try:
            asked = json.dumps({"ids": list(ids), "new_tokens": new_tokens})
            self._process.stdin.write(f"{asked}\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        while isinstance(answer := self._answer(ANSWER_LIMIT_S), list):
            yield answer
        text: list[int] | None = answer.get("text")
        return text

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

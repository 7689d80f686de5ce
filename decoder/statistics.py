"""The record of a decode round, its timers, and the statistics and traces of such records."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from costmodel.errors import InputError
from costmodel.io import write_error
from costmodel.online import OnlineEstimator
from decoder.acceptance.rules import Accepted
from decoder.device import synchronise
from decoder.tree.draft_tree import DraftTree


@dataclass(slots=True)
class StageTimes:
    """Seconds spent in each stage of the decode cycle, of one round or of many."""

    draft_s: float = 0.0
    build_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.build_s + self.verify_s + self.accept_s + self.commit_s

    def add(self, other: StageTimes) -> None:
        for stage in self.__slots__:
            setattr(self, stage, getattr(self, stage) + getattr(other, stage))


class StageTimer:
    def __init__(self, device: torch.device | None = None) -> None:
        """device: a stage ends when it has finished its work, by a synchronisation."""
        self.times = StageTimes()
        self._device = device
        self._last_s = perf_counter()

    def end(self, stage: str) -> None:
        """End a stage, named by its field of `StageTimes`."""
        if self._device is not None:
            synchronise(self._device)
        now_s = perf_counter()
        setattr(self.times, stage, getattr(self.times, stage) + now_s - self._last_s)
        self._last_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One sequence's part of one decode round.

    tree          the verified draft tree; empty for a plain step
    accepted      the rows and tokens that the target accepted, and its bonus token
    context       cached tokens before the round
    drafted       whether the drafter ran this round, for this sequence or another of the batch
    text          number of the text among those of its decoder, from 0
    index         number of the round in its text, from 0
    batch         sequences in the round's forward
    mean_nodes    of the trees of these sequences
    mean_context  of the cached tokens of these sequences
    stages        times of the whole round; `commit_s` is added last, after `Policy.observe`
    """

    tree: DraftTree
    accepted: Accepted
    context: int
    drafted: bool = True
    text: int = 0
    index: int = 0
    batch: int = 1
    mean_nodes: float = 0.0
    mean_context: int = 0
    stages: StageTimes = field(default_factory=StageTimes)

    @property
    def nodes(self) -> int:
        return self.tree.nodes

    @property
    def depth(self) -> int:
        """Of the verified tree; 0 for a plain step."""
        return int(self.tree.depths.max(initial=0))

    @property
    def accepted_tokens(self) -> int:
        return len(self.accepted.rows)

    @property
    def emitted(self) -> list[int]:
        """The accepted tokens and the bonus token."""
        return [*self.accepted.tokens, self.accepted.bonus]


@dataclass(slots=True)
class Statistics:
    """Counts and times of one generation; in a batch, the times of its rounds are the batch's.

    The first token comes from the prefill and all others from rounds, so rates are
    `new_tokens - 1` over `decode_s`.
    """

    policy: str
    profile: str  # one line: where the cost model came from
    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish: str = ""  # "eos", "stop", "length" or "interrupted"
    warnings: list[str] = field(default_factory=list)  # of drift; each once
    stages: StageTimes = field(default_factory=StageTimes)
    tree_nodes: list[int] = field(default_factory=list)  # of each round
    accepted_depths: list[int] = field(default_factory=list)  # of each round

    def add(self, finished: Round) -> None:
        self.rounds += 1
        self.drafted_rounds += finished.nodes > 0
        self.drafted_tokens += finished.nodes
        self.accepted_tokens += finished.accepted_tokens
        self.decode_s += finished.stages.total_s
        self.stages.add(finished.stages)
        self.tree_nodes.append(finished.nodes)
        self.accepted_depths.append(finished.accepted_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of decoding alone; None if nothing was decoded after the prefill."""
        timed = self.new_tokens > 1 and self.decode_s > 0
        return (self.new_tokens - 1) / self.decode_s if timed else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens of the text a forward after the prefill, plain steps and bonus tokens counted."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else None

    def lines(self) -> list[str]:
        rate, per_step, stages = (
            self.tokens_per_s,
            self.tokens_per_verification,
            asdict(self.stages),
        )
        total_s = sum(stages.values()) or 1.0
        shares = ", ".join(f"{name[:-2]} {value / total_s:.1%}" for name, value in stages.items())
        return [
            f"{self.new_tokens} tokens in {self.decode_s:.2f} s after a prefill of "
            f"{self.prompt_tokens} tokens in {self.prefill_s:.2f} s; ended by {self.finish}",
            "too few tokens for a rate"
            if rate is None or per_step is None
            else f"{rate:.1f} tokens/s, {per_step:.2f} tokens a verification, "
            f"{self.drafted_tokens} drafted and {self.accepted_tokens} accepted in "
            f"{self.rounds} rounds ({self.policy})",
            f"time: {shares}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, with derived figures, without the lists of rounds."""
        data = asdict(self)
        del data["tree_nodes"], data["accepted_depths"]
        return data | {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_verification": self.tokens_per_verification,
        }


class RoundTrace:
    """Appends every round to a JSONL file, one object a line. Raises InputError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise write_error(path, error, InputError) from error

    def write(self, finished: Round, cost: OnlineEstimator | None) -> None:
        """Append one round, with the seconds that the cost model predicts of the whole batch."""
        verify_s = cycle_s = None
        if cost is not None:
            nodes, context, batch = finished.mean_nodes, finished.mean_context, finished.batch
            verify_s = float(cost.verify_s(nodes, context, batch))
            cycle_s = float(cost.cycle_s(np.array([nodes]), context, batch)[0])
        record = {
            "text": finished.text,
            "round": finished.index,
            "batch": finished.batch,
            "context": finished.context,
            "nodes": finished.nodes,
            "depth": finished.depth,
            "expected_committed": finished.tree.expected_committed,
            "accepted": finished.accepted_tokens,
            "predicted_verify_s": verify_s,
            "predicted_cycle_s": cycle_s,
        }
        try:
            self._file.write(json.dumps(record | asdict(finished.stages)).encode() + b"\n")
        except OSError as error:
            raise write_error(self._path, error, InputError) from error


Forward = tuple[float, int, int]  # rows, cached tokens and sequences of a verification


class HostEvent:
    """The host's clock as an event of a device whose work is done when the call returns."""

    def record(self) -> None:
        self._at_s = perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end._at_s - self._at_s)


class ForwardTimer:
    """Timer of forwards by events, read once the device has passed them.

    The copy of the accepted tokens waits for the forward, so its time is usually known in the
    same round, else a round later.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """make_event: a new `torch.cuda.Event` with timing, or a `HostEvent`."""
        self._make_event = make_event
        self._waiting: deque[tuple[Forward, Any, Any]] = deque()

    def start(self) -> None:
        """Start timing; a start without a stop is forgotten."""
        self._start = self._make_event()
        self._start.record()

    def stop(self, forward: Forward) -> None:
        end = self._make_event()
        end.record()
        self._waiting.append((forward, self._start, end))

    def finished(self) -> Iterator[tuple[Forward, float]]:
        """Forwards whose seconds are known by now, in order; each is returned once."""
        while self._waiting and self._waiting[0][2].query():
            forward, start, end = self._waiting.popleft()
            yield forward, start.elapsed_time(end) / 1e3  # it gives milliseconds


def forward_timer(device: torch.device) -> ForwardTimer:
    if device.type == "cuda":
        return ForwardTimer(partial(torch.cuda.Event, enable_timing=True))
    return ForwardTimer(HostEvent)

"""Requests to a server as calls to time, and the times of verifications from theirs.

A request of s new tokens behind c cached ones, with one token out, takes the forward of s rows and
a floor: HTTP, queue, tokens to text. With n tokens out it takes n - 1 plain steps more, so two
requests of one new token show the plain step and the floor.

The server computes logits of the last row only, a verification of all: the LM head's further rows
are added from the physical roofline. Steps of several sequences come from streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from costmodel.errors import MeasurementError
from costmodel.fields import LEAST_S
from costmodel.roofline import Roofline, physical_bytes, physical_flops
from integrations.openai_server.client import Completion, ServerClient
from profiler.calibrate.points import draw_rows, verify_grid
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.instruments import Guard
from profiler.measure.samples import PointSamples

ROWS = (2, 4, 8, 16, 32, 64, 128)
HELD_OUT_CONTEXTS = 3
HELD_OUT_ROWS = 4
STREAM_TOKENS = 17  # of one sample of a step of several sequences
BLOCK_TOKENS = 128  # a multiple of the usual blocks of prefix caches, of 16, 32, 64 or 128 tokens
CACHE_TRIES = 3
MOST_REPEATED = 0.7  # of a first request's time, for its repeat to count as cached
NO_CACHE = (
    "Start it with prefix caching (vLLM --enable-prefix-caching, SGLang without "
    "--disable-radix-cache, llama.cpp with cache_prompt)."
)
ANSWER_TOKENS = 9  # of one sample of a plain step
LEAST_PIECES = 0.75  # of a stream's tokens that come one by one; a few wait for a whole character
LEAST_OVER_BOUND = 0.9  # of the median time over its physical bound
EVEN = 0.6  # least median of the intervals between tokens over their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTasks:
    """The points that a server's calibration may measure.

    held_out_contexts  contexts of the held-out points (`draw_contexts`)
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most_rows: int
    held_out_contexts: tuple[int, ...]
    seed: int = 0

    def grid(self) -> list[Task]:
        """Requests of one sequence."""
        rows = sorted({rows for rows in ROWS if rows < self.most_rows} | {self.most_rows})
        return verify_grid(rows, self.contexts)

    def plain(self) -> list[Task]:
        """Requests of one row, with one token out and with several, and streams of sequences.

        Several sequences run at the shortest and the middle context, which fit into most caches.
        """
        ordered = sorted(self.contexts)
        few = sorted({ordered[0], ordered[len(ordered) // 2]})
        tasks = [Task(kind="verify", size=1, context=context) for context in ordered]
        for batch in sorted({1, *self.batches}):
            at = ordered if batch == 1 else few
            tasks += [Task(kind="plain", size=1, context=c, batch=batch) for c in at]
        return tasks

    def held_out(self) -> list[Task]:
        """Points that no fit uses: at each context the plain step, and log-uniform row counts."""
        fitted = {(task.size, task.context) for task in self.grid()}
        random = np.random.default_rng((self.seed, 7919))
        tasks = set()
        for context in self.held_out_contexts:
            drawn = draw_rows(random, self.most_rows, HELD_OUT_ROWS)
            sizes = {1} | {rows for rows in drawn if (rows, context) not in fitted}
            tasks |= {Task(kind="held_out", size=rows, context=context) for rows in sizes}
        return sorted(tasks)


def draw_contexts(contexts: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Log-uniform contexts for the held-out points, one in each third of the range."""
    random = np.random.default_rng((seed, 7907))
    edges = np.linspace(np.log(min(contexts)), np.log(max(contexts)), HELD_OUT_CONTEXTS + 1)
    return tuple(np.rint(np.exp(random.uniform(edges[:-1], edges[1:]))).astype(int).tolist())


class ServedWorkload:
    """Turns tasks into requests of random tokens; each call returns the seconds that count.

    Each context has its own random prefix, for each of several sequences. It is cached before the
    clock starts: by an untimed request where the last one had another prefix, since a server may
    keep few. Then come tokens drawn anew, which no cache can hold.
    """

    def __init__(
        self, server: ServerClient, *, vocab: int, seed: int, most_tokens: int | None = None
    ) -> None:
        """
        vocab        tokens of the vocabulary; its ends, where special tokens are, are not drawn
        most_tokens  of a prompt and its answer, where the server tells
        """
        self._server, self._most_tokens = server, most_tokens
        self._range = (vocab // 8, vocab - vocab // 8)
        self._seed = seed
        self._fresh = np.random.default_rng((seed, 1))
        self._prefixes: dict[tuple[int, int], list[int]] = {}
        self._cached = (0, 0)  # context and sequences of the last request
        self.late = False  # whether the last streams ran apart, or their tokens came in bunches

    def call(self, task: Task) -> Callable[[], float]:
        if task.batch > 1:
            return lambda: self._step(task.context, task.batch)
        plain = task.kind == "plain" or (task.kind == "held_out" and task.size == 1)
        tokens = ANSWER_TOKENS if plain else 1
        return lambda: self._request(task.context, task.size, tokens).seconds

    def shortfall(self, task: Task) -> str:
        """The reason why the server cannot take the task; empty where it can."""
        room = self.most_context(task.size)
        if room is not None and task.context > room:
            return f"the server takes {self._most_tokens} tokens"
        return ""

    def most_context(self, rows: int) -> int | None:
        """The longest context that the server takes before `rows` rows; None: it does not tell."""
        if self._most_tokens is None:
            return None
        return self._most_tokens - max(rows, STREAM_TOKENS + 1) - 1

    def aligned(self, contexts: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The contexts in whole blocks of the server's cache, and whether it tells what it caches.

        Where it does not, blocks are assumed to divide 128 tokens. Raises MeasurementError where
        nothing is cached.
        """
        whole = set()
        for context in contexts:
            self._request(context, 1)
            told = self._request(context, 1).cached_tokens
            if told is None:
                blocks = {max(context // BLOCK_TOKENS, 1) for context in contexts}
                return tuple(BLOCK_TOKENS * block for block in sorted(blocks)), False
            if told == 0:
                raise MeasurementError(
                    f"the server caches nothing of {context} repeated tokens, so no rows behind a "
                    "context can be timed",
                    hint=NO_CACHE,
                )
            whole.add(min(told, context))
        return tuple(sorted(whole)), True

    def check_cache(self, context: int) -> None:
        """Raise MeasurementError where a prompt's repeat is hardly faster than its first request.

        Without a prefix cache every request computes its whole prompt, and rows behind a context
        cannot be timed.
        """
        first, repeated = [], []
        for _ in range(CACHE_TRIES):
            prefix = self._draw(context)
            first.append(self._server.complete(prefix + self._draw(1)).seconds)
            repeated.append(self._server.complete(prefix + self._draw(1)).seconds)
        self._cached = (0, 0)
        if median(repeated) > MOST_REPEATED * median(first):
            raise MeasurementError(
                f"the server has no prefix cache: {context} tokens take {median(first):.3g} s, and "
                f"{median(repeated):.3g} s when repeated, so no rows behind a context can be timed",
                hint=NO_CACHE,
            )

    def find_most_together(self, batches: tuple[int, ...]) -> int:
        """The largest of the batches whose requests the server runs at once."""
        for batch in sorted({1, *batches}, reverse=True):
            prompts = [self._draw(BLOCK_TOKENS) for _ in range(batch)]
            arrivals = self._server.stream(prompts, STREAM_TOKENS)
            if ran_together(arrivals):
                step_seconds(arrivals, STREAM_TOKENS)  # an error where a step has several tokens
                break
        self._cached = (0, 0)
        return batch

    def _request(self, context: int, rows: int, tokens: int = 1) -> Completion:
        if self._cached[0] != context:
            self._server.complete(self._prefix(context, 0) + self._draw(1))
        self._cached = (context, 1)
        return self._server.complete(self._prefix(context, 0) + self._draw(rows), tokens)

    def _step(self, context: int, batch: int) -> float:
        prefixes = [self._prefix(context, index) for index in range(batch)]
        if self._cached[0] != context or self._cached[1] < batch:
            for prefix in prefixes:
                self._server.complete(prefix + self._draw(1))
        self._cached = (context, batch)
        arrivals = self._server.stream(
            [prefix + self._draw(1) for prefix in prefixes], STREAM_TOKENS
        )
        together = ran_together(arrivals)
        self.late = not together or bunched(arrivals)
        if together:
            return step_seconds(arrivals, STREAM_TOKENS)
        whole_s = max(times[-1] for times in arrivals) - min(times[0] for times in arrivals)
        return whole_s / STREAM_TOKENS  # rejected by the guard

    def _prefix(self, context: int, index: int) -> list[int]:
        key = (context, index)
        if key not in self._prefixes:
            random = np.random.default_rng((self._seed, *key))
            self._prefixes[key] = random.integers(*self._range, context).tolist()
        return self._prefixes[key]

    def _draw(self, count: int) -> list[int]:
        drawn: list[int] = self._fresh.integers(*self._range, count).tolist()
        return drawn


class ArrivalGuard(Guard):
    """Rejects steps of streams that did not run together or whose tokens came in bunches."""

    def __init__(self, workload: ServedWorkload) -> None:
        self._workload = workload

    def start(self) -> None:
        self._workload.late = False

    def disturbance(self) -> str:
        return "streams apart or in bunches" if self._workload.late else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a request takes beside its forward: `base_s + token_s * context`.

    error_s  root mean square of what the line leaves over
    """

    base_s: float
    token_s: float
    error_s: float

    @classmethod
    def fit(cls, contexts: Sequence[int], seconds: Sequence[float]) -> Floor:
        """The line of least squares; neither part is negative. Raises MeasurementError."""
        if not contexts:
            raise MeasurementError("no context has both a request and a plain step")
        x, y = np.asarray(contexts, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        apart = x - x.mean()
        spread = float(apart @ apart)
        token_s = max(float(apart @ y) / spread, 0.0) if spread else 0.0
        base_s = float(y.mean() - token_s * x.mean())
        if base_s < 0:  # then the line through 0, or no floor at all
            base_s, token_s = 0.0, max(float(x @ y) / float(x @ x), 0.0)
        left = y - base_s - token_s * x
        return cls(base_s=base_s, token_s=token_s, error_s=float(np.sqrt(np.mean(left**2))))

    def seconds(self, context: int) -> float:
        return self.base_s + self.token_s * context


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTimes:
    """A sweep whose samples are of verifications, the floor taken out, and the LM head's share.

    lm_head_share  the largest share of a time that was added for the LM head
    """

    swept: SweepResult
    floor: Floor
    lm_head_share: float

    def error_bar(self, held_out_error: float) -> float:
        """The relative error to expect: that at held-out points, of the floor, of the LM head."""
        plain_s = [
            samples.typical_s for task, samples in self.swept.samples.items() if task.size == 1
        ]
        floor_error = self.floor.error_s / float(np.median(plain_s))
        return min(math.hypot(held_out_error, floor_error, self.lm_head_share), 10.0)


def forward_times(swept: SweepResult, roofline: Roofline) -> ForwardTimes:
    """The forwards' times from a sweep's of requests, each as measured.

    `plain` and `held_out` of one row and one sequence are requests with ANSWER_TOKENS out, `plain`
    of several sequences is a step of streams. They become the points of one row; requests of one
    row with one token out only give the floor. Raises MeasurementError where it cannot be known,
    and where most times are below the physical bound: then the device, the weights or the degree
    are not the server's. Single ones may be, as bounds are measured too.
    """
    contexts, seconds_there = [], []
    for task, measured in sorted(swept.samples.items()):
        longer = swept.samples.get(replace(task, kind="plain"))
        if task.kind == "verify" and task.size == 1 and longer is not None:
            step_s = (longer.typical_s - measured.typical_s) / (ANSWER_TOKENS - 1)
            contexts.append(task.context)
            seconds_there.append(measured.typical_s - step_s)
    floor = Floor.fit(contexts, seconds_there)
    physical = roofline.with_count("physical")
    samples: dict[Task, PointSamples] = {}
    shares, over_bound = [0.0], []
    for task, measured in swept.samples.items():
        if task.kind == "verify" and task.size == 1:
            continue
        taken_s, added_s, forwards = floor.seconds(task.context), 0.0, 1
        if task.size > 1:
            added_s = lm_head_s(roofline, task.size) - lm_head_s(roofline, 1)
        elif task.batch > 1:
            taken_s = 0.0
        else:
            forwards = ANSWER_TOKENS
        bound_s = float(physical.seconds(task.size, task.context, task.batch))
        forwards_s = ((sample_s - taken_s) / forwards for sample_s in measured.seconds)
        seconds = tuple(max(forward_s, LEAST_S) + added_s for forward_s in forwards_s)
        forward = replace(task, kind="verify") if task.kind == "plain" else task
        samples[forward] = replace(measured, seconds=seconds)
        over_bound.append(samples[forward].typical_s / bound_s)
        shares.append(added_s / samples[forward].typical_s)
    if over_bound and (ratio := median(over_bound)) < LEAST_OVER_BOUND:
        raise MeasurementError(
            f"the server is {1 / ratio:.3g} times as fast as the device, weights and number of "
            "devices that were named allow",
            hint="Name its own: --device h100-sxm, --tensor-parallel-size 2, --target NAME-FP8.",
        )
    return ForwardTimes(
        swept=replace(swept, samples=samples), floor=floor, lm_head_share=max(shares)
    )


def lm_head_s(roofline: Roofline, rows: int) -> float:
    """Least seconds of the LM head for so many rows of one sequence."""
    a, peaks, degree = roofline.architecture, roofline.peaks, roofline.tensor_parallel
    moved = physical_bytes(a, rows, 0, 1, roofline.element_bytes)
    flops = float(physical_flops(a, rows, 0).lm_head)
    weights = a.hidden * a.vocab * roofline.read_bytes[1]
    moved_bytes = weights + float(moved.lm_head_io)
    return max(flops / peaks.flops_per_s, moved_bytes / peaks.bytes_per_s) / degree


def ran_together(arrivals: Sequence[Sequence[float]]) -> bool:
    """Whether streams, by the arrival times of their tokens, have a time at which all ran."""
    return max(times[0] for times in arrivals) < min(times[-1] for times in arrivals)


def bunched(arrivals: Sequence[Sequence[float]]) -> bool:
    """Whether tokens of a stream arrived in bunches: this machine or the network delayed them.

    Then the first one's time may be late, and the steps seem too short.
    """
    intervals = [np.diff(times) for times in arrivals if len(times) > 1]
    return any(float(np.median(gaps)) < EVEN * float(np.mean(gaps)) for gaps in intervals)


def step_seconds(arrivals: Sequence[Sequence[float]], tokens: int) -> float:
    """Seconds of a step, from the arrival times of streams of `tokens` tokens that ran at once.

    Only the time in which all streams run counts. A stream that brings fewer pieces than tokens
    has the same number of tokens in each piece. Raises MeasurementError where none is left, and
    where a step brings several tokens.
    """
    if any(len(times) < LEAST_PIECES * tokens for times in arrivals):
        raise MeasurementError(
            "the server's streams bring several tokens at once",
            hint="Start it without speculative decoding and without multi-step scheduling.",
        )
    start_s = max(times[0] for times in arrivals)
    end_s = min(times[-1] for times in arrivals)
    pieces = [sum(start_s < time <= end_s for time in times) for times in arrivals]
    if not max(pieces):
        raise MeasurementError(
            f"{len(arrivals)} requests at once did not run together on the server",
            hint="Give a smaller --batch, or run again while the server has no other work.",
        )
    steps = [
        count * (tokens - 1) / (len(times) - 1)
        for count, times in zip(pieces, arrivals, strict=True)
    ]
    return (end_s - start_s) / float(np.mean(steps))

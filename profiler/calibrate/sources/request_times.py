"""From times of requests to times of verifications: floor, LM head, and how certain they are.

A request of s new tokens behind c cached ones, with one token out, takes the forward of s rows and
a floor: HTTP, queue, tokens to text. With n tokens out it takes n - 1 plain steps more, so two
requests of one new token show the plain step and the floor.

The server computes logits of the last row only, a verification of all: the LM head's further rows
are added from the physical roofline. Steps of several sequences come from streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.errors import MeasurementError
from costmodel.roofline import Roofline, physical_bytes, physical_flops
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.samples import Samples

ANSWER_TOKENS = 9  # of one sample of a plain step
LEAST_PIECES = 0.75  # of a stream's tokens that come one by one; a few wait for a whole character
EVEN = 0.6  # least median of the intervals between tokens over their mean


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
            samples.median_s for task, samples in self.swept.samples.items() if task.size == 1
        ]
        floor_error = self.floor.error_s / float(np.median(plain_s))
        return min(math.hypot(held_out_error, floor_error, self.lm_head_share), 10.0)


def forward_times(swept: SweepResult, roofline: Roofline) -> ForwardTimes:
    """The forwards' times from a sweep's of requests; none is below the physical bound.

    `plain` and `held_out` of one row and one sequence are requests with ANSWER_TOKENS out, `plain`
    of several sequences is a step of streams. They become the points of one row; requests of one
    row with one token out only give the floor. Raises MeasurementError where it cannot be known.
    """
    floor = _floor(swept)
    physical = roofline.with_count("physical")
    samples: dict[Task, Samples] = {}
    shares = [0.0]
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
        seconds = tuple(
            max((sample_s - taken_s) / forwards + added_s, bound_s) for sample_s in measured.seconds
        )
        forward = replace(task, kind="verify") if task.kind == "plain" else task
        samples[forward] = replace(measured, seconds=seconds)
        shares.append(added_s / samples[forward].median_s)
    return ForwardTimes(
        swept=replace(swept, samples=samples), floor=floor, lm_head_share=max(shares)
    )


def _floor(swept: SweepResult) -> Floor:
    contexts, seconds = [], []
    for task, samples in sorted(swept.samples.items()):
        longer = swept.samples.get(replace(task, kind="plain"))
        if task.kind == "verify" and task.size == 1 and longer is not None:
            step_s = (longer.median_s - samples.median_s) / (ANSWER_TOKENS - 1)
            contexts.append(task.context)
            seconds.append(samples.median_s - step_s)
    return Floor.fit(contexts, seconds)


def lm_head_s(roofline: Roofline, rows: int) -> float:
    """Least seconds of the LM head for so many rows of one sequence."""
    a, peaks, degree = roofline.architecture, roofline.peaks, roofline.tensor_parallel
    moved = physical_bytes(a, rows, 0, 1, roofline.element_bytes)
    flops = float(physical_flops(a, rows, 0).lm_head)
    weights = a.hidden * a.vocab * roofline.element_bytes
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

"""Seconds of one step of a server, by what is in it."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.capacity.engines import EngineRules
from costmodel.capacity.forward import ServingForward
from costmodel.capacity.overheads import Overheads
from costmodel.capacity.steady import TokenWork
from costmodel.errors import InputError

# Seconds of a step that decodes `batch` sequences with `context` cached tokens each on average,
# and prefills `prompt_tokens` besides. Either of batch and prompt_tokens may be 0, not both.
StepTime = Callable[[int, int, float], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGrid:
    """A StepTime that interpolates linearly between precomputed steps.

    `seconds` [batches, prompt tokens, contexts]; each axis rises. Outside of an axis its last two
    points are extended, and never below the smallest time of the grid.
    """

    batches: tuple[float, ...]
    prompt_tokens: tuple[float, ...]
    contexts: tuple[float, ...]
    seconds: NDArray[np.float64]
    _rows: list[list[list[float]]] = dataclasses.field(init=False, repr=False)
    _least_s: float = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        axes = (self.batches, self.prompt_tokens, self.contexts)
        for name, axis in zip(("batches", "prompt_tokens", "contexts"), axes, strict=True):
            values = np.asarray(axis, dtype=np.float64)
            if not len(values) or not np.all(np.isfinite(values)) or np.any(values < 0):
                raise InputError(f"{name} must be numbers of 0 or more, at least one")
            if np.any(np.diff(values) <= 0):
                raise InputError(f"{name} must rise")
        if self.seconds.shape != tuple(len(axis) for axis in axes):
            raise InputError("a grid of steps needs a time for each batch, prompt and context")
        if not np.all(np.isfinite(self.seconds) & (self.seconds > 0)):
            raise InputError("times of steps must be finite and above 0")
        # Plain lists: a scalar of a numpy array costs ten times as much to read.
        object.__setattr__(self, "_rows", self.seconds.tolist())
        object.__setattr__(self, "_least_s", float(self.seconds.min()))

    @classmethod
    def of(
        cls,
        step_s: StepTime,
        batches: Sequence[int],
        prompt_tokens: Sequence[int],
        contexts: Sequence[float],
    ) -> StepGrid:
        """The grid of a slow StepTime; an empty step takes as long as one with one prompt token."""
        points = itertools.product(batches, prompt_tokens, contexts)
        times = [step_s(b, p if b or p else 1, c) for b, p, c in points]
        return cls(
            batches=tuple(batches),
            prompt_tokens=tuple(prompt_tokens),
            contexts=tuple(contexts),
            seconds=np.array(times).reshape(len(batches), len(prompt_tokens), len(contexts)),
        )

    def __call__(self, batch: int, prompt_tokens: int, context: float) -> float:
        i, u = _place(self.batches, batch)
        j, v = _place(self.prompt_tokens, prompt_tokens)
        k, w = _place(self.contexts, context)
        plane = self._rows[i]
        found = _bilinear(plane, j, v, k, w)
        if u:
            found += u * (_bilinear(self._rows[i + 1], j, v, k, w) - found)
        return found if found > self._least_s else self._least_s


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The cell of a value and its share of the way to the cell's end, beyond 0 to 1 outside."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _bilinear(plane: list[list[float]], j: int, v: float, k: int, w: float) -> float:
    row = plane[j]
    found = row[k] + w * (row[k + 1] - row[k]) if w else row[k]
    if v:
        row = plane[j + 1]
        other = row[k] + w * (row[k + 1] - row[k]) if w else row[k]
        found += v * (other - found)
    return found


def server_step_s(forward: ServingForward, rules: EngineRules, overheads: Overheads) -> StepTime:
    """A server's steps from measured operators and fitted overheads: exact, and slow.

    A step with a prompt pays the overhead of one. Chunks of a long prompt are priced as prompts of
    their own: what their attention reads of the chunks before is left out.
    """

    def seconds(batch: int, prompt_tokens: int, context: float) -> float:
        decode = forward.decode(batch, context) if batch else None
        prompts_s = forward.prompt(prompt_tokens, batch, 1).total if prompt_tokens else 0.0
        work = TokenWork(
            products_s=decode.products if decode else 0.0,
            attention_s=decode.attention if decode else 0.0,
            all_reduce_s=decode.all_reduce if decode else 0.0,
            prompts_s=prompts_s,
            prompt_steps=1.0 if prompt_tokens else 0.0,
            layers=forward.architecture.layers,
            devices=forward.tensor_parallel,
            running=float(batch),
            waiting=0.0,
        )
        return overheads.time_per_token_s(work, overlaps_host=rules.overlaps_host)

    return seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What one verification commits, for batches up to each of `up_to`.

    `up_to` rises and the last holds for every larger batch; `rows` are tokens that one sequence
    verifies in a step (tree nodes + 1); `committed[i][n]` is the probability of n + 1 tokens.
    Times of steps are those of the same rows: the StepTime knows the tree by the batch.
    """

    up_to: tuple[int, ...]
    rows: tuple[int, ...]
    committed: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.up_to) == len(self.rows) == len(self.committed) > 0:
            raise InputError("speculation needs rows and committed lengths for each batch")
        if any(b <= a for a, b in itertools.pairwise((0, *self.up_to))):
            raise InputError("the batches of a speculation must rise from at least 1")
        for rows, shares in zip(self.rows, self.committed, strict=True):
            if not 1 <= len(shares) <= rows:
                raise InputError(
                    f"a verification of {rows} rows commits 1 to {rows} tokens, not {len(shares)}"
                )
            if min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
                raise InputError("the shares of committed lengths must add up to 1")

    @classmethod
    def of(cls, rows: int, committed: ArrayLike) -> Speculation:
        """The same tree at every batch."""
        shares = tuple(float(share) for share in np.atleast_1d(np.asarray(committed)))
        return cls(up_to=(1,), rows=(rows,), committed=(shares,))

    @property
    def plain(self) -> bool:
        """Whether every step commits exactly one token."""
        return all(len(shares) == 1 for shares in self.committed)

    def level(self, batch: int) -> int:
        """Which entry holds at a batch."""
        return min(bisect.bisect_left(self.up_to, batch), len(self.up_to) - 1)


PLAIN = Speculation(up_to=(1,), rows=(1,), committed=((1.0,),))

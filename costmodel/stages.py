"""Profile sections for what is measured beside the verification: stages and drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import model_validator

from costmodel.schema import (
    Counts,
    CountsOrZero,
    SecondsList,
    Section,
    SpreadList,
    Text,
    Utc,
    check_ascending,
    check_lengths,
)

Array = NDArray[np.float64]


class SampledSection(Section):
    """Medians of samples along one axis; all arrays have one length and the axis ascends."""

    axis: ClassVar[str]

    if TYPE_CHECKING:  # each section declares it after its axis, the order in the file
        median_s: SecondsList

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_lengths(self, (self.axis, "median_s", "mad_s", "n"))
        check_ascending(self.axis, getattr(self, self.axis))
        return self

    def seconds(self, at: ArrayLike) -> Array:
        """Interpolate linearly; beyond the last point its last slope goes on, never falling."""
        return extend_linear(getattr(self, self.axis), self.median_s, at)


class NodesSection(SampledSection):
    """A cost by the number of drafted nodes N: building or accepting a tree."""

    axis = "nodes"
    nodes: CountsOrZero
    median_s: SecondsList
    mad_s: SpreadList
    n: Counts


class TokensSection(SampledSection):
    """A cost by a number of tokens: prefill (prompt tokens) or commit (tokens kept)."""

    axis = "tokens"
    tokens: Counts
    median_s: SecondsList
    mad_s: SpreadList
    n: Counts


class DrafterSection(SampledSection):
    """One draft of one drafter, by context.

    `kind` and `created_utc` are given where it was not timed with the rest of the profile:
    `quick` by a decoder at its start, `measured` by a calibration before.
    """

    axis = "context"
    name: Text
    kind: Literal["measured", "quick"] | None = None
    created_utc: Utc | None = None
    context: CountsOrZero
    median_s: SecondsList
    mad_s: SpreadList
    n: Counts

    @model_validator(mode="after")
    def _check_origin(self) -> Self:
        if (self.kind is None) != (self.created_utc is None):
            raise ValueError("kind and created_utc are given both or not at all")
        return self


class PlainSection(Section):
    """The decoder's own plain step of one row a sequence; ascending by batch, then context."""

    context: CountsOrZero
    batch: Counts
    median_s: SecondsList
    mad_s: SpreadList
    n: Counts

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_lengths(self, ("context", "batch", "median_s", "mad_s", "n"))
        check_ascending("batch, then context", self.batch, self.context)
        return self

    def seconds(self, context: float, batch: int = 1) -> float | None:
        """Seconds of a plain step; None where this batch was not measured."""
        pairs = zip(self.batch, self.context, self.median_s, strict=True)
        known = [(c, t) for b, c, t in pairs if b == batch]
        if not known:
            return None
        return float(extend_linear([c for c, _ in known], [t for _, t in known], context))


class StagesSection(Section):
    """Costs of a cycle beside draft and verification; what was not measured is left out.

    `accept` is the walk with the target's argmax, `accept_sampled` the one that draws.
    """

    plain: PlainSection | None = None
    prefill: TokensSection | None = None
    build: NodesSection | None = None
    accept: NodesSection | None = None
    accept_sampled: NodesSection | None = None
    commit: TokensSection | None = None


def extend_linear(axis: ArrayLike, values: ArrayLike, at: ArrayLike) -> Array:
    """Piecewise linear through (axis, values); ends: level before, last slope (>= 0) after."""
    x, y = np.asarray(axis, dtype=np.float64), np.asarray(values, dtype=np.float64)
    place = np.asarray(at, dtype=np.float64)
    inside = np.interp(place, x, y)
    if len(x) < 2:
        return np.asarray(inside, dtype=np.float64)
    slope = max(float((y[-1] - y[-2]) / (x[-1] - x[-2])), 0.0)
    return np.asarray(inside + slope * np.maximum(place - x[-1], 0.0), dtype=np.float64)

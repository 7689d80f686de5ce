"""What the pictures of a benchmark draw beyond its figures: rounds in groups, prompts in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiler.bench.analysis import paired_ratio, tally
from profiler.bench.record import Result

LEAST_SAMPLES = 5  # rounds behind a median that is drawn
BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """Every round of one arm, in one array a quantity: [rounds].

    context      cached tokens before the round
    predicted_s  of the target's forward, as expected before the round; NaN without a cost model
    The others are as in `Rounds`.
    """

    context: NDArray[np.int64]
    nodes: NDArray[np.int64]
    accepted: NDArray[np.int64]
    expected: NDArray[np.float64]
    verify_s: NDArray[np.float64]
    predicted_s: NDArray[np.float64]

    @property
    def has_model(self) -> bool:
        """Whether the time of every forward was foretold."""
        return not np.isnan(self.predicted_s).any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds of the target's forward over trees of one size in one band of contexts."""

    context: int  # the band goes from here to twice as many tokens
    nodes: int
    rounds: int
    measured_s: float
    predicted_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBand:
    """Chosen tree sizes over rounds with about the same context."""

    context: float
    low: float  # the quartiles
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBin:
    """Rounds with about the same predicted committed length, and what they committed."""

    predicted: float
    realised: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRatio:
    """How many times as fast one prompt was; `least` and `most` over its repeats."""

    prompt: str
    set: str
    ratio: float
    least: float
    most: float


def round_table(result: Result, arm: str) -> RoundTable | None:
    """All rounds of an arm; None where it tells of none."""
    prompt_tokens = {prompt.id: prompt.tokens for prompt in result.prompts}
    parts: list[NDArray[np.float64]] = []
    for response in result.of(arm):
        own = response.rounds
        if own is None or not own.count:
            continue
        committed = np.array(own.accepted) + 1
        context = prompt_tokens[response.prompt] + np.cumsum(committed) - committed
        predicted = own.predicted_verify_s or (np.nan,) * own.count
        columns = (context, own.nodes, own.accepted, own.expected, own.verify_s, predicted)
        parts.append(np.array(columns, dtype=np.float64))
    if not parts:
        return None
    context, nodes, accepted, expected, verify_s, predicted_s = np.concatenate(parts, axis=1)
    return RoundTable(
        context=context.astype(np.int64),
        nodes=nodes.astype(np.int64),
        accepted=accepted.astype(np.int64),
        expected=expected,
        verify_s=verify_s,
        predicted_s=predicted_s,
    )


def latencies(table: RoundTable) -> list[Latency]:
    """Medians by band of contexts (a power of two wide) and tree size, where rounds suffice."""
    bands = 2 ** np.floor(np.log2(np.maximum(table.context, 1))).astype(np.int64)
    found = []
    for band, nodes in sorted(set(zip(bands.tolist(), table.nodes.tolist(), strict=True))):
        here = (bands == band) & (table.nodes == nodes)
        if here.sum() < LEAST_SAMPLES:
            continue
        predicted = table.predicted_s[here]
        known = not np.isnan(predicted).any()
        found.append(
            Latency(
                context=band,
                nodes=nodes,
                rounds=int(here.sum()),
                measured_s=float(np.median(table.verify_s[here])),
                predicted_s=float(np.median(predicted)) if known else None,
            )
        )
    return found


def join_tables(tables: list[RoundTable]) -> RoundTable:
    """The rounds of several arms as if they were one's."""
    names = RoundTable.__dataclass_fields__
    return RoundTable(
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    )


def size_shares(table: RoundTable) -> dict[tuple[int, int], float]:
    """The share of all rounds by tree size: 0 (a plain step), 1, 2-3, 4-7, 8-15, ... nodes."""
    counts = Counter(int(nodes).bit_length() for nodes in table.nodes)
    return {
        ((1 << bits) >> 1, (1 << bits) - 1): counts[bits] / len(table.nodes)
        for bits in sorted(counts)
    }


def sizes_by_context(table: RoundTable) -> list[SizeBand]:
    """Quartiles of the tree size over groups of rounds, equally many, by context."""
    order = np.argsort(table.context, kind="stable")
    return [
        SizeBand(context=float(table.context[group].mean()), low=low, middle=middle, high=high)
        for group in _groups(order)
        for low, middle, high in [np.quantile(table.nodes[group], (0.25, 0.5, 0.75)).tolist()]
    ]


def score_bins(table: RoundTable) -> list[ScoreBin]:
    """Rounds with a tree in groups, equally many, by predicted committed length."""
    drafted = np.flatnonzero(table.nodes > 0)
    order = drafted[np.argsort(table.expected[drafted], kind="stable")]
    return [
        ScoreBin(
            predicted=float(table.expected[group].mean()),
            realised=float(table.accepted[group].mean() + 1),
            rounds=len(group),
        )
        for group in _groups(order)
    ]


def score_cells(table: RoundTable, width: float) -> dict[tuple[float, int], int]:
    """Rounds with a tree by predicted committed length (the middle of a cell) and realised one."""
    drafted = table.nodes > 0
    cells = np.floor(table.expected[drafted] / width).astype(np.int64)
    realised = table.accepted[drafted] + 1
    counts = Counter(zip(cells.tolist(), realised.tolist(), strict=True))
    return {((cell + 0.5) * width, own): count for (cell, own), count in sorted(counts.items())}


def prompt_ratios(result: Result, arm: str, base: str) -> list[PromptRatio]:
    """Decode-only ratios of each prompt, the least first; prompts that decoded nothing are
    left out."""
    found = []
    for prompt in result.prompts:
        ours, theirs = (
            [one for one in result.of(name) if one.prompt == prompt.id] for name in (arm, base)
        )
        whole = paired_ratio(tally(ours, "decode"), tally(theirs, "decode"))
        if whole is None:
            continue
        pairs = zip(ours, theirs, strict=True)
        each = [paired_ratio(tally([a], "decode"), tally([b], "decode")) for a, b in pairs]
        ratios = [one.pooled for one in each if one is not None]
        found.append(
            PromptRatio(
                prompt=prompt.id,
                set=prompt.set,
                ratio=whole.pooled,
                least=min(ratios),
                most=max(ratios),
            )
        )
    return sorted(found, key=lambda one: one.ratio)


def _groups(order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """At most `BINS` parts of about the same length, none shorter than `LEAST_SAMPLES`."""
    parts = min(BINS, len(order) // LEAST_SAMPLES)
    return np.array_split(order, parts) if parts else []

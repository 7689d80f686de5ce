"""Every round of an arm as arrays, and groups of rounds for the pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.bench.analysis.ratios import Ratio, Tally, paired_ratio
from lab.bench.record import Prompt, Result

LEAST_SAMPLES = 5  # rounds of a drawn median
BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """Every round of one arm, one array [rounds] for each quantity.

    context      cached tokens before the round
    predicted_s  predicted seconds of the target's forward; NaN without a cost model
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
        """Whether every forward has a predicted time."""
        return not np.isnan(self.predicted_s).any()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLatency:
    """Median seconds of the target's forward for one tree size in one band of contexts."""

    context: int  # the band ends at twice as many tokens
    nodes: int
    rounds: int
    measured_s: float
    predicted_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBand:
    """Quartiles of the tree sizes chosen at about one context."""

    context: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBin:
    """Mean predicted and realised committed length of a group of rounds."""

    predicted: float
    realised: float
    rounds: int


def round_table(result: Result, arm: str) -> RoundTable | None:
    """All rounds of an arm; None where it reports none."""
    prompt_tokens = {prompt.id: prompt.tokens for prompt in result.prompts}
    parts: list[NDArray[np.float64]] = []
    for response in result.of(arm):
        rounds = response.rounds
        if rounds is None or not rounds.count:
            continue
        committed = np.array(rounds.accepted) + 1
        context = prompt_tokens[response.prompt] + np.cumsum(committed) - committed
        predicted = rounds.predicted_verify_s or (np.nan,) * rounds.count
        columns = (
            context, rounds.nodes, rounds.accepted, rounds.expected, rounds.verify_s, predicted
        )  # fmt: skip
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


def latencies(table: RoundTable) -> list[RoundLatency]:
    """Medians by context band [2^k, 2^(k+1)) and tree size, of `LEAST_SAMPLES` rounds or more."""
    bands = 2 ** np.floor(np.log2(np.maximum(table.context, 1))).astype(np.int64)
    points = []
    for band, nodes in sorted(set(zip(bands.tolist(), table.nodes.tolist(), strict=True))):
        inside = (bands == band) & (table.nodes == nodes)
        if inside.sum() < LEAST_SAMPLES:
            continue
        predicted = table.predicted_s[inside]
        has_model = not np.isnan(predicted).any()
        points.append(
            RoundLatency(
                context=band,
                nodes=nodes,
                rounds=int(inside.sum()),
                measured_s=float(np.median(table.verify_s[inside])),
                predicted_s=float(np.median(predicted)) if has_model else None,
            )
        )
    return points


def join_tables(tables: list[RoundTable]) -> RoundTable:
    """The rounds of several arms as one table."""
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
    """Quartiles of the tree size by context, in groups of equally many rounds."""
    order = np.argsort(table.context, kind="stable")
    return [
        SizeBand(context=float(table.context[group].mean()), low=low, middle=middle, high=high)
        for group in _groups(order)
        for low, middle, high in [np.quantile(table.nodes[group], (0.25, 0.5, 0.75)).tolist()]
    ]


def score_bins(table: RoundTable) -> list[ScoreBin]:
    """Groups of equally many rounds with a tree, by predicted committed length."""
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
    """Counts of rounds with a tree by predicted (middle of a cell) and realised committed
    length."""
    drafted = table.nodes > 0
    cells = np.floor(table.expected[drafted] / width).astype(np.int64)
    realised = table.accepted[drafted] + 1
    counts = Counter(zip(cells.tolist(), realised.tolist(), strict=True))
    return {
        ((cell + 0.5) * width, length): count for (cell, length), count in sorted(counts.items())
    }


def prompt_ratios(result: Result, arm: str, base: str) -> list[tuple[Prompt, Ratio]]:
    """Decode-only speed of each prompt over its repeats, slowest first.

    Prompts that decoded nothing are left out.
    """
    ratios = []
    for prompt in result.prompts:
        by_repeat = (
            {
                one.repeat: Tally(one.decoded_tokens, one.decode_s)
                for one in result.of(name)
                if one.prompt == prompt.id
            }
            for name in (arm, base)
        )
        ratio = paired_ratio(*by_repeat)
        if ratio is not None:
            ratios.append((prompt, ratio))
    return sorted(ratios, key=lambda pair: pair[1].pooled)


def _groups(order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """At most `BINS` parts of about equal length, none shorter than `LEAST_SAMPLES`."""
    parts = min(BINS, len(order) // LEAST_SAMPLES)
    return np.array_split(order, parts) if parts else []

"""Tables of `lab.studies.vllm_policy`: the policy beside every fixed draft length, by cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.bench.analysis.ratios import bootstrap_interval, rate_ratios

LENGTHS = {"ngram": (0, 1, 2, 3, 5, 8, 12), "dflash": (0, 1, 2, 3, 5, 7)}
POLICY = "policy"
TOKENS = 64  # of each sequence, in the mean
DRAWS = 2000
LEAST_REPETITIONS = 2  # for an interval

Record = dict[str, Any]
Tables = dict[tuple[int, int], np.ndarray]


def show(records: Sequence[Record], *, to_store: bool) -> None:
    """Print the tables of each drafter; store them if asked to."""
    summaries = [
        summary(drafter, tables) for drafter in LENGTHS if (tables := tables_of(records, drafter))
    ]
    for one in summaries:
        print_summary(one)
    if to_store:
        from lab.studies.common import environment, store

        versions = sorted({record["vllm"] for record in records if record["kind"] == "run"})
        made = {"environment": environment("cpu"), "vllm": versions, "tokens_a_sequence": TOKENS}
        store("vllm_policy", made | {"rates": summaries})


def tables_of(records: Sequence[Record], drafter: str) -> Tables:
    """Tokens and seconds by cell: [repetitions, arms, 2], the policy last; whole repetitions."""
    arms = [*LENGTHS[drafter], POLICY]
    rows: dict[tuple[int, int], dict[int, dict[Any, tuple[int, float]]]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "run" and record["drafter"] == drafter:
            cell = rows[record["at_once"], record["context"]]
            row = cell.setdefault(record["repetition"], {})
            row[record["arm"]] = (record["tokens"], record["seconds"])
    tables = {
        cell: np.array([[row[arm] for arm in arms] for row in of.values() if len(row) == len(arms)])
        for cell, of in sorted(rows.items())
    }
    return {cell: table for cell, table in tables.items() if len(table)}


def summary(drafter: str, tables: Tables) -> Record:
    """The cells of a drafter, and all together.

    A cell's rate is all its tokens over all its seconds; cells are put together by their geometric
    mean. The best lengths are picked in hindsight.
    """
    lengths = LENGTHS[drafter]
    cells = [cell_row(place, table) for place, table in tables.items()]
    means = mean_rates(tables)
    single = int(np.argmax(means[:-1]))
    return {
        "drafter": drafter,
        "lengths": lengths,
        "cells": cells,
        "mean_tokens_per_s": [round(float(rate), 2) for rate in means],
        "best_single_length": lengths[single],
        "over_best_single": float(means[-1] / means[single]),
        "over_best_single_95": mean_interval(tables, single),
        "mean_over_best": float(np.exp(np.mean([np.log(row["over_best"]) for row in cells]))),
    }


def cell_row(place: tuple[int, int], table: np.ndarray) -> Record:
    totals = table.sum(axis=0)
    rates = totals[:, 0] / totals[:, 1]
    best = int(np.argmax(rates[:-1]))
    row = {
        "at_once": place[0],
        "context": place[1],
        "repetitions": len(table),
        "tokens_per_s": [round(float(rate), 2) for rate in rates],
    }
    for name, base in (("best", best), ("plain", 0)):
        pairs = np.hstack([table[:, -1], table[:, base]])
        row[f"over_{name}"] = float(rate_ratios(pairs.sum(axis=0)))
        row[f"over_{name}_95"] = (
            bootstrap_interval(pairs) if len(pairs) >= LEAST_REPETITIONS else None
        )
    return row


def mean_rates(tables: Tables) -> np.ndarray:
    """Geometric means over all cells: [arms]."""
    totals = np.array([table.sum(axis=0) for table in tables.values()])  # [cells, arms, 2]
    means: np.ndarray = np.exp(np.log(totals[..., 0] / totals[..., 1]).mean(axis=0))
    return means


def mean_interval(tables: Tables, base: int) -> tuple[float, float]:
    """95 % interval of the policy's mean rate over another arm's, by resampling repetitions."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = {
            cell: table[random.integers(len(table), size=len(table))]
            for cell, table in tables.items()
        }
        means = mean_rates(drawn)
        ratios.append(means[-1] / means[base])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def print_summary(result: Record) -> None:
    print(f"{result['drafter']}: tokens/s")
    lengths = " ".join(f"K={k:<4}" for k in result["lengths"])
    print(f"at once context  n {lengths} policy  /best          95 % /plain")
    for row in result["cells"]:
        rates = " ".join(f"{rate:6.1f}" for rate in row["tokens_per_s"])
        low, high = row["over_best_95"] or (float("nan"), float("nan"))
        print(
            f"{row['at_once']:7} {row['context']:7} {row['repetitions']:2} {rates} "
            f"{row['over_best']:6.3f} [{low:.3f}, {high:.3f}] {row['over_plain']:6.3f}"
        )
    low, high = result["over_best_single_95"]
    print(
        f"all cells: policy over the best single length, K = {result['best_single_length']}: "
        f"{result['over_best_single']:.3f} [{low:.3f}, {high:.3f}]; over each cell's best: "
        f"{result['mean_over_best']:.3f}"
    )

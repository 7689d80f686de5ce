"""Fits the tail of every published acceptance process to the paper's tree length.

    python -m lab.studies.fit_acceptance

The chain's length determines the acceptance of the first rank exactly. The tail is then found by
bisection, so that the best-first tree of the stated nodes commits the published number of tokens
a round in expectation. Rewrites `costmodel/published_acceptance.csv`; reports each length on
blocks that the fit did not use, and the correlation of predicted and accepted length that BASTION
reports for MATH500 (appendix H.1: 0.79-0.82).
"""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

import costmodel.acceptance as data
from costmodel.acceptance import AcceptanceProcess, PublishedRow, process_of, published_rows
from costmodel.planning.acceptance import chain_curve
from decoder.tree.draft_tree import Lattice, best_first
from lab.bench.simulated import published
from lab.studies.common import store

BLOCKS = 4000
STEPS = 10  # of the bisection: the tail to 2 / 1024


def tree_length(process: AcceptanceProcess, nodes: int, seed: int) -> float:
    """tau of the best-first tree: mean of 1 + the sum of its calibrated path scores.

    The chain's length over the same blocks, whose expectation is known, is a control variate.
    """
    table = replace(process, rank1=process.rank1[:1]).rank_table(nodes)[0]  # same at all depths
    picked = np.random.default_rng(seed).integers(0, len(table), (BLOCKS, process.gamma))
    tokens = np.zeros((process.gamma, nodes), np.int64)
    trees = np.array(
        [best_first(Lattice(tokens, table[at]), nodes).expected_committed for at in picked]
    )
    chains = 1.0 + np.cumprod(table[picked, 0], axis=1).sum(axis=1)
    slope = np.cov(trees, chains)[0, 1] / chains.var()
    return float(trees.mean() - slope * (chains.mean() - float(chain_curve(process)[-1])))


def fitted(row: PublishedRow) -> PublishedRow:
    low, high = 0.0, 2.0
    for _ in range(STEPS):
        tail = (low + high) / 2
        length = tree_length(process_of(replace(row, tail=tail)), row.tree_nodes, seed=1)
        low, high = (tail, high) if length < row.tree else (low, tail)
    return replace(row, tail=round((low + high) / 2, 4))


def correlation(process: AcceptanceProcess, rounds: int = 20_000) -> float:
    """Pearson correlation of predicted and accepted length of the chain."""
    random = np.random.default_rng(0)
    table = process.confidences()
    at = random.integers(0, table.shape[1], (rounds, process.gamma))
    confidence = np.take_along_axis(table.T, at, axis=0)
    accepted = np.cumprod(random.random(confidence.shape) < confidence, axis=1).sum(axis=1)
    return float(np.corrcoef(np.cumprod(confidence, axis=1).sum(axis=1), accepted)[0, 1])


def main() -> None:
    rows, report = [], []
    for old in published_rows():
        row = fitted(old)
        rows.append(row)
        process = process_of(row)
        length = tree_length(process, row.tree_nodes, seed=2)
        chain = {"published": row.chain, "reproduced": float(chain_curve(process)[-1])}
        tree = {"published": row.tree, "reproduced": length, "nodes": row.tree_nodes}
        report.append({"label": row.label, "chain": chain, "tree": tree, "tail": row.tail})
        print(f"{row.label}: tail {row.tail}, tree {row.tree} -> {length:.2f}", flush=True)
    names = [field.name for field in fields(PublishedRow)]
    table = Path(data.__file__).with_name("published_acceptance.csv")
    with table.open("w", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: getattr(row, name) for name in names} for row in rows)
    correlations = {
        target: correlation(published("bastion", "math500", target=target))
        for target in ("qwen3-4b", "qwen3-8b")
    }
    result = {"acceptance": "simulated", "blocks": BLOCKS, "correlation_math500": correlations}
    store("fit_acceptance", result | {"rows": report})


if __name__ == "__main__":
    main()

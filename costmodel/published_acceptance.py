"""Acceptance lengths that papers report for DFlash drafters, as acceptance processes.

`published_acceptance.csv` holds one line a table, target, temperature and data set:

    chain       tau of the drafter's single path (block of 16, so 15 drafted positions)
    tree        tau of the paper's best-first tree over the same drafts
    tree_nodes  nodes of that tree, as far as the papers say
    tail        of the process that reproduces both, fitted by `benchmarks/fit_acceptance.py`

Sources: `bastion` is table 1 of the BASTION paper (rows DFlash and BASTION, A100), `ddtree`
table 1 of the DDTree paper (arXiv 2604.12989; rows DFlash and DFlash+DDTree, H200). Neither
gives the trees' nodes line by line. DDTree takes the best of 16 .. 1024 a line and names 512
for Qwen3-8B on MATH-500 at temperature 0; 512 is used for all its lines. BASTION's controller
chooses anew each round, and 256 is assumed. At temperature 1 BASTION's public code accepts by
the argmax, so its `tree` figures there are no lossless ones.

A chain's length fixes one rate for all depths; neither paper gives acceptance by depth.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files

from costmodel.acceptance_process import AcceptanceProcess, constant
from costmodel.errors import InputError

BLOCK_GAMMA = 15  # positions that the published drafters draft: block size 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One line of a paper's table."""

    table: str
    target: str
    temperature: int
    dataset: str
    chain: float
    tree: float
    tree_nodes: int
    tail: float

    @property
    def label(self) -> str:
        return f"{self.table} table 1, {self.target}, {self.dataset}, T = {self.temperature}"


def published_rows() -> list[PublishedRow]:
    """All lines, in the order of the file."""
    text = files("costmodel").joinpath("published_acceptance.csv").read_text(encoding="utf-8")
    return [
        PublishedRow(
            table=line["table"],
            target=line["target"],
            temperature=int(line["temperature"]),
            dataset=line["dataset"],
            chain=float(line["chain"]),
            tree=float(line["tree"]),
            tree_nodes=int(line["tree_nodes"]),
            tail=float(line["tail"]),
        )
        for line in csv.DictReader(text.splitlines())
    ]


def published(
    table: str, dataset: str, *, target: str = "qwen3-8b", temperature: int = 0
) -> AcceptanceProcess:
    """The process of one line. Raises InputError where the papers have no such line."""
    rows = published_rows()
    wanted = (table, dataset, target, temperature)
    for row in rows:
        if (row.table, row.dataset, row.target, row.temperature) == wanted:
            return process_of(row)
    known = sorted({f"{row.table} {row.target} {row.dataset}" for row in rows})
    raise InputError(
        f"no published acceptance of {table} {target} {dataset} at temperature {temperature}",
        hint=f"There is, at temperatures 0 and 1: {', '.join(known)}.",
    )


def process_of(row: PublishedRow) -> AcceptanceProcess:
    """The process that reproduces the row's two lengths."""
    rate = constant(row.chain, BLOCK_GAMMA).rank1
    return AcceptanceProcess(label=row.label, kind="published", rank1=rate, tail=row.tail)

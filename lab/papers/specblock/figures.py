"""SpecBlock's table 3 and figure 5 of a trained drafter, on texts that `train-drafter` held out.

python -m lab.papers.specblock.figures work/drafter --target NAME --texts work/texts
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import torch

from decoder.model.loading import LoadedModel
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import plain_copy
from lab.papers.specblock.training.objective import (
    Measured,
    SpecBlockObjective,
    SpecBlockSettings,
    Trees,
    measure_trees,
)
from lab.training.corpus import read_corpus, split
from lab.training.features import Example, Examples
from lab.training.recipe import begun, load_target

RANKS = ("rank 1", "rank 2-4", "rank 5-10", "rank > 10")


def rank_quality(ranks: torch.Tensor) -> list[list[float | None]]:
    """Frequency, precision, recall and F1 of each bucket; None where nothing is counted.

    ranks  [4, 4] positions by the target token's bucket and the one that the rank head gave
    """
    rows = []
    for bucket in range(len(ranks)):
        right, true = int(ranks[bucket, bucket]), int(ranks[bucket].sum())
        given = int(ranks[:, bucket].sum())
        shares = (
            (true, int(ranks.sum())),
            (right, given),
            (right, true),
            (2 * right, given + true),
        )
        rows.append([part / whole if whole else None for part, whole in shares])
    return rows


def lines(measured: Measured, trees: Trees) -> list[str]:
    """The rows of the table, of which a name tells the columns, and both panels of the figure."""
    qualities = zip(RANKS, rank_quality(measured.ranks), strict=True)
    blocks = enumerate(zip(measured.matched, measured.reached, strict=True))
    rows = [
        *((f"{rank}: frequency, precision, recall, F1", shares) for rank, shares in qualities),
        ("tree's greedy chain: right at each place", _shares(trees.matched, trees.reached)),
        *((f"block {number}: right at each place", _shares(*counts)) for number, counts in blocks),
    ]
    return [
        " | ".join((name, *("-" if share is None else f"{share:.3f}" for share in shares)))
        for name, shares in rows
    ]


def measure(
    loaded: LoadedModel, drafter: SpecBlockDrafter, examples: Sequence[Example]
) -> tuple[Measured, Trees]:
    """What `lines` shows, along these texts, from every token of their continuations."""
    model = plain_copy(drafter.model).float()
    longest = max(len(example.tokens) for example in examples)
    settings = SpecBlockSettings(anchors=longest, blocks=drafter.growth.blocks)
    objective = SpecBlockObjective(loaded, settings, model)
    return objective.measure(examples), measure_trees(loaded, model, examples)


def _shares(matched: Iterable[float], reached: Iterable[float]) -> list[float | None]:
    pairs = zip(matched, reached, strict=True)
    return [float(hits) / float(count) if count else None for hits, count in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", help="folder or hub id of a SpecBlock drafter")
    parser.add_argument("--target", help="as of train-drafter")
    parser.add_argument("--texts", type=Path, required=True, help="folder in its OUTPUT")
    given = parser.parse_args()
    loaded = load_target(given.target)
    drafter = begun(loaded, given.drafter, SpecBlockDrafter, "SpecBlock")
    held_out = split(read_corpus(given.texts, loaded.architecture.vocab))[1]
    if not held_out:
        parser.error(f"{given.texts} holds no held-out text")
    examples = Examples(loaded, held_out, drafter.feature_layers, given.texts.parent)
    click.echo("\n".join(lines(*measure(loaded, drafter, examples))))


if __name__ == "__main__":
    main()

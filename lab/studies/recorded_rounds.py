"""Hindsight on the rounds of a benchmark's trace.

A round's line in the trace has its context, the tree that was verified, and the accepted tokens.
Its candidates are drafted again (they depend on the text and on what the drafter learnt before,
which is replayed in order), and the profile gives the cost of every tree size. So the best fixed
size in hindsight needs no other run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.online.cycle import CycleCost
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.tree.draft_tree import EMPTY, best_first
from decoder.tree.growth import TopPaths
from lab.studies.rounds import RecordedHindsight, committed_by_size, pooled_ratio

SIZES = (0, 1, 3, 7, 15, 31, 63, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A decoded text: all its tokens, how many of them are the prompt, and its rounds."""

    tokens: list[int]
    prompt: int
    rounds: list[dict[str, Any]]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace, in the order in which they were written."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def hindsight_of(
    texts: Iterable[Text], drafter: Drafter, cost: CycleCost
) -> list[RecordedHindsight]:
    """For each text: tokens and seconds of every size in `SIZES` in each recorded round.

    texts    all that the run's drafter drafted, in order
    drafter  a new one of the same kind
    """
    hindsights = []
    for text in texts:
        session = drafter.start(np.asarray(text.tokens[: text.prompt], dtype=np.int64), None)
        rows = [_every_size(session, drafter, text, record) for record in text.rounds]
        nodes = np.array([sizes for sizes, _ in rows])
        contexts = [record["context"] for record in text.rounds]
        hindsights.append(
            RecordedHindsight(
                sizes=np.array(SIZES),
                committed=np.array([committed for _, committed in rows], dtype=np.float64),
                seconds=np.array(
                    [cost.cycle_s(*each) for each in zip(nodes, contexts, strict=True)]
                ),
            )
        )
    return hindsights


def _every_size(
    session: DraftSession, drafter: Drafter, text: Text, record: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The nodes that each size verifies in one recorded round, and the tokens it commits."""
    context, most = record["context"], max(SIZES)
    tokens = np.asarray(text.tokens, dtype=np.int64)
    rest = tokens[context + 1 :].tolist()
    depth = min(drafter.max_depth, len(rest) - 1)
    tree = EMPTY
    if depth >= 1:  # the last token of a text needs no draft
        request = DraftRequest(depth=depth, width=most, growth=TopPaths())
        tree = best_first(session.draft(tokens[: context + 1], request), most)
    session.observe(rest[: record["accepted"] + 1], None)
    sizes = np.array(SIZES)
    # A fixed size verifies fewer nodes where the drafter has no more.
    return np.minimum(sizes, tree.nodes), committed_by_size(tree, rest[:depth], most)[sizes]


def played_of(texts: Iterable[Text], cost: CycleCost) -> np.ndarray:
    """[texts, 2] tokens of the recorded rounds, and their seconds by the same cost model."""
    return np.array(
        [
            (
                sum(1 + record["accepted"] for record in text.rounds),
                sum(
                    float(cost.cycle_s(np.array([float(record["nodes"])]), record["context"])[0])
                    for record in text.rounds
                ),
            )
            for text in texts
        ]
    )


def summary(
    texts: list[Text], hindsights: list[RecordedHindsight], cost: CycleCost
) -> dict[str, Any]:
    """The recorded policy against the best fixed size and against the best of every round."""
    together = RecordedHindsight(
        sizes=hindsights[0].sizes,
        committed=np.concatenate([each.committed for each in hindsights]),
        seconds=np.concatenate([each.seconds for each in hindsights]),
    )
    size, best = together.best_fixed()
    at = list(together.sizes).index(size)
    fixed = np.array(
        [(each.committed[:, at].sum(), each.seconds[:, at].sum()) for each in hindsights]
    )
    played = played_of(texts, cost)
    rate = float(played[:, 0].sum() / played[:, 1].sum())
    _, oracle = together.oracle()
    return {
        "rounds": len(together.committed),
        "best_fixed": size,
        "over_best_fixed": pooled_ratio(played, fixed),
        "oracle_regret": 1.0 - rate / oracle,
        "best_fixed_oracle_regret": 1.0 - best / oracle,
        "fixed_tokens_per_s": dict(
            zip(map(str, together.sizes.tolist()), together.fixed_rates().tolist(), strict=True)
        ),
    }

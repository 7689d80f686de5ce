"""What each round did, one JSON object a line, for later analysis."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from costmodel.errors import InputError
from decoder.statistics import StageTimes
from decoder.tree import DraftTree


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """One sequence's part of one round, for whoever listens with `TreeDecoder.on_round`.

    accepted  drafted tokens that were accepted of the tree
    stages    seconds of the whole round's stages, and `round_s` of all of it
    """

    tree: DraftTree
    accepted: int
    stages: StageTimes
    round_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One sequence's part of one round.

    text         counts the texts of this decoder from 0
    batch        sequences in the round's forward; times are of the whole round
    context      cached tokens before the round
    nodes        of the tree that was verified, with its expected committed length
    accepted     drafted tokens that were accepted
    predicted_s  of the forward and of the whole cycle, by the cost model as it stands
                 after the round; None without one
    """

    text: int
    round: int
    batch: int
    context: int
    nodes: int
    depth: int
    expected_committed: float
    accepted: int
    predicted_verify_s: float | None
    predicted_cycle_s: float | None
    stages: StageTimes


class RoundTrace:
    """Appends records to a JSONL file, a line a record."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(
                f"cannot write the trace {path}: {error.strerror or error}",
                hint="Choose another place for --trace.",
            ) from error

    def write(self, record: RoundRecord) -> None:
        data = asdict(record)
        stages = data.pop("stages")
        self._file.write(json.dumps(data | stages) + "\n")

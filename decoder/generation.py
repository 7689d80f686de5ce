"""Generations in progress: one text as a stream, or several together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from costmodel.errors import InputError
from decoder.decode_loop import LoopParts, TextSequence, prefill, run_round
from decoder.statistics import Statistics
from decoder.text import TextRequest


class DecodeRun(Iterator[str]):
    """One generation in progress: an iterator of pieces of text.

    A loop over it can be left, and another one continues where the first stopped. A target has
    one KV cache, so another generation with it ends this one: the next piece is then an InputError.
    Each round holds the target's lock. After `close`, an error or an interrupt, `stats.finish` is
    "interrupted" and `token_ids` holds whole rounds.
    """

    def __init__(self, parts: LoopParts, request: TextRequest) -> None:
        self.has_text = request.stream is not None
        self._parts, self._lock = parts, parts.target.lock
        self._sequence = TextSequence(parts, request)
        self._rounds = self._run()
        self._pieces: deque[str] = deque()

    @property
    def token_ids(self) -> list[int]:
        return self._sequence.token_ids

    @property
    def stats(self) -> Statistics:
        return self._sequence.stats

    def __next__(self) -> str:
        with self._lock:
            while not self._pieces:
                self._pieces.extend(next(self._rounds))
            return self._pieces.popleft()

    def rounds(self) -> Iterator[list[str]]:
        """The pieces of text of each round, the prefill's first; `token_ids` grows with them."""
        while True:
            with self._lock:
                pieces = next(self._rounds, None)
            if pieces is None:
                return
            yield pieces

    def close(self) -> None:
        """Stop here. Not closing a stream does no harm either."""
        with self._lock:
            self._rounds.close()
            self._pieces.clear()
            self._sequence.interrupt()

    def _run(self) -> Generator[list[str], None, None]:
        parts, sequence = self._parts, self._sequence
        target = parts.target
        try:
            _reserve(parts, [sequence])
            reservation = target.reservations
            yield list(sequence.take([prefill(parts, sequence)]))
            while not sequence.ended:
                if target.reservations != reservation:
                    raise InputError(
                        "this stream cannot go on: its target began another text since",
                        hint="Finish one stream before the next, use generate_batch for several "
                        "texts at once, or a decoder with a model of its own for each.",
                    )
                [finished] = run_round(parts, [sequence])
                yield list(sequence.take(finished.emitted))
        finally:
            sequence.interrupt()
            _end(parts, sequence)


def _reserve(parts: LoopParts, sequences: Sequence[TextSequence]) -> None:
    """Give the target a cache for the whole texts and the last round's trees.

    Another decoder of the target may have had other layers captured since.
    """
    parts.target.capture(parts.drafter.drafter.feature_layers)
    rows = parts.policy.max_nodes + 1
    longest = max(one.cached + 1 + one.wanted for one in sequences)
    parts.target.reserve(longest + rows, len(sequences))
    parts.target.prepare(rows)


def _end(parts: LoopParts, sequence: TextSequence) -> None:
    """Log the drift that a text's rounds found, behind its last piece, never within a stream."""
    parts.policy.ended(sequence.number)
    drift = None if parts.cost is None else parts.cost.drift_warning
    if drift is not None and drift in sequence.stats.warnings:
        logging.getLogger(__name__).warning(drift)


def run_together(
    parts: LoopParts, requests: Sequence[TextRequest]
) -> list[tuple[TextSequence, str]]:
    """Decode several texts, with one forward a round for all that have not ended.

    The tokens of each are those that it gives alone. Other threads wait until all have ended.
    Returns each sequence with its text.
    """
    sequences = [TextSequence(parts, request, place) for place, request in enumerate(requests)]
    with parts.target.lock:
        try:
            _reserve(parts, sequences)
            pieces = [list(one.take([prefill(parts, one)])) for one in sequences]
            while running := [one for one in sequences if not one.ended]:
                for sequence, finished in zip(running, run_round(parts, running), strict=True):
                    pieces[sequence.place] += sequence.take(finished.emitted)
        finally:
            for sequence in sequences:
                _end(parts, sequence)
    return [(one, "".join(pieces[one.place])) for one in sequences]

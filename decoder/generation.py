"""Generations in progress: one text as a stream, or several together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from costmodel.errors import InputError
from decoder.acceptance.rules import AcceptanceRule, RuleName
from decoder.decode_loop import LoopParts, TextSequence, prefill, run_round
from decoder.statistics import Statistics
from decoder.text import TextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """The parts of a decoder that its texts are generated with.

    profile_line  one line: where the cost model came from
    text_numbers  the numbers of its texts, one for each that begins
    """

    loop: LoopParts
    acceptance: RuleName
    profile_line: str
    text_numbers: Iterator[int]

    def open(self, request: TextRequest, place: int = 0) -> TextSequence:
        """A new text, at this place in the target's cache."""
        stats = Statistics(policy=self.loop.policy.name, profile=self.profile_line)
        rule = AcceptanceRule(self.acceptance, request.sampling, self.loop.target.device)
        number = next(self.text_numbers)
        return TextSequence(request, stats, rule, number=number, place=place)

    @property
    def largest_rows(self) -> int:
        """Rows of the largest verification of a sequence."""
        return self.loop.policy.max_nodes + 1

    def tokens_needed(self, sequence: TextSequence) -> int:
        """Capacity of the cache for the whole text and the last round's tree."""
        return sequence.cached + 1 + sequence.wanted + self.largest_rows


class DecodeRun(Iterator[str]):
    """One generation in progress: an iterator of pieces of text.

    A loop over it can be left, and another one continues where the first stopped. A target has
    one KV cache, so another generation with the same target ends this one. The next piece is
    then an InputError. Threads are safe: each round holds the target's lock. After `close`, an
    error or an interrupt, `stats.finish` is "interrupted" and `token_ids` holds whole rounds.
    """

    def __init__(self, parts: GenerationParts, request: TextRequest) -> None:
        self.has_text = request.stream is not None
        self._parts = parts
        self._lock = parts.loop.target.lock
        self._sequence = parts.open(request)
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
        loop, sequence = self._parts.loop, self._sequence
        target = loop.target
        try:
            target.reserve(self._parts.tokens_needed(sequence))
            target.prepare(self._parts.largest_rows)
            reservation = target.reservations
            yield list(sequence.take([prefill(loop, sequence)]))
            while not sequence.ended:
                if target.reservations != reservation:
                    raise InputError(
                        "this stream cannot go on: its target began another text since",
                        hint="Finish one stream before the next, use generate_batch for several "
                        "texts at once, or a decoder with a model of its own for each.",
                    )
                [finished] = run_round(loop, [sequence])
                yield list(sequence.take(finished.emitted))
        finally:
            sequence.interrupt()
            loop.policy.ended(sequence.number)
            _log_drift(loop, sequence)


def _log_drift(loop: LoopParts, sequence: TextSequence) -> None:
    """Log the drift that a text's rounds found, behind its last piece, never within a stream."""
    drift = None if loop.cost is None else loop.cost.drift_warning
    if drift is not None and drift in sequence.stats.warnings:
        logging.getLogger(__name__).warning(drift)


def run_together(
    parts: GenerationParts, requests: Sequence[TextRequest]
) -> list[tuple[TextSequence, str]]:
    """Decode several texts, with one forward a round for all that have not ended.

    The tokens of each are those that it gives alone. Other threads wait until all have ended.
    Returns each sequence with its text.
    """
    loop = parts.loop
    sequences = [parts.open(request, place) for place, request in enumerate(requests)]
    with loop.target.lock:
        try:
            loop.target.reserve(max(map(parts.tokens_needed, sequences)), len(sequences))
            loop.target.prepare(parts.largest_rows)
            pieces = [list(sequence.take([prefill(loop, sequence)])) for sequence in sequences]
            while running := [sequence for sequence in sequences if not sequence.ended]:
                for sequence, finished in zip(running, run_round(loop, running), strict=True):
                    pieces[sequence.place] += sequence.take(finished.emitted)
        finally:
            for sequence in sequences:
                loop.policy.ended(sequence.number)
                _log_drift(loop, sequence)
    return [(sequence, "".join(pieces[sequence.place])) for sequence in sequences]

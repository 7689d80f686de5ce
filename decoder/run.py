"""Generations in progress: one streamed, or several together."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from costmodel.errors import InputError
from decoder.acceptance_rule import AcceptanceRule
from decoder.rounds import prefill, run_round
from decoder.sequence import TextRequest, TextSequence
from decoder.statistics import Statistics

if TYPE_CHECKING:
    from decoder.engine import TreeDecoder


class DecodeRun(Iterator[str]):
    """One generation in progress, in pieces of text as they are completed.

    Leaving a loop over it and entering another goes on where the first stopped. A target
    has one KV cache, so that beginning another generation with it ends this one: asked for
    more, it raises InputError. After `close`, or an error or interrupt inside a round,
    `stats.finish` says "interrupted", and `token_ids` holds what was complete.
    """

    def __init__(self, decoder: TreeDecoder, request: TextRequest) -> None:
        self.has_text = request.stream is not None
        self._decoder = decoder
        self._sequence = _open(decoder, request, place=0)
        self._rounds = self._run()
        self._pieces: deque[str] = deque()

    @property
    def token_ids(self) -> list[int]:
        return self._sequence.token_ids

    @property
    def stats(self) -> Statistics:
        return self._sequence.stats

    def __next__(self) -> str:
        while not self._pieces:
            self._pieces.extend(next(self._rounds))
        return self._pieces.popleft()

    def rounds(self) -> Iterator[list[str]]:
        """The pieces of text of each round, the prefill first; `token_ids` grows with them."""
        return self._rounds

    def close(self) -> None:
        """Stop here. Not closing a stream does no harm either."""
        self._rounds.close()
        self._pieces.clear()
        self._sequence.interrupt()

    def _run(self) -> Generator[list[str], None, None]:
        decoder, sequence = self._decoder, self._sequence
        target = decoder.target
        try:
            target.reserve(_tokens_needed(decoder, sequence))
            own = target.reservations
            yield list(sequence.take([prefill(decoder, sequence)]))
            while not sequence.ended:
                if target.reservations != own:
                    raise InputError(
                        "this stream cannot go on: its target began another text since",
                        hint="Finish one stream before the next, use generate_batch for several "
                        "texts at once, or a decoder with a model of its own for each.",
                    )
                [emitted] = run_round(decoder, [sequence])
                yield list(sequence.take(emitted))
        finally:
            sequence.interrupt()


def run_together(
    decoder: TreeDecoder, requests: Sequence[TextRequest]
) -> list[tuple[TextSequence, str]]:
    """Decode several texts, one forward a round for all that have not ended.

    Each gives the tokens that it gives alone. Returns each sequence with its text.
    """
    sequences = [_open(decoder, request, place) for place, request in enumerate(requests)]
    tokens = max(_tokens_needed(decoder, sequence) for sequence in sequences)
    decoder.target.reserve(tokens, len(sequences))
    pieces = [list(sequence.take([prefill(decoder, sequence)])) for sequence in sequences]
    while running := [sequence for sequence in sequences if not sequence.ended]:
        for sequence, emitted in zip(running, run_round(decoder, running), strict=True):
            pieces[sequence.place] += sequence.take(emitted)
    return [(sequence, "".join(pieces[sequence.place])) for sequence in sequences]


def _open(decoder: TreeDecoder, request: TextRequest, place: int) -> TextSequence:
    stats = Statistics(policy=decoder.policy.name, profile=decoder.profile_line)
    rule = AcceptanceRule(decoder.acceptance, request.sampling, decoder.target.device)
    return TextSequence(request, decoder.drafter, stats, rule, decoder.number_text(), place)


def _tokens_needed(decoder: TreeDecoder, sequence: TextSequence) -> int:
    return sequence.cached + 1 + sequence.wanted + decoder.policy.max_nodes + 1

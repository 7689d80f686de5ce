"""Generations in progress: one streamed, or several together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from decoder.acceptance_rule import AcceptanceRule
from decoder.rounds import prefill, run_round
from decoder.sequence import TextRequest, TextSequence
from decoder.statistics import Statistics

if TYPE_CHECKING:
    from decoder.engine import TreeDecoder


class DecodeRun:
    """One generation in progress; iterate over it for text pieces."""

    def __init__(self, decoder: TreeDecoder, request: TextRequest) -> None:
        self.has_text = request.stream is not None
        self._decoder = decoder
        self._sequence = _open(decoder, request, place=0)

    @property
    def token_ids(self) -> list[int]:
        return self._sequence.token_ids

    @property
    def stats(self) -> Statistics:
        return self._sequence.stats

    def __iter__(self) -> Iterator[str]:
        for pieces in self.rounds():
            yield from pieces

    def rounds(self) -> Iterator[list[str]]:
        """The pieces of text of each round, the prefill first; `token_ids` grows with them."""
        decoder, sequence = self._decoder, self._sequence
        decoder.target.reserve(_tokens_needed(decoder, sequence))
        yield list(sequence.take([prefill(decoder, sequence)]))
        while not sequence.ended:
            [emitted] = run_round(decoder, [sequence])
            yield list(sequence.take(emitted))


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

"""A drafter that knows the target's continuation and hides it at drawn ranks.

It stands in for a trained block drafter where none is at hand: with the target's own
continuation, decoded once, its blocks hold the true next tokens at ranks that an
`AcceptanceProcess` draws, so every budget policy can be compared on any target and device,
a randomly initialised one included. All draws are hashes of (seed, prompt, position in the
text): a hard token is hard for every policy and from wherever its block starts, as it is
for a real drafter, so policies that are compared meet the same luck. What a round finds out
about one position says nothing about those behind it, so stated probabilities stay true.

What is measured with it is measured with *simulated acceptance*, and its name says so. Its
own time is a few microseconds; where a comparison must count the time of a real drafter,
`paced_by` runs one beside it and throws its candidates away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.drafters.acceptance_process import AcceptanceProcess
from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
from decoder.jit import jit
from decoder.tree import Lattice

UNKNOWN = -1  # a position whose true token is not known
MIX = np.uint64(0x9E3779B97F4A7C15)


class Truth:
    """Texts that the target is known to write, prompts included; several may share a start."""

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self._texts: list[NDArray[np.int64]] = []
        for text in texts:
            self.add(text)

    def add(self, text: Sequence[int]) -> None:
        """Know a text, prompt and continuation in one."""
        self._texts.append(np.asarray(text, dtype=np.int64))

    def find(self, context: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The longest known text that begins with `context`, or None."""
        size = len(context)
        known = [
            text
            for text in self._texts
            if len(text) >= size and np.array_equal(text[:size], context)
        ]
        return max(known, key=len, default=None)


class ReplayDrafter:
    """Block lattices that hold the true next tokens with the acceptance of a process.

    truth     what the target writes; a text that leaves it, or goes on beyond its end, is
              still drafted, with tokens that have nothing to do with the target's
    vocab     size of the vocabulary that wrong tokens are taken from
    paced_by  a drafter that is run at every draft for its time alone

    Its trees are deterministic at any temperature; above 0 the target soon leaves the truth.
    """

    draws: Draws = "never"

    def __init__(
        self,
        truth: Truth,
        process: AcceptanceProcess,
        *,
        vocab: int,
        seed: int = 0,
        paced_by: Drafter | None = None,
    ) -> None:
        if vocab < 2:
            raise InputError(f"a replay needs a vocabulary of 2 or more tokens, got {vocab}")
        self.name = f"replay of simulated acceptance: {process.label}"
        self.architecture_hash = "replay" if paced_by is None else paced_by.architecture_hash
        self.max_depth = process.gamma
        self.feature_layers: tuple[int, ...] = () if paced_by is None else paced_by.feature_layers
        self.truth = truth
        self.process = process
        self.vocab = vocab
        self.seed = seed
        self.confidences = process.confidences()
        self._paced_by = paced_by

    def session(self) -> ReplaySession:
        return ReplaySession(self, None if self._paced_by is None else self._paced_by.session())


class ReplaySession:
    """The replay of one sequence."""

    def __init__(self, drafter: ReplayDrafter, pace: DraftSession | None) -> None:
        self._drafter = drafter
        self._pace = pace
        self._key = 0
        self._text: NDArray[np.int64] | None = None

    def start(self, prompt: NDArray[np.int64], features: torch.Tensor | None) -> None:
        if self._pace is not None:
            self._pace.start(prompt, features)
        tokens = np.ascontiguousarray(prompt, dtype=np.int64)
        self._key = _key(tokens, self._drafter.seed % 2**63)
        self._text = self._drafter.truth.find(prompt)

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice:
        """[depth, K] candidates with the probabilities that they are the target's tokens."""
        drafter = self._drafter
        if self._pace is not None:
            self._pace.draft(context, request)
        depth = min(request.depth, drafter.max_depth)
        known = self._known(context, depth)
        draws = (drafter.confidences, drafter.process.tail, drafter.vocab)
        # Without one token of the vocabulary, so that the truth can be among none of them.
        width = min(request.width, drafter.vocab - 1)
        tokens, probabilities = _block(self._key, len(context), known, width, draws)
        return Lattice(tokens, probabilities)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        if self._pace is not None:
            self._pace.observe(emitted, features)

    def _known(self, context: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """[depth] true tokens behind the context, `UNKNOWN` where there are none."""
        known = np.full(depth, UNKNOWN, dtype=np.int64)
        size, text = len(context), self._text
        if text is None or not np.array_equal(text[:size], context):
            text = self._text = self._drafter.truth.find(context)
        if text is not None:
            rest = text[size : size + depth]
            known[: len(rest)] = rest
        return known


@jit
def _mix(state):  # type: ignore[no-untyped-def]
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@jit
def _key(prompt, seed):  # type: ignore[no-untyped-def]
    """One number of 63 bits, which Python can hand back, for a prompt and a seed."""
    key = _mix(np.uint64(seed) + MIX)
    for token in prompt:
        key = _mix((key ^ np.uint64(token)) + MIX)
    return np.int64(key >> np.uint64(1))


@jit
def _uniform(state):  # type: ignore[no-untyped-def]
    return float(state >> np.uint64(11)) * 2.0**-53


@jit
def _block(key, start, known, width, draws):  # type: ignore[no-untyped-def]
    """Tokens and probabilities [depth, width] of the block that starts at position `start`."""
    confidences, tail, vocab = draws
    depth = len(known)
    tokens = np.empty((depth, width), np.int64)
    probabilities = np.empty((depth, width), np.float64)
    for level in range(depth):
        state = _mix((np.uint64(key) ^ np.uint64(start + level)) + MIX)
        first, second, third = _mix(state + MIX), _mix(state + MIX + MIX), _mix(state)
        hazard = confidences[level, int(_uniform(first) * confidences.shape[1])]
        draw = _uniform(second)
        truth = known[level] if known[level] >= 0 else np.int64(third % np.uint64(vocab))
        offset = np.int64((third >> np.uint64(20)) % np.uint64(vocab - 1))
        left, wrong, found = 1.0, 0, False
        for rank in range(width):
            share = left * hazard
            probabilities[level, rank] = share
            if not found and draw < share:
                tokens[level, rank] = truth
                found = True
            else:
                # Distinct over the ranks, and never the truth.
                tokens[level, rank] = (truth + 1 + (offset + wrong) % (vocab - 1)) % vocab
                wrong += 1
            draw -= share
            left -= share
            rising = hazard / (1.0 - hazard) if hazard < 0.5 else 1.0
            hazard = min(rising, tail / (rank + 2))
    return tokens, probabilities

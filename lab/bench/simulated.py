"""The simulated drafter: it replays known texts at ranks drawn from an acceptance process.

It stands in for a trained block drafter, so that budget policies can be compared on any target and
device. All draws are hashes of (seed, prompt, position in the text): a hard token is hard for
every policy and wherever its block starts, as for a real drafter. Positions are independent, so
the stated probabilities hold whatever a round has revealed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from costmodel.acceptance import AcceptanceProcess, process_of, published_rows
from costmodel.statistics import Ints
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.jit import jit
from decoder.tree.draft_tree import Lattice

UNKNOWN = -1  # the true token of a position that no text reaches
MIX = np.uint64(0x9E3779B97F4A7C15)


def published(
    table: str, dataset: str, *, target: str = "qwen3-8b", temperature: int = 0
) -> AcceptanceProcess:
    """The process of one line of the published table."""
    wanted = (table, dataset, target, temperature)
    lines = {(row.table, row.dataset, row.target, row.temperature): row for row in published_rows()}
    return process_of(lines[wanted])


class Truth:
    """Texts that the target writes, prompts included; several may begin alike."""

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self._texts = [np.asarray(text, dtype=np.int64) for text in texts]

    def add(self, text: Sequence[int]) -> None:
        """Add a text, prompt and continuation in one."""
        self._texts.append(np.asarray(text, dtype=np.int64))

    def find(self, context: Ints) -> Ints | None:
        """The longest text that begins with `context`, or None."""
        size = len(context)
        texts = [
            text
            for text in self._texts
            if len(text) >= size and np.array_equal(text[:size], context)
        ]
        return max(texts, key=len, default=None)


class SimulatedDrafter(Drafter):
    """Drafts lattices that hold the true next tokens with the acceptance of a process.

    Where a text departs from `truth` or runs past its end, as it soon does at a temperature above
    0, the drafted tokens are unrelated to the target's. `vocab` is the size of the vocabulary that
    wrong tokens are drawn from.
    """

    simulated = True

    architecture_hash = "replay"

    def __init__(
        self, truth: Truth, process: AcceptanceProcess, *, vocab: int, seed: int = 0
    ) -> None:
        self.name = f"replay of simulated acceptance: {process.label}"
        self.max_depth = process.gamma
        self.truth, self.process = truth, process
        self.vocab, self.seed = vocab, seed
        self.confidences = process.confidences()

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> SimulatedSession:
        return SimulatedSession(self, prompt)


class SimulatedSession(DraftSession):
    """The replay of one sequence."""

    def __init__(self, drafter: SimulatedDrafter, prompt: Ints) -> None:
        self._drafter = drafter
        tokens = np.ascontiguousarray(prompt, dtype=np.int64)
        self._key = _key(tokens, drafter.seed % 2**63)
        self._text = drafter.truth.find(prompt)

    def draft(self, context: Ints, request: DraftRequest) -> Lattice:
        """[depth, K] candidates with the probabilities that they are the target's tokens."""
        drafter = self._drafter
        depth = min(request.depth, drafter.max_depth)
        truth = self._true_tokens(context, depth)
        draws = (drafter.confidences, drafter.process.tail, drafter.vocab)
        # One fewer than the vocabulary, so that a block can lack the true token.
        width = min(request.width, drafter.vocab - 1)
        tokens, probabilities = _block(self._key, len(context), truth, width, draws)
        return Lattice(tokens, probabilities)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        return

    def _true_tokens(self, context: Ints, depth: int) -> Ints:
        """The true tokens [depth] after the context; `UNKNOWN` where no text reaches."""
        truth = np.full(depth, UNKNOWN, dtype=np.int64)
        size, text = len(context), self._text
        if text is None or not np.array_equal(text[:size], context):
            text = self._text = self._drafter.truth.find(context)
        if text is not None:
            rest = text[size : size + depth]
            truth[: len(rest)] = rest
        return truth


@jit
def _mix(state):
    """SplitMix64's output function (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@jit
def _key(prompt, seed):
    """A hash of a prompt and a seed, 63 bits that Python can pass back."""
    key = _mix(np.uint64(seed) + MIX)
    for token in prompt:
        key = _mix((key ^ np.uint64(token)) + MIX)
    return np.int64(key >> np.uint64(1))


@jit
def _uniform(state):
    return float(state >> np.uint64(11)) * 2.0**-53


@jit
def _block(key, start, truth, width, draws):
    """Tokens and probabilities [depth, width] of the block that starts at position `start`."""
    confidences, tail, vocab = draws
    depth = len(truth)
    tokens = np.empty((depth, width), np.int64)
    probabilities = np.empty((depth, width), np.float64)
    for level in range(depth):
        state = _mix((np.uint64(key) ^ np.uint64(start + level)) + MIX)
        first, second, third = _mix(state + MIX), _mix(state + MIX + MIX), _mix(state)
        hazard = confidences[level, int(_uniform(first) * confidences.shape[1])]
        draw = _uniform(second)
        right = truth[level] if truth[level] >= 0 else np.int64(third % np.uint64(vocab))
        offset = np.int64((third >> np.uint64(20)) % np.uint64(vocab - 1))
        left, wrong, placed = 1.0, 0, False
        for rank in range(width):
            share = left * hazard
            probabilities[level, rank] = share
            if not placed and draw < share:
                tokens[level, rank] = right
                placed = True
            else:
                # Distinct over the ranks, and never the right token.
                tokens[level, rank] = (right + 1 + (offset + wrong) % (vocab - 1)) % vocab
                wrong += 1
            draw -= share
            left -= share
            rising = hazard / (1.0 - hazard) if hazard < 0.5 else 1.0
            hazard = min(rising, tail / (rank + 2))
    return tokens, probabilities

"""The n-gram drafter: continuations of earlier occurrences of the context's suffix.

Every earlier place with the context's last token is a match; its length is the number of tokens
that agree there, back from that token. The continuations of the best matches form a trie. The
probability of a child is

    hit(length of the longest match at its parent) x its share of the match weights,

where hit(m) is the measured frequency with which the target's next token was among the
continuations of an m-token match, at the root or below it: a match that has just continued is
likelier to continue. Prompt lookup decoding (Saxena, 2023) has one match and no probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from costmodel.statistics import Array, Ints
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.jit import jit
from decoder.tree.draft_tree import CandidateTree

MAX_MATCH = 16  # longer matches are treated alike
MAX_MATCHES = 32  # continuations taken into the trie
WEIGHT_GROWTH = 2.0  # one more matching token makes a continuation this much likelier

# Hit rates at first, by match length 1, 2, ..., and the observations that they count as; they
# matter in the first rounds of a new decoder only.
PRIOR_HITS = np.array([0.30, 0.45, 0.55, 0.62, 0.68, 0.72, 0.76, 0.80] + [0.85] * 8)
PRIOR_WEIGHT = 12.0
FORGETTING = 0.998  # factor of old observations for each new one


class NgramDrafter(Drafter):
    """Drafts from the text so far, without a model; its sessions share its hit rates."""

    name = "ngram"
    architecture_hash = "ngram"

    def __init__(self, max_depth: int = 16) -> None:
        self.max_depth = max_depth
        self._tried = np.full((2, MAX_MATCH), PRIOR_WEIGHT)  # at the root, below it
        self._hits = np.tile(PRIOR_HITS * PRIOR_WEIGHT, (2, 1))
        _build_trie(np.frombuffer(bytes(8), np.int64), 1, self.hit_rates())  # read-only, as later

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> NgramSession:
        return NgramSession(self)

    def unlearnt(self) -> NgramDrafter:
        return NgramDrafter(self.max_depth)

    def hit_rates(self) -> Array:
        """Hit rates [2, MAX_MATCH] of matches of 1, 2, ... tokens: at the root, below it."""
        return self._hits / self._tried

    def learn(self, row: int, match: int, hit: bool) -> None:
        """Count one match of `match` tokens at `row` of a trie."""
        slot = min(row, 1), min(match, MAX_MATCH) - 1
        self._tried[slot] = self._tried[slot] * FORGETTING + 1.0
        self._hits[slot] = self._hits[slot] * FORGETTING + hit


class NgramSession(DraftSession):
    """The drafting of one text."""

    rewinds = True

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._trie: tuple[Ints, Ints, Ints] | None = None  # of the last draft, until observed

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The trie of the best matches' continuations, parents before children."""
        depth, rates = min(request.depth, self._drafter.max_depth), self._drafter.hit_rates()
        tokens, parents, probabilities, matches = _build_trie(context, depth, rates)
        self._trie = tokens, parents, matches
        return CandidateTree(tokens, parents, probabilities)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        """Count a hit or miss at every trie row that the emitted tokens pass through."""
        if self._trie is None:
            return
        (tokens, parents, matches), row = self._trie, 0
        self._trie = None
        for token in emitted:
            children = np.flatnonzero(parents == row)
            if len(children) == 0:
                break
            hits = children[tokens[children] == token]
            self._drafter.learn(row, int(matches[row]), len(hits) > 0)
            if len(hits) == 0:
                break
            row = int(hits[0]) + 1

    def rewind(self, tokens: int) -> None:
        """Forget the last draft, so that a round that is timed again counts no hits."""
        self._trie = None


@jit
def _build_trie(context, depth, hit_rates):  # type: ignore[no-untyped-def]
    """Tokens, parents, probabilities of matches' continuations, and each row's longest match."""
    # Ends and lengths of the longest, then most recent, matches of the context's suffix.
    last, count = len(context) - 1, 0
    ends, lengths = np.empty(MAX_MATCHES, np.int64), np.empty(MAX_MATCHES, np.int64)
    for end in range(last - 1, -1, -1):
        if context[end] != context[last]:
            continue
        length = 1
        while (
            length < MAX_MATCH and length <= end and context[end - length] == context[last - length]
        ):
            length += 1
        if count == MAX_MATCHES and lengths[count - 1] >= length:
            continue
        place = count if count < MAX_MATCHES else count - 1
        while place > 0 and lengths[place - 1] < length:
            ends[place], lengths[place] = ends[place - 1], lengths[place - 1]
            place -= 1
        ends[place], lengths[place] = end, length
        count = min(count + 1, MAX_MATCHES)
    most = count * depth
    tokens = np.empty(most, np.int64)
    parents = np.empty(most, np.int64)
    weights = np.empty(most, np.float64)
    longest = np.zeros(most + 1, np.int64)  # match length at each row, root included
    first_child = np.full(most + 1, -1, np.int64)
    next_sibling = np.full(most + 1, -1, np.int64)
    passed = np.zeros(most + 1, np.float64)  # weight of continuations that go on from a row
    size = 0
    for match in range(count):
        weight = WEIGHT_GROWTH ** lengths[match]
        row = 0
        for step in range(min(depth, last - ends[match])):
            if longest[row] == 0:
                longest[row] = lengths[match] + step
            passed[row] += weight
            token = context[ends[match] + 1 + step]
            child = first_child[row]
            while child >= 0 and tokens[child - 1] != token:
                child = next_sibling[child]
            if child < 0:
                tokens[size], parents[size], weights[size] = token, row, 0.0
                size += 1
                child = size
                next_sibling[child] = first_child[row]
                first_child[row] = child
            weights[child - 1] += weight
            row = child
    probabilities = np.empty(size, np.float64)
    for node in range(size):
        parent = parents[node]
        rate = hit_rates[min(parent, 1), min(longest[parent], hit_rates.shape[1]) - 1]
        probabilities[node] = rate * weights[node] / passed[parent]
    return tokens[:size], parents[:size], probabilities, longest[: size + 1]

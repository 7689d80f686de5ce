"""The n-gram drafter against its definition, written here the slow way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.drafters import ngram
from decoder.drafters.ngram import FORGETTING, MAX_MATCH, MAX_MATCHES, PRIOR_HITS, NgramDrafter
from tests.decoder.models import as_paths, request

parts = [
    st.lists(st.integers(0, most), min_size=1, max_size=size)
    for most, size in ((2, 40), (9, 60), (3, 9))
]
repeated = st.tuples(parts[2], st.integers(2, 9)).map(lambda pair: pair[0] * pair[1])
contexts = st.one_of(*parts[:2], repeated)


def matches(context):
    """(length, end) of the best matches: the longest, among equals the most recent."""
    found = []
    last = len(context) - 1
    for end in range(last):
        length = 0
        while length < MAX_MATCH and end - length >= 0:
            if context[end - length] != context[last - length]:
                break
            length += 1
        if length:
            found.append((length, end))
    return sorted(found, reverse=True)[:MAX_MATCHES]


def reference(context, depth, rates):
    """{path of tokens: probability given its parent}, straight from the definition."""
    found = [(length, context[end + 1 :][:depth]) for length, end in matches(context)]
    paths = [(length, tokens, ngram.WEIGHT_GROWTH**length) for length, tokens in found]
    probabilities = {}
    for _, tokens, _ in paths:
        for step in range(len(tokens)):
            parent = tuple(tokens[:step])
            going_on = [p for p in paths if tuple(p[1][:step]) == parent and len(p[1]) > step]
            longest = max(length + step for length, _, _ in going_on)
            share = sum(w for _, t, w in going_on if t[step] == tokens[step])
            share /= sum(w for _, _, w in going_on)
            rate = rates[min(longest, MAX_MATCH) - 1]
            probabilities[(*parent, tokens[step])] = rate * share
    return probabilities


def draft(context, depth=16, drafter=None):
    session = (drafter or NgramDrafter()).start(np.array(context[:1]), None)
    return session.draft(np.array(context, dtype=np.int64), request(depth))


@given(contexts, st.integers(1, 18))
@settings(max_examples=200)
def test_the_trie_is_the_one_defined(context, depth):
    expected = reference(context, min(depth, 16), PRIOR_HITS)
    found = as_paths(draft(context, depth))
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected)


def test_only_the_best_matches_of_many_are_taken():
    context = [value for index in range(100) for value in (1, 10 + index)] + [1]
    tree = draft(context, depth=1)
    assert sorted(tree.tokens.tolist()) == list(range(110 - MAX_MATCHES, 110))


class TestLearning:
    CONTEXT = (5, 6, 7, 8, 5)  # a match of one token, continued by 6 7 8

    def observe(self, drafter, emitted):
        session = drafter.start(np.array(self.CONTEXT[:1]), None)
        tree = session.draft(np.array(self.CONTEXT), request(3))
        session.observe(emitted, None)
        return tree.probabilities[0]

    def test_hits_raise_and_misses_lower_the_probability(self):
        drafter = NgramDrafter()
        before = self.observe(drafter, [6, 9])
        assert before == PRIOR_HITS[0]
        raised = self.observe(drafter, [9])
        tried = ngram.PRIOR_WEIGHT * FORGETTING + 1
        hits = PRIOR_HITS[0] * ngram.PRIOR_WEIGHT * FORGETTING + 1
        assert raised == pytest.approx(hits / tried)
        lowered = self.observe(drafter, [9])
        assert lowered == pytest.approx(hits * FORGETTING / (tried * FORGETTING + 1))
        assert before < raised
        assert lowered < raised

    def test_each_match_length_learns_on_its_own(self):
        """6 is a hit of a match of one, 7 then a miss of a match of two."""
        drafter = NgramDrafter()
        self.observe(drafter, [6, 9])
        tree = draft(self.CONTEXT, 3, drafter)
        assert tree.probabilities[0] > PRIOR_HITS[0]
        assert tree.probabilities[1] < PRIOR_HITS[1]
        assert tree.probabilities[2] == PRIOR_HITS[2]

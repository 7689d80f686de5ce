"""The kind of a draft by the pairs of its text, against a search by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from integrations.pairs import MOST_PAIRS, SeenPairs

tokens = st.lists(st.integers(0, 4), max_size=30)


@given(tokens, tokens, st.integers(0, 30))
def test_the_kind_counts_pairs_that_stand_in_the_text(text, draft, cut) -> None:
    pairs = SeenPairs()
    pairs.extend(text[:cut])
    pairs.extend(text[cut:])
    assert len(pairs) == len(text)
    seen = 0
    while seen < min(len(draft), MOST_PAIRS):
        line = text[-1:] + draft[: seen + 1]
        if not any(line[-2:] == text[at : at + 2] for at in range(len(text) - 1)):
            break
        seen += 1
    assert pairs.kind(draft) == 1 + seen


def test_a_draft_without_a_text_before_it() -> None:
    assert SeenPairs().kind([3, 4]) == 1

"""Kinds of drafts: n-gram matches and seen pairs."""

from hypothesis import given
from hypothesis import strategies as st

from integrations.draft_lengths.acceptance import (
    LONGEST_AGREEMENT,
    MOST_PAIRS,
    MatchedText,
    SeenPairs,
)


def by_hand(text: list[int], least: int, most: int) -> int:
    """The first place of the longest n-gram, and the tokens that agree back from there."""
    for length in range(most, least - 1, -1):
        suffix = text[len(text) - length :]
        for start in range(len(text) - length):
            if text[start : start + length] == suffix:
                end = start + length
                agreed = 0
                while agreed < end and text[end - 1 - agreed] == text[len(text) - 1 - agreed]:
                    agreed += 1
                return min(agreed, LONGEST_AGREEMENT)
    return 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3),
    st.integers(0, 60),
)  # fmt: skip
def test_the_agreement_is_that_of_the_drafters_place(text, least, more, cut):
    matched = MatchedText(least, least + more)
    matched.extend(text[:cut])
    matched.extend(text[cut:])
    assert len(matched) == len(text)
    assert matched.kind([]) == by_hand(text, least, least + more)


def test_texts_longer_than_the_buffer():
    matched = MatchedText(2, 4)
    for _ in range(3):
        matched.extend(list(range(700)))
    assert matched.kind([]) == LONGEST_AGREEMENT
    matched.extend([9999])
    assert matched.kind([]) == 0


tokens = st.lists(st.integers(0, 4), max_size=30)


@given(tokens, tokens, st.integers(0, 30))
def test_the_kind_counts_pairs_that_stand_in_the_text(text, draft, cut):
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

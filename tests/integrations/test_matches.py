"""The agreement behind an n-gram draft, against a search by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from integrations.matches import LONGEST_AGREEMENT, MatchedText


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
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 60),
)
def test_the_agreement_is_that_of_the_drafters_place(text, least, more, cut) -> None:
    matched = MatchedText(least, least + more)
    matched.extend(text[:cut])
    matched.extend(text[cut:])
    assert len(matched) == len(text)
    assert matched.kind([]) == by_hand(text, least, least + more)


def test_texts_longer_than_the_buffer() -> None:
    matched = MatchedText(2, 4)
    for _ in range(3):
        matched.extend(list(range(700)))
    assert matched.kind([]) == LONGEST_AGREEMENT
    matched.extend([9999])
    assert matched.kind([]) == 0

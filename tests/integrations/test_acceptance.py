"""Acceptance by position: against texts compared by hand and against the rates they came from."""

from __future__ import annotations

import numpy as np
import pytest

from integrations.acceptance import (
    ANY_KIND,
    FIRST_GUESS,
    NEIGHBOUR_TRIALS,
    SHARED_MEMORY,
    SHORT_CONTEXT,
    AcceptanceByPosition,
    kind_at,
)


def tried(acceptance: AcceptanceByPosition) -> list[float]:
    return acceptance._shared[ANY_KIND].tried


def test_a_draft_is_compared_beyond_what_was_verified() -> None:
    acceptance = AcceptanceByPosition(4)
    # One token of the draft was verified and kept; the text then goes on as drafted, but for 9.
    acceptance.observe_text("a", [5, 6, 7, 8], [5, 6], context=0)
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_text("a", [], [7, 9], context=0)
    assert tried(acceptance) == [1, 1, 1, 1]
    assert acceptance._shared[ANY_KIND].accepted == [1, 1, 1, 0]


def test_a_wrong_token_ends_the_comparison() -> None:
    acceptance = AcceptanceByPosition(3)
    acceptance.observe_text("a", [5, 6, 7], [4], context=0)
    acceptance.observe_text("a", [], [6, 7], context=0)
    assert tried(acceptance) == [1, 0, 0]


def test_drafts_of_several_steps_are_compared_side_by_side() -> None:
    acceptance = AcceptanceByPosition(2)
    acceptance.observe_text("a", [1, 2], [1], context=0)
    acceptance.observe_text(
        "a", [2, 3], [2], context=0
    )  # the first draft's second token, and a new draft
    acceptance.observe_text("a", [], [4], context=0)
    assert acceptance._shared[ANY_KIND].accepted == pytest.approx(
        [1 + SHARED_MEMORY, SHARED_MEMORY]
    )
    assert tried(acceptance)[0] == pytest.approx(1 + SHARED_MEMORY)


def test_sequences_are_told_apart_and_forgotten() -> None:
    acceptance = AcceptanceByPosition(1)
    for _ in range(60):
        acceptance.observe_text("good", [1], [1], context=0)
        acceptance.observe_text("bad", [1], [2], context=0)
    (good,), (bad,) = acceptance.survival("good"), acceptance.survival("bad")
    assert good > 0.8 and bad < 0.2
    acceptance.forget("good")
    assert acceptance.survival("good") == pytest.approx(acceptance.rates())


def test_kinds_are_told_apart_and_count_for_all_together() -> None:
    acceptance = AcceptanceByPosition(2)
    for _ in range(60):
        acceptance.observe_text("a", [1, 2], [1, 2], kind=4, context=0)
        acceptance.observe_text("a", [1, 2], [9], kind=2, context=0)
    drafts = (("a", 4), ("a", 2), ("a", ANY_KIND), ("b", 3))
    long, short, unknown, unseen = (acceptance.survival(*draft) for draft in drafts)
    assert long[0] > 0.9 and long[1] > 0.85
    assert short[0] < 0.1
    assert 0.4 < unknown[0] < 0.6
    assert unseen[0] == FIRST_GUESS
    assert acceptance.rates(4)[0] > 0.9


def test_a_draft_keeps_its_kind_until_it_is_compared() -> None:
    acceptance = AcceptanceByPosition(3)
    acceptance.observe_text("a", [5, 6, 7], [5], kind=3, context=0)
    acceptance.observe_text("a", [], [6, 7], kind=2, context=0)
    assert acceptance._shared[3].accepted == [1, 1, 1]
    assert 2 not in acceptance._shared


def test_contexts_have_kinds_by_their_doublings() -> None:
    edges = [0, SHORT_CONTEXT - 1, SHORT_CONTEXT, 2 * SHORT_CONTEXT, 4 * SHORT_CONTEXT - 1]
    assert [kind_at(context) for context in edges] == [ANY_KIND, ANY_KIND, -1, -2, -2]


def test_long_contexts_have_rates_of_their_own() -> None:
    """A drafter that is good behind short texts and bad behind long ones."""
    acceptance = AcceptanceByPosition(1)
    for index in range(200):
        name = str(index)
        acceptance.observe_text(name, [1], [1], context=100)
        acceptance.observe_text(name, [1], [2], context=2000)
    short, long = (acceptance.survival("new", kind_at(c))[0] for c in (200, 1900))
    assert short > 0.9 and long < 0.1


def test_a_range_of_contexts_starts_with_the_nearest() -> None:
    acceptance = AcceptanceByPosition(2)
    for index in range(200):
        acceptance.observe_text(str(index), [1, 2], [1, 9], context=100)
        acceptance.observe_text(str(index), [1, 2], [9], context=5000)
    first, second = acceptance.rates(kind_at(600))
    assert first > 0.9 and second < 0.2
    assert acceptance.rates(kind_at(9000))[0] < 0.2
    # What is taken over counts little, so that the range's own trials soon outweigh it.
    assert max(acceptance._shared[kind_at(600)].tried) == NEIGHBOUR_TRIALS


def test_a_sequence_takes_its_own_rates_into_the_next_range() -> None:
    acceptance = AcceptanceByPosition(1)
    for _ in range(60):
        acceptance.observe_text("good", [1], [1], context=500)
        acceptance.observe_text("bad", [1], [2], context=500)
    good, bad = (acceptance.survival(name, kind_at(600))[0] for name in ("good", "bad"))
    assert good > 0.75 and bad < 0.25


def test_counts_of_a_verification() -> None:
    acceptance = AcceptanceByPosition(4)
    acceptance.observe_count("a", drafted=3, accepted=1, context=0)
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_count("a", drafted=3, accepted=3, context=0)
    assert tried(acceptance)[2] == 1


def test_before_anything_is_seen() -> None:
    assert AcceptanceByPosition(3).rates() == [FIRST_GUESS] * 3


def test_the_rates_of_drawn_texts_are_found() -> None:
    """A draft token at each position is right at its own rate, however few are verified."""
    rates = np.array([0.4, 0.7, 0.9])
    random = np.random.default_rng(0)
    acceptance = AcceptanceByPosition(3)
    for _ in range(4000):
        right = random.random(3) < rates
        text = [position if right[position] else 99 for position in range(3)]
        acceptance.observe_text("a", [0, 1, 2], text[:1], context=0)  # a plain step
        acceptance.observe_text("a", [], text[1:], context=0)
    assert acceptance.rates() == pytest.approx(rates, abs=0.06)

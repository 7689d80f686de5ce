"""Acceptance by position: against texts compared by hand and against the rates they came from."""

from __future__ import annotations

import numpy as np
import pytest

from integrations.acceptance import ANY_KIND, FIRST_GUESS, SHARED_MEMORY, AcceptanceByPosition


def tried(acceptance: AcceptanceByPosition) -> list[float]:
    return acceptance._shared[ANY_KIND].tried


def test_a_draft_is_compared_beyond_what_was_verified():
    acceptance = AcceptanceByPosition(4)
    # One token of the draft was verified and kept; the text then goes on as drafted, but for 9.
    acceptance.observe_text("a", [5, 6, 7, 8], [5, 6])
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_text("a", [], [7, 9])
    assert tried(acceptance) == [1, 1, 1, 1]
    assert acceptance._shared[ANY_KIND].accepted == [1, 1, 1, 0]


def test_drafts_of_several_steps_are_compared_side_by_side():
    acceptance = AcceptanceByPosition(2)
    acceptance.observe_text("a", [1, 2], [1])
    acceptance.observe_text("a", [2, 3], [2])  # the first draft's second token, and a new draft
    acceptance.observe_text("a", [], [4])
    assert acceptance._shared[ANY_KIND].accepted == pytest.approx(
        [1 + SHARED_MEMORY, SHARED_MEMORY]
    )
    assert tried(acceptance)[0] == pytest.approx(1 + SHARED_MEMORY)


def test_sequences_are_told_apart_and_forgotten():
    acceptance = AcceptanceByPosition(1)
    for _ in range(60):
        acceptance.observe_text("good", [1], [1])
        acceptance.observe_text("bad", [1], [2])
    (good,), (bad,) = acceptance.survival("good"), acceptance.survival("bad")
    assert good > 0.8 and bad < 0.2
    acceptance.forget("good")
    assert acceptance.survival("good") == pytest.approx(acceptance.rates())


def test_kinds_are_told_apart_and_count_for_all_together():
    acceptance = AcceptanceByPosition(2)
    for _ in range(60):
        acceptance.observe_text("a", [1, 2], [1, 2], kind=4)
        acceptance.observe_text("a", [1, 2], [9], kind=2)
    drafts = (("a", 4), ("a", 2), ("a", ANY_KIND), ("b", 3))
    long, short, unknown, unseen = (acceptance.survival(*draft) for draft in drafts)
    assert long[0] > 0.9 and long[1] > 0.85
    assert short[0] < 0.1
    assert 0.4 < unknown[0] < 0.6
    assert unseen[0] == FIRST_GUESS
    assert acceptance.rates(4)[0] > 0.9


def test_counts_of_a_verification():
    acceptance = AcceptanceByPosition(4)
    acceptance.observe_count("a", drafted=3, accepted=1)
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_count("a", drafted=3, accepted=3)
    assert tried(acceptance)[2] == 1


def test_the_rates_of_drawn_texts_are_found():
    """A draft token at each position is right at its own rate, however few are verified."""
    rates = np.array([0.4, 0.7, 0.9])
    random = np.random.default_rng(0)
    acceptance = AcceptanceByPosition(3)
    for _ in range(4000):
        right = random.random(3) < rates
        text = [position if right[position] else 99 for position in range(3)]
        acceptance.observe_text("a", [0, 1, 2], text[:1])  # a plain step
        acceptance.observe_text("a", [], text[1:])
    assert acceptance.rates() == pytest.approx(rates, abs=0.06)

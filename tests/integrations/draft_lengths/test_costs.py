"""Costs of steps, and acceptance by position and by the kind of draft, corrected online."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import ProfileError
from integrations.draft_lengths.acceptance import (
    ANY_KIND,
    FIRST_GUESS,
    LONGEST_AGREEMENT,
    MOST_PAIRS,
    SHARED_MEMORY,
    AcceptanceByPosition,
    MatchedText,
    SeenPairs,
)
from integrations.draft_lengths.costs import CONTEXT_RANGE, ContextCurves, StepCosts
from tests.integrations.made_engine_profile import DRAFTER, make_engine_profile, step_s

CONTEXT = 2048 - CONTEXT_RANGE / 2  # the middle of a range of contexts


def costs(**options) -> StepCosts:
    return StepCosts(make_engine_profile(**options), DRAFTER)


def test_steps_and_drafts_are_those_of_the_profile_and_an_unknown_drafter_is_named():
    seconds = costs().verify_s(2, CONTEXT, 6)
    drafted = np.arange(7)
    assert seconds == pytest.approx(step_s(1 + drafted / 2, CONTEXT, 2), rel=0.01)
    seconds = costs(draft_s=0.002, a_token_s=0.0001).draft_s(4, CONTEXT, 8)
    assert seconds[:2] == pytest.approx([0.002, 0.0024])
    assert seconds[8] == pytest.approx(0.002 + 0.0001 * 8 * 4)
    with pytest.raises(ProfileError, match=r"no cost of the drafter other \(it has vllm-ngram"):
        StepCosts(make_engine_profile(), "other")


@pytest.mark.parametrize("factors", [(1.3, 1.3), (1.0, 1.25)])
def test_a_slower_machine_and_dearer_drafts_are_learnt(factors):
    wrong = costs()
    before = wrong.verify_s(1, CONTEXT, 4)
    for _ in range(400):
        for drafted, factor in zip((0, 4), factors, strict=True):
            predicted_s = float(wrong.verify_s(1, CONTEXT, 4)[drafted])
            wrong.observe(predicted_s, factor * float(before[drafted]), drafted=drafted > 0)
    after = wrong.verify_s(1, CONTEXT, 4)
    wanted = [factors[0] * before[0], factors[1] * before[4]]
    assert [after[0], after[4]] == pytest.approx(wanted, rel=0.02)


def test_one_wild_time_changes_little_and_idleness_is_no_overhead():
    steady = costs()
    for _ in range(50):
        steady.observe(0.02, 0.02, drafted=False)
    before = steady.verify_s(1, CONTEXT, 4)
    steady.observe(0.02, 20.0, drafted=False)
    assert steady.verify_s(1, CONTEXT, 4) == pytest.approx(before, rel=0.02)
    idle = costs()
    idle.observe_gap(5.0, 0.02)
    assert idle.gap_s == 0
    for _ in range(200):
        idle.observe_gap(0.002, 0.02)
    assert idle.gap_s == pytest.approx(0.002, rel=0.01)


TABLE_CONTEXT, LONGEST = 2000, 7


def curves() -> ContextCurves:
    return ContextCurves(StepCosts(make_engine_profile(), DRAFTER), TABLE_CONTEXT, LONGEST)


def test_at_the_tables_own_context_nothing_changes():
    table_ms = np.linspace(5.0, 9.0, 200)
    assert curves().verify_ms(table_ms, 4, TABLE_CONTEXT) == pytest.approx(table_ms)
    assert curves().draft_ms(table_ms, 4, TABLE_CONTEXT) == pytest.approx(table_ms)


@pytest.mark.parametrize("batch", [1, 8])
def test_rows_of_a_short_context_cost_less(batch):
    padded_ms = np.repeat(np.arange(1.0, 26.0), 8)  # as of graphs for every eighth size
    moved_ms = curves().verify_ms(padded_ms, batch, 200)
    for tokens in range(batch, batch * (1 + LONGEST) + 1):
        ratio = step_s(tokens / batch, 200, batch) / step_s(tokens / batch, TABLE_CONTEXT, batch)
        assert moved_ms[tokens] == pytest.approx(padded_ms[tokens] * ratio, rel=0.02)
    assert (moved_ms[:batch] == padded_ms[:batch]).all()
    assert (moved_ms[batch * (1 + LONGEST) + 1 :] == padded_ms[batch * (1 + LONGEST) + 1 :]).all()


def tried(acceptance: AcceptanceByPosition) -> list[float]:
    return acceptance._shared[ANY_KIND].tried


def test_drafts_are_compared_beyond_what_was_verified_and_side_by_side():
    acceptance = AcceptanceByPosition(4)
    # One token of the draft was verified and kept; the text then goes on as drafted, but for 9.
    acceptance.observe_text("a", [5, 6, 7, 8], [5, 6])
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_text("a", [], [7, 9])
    assert tried(acceptance) == [1, 1, 1, 1]
    assert acceptance._shared[ANY_KIND].accepted == [1, 1, 1, 0]
    acceptance = AcceptanceByPosition(4)
    acceptance.observe_count("a", drafted=3, accepted=1)
    assert tried(acceptance) == [1, 1, 0, 0]
    acceptance.observe_count("a", drafted=3, accepted=3)
    assert tried(acceptance)[2] == 1
    acceptance = AcceptanceByPosition(2)
    acceptance.observe_text("a", [1, 2], [1])
    acceptance.observe_text("a", [2, 3], [2])  # the first draft's second token, and a new draft
    acceptance.observe_text("a", [], [4])
    assert acceptance._shared[ANY_KIND].accepted == pytest.approx(
        [1 + SHARED_MEMORY, SHARED_MEMORY]
    )
    assert tried(acceptance)[0] == pytest.approx(1 + SHARED_MEMORY)


def test_sequences_and_kinds_are_told_apart_and_sequences_forgotten():
    acceptance = AcceptanceByPosition(1)
    for _ in range(60):
        acceptance.observe_text("good", [1], [1])
        acceptance.observe_text("bad", [1], [2])
    (good,), (bad,) = acceptance.survival("good"), acceptance.survival("bad")
    assert good > 0.8 and bad < 0.2
    acceptance.forget("good")
    assert acceptance.survival("good") == pytest.approx(acceptance.rates())
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

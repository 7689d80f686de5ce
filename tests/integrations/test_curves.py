"""Cost tables moved to another context, against seconds worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from integrations.costs import StepCosts
from integrations.curves import ContextCurves
from tests.integrations.made_engine_profile import DRAFTER, make_engine_profile, step_s

TABLE_CONTEXT, LONGEST = 2000, 7


def curves() -> ContextCurves:
    return ContextCurves(StepCosts(make_engine_profile(), DRAFTER), TABLE_CONTEXT, LONGEST)


def test_at_the_tables_own_context_nothing_changes() -> None:
    table_ms = np.linspace(5.0, 9.0, 200)
    assert curves().verify_ms(table_ms, 4, TABLE_CONTEXT) == pytest.approx(table_ms)
    assert curves().draft_ms(table_ms, 4, TABLE_CONTEXT) == pytest.approx(table_ms)


@pytest.mark.parametrize("batch", [1, 8])
def test_rows_of_a_short_context_cost_less(batch: int) -> None:
    padded_ms = np.repeat(np.arange(1.0, 26.0), 8)  # as of graphs for every eighth size
    moved_ms = curves().verify_ms(padded_ms, batch, 200)
    for tokens in range(batch, batch * (1 + LONGEST) + 1):
        ratio = step_s(tokens / batch, 200, batch) / step_s(tokens / batch, TABLE_CONTEXT, batch)
        assert moved_ms[tokens] == pytest.approx(padded_ms[tokens] * ratio, rel=0.02)
    assert (moved_ms[:batch] == padded_ms[:batch]).all()
    assert (moved_ms[batch * (1 + LONGEST) + 1 :] == padded_ms[batch * (1 + LONGEST) + 1 :]).all()


def test_a_table_that_ends_before_the_longest_drafts() -> None:
    moved_ms = curves().verify_ms(np.ones(20), 4, 200)
    assert len(moved_ms) == 20
    assert (moved_ms[4:] < 1).all()

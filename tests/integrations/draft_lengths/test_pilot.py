"""The policy between scheduling and results: what it is told, and in which order."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.errors import InputError
from integrations.draft_lengths.acceptance import ANY_KIND
from integrations.draft_lengths.pilot import UNKNOWN, DraftTable, StepPilot, TablePilot
from integrations.draft_lengths.policy import DraftPolicy, RunningSequence


class NotedPolicy(DraftPolicy):
    """A policy that verifies one token of every draft, asks for three more, and notes the rest."""

    def __init__(self, shortens: bool) -> None:
        self.shortens, self.longest = shortens, 3
        self.steps, self.gaps, self.texts, self.counts, self.forgotten, self.tokens = (
            [] for _ in range(6)
        )
        self.costs = SimpleNamespace(
            observe=lambda predicted, measured, *, drafted: self.steps.append((measured, drafted)),
            observe_gap=lambda gap_s, step_s: self.gaps.append(gap_s),
        )
        self.acceptance = SimpleNamespace(
            observe_text=lambda name, draft, text, kind=ANY_KIND: self.texts.append(
                (name, list(draft), list(text), kind)
            ),
            observe_count=lambda *counts: self.counts.append(counts),
            forget=self.forgotten.append,
        )

    def verified(self, sequences: Sequence[RunningSequence]) -> list[int]:
        return [min(len(one.draft), 1) for one in sequences]

    def draft_length(self, sequences: Sequence[RunningSequence]) -> int:
        return 3

    def predicted_s(self, sequences, rows: int, drafted: int) -> float:
        return 0.01 * (1 + rows)

    def observe_step(self, batch, context, tokens, predicted_s) -> None:
        self.tokens.append((batch, tokens))


def sequence(
    name: str, context: int, draft: Sequence[int] = (), kind: int = ANY_KIND
) -> RunningSequence:
    return RunningSequence(name=name, context=context, draft=draft, kind=kind)


def pilot(*times_s: float, ahead: bool = False) -> StepPilot:
    clock = iter(times_s)
    return StepPilot(NotedPolicy(not ahead), ahead=ahead, clock_s=lambda: next(clock))


def test_steps_and_what_came_of_them_also_where_scheduled_ahead():
    own = pilot(0.0, 0.02, 0.03, 0.06)
    choice = own.choose([sequence("a", 9, [4, 5], kind=3), sequence("b", 7)])
    assert (dict(choice.verified), choice.draft_tokens) == ({"a": 1, "b": 0}, 3)
    own.scheduled(choice, {"a": 2, "b": 1})
    own.ended({"a": [4, 8], "b": [6]})
    policy = own.policy
    assert policy.steps == [(0.02, True)]
    assert policy.texts == [("a", [4, 5], [4, 8], 3), ("b", [], [6], 0)]
    assert policy.tokens == [(2, 3)]
    own.scheduled(own.choose([sequence("a", 11)]), {"a": 1})
    own.ended({"a": [3]})
    assert policy.gaps == pytest.approx([0.01])
    assert policy.steps[1] == (pytest.approx(0.03), False)
    # Drafts are not known, steps end in order, and one lasts from the end of the last
    own = pilot(0.0, 0.01, 0.10, 0.12, 0.19, ahead=True)
    draft = [UNKNOWN] * 3
    for _ in range(2):
        choice = own.choose([sequence("a", 9, draft)])
        assert dict(choice.verified) == {"a": 3}
        own.scheduled(choice, {"a": 4})
    own.ended({"a": [1, 2, 3]})
    own.choose([sequence("a", 12, draft)])
    own.ended({"a": [4]})
    assert own.policy.counts == [("a", 3, 2), ("a", 3, 0)]
    assert np.array(own.policy.steps)[:, 0] == pytest.approx([0.10, 0.09])


def test_steps_with_a_prefill_are_not_timed_and_ended_sequences_forgotten():
    own = pilot(0.0, 0.5)
    own.scheduled(own.choose([sequence("a", 9)]), {"a": 1, "new": 300})
    own.ended({"a": [1], "new": [2]})
    assert own.policy.steps == []
    assert [name for name, *_ in own.policy.texts] == ["a", "new"]
    own = pilot(0.0, 1.0, 1.5)
    own.scheduled(own.choose([]), {})
    own.scheduled(own.choose([sequence("a", 9)]), {"a": 1})
    own.ended({"a": [1]})
    assert own.policy.steps == [(0.5, False)]
    own = pilot()
    own.forget({"a", "b"})
    own.forget({"b"})
    own.forget({"b"})
    assert own.policy.forgotten == ["a"]


def test_a_table_holds_the_nearest_lengths_beyond_its_ends_and_refuses_others():
    table = DraftTable([[1, 4, 0, 512, 3], [1, 4, 513, 2048, 5], [5, 8, 1]], range(6))
    own = TablePilot(table)
    asked = {(1, 9): 3, (4, 512): 3, (4, 513): 5, (2, 9999): 5, (8, 9999): 1, (64, 9): 1}
    for (batch, context), tokens in asked.items():
        choice = own.choose([sequence(str(one), context) for one in range(batch)])
        assert (choice.verified, choice.draft_tokens) == ({}, tokens)
    for rows in ([], [[1, 4, 7]], [[1, 4, 9, 0, 3]], [[0, 4, 3]], [[1, 3]]):
        with pytest.raises(InputError):
            DraftTable(rows, range(6))

"""Rounds in groups and prompts in order, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from lab.bench.analysis.round_groups import (
    RoundTable,
    join_tables,
    latencies,
    prompt_ratios,
    round_table,
    score_bins,
    score_cells,
    size_shares,
    sizes_by_context,
)
from lab.bench.record import Prompt, Response, Result, Rounds
from tests.profiler.made_bench import PLAIN_ARM, make_result, policy_arm


def table_of(**columns: list[float]) -> RoundTable:
    """A table whose other columns are zero; no time is predicted."""
    count = len(next(iter(columns.values())))
    whole = {name: columns.get(name, [0] * count) for name in ("context", "nodes", "accepted")}
    parts = {name: columns.get(name, [0.0] * count) for name in ("expected", "verify_s")}
    predicted = columns.get("predicted_s", [np.nan] * count)
    return RoundTable(
        **{name: np.array(values, dtype=np.int64) for name, values in whole.items()},
        **{name: np.array(values) for name, values in parts.items()},
        predicted_s=np.array(predicted),
    )


def two_texts() -> Result:
    """Two prompts of 10 and 100 tokens, decoded plainly and by an arm of two rounds each."""
    arm = policy_arm("bastion")
    rounds = Rounds(
        nodes=(4, 7), depths=(3, 3), accepted=(2, 0), expected=(2.5, 3.0),
        verify_s=(0.2, 0.3), cycle_s=(0.25, 0.35),
        predicted_verify_s=(0.1, 0.3), predicted_cycle_s=(0.2, 0.4),
        expected_by_depth=(1.5, 1.0, 1.0),
    )  # fmt: skip
    base = make_result([PLAIN_ARM, arm], per_set=2, repeats=2, sets=("one",))
    prompts = tuple(
        Prompt(id=name, set="one", category="", tokens=tokens, hash=name)
        for name, tokens in (("short", 10), ("long", 100))
    )
    seconds = {("plain", "short"): (4.0, 6.0), ("plain", "long"): (4.0, 4.0),
               (arm.name, "short"): (2.0, 2.0), (arm.name, "long"): (8.0, 1.0)}  # fmt: skip
    responses = tuple(
        Response(
            arm=name, prompt=prompt, repeat=repeat, place=0, tokens=(1, 2, 3, 4, 5),
            finish="length", first_token_s=1.0, total_s=1.0 + decode_s,
            rounds=rounds if name == arm.name else None,
        )
        for (name, prompt), own in seconds.items() for repeat, decode_s in enumerate(own)
    )  # fmt: skip
    return replace(base, prompts=prompts, responses=responses)


class TestRoundTable:
    def test_the_context_grows_by_what_each_round_commits(self) -> None:
        table = round_table(two_texts(), "bastion+demo")
        assert table is not None
        # 10 cached tokens, then 2 accepted and the bonus token more; twice each prompt.
        assert table.context.tolist() == [10, 13, 10, 13, 100, 103, 100, 103]
        assert table.nodes.tolist() == [4, 7] * 4
        assert table.predicted_s.tolist() == [0.1, 0.3] * 4
        assert table.has_model

    def test_an_arm_that_tells_nothing_has_none(self) -> None:
        assert round_table(two_texts(), "plain") is None

    def test_joined_tables_keep_every_round(self) -> None:
        one, other = table_of(nodes=[1, 2]), table_of(nodes=[3], predicted_s=[0.5])
        joined = join_tables([one, other])
        assert joined.nodes.tolist() == [1, 2, 3]
        assert not joined.has_model


class TestGroups:
    def test_latencies_are_medians_where_rounds_suffice(self) -> None:
        measured = [0.1, 0.2, 0.3, 0.4, 0.9, 5.0, 6.0]
        table = table_of(
            context=[64, 127, 100, 90, 80, 64, 64], nodes=[7] * 5 + [15] * 2, verify_s=measured,
            predicted_s=[0.2] * 7,
        )  # fmt: skip
        [point] = latencies(table)  # 15 nodes were verified twice only
        assert (point.context, point.nodes, point.rounds) == (64, 7, 5)
        assert point.measured_s == median(measured[:5])
        assert point.predicted_s == 0.2

    def test_contexts_are_split_at_powers_of_two(self) -> None:
        table = table_of(context=[127] * 5 + [128] * 5, nodes=[7] * 10)
        assert [point.context for point in latencies(table)] == [64, 128]

    def test_what_was_not_predicted_everywhere_is_not_shown(self) -> None:
        table = table_of(context=[64] * 5, predicted_s=[0.1] * 4 + [np.nan])
        assert [point.predicted_s for point in latencies(table)] == [None]

    def test_sizes_are_counted_in_groups_that_double(self) -> None:
        shares = size_shares(table_of(nodes=[0, 1, 2, 3, 4, 7, 8, 8]))
        assert shares == {(0, 0): 1 / 8, (1, 1): 1 / 8, (2, 3): 2 / 8, (4, 7): 2 / 8,
                          (8, 15): 2 / 8}  # fmt: skip

    def test_sizes_by_context_are_quartiles_of_equal_groups(self) -> None:
        contexts = list(range(10))
        low, high = sizes_by_context(table_of(context=contexts[::-1], nodes=[9] * 5 + [1] * 5))
        assert (low.context, low.middle) == (2.0, 1.0)
        assert (high.context, high.low, high.middle, high.high) == (7.0, 9.0, 9.0, 9.0)

    def test_few_rounds_make_no_group(self) -> None:
        assert sizes_by_context(table_of(context=[1, 2, 3, 4])) == []

    def test_score_bins_leave_plain_steps_out(self) -> None:
        table = table_of(
            nodes=[0] + [7] * 5, expected=[9.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            accepted=[0, 0, 1, 2, 3, 4],
        )  # fmt: skip
        [one] = score_bins(table)
        assert (one.predicted, one.realised, one.rounds) == (3.0, 3.0, 5)

    def test_score_cells_count_rounds(self) -> None:
        table = table_of(nodes=[7] * 4 + [0], expected=[1.0, 1.49, 1.5, 1.2, 1.2],
                         accepted=[0, 0, 0, 2, 0])  # fmt: skip
        assert score_cells(table, 0.5) == {(1.25, 1): 2, (1.25, 3): 1, (1.75, 1): 1}


class TestPromptRatios:
    def test_ratios_are_of_summed_times_and_span_the_repeats(self) -> None:
        pairs = prompt_ratios(two_texts(), "bastion+demo", "plain")
        assert [prompt.id for prompt, _ in pairs] == ["long", "short"]
        slow, fast = (ratio for _, ratio in pairs)
        assert slow.pooled == pytest.approx(8 / 9)
        assert (slow.least, slow.most) == (pytest.approx(0.5), pytest.approx(4.0))
        assert fast.pooled == pytest.approx(10 / 4)
        assert (fast.least, fast.most) == (pytest.approx(2.0), pytest.approx(3.0))

    def test_a_prompt_that_decoded_nothing_is_left_out(self) -> None:
        result = two_texts()
        cut = tuple(
            replace(one, tokens=one.tokens[:1]) if one.prompt == "long" else one
            for one in result.responses
        )
        found = prompt_ratios(replace(result, responses=cut), "bastion+demo", "plain")
        assert [prompt.id for prompt, _ in found] == ["short"]

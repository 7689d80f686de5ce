"""SpecBlock's ablations, DFlash's block sizes and BlockPilot beside each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decoder.drafters.factory import load_drafter
from lab.bench.analysis.families import ablations, block_sizes
from lab.bench.analysis.summary import ResultFigures, derived
from lab.bench.arms.drafter_names import describe_drafters, drafter_labels
from lab.bench.record import Model, Result, Update
from lab.bench.report.page import page, verdicts
from lab.bench.report.tables import drafter_tables
from lab.bench.report.terminal import print_result
from lab.bench.store import read_result, write_result
from tests.decoder.draft_models import dflash_folder, draft_target
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm
from tests.lab.papers.blockpilot.test_blockpilot import pilot_folder
from tests.lab.papers.specblock.specblock_models import specblock_folder
from tests.profiler.page_reader import PageReader

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


def rate_of(result: Result, arm: str) -> float:
    """Tokens a second of decoding, from the raw responses alone."""
    own = [one for one in result.responses if one.arm == arm]
    return sum(len(one.tokens) - 1 for one in own) / sum(
        one.total_s - one.first_token_s for one in own
    )


def kept_of(result: Result, arm: str) -> float:
    own = [one for one in result.responses if one.arm == arm]
    return sum(len(one.tokens) - 1 for one in own) / sum(len(one.rounds.nodes) for one in own)


@pytest.mark.slow
class TestAblations:
    def test_each_policy_has_its_own_rows_against_the_whole_drafter(self) -> None:
        result = made(SPECBLOCK)
        chain, bastion = ablations(result)
        assert (chain.policy, chain.base) == ("chain", "chain+whole")
        assert (bastion.policy, bastion.base) == ("bastion", "bastion+whole")
        assert [own.drafter for own in chain.members] == ["no-shift", "whole", "poor"]
        for own in (*chain.members, *bastion.members):
            policy = own.arm.partition("+")[0]
            whole = rate_of(result, f"{policy}+whole")
            if own.drafter == "whole":
                assert own.over_base is None
            else:
                assert own.over_base is not None and own.over_base.low is not None
                assert own.over_base.pooled == pytest.approx(rate_of(result, own.arm) / whole)

    def test_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = made(SPECBLOCK, ("chain",))
        reader = PageReader(page(result))
        rows = reader.columns("ablations")
        assert list(rows) == ["chain+no-shift", "chain+whole", "chain+poor"]
        assert [row[1] for row in rows.values()] == ["no-shift", "nothing", "no-mask, no-rank-head"]
        assert rows["chain+whole"][6:] == ["-", "-"]
        poor = rate_of(result, "chain+poor")
        assert rows["chain+poor"][2] == f"{kept_of(result, 'chain+poor'):.2f}"
        assert rows["chain+poor"][4] == f"{poor / rate_of(result, 'plain'):.2f}x"
        assert rows["chain+poor"][6] == f"{poor / rate_of(result, 'chain+whole'):.2f}x"
        assert "SpecBlock's ablations" in reader.texts["h2"]
        models = dict(reader.tables["models"])
        assert "without: no-mask, no-rank-head" in models["poor"]
        assert "updates: bandit" in models["whole@adapt=bandit"]
        print_result(result)
        assert "SpecBlock's ablations" in capsys.readouterr().out

    def test_without_a_whole_drafter_nothing_is_compared_with_it(self) -> None:
        [family] = ablations(made((SPECBLOCK[0], SPECBLOCK[2]), ("chain",)))
        assert family.base is None
        assert [own.over_base for own in family.members] == [None, None]

    def test_one_drafter_alone_is_no_ablation(self) -> None:
        assert ablations(made((SPECBLOCK[1], SPECBLOCK[3]))) == []
        assert [one.name for one in drafter_tables(ResultFigures(made(BLOCKS[:1])))] == []


class TestBlockSizes:
    def test_the_table_of_the_paper(self) -> None:
        result = made(BLOCKS, ("chain",))
        [family] = block_sizes(result)
        assert [(own.drafter, own.block_size) for own in family.members] == [
            ("demo@block=4", 4), ("demo", 8), ("demo@block=16", 16), ("pilot", None),
        ]  # fmt: skip
        assert family.base == "chain+pilot"
        rows = PageReader(page(result)).columns("blocks")
        assert [row[1] for row in rows.values()] == ["4", "8", "16", "by prompt"]
        for name, row in rows.items():
            over = rate_of(result, name) / rate_of(result, "chain+pilot")
            assert row[6] == ("-" if name == "chain+pilot" else f"{over:.2f}x")

    def test_sizes_without_a_predictor_and_a_predictor_alone(self) -> None:
        sizes = tuple(one for one in BLOCKS if one.kind == "dflash")
        [family] = block_sizes(made(sizes, ("chain",)))
        assert family.base is None
        assert len(family.members) == 3
        alone = (replace(BLOCKS[1], same_as=None), BLOCKS[3])
        assert block_sizes(made(alone, ("chain",))) == []


def test_the_sentence_on_an_arm_that_learns_gives_both_speeds() -> None:
    result = made((SPECBLOCK[1], SPECBLOCK[3]), ("bastion",))
    update = Update(seconds=0.2, action="full", trained=True, rollback=False)
    name = "bastion+whole@adapt=bandit"
    responses = [replace(one, update=update) if one.arm == name else one
                 for one in result.responses]  # fmt: skip
    result = replace(result, responses=tuple(responses))
    still, learning = verdicts(ResultFigures(result))
    own, plain = (result.of(arm) for arm in (name, "plain"))
    seconds = sum(one.total_s + 0.2 for one in own)
    end_to_end = sum(one.total_s for one in plain) / seconds
    decoding = rate_of(result, name) / rate_of(result, "plain")
    assert f"{decoding:.2f} times as fast" in learning
    assert f", {end_to_end:.2f} times end to end with its updates" in learning
    assert "end to end" not in still


def test_the_file_holds_the_same(tmp_path: Path) -> None:
    for drafters, name in ((SPECBLOCK, "ablations"), (BLOCKS, "block_sizes")):
        result = made(drafters)
        path = tmp_path / f"{name}.json"
        write_result(result, path, **derived(result))
        assert read_result(path) == result
        found = json.loads(path.read_text())["summary"][name]
        own = (ablations if name == "ablations" else block_sizes)(result)
        assert [family["base"] for family in found] == [family.base for family in own]
        ratio = found[0]["members"][0]["over_base"]
        assert ratio["pooled"] == own[0].members[0].over_base.pooled


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
        ("ngram", "ngram", None, (), None),
        ("draft", "dflash", 5, (), None),
        ("draft@block=3", "dflash", 3, (), "draft"),
        ("pilot", "blockpilot", None, (), "draft"),
        ("other", "dflash", 5, (), None),
        ("same", "dflash", 5, (), "draft"),
        ("whole", "specblock", None, (), None),
        ("part", "specblock", None, ("no-mask",), None),
        ("ngram+draft@block=3", "combined", None, (), None),
    ]
    assert not [one for one in models if "/" in one.source]

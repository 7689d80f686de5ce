"""SpecBlock's ablations, DFlash's block sizes and BlockPilot beside each other."""

from dataclasses import replace
from pathlib import Path

import pytest

from decoder.drafters.factory import load_drafter
from lab.bench.analysis.families import ablations, block_sizes
from lab.bench.analysis.summary import ResultFigures
from lab.bench.arms.drafter_names import describe_drafters, drafter_labels
from lab.bench.record import Model, Result
from lab.bench.report.tables import drafter_tables
from tests.decoder.draft_models import dflash_folder, draft_target
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm, raw_rate
from tests.lab.papers.blockpilot.test_blockpilot import pilot_folder
from tests.lab.papers.specblock.specblock_models import specblock_folder

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
class TestAblations:
    def test_each_policy_has_its_own_rows_against_the_whole_drafter(self) -> None:
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


class TestBlockSizes:
    def test_the_table_of_the_paper(self) -> None:
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

"""Ratios, intervals, verdicts and what is derived of rounds, against numbers worked by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.acceptance import find_acceptance
from lab.bench.analysis.figures import cost_error, path_scores, verification
from lab.bench.analysis.hindsight import hindsight
from lab.bench.analysis.papers import paper_figures, tree_depth
from lab.bench.analysis.ratios import Tally, paired_ratio
from lab.bench.analysis.summary import derived
from lab.bench.analysis.warnings import result_warnings
from lab.bench.record import ProfileInfo, Result, write_result
from tests.lab.bench.made_bench import arm, prompt, response, result, rounds


def tallied(seconds: list[float], tokens: int = 100) -> dict[str, Tally]:
    return {f"p{i}": Tally(tokens, own) for i, own in enumerate(seconds)}


class TestRatio:
    def test_pooled_is_not_a_mean_of_ratios(self) -> None:
        ours = {"a": Tally(10, 1.0), "b": Tally(90, 3.0)}
        theirs = {"a": Tally(10, 1.0), "b": Tally(90, 9.0)}
        ratio = paired_ratio(ours, theirs)
        assert ratio.pooled == pytest.approx(10 / 4)
        assert (ratio.least, ratio.median, ratio.most) == pytest.approx((1.0, 2.0, 3.0))
        assert (ratio.low, ratio.high, ratio.verdict) == (None, None, "undecided")

    def test_only_prompts_that_both_decoded_count(self) -> None:
        ours = {"a": Tally(10, 1.0), "b": Tally(0, 0.0), "c": Tally(10, 5.0)}
        theirs = {"a": Tally(10, 2.0), "b": Tally(0, 0.0)}
        ratio = paired_ratio(ours, theirs)
        assert (ratio.prompts, ratio.pooled) == (1, pytest.approx(2.0))
        assert paired_ratio({"b": Tally(0, 0.0)}, theirs) is None

    @pytest.mark.parametrize(("seconds", "verdict"), [
        ([0.9, 0.85, 0.9, 0.92, 0.88, 0.9], "faster"),
        ([1.1, 1.15, 1.1, 1.12, 1.08, 1.1], "slower"),
        ([0.9, 1.15, 1.1, 0.92, 1.08, 0.9], "undecided"),
    ])  # fmt: skip
    def test_verdicts(self, seconds: list[float], verdict: str) -> None:
        ratio = paired_ratio(tallied(seconds), tallied([1.0] * 6))
        assert ratio.verdict == verdict

    @pytest.mark.parametrize(("prompts", "least", "most"), [(6, 0.91, 0.985), (30, 0.925, 0.98)])
    def test_the_interval_covers_the_truth(self, prompts: int, least: float, most: float) -> None:
        """About 95 % of made-up benchmarks: prompts differ in length, and arms have noise."""
        random, covered, trials = np.random.default_rng(1), 0, 400
        for _ in range(trials):
            length = random.lognormal(0.0, 0.5, prompts)
            # Each of mean 1 but for the length, so the true ratio is that of 1 to 0.8.
            base, ours = (length * random.lognormal(-0.02, 0.2, prompts) for _ in range(2))
            ratio = paired_ratio(tallied((0.8 * ours).tolist()), tallied(base.tolist()))
            covered += ratio.low <= 1 / 0.8 <= ratio.high
        assert least <= covered / trials <= most


def two_arms(ours_s: Sequence[float], plain_s: Sequence[float], tokens: int = 21) -> Result:
    names = [f"p{i}" for i in range(len(plain_s))]
    responses = [response("plain", n, tokens, s) for n, s in zip(names, plain_s, strict=True)]
    responses += [response("chain+d", n, tokens, s) for n, s in zip(names, ours_s, strict=True)]
    arms = [arm("plain"), arm("chain+d", drafter="d")]
    return result(arms, [prompt(name) for name in names], responses)


class TestPapers:
    def run(self) -> Result:
        """Two texts of 11 and 6 tokens, the first token of each after 1 s."""
        tokens = {"p": 11, "q": 6}
        own = {
            "p": rounds(nodes=(9, 9), accepted=(4, 4), depths=(5, 5)),
            "q": rounds(nodes=(9,) * 4, accepted=(1, 2, 2, 0), depths=(5,) * 4),
        }
        stages = {"draft_s": 0.2, "build_s": 0.1, "verify_s": 0.6, "accept_s": 0.1}
        decode_s = {"plain": 10.0, "transformers:plain": 20.0, "dynatree+d": 5.0}
        pairs = product(decode_s.items(), tokens.items())
        responses = [response(name, text, n, seconds) for (name, seconds), (text, n) in pairs]
        last = responses[4:]
        responses[4:] = [replace(one, rounds=own[one.prompt], stages=stages) for one in last]
        peer = arm("transformers:plain", kind="peer", policy="plain")
        arms = [arm("plain"), peer, arm("dynatree+d", drafter="d")]
        return result(arms, [prompt("p"), prompt("q", "other")], responses)

    def test_each_figure_by_hand(self) -> None:
        found = paper_figures(self.run(), "dynatree+d")
        assert found.tau == pytest.approx((5 + 5 + 2 + 3 + 3 + 1) / 6)
        assert found.tau_of_texts == pytest.approx((10 / 2 + 9 / 4) / 2)
        assert found.depth_share == pytest.approx(19 / 6 / (5 + 2))
        assert found.draft_share == pytest.approx(0.3)
        # 11 and 6 tokens in 6 s each.
        assert found.tokens_per_s == pytest.approx((11 / 6 + 1) / 2)
        assert found.tokens_per_s_std == pytest.approx((11 / 6 - 1) / 2)
        # Seconds a later token: 0.5 and 1, of plain 1 and 2, of transformers 2 and 4.
        assert found.tpot_ratios == pytest.approx({"plain": 2.0, "transformers:plain": 4.0})
        assert found.call_ratios == pytest.approx({"plain": 22 / 12, "transformers:plain": 42 / 12})

    def test_one_set_and_an_arm_without_rounds(self) -> None:
        found = paper_figures(self.run(), "dynatree+d", "other")
        assert (found.tau, found.tau_of_texts) == pytest.approx((9 / 4, 9 / 4))
        assert found.tokens_per_s_std == 0.0
        peer = paper_figures(self.run(), "transformers:plain")
        assert (peer.tau, peer.depth_share, peer.draft_share) == (None, None, None)
        assert peer.tpot_ratios == pytest.approx({"plain": 0.5, "transformers:plain": 1.0})

    def test_the_depths_of_the_paper(self) -> None:
        """Table 3: 7.15 tokens a round of D = 5 are 102.2 %, 7.10 of D = 8 are 71.0 %."""
        assert 7.15 / (tree_depth("dynatree") + 2) == pytest.approx(1.022, abs=1e-3)
        assert 7.10 / (tree_depth("static-tree:8x3:0.1") + 2) == pytest.approx(0.710, abs=1e-3)
        assert tree_depth("dynatree:printed,base_depth=7,window=5") == 7
        assert tree_depth("fixed:16") is None


def test_a_text_cut_within_a_round() -> None:
    """Rounds emit 3, 1 and 4 tokens after the first; of the last only 2 are kept."""
    own = rounds(nodes=(4, 0, 4), accepted=(2, 0, 3))
    one = response("a", "p", tokens=1 + 3 + 1 + 2, decode_s=1.0, rounds=own)
    found = verification([(one, own)])
    assert found.pooled == pytest.approx(6 / 3)
    assert found.pooled_without_bonus == pytest.approx((2 + 0 + 2) / 3)


class TestFigures:
    def test_path_scores_of_many_rounds(self) -> None:
        random = np.random.default_rng(0)
        depth = random.integers(1, 6, 200)
        accepted = random.integers(0, depth + 1)
        expected = accepted + 1 + random.normal(0, 1, 200)
        own = rounds(depth.tolist(), accepted.tolist(), expected=tuple(expected.tolist()))
        found = path_scores([own])
        order = [np.argsort(np.argsort(expected))]
        middle = [np.mean([np.sum(accepted < a), np.sum(accepted <= a) - 1]) for a in accepted]
        assert found.pearson == pytest.approx(np.corrcoef(expected, accepted)[0, 1])
        assert found.spearman == pytest.approx(np.corrcoef(order[0], middle)[0, 1])

    def test_cost_error_is_relative_to_what_was_measured(self) -> None:
        predicted = tuple(0.01 * (1 + error) for error in (-0.1, 0.2, 0.3, 0.0) * 10)
        own = rounds((0,) * 40, (0,) * 40, predicted_verify_s=predicted)
        found = cost_error([own], "verify_s")
        assert found.median == pytest.approx(0.15)
        assert found.bias == pytest.approx(0.1)
        assert found.p95 == pytest.approx(0.3)
        assert cost_error([rounds((0,), (0,))], "verify_s") is None


def sweep_result(times: dict[str, list[float]]) -> Result:
    """Two sets of two prompts; 11 tokens each, 10 of them decoded in the given seconds."""
    prompts = [prompt(name, name[0]) for name in ("a1", "a2", "b1", "b2")]
    nodes = {name: int(name[6:-2]) if name.startswith("fixed") else None for name in times}
    drafting = [arm(name, drafter="d", nodes=nodes[name]) for name in times if name != "plain"]
    arms = [arm("plain"), *drafting]
    responses = []
    for name, own in times.items():
        pairs = zip(prompts, own, strict=True)
        responses += [response(name, one.id, 11, seconds) for one, seconds in pairs]
    return result(arms, prompts, responses)


TIMES = {
    "plain": [4.0, 4.0, 4.0, 4.0], "fixed:3+d": [2.0, 2.0, 3.0, 5.0],
    "fixed:7+d": [3.0, 1.0, 5.0, 6.0], "bastion+d": [2.0, 1.5, 3.0, 4.5],
}  # fmt: skip


def test_hindsight_is_what_can_be_added_up_by_hand() -> None:
    found = hindsight(sweep_result(TIMES), "d")
    sizes = {size.nodes: size.arm for size in found.sizes}
    assert sizes == {0: "plain", 3: "fixed:3+d", 7: "fixed:7+d"}
    assert found.single_best == "fixed:3+d"  # 12 s, against 16 and 15
    assert found.set_best == {"a": "fixed:3+d", "b": "plain"}  # b: 8 s (fixed:3 too), 11
    assert found.prompt_tokens_per_s == pytest.approx(40 / (2 + 1 + 3 + 4))
    (bastion,) = found.against
    assert bastion.arm == "bastion+d"
    assert bastion.single.pooled == pytest.approx(12 / 11)
    assert bastion.per_set.pooled == pytest.approx((4 + 8) / 11)
    assert bastion.per_prompt.pooled == pytest.approx(10 / 11)


def test_planning_reads_a_result(tmp_path) -> None:
    own = rounds(nodes=(3,) * 8, accepted=(3, 0, 1, 2, 3, 0, 2, 1))
    responses = [
        response("plain", "p", 9, 2.0),
        response("chain+d", "p", 9, 1.0, rounds=own),
        response("fixed:2+d", "p", 9, 1.0, rounds=rounds((2,) * 4, (0, 1, 2, 1))),
        response("fixed:4+d", "p", 9, 1.0, rounds=rounds((4, 4, 0), (3, 2, 0), (3, 3, 0))),
    ]
    arms = [arm("plain"), arm("chain+d", drafter="d")]
    arms += [arm(f"fixed:{n}+d", policy=f"fixed:{n}", drafter="d", nodes=n) for n in (2, 4)]
    found = result(arms, [prompt("p")], responses)
    path = tmp_path / "out.json"
    write_result(found, path, **derived(found))
    read = find_acceptance(str(path), "any target")
    # 8 rounds: 6, 4 and 2 of them accepted 1, 2 and 3 tokens.
    assert read.chain == pytest.approx([1, 1 + 6 / 8, 1 + 10 / 8, 1 + 12 / 8])
    assert read.kind == "recorded"
    sweep = find_acceptance(f"{path}#fixed:4+d", "any target")
    # 4 nodes were asked for in three rounds; for one of them there was no candidate.
    assert sweep.tree == pytest.approx([1.0, 1.5, 2.0, 2 + 1 / 3, 2 + 2 / 3])
    with pytest.raises(InputError, match=r"no acceptance of 'plain'.*chain\+d, fixed:2\+d"):
        find_acceptance(f"{path}#plain", "any target")


class TestWarnings:
    def test_a_machine_that_changed(self) -> None:
        found = two_arms([1.0] * 12, [2.0] * 12)
        responses = list(found.responses)
        for place, one in enumerate(responses):
            if one.arm == "plain":
                total_s = 1.0 + (2.0 if place < 6 else 2.5)
                responses[place] = replace(one, place=place, total_s=total_s)
        (warning,) = result_warnings(replace(found, responses=tuple(responses)))
        assert "plain steps took 25% more time in the second half" in warning

    def test_texts_a_borrowed_profile_and_drift(self) -> None:
        found = two_arms([1.0] * 12, [2.0] * 12)
        last = replace(found.responses[-1], tokens=(7,) * 21, warnings=("it drifts", "it drifts"))
        profile = ProfileInfo(line="x", sha256="1", kind="composed", created_utc="2026")
        changed = replace(found, responses=(*found.responses[:-1], last), profile=profile)
        costs, texts, drift = result_warnings(changed)
        assert costs.startswith("the costs come from a composed profile")
        assert "of 12: chain+d 1" in texts
        assert drift == "it drifts"

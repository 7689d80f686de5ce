"""The harness cannot flatter: decoders of known speed come out at that speed."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.errors import InputError
from lab.bench.analysis.ratios import compare_arms, rate, tally_arm
from lab.bench.record import Result, read_result, write_result
from tests.lab.bench.fake_bench import END, Clock, FakeArm, endless, run, schedule
from tests.lab.bench.made_bench import arm


def ending_after(tokens: int):
    """A text whose end token is the `tokens`-th, with more behind it."""

    def text(ids: Sequence[int]) -> list[int]:
        return [1] * (tokens - 1) + [END] + [2] * 40

    return text


def runners(clock: Clock, text=endless, **changed) -> list[FakeArm]:
    """Plain at 10 ms a token, and trees at 25 ms for 4 tokens."""
    trees = arm("fixed:3+d", drafter="d", nodes=3)
    usual = {"round_s": 0.025, "tokens_a_round": 4}
    return [FakeArm(arm("plain"), clock, text), FakeArm(trees, clock, text, **usual | changed)]


class TestKnownSpeed:
    def test_whole_rounds_give_the_true_ratio(self) -> None:
        found = run(runners(Clock()), schedule())  # 1 token, then 5 rounds of 4
        ratio = compare_arms(found, "fixed:3+d", "plain")
        assert ratio.pooled == pytest.approx(4 * 0.010 / 0.025)
        assert rate(tally_arm(found, "plain", "decode")) == pytest.approx(100.0)
        whole = compare_arms(found, "fixed:3+d", "plain", "total")
        assert whole.pooled == pytest.approx((0.05 + 20 * 0.010) / (0.05 + 5 * 0.025))

    @pytest.mark.parametrize("length", [1, 2, 6, 8, 21])
    def test_a_text_cut_by_its_end(self, length: int) -> None:
        """The round in which it ends is paid in full, and what comes behind the end is no gain."""
        found = run(runners(Clock(), ending_after(length), stubborn=True), schedule())
        for one in found.responses:
            assert one.tokens == (1,) * (length - 1) + (END,)
            assert one.finish == "eos"
        rounds = -(-(length - 1) // 4)
        trees = found.of("fixed:3+d")[0]
        assert trees.decode_s == pytest.approx(0.025 * rounds)
        assert found.of("plain")[0].decode_s == pytest.approx(0.010 * (length - 1))
        ratio = compare_arms(found, "fixed:3+d", "plain")
        if length == 1:
            assert ratio is None  # nothing was decoded behind the first token
        else:
            assert ratio.pooled == pytest.approx(0.010 * (length - 1) / (0.025 * rounds))


def test_arms_take_turns_and_each_begins_as_often() -> None:
    blocks = list(schedule(prompts=3, repeats=2, seed=7).turns(["a", "b", "c"]))
    assert [turn.place for block in blocks for turn in block] == list(range(18))
    arms = ["".join(turn.runner for turn in block) for block in blocks]
    assert arms == 2 * ["abc", "bca", "cab"]
    first = [block[0] for block in blocks]
    assert [(turn.repeat, turn.encoded.prompt.id, turn.seed) for turn in first] == [
        (0, "p0", 7), (0, "p1", 8), (0, "p2", 9), (1, "p0", 10), (1, "p1", 11), (1, "p2", 12),
    ]  # fmt: skip


@pytest.mark.parametrize("text", [endless, ending_after(6)])
def test_what_others_do_meanwhile_does_not_count(text) -> None:
    """Arms that can wait decode a prompt together; one that cannot, by itself."""

    def outcome(by_round: bool) -> Result:
        clock = Clock()
        own = runners(clock, text, stepped=True, stubborn=True)
        own[0].stepped = True
        peer = FakeArm(arm("peer"), clock, text, round_s=0.012)
        return run([*own, peer], schedule(by_round=by_round))

    whole, by_round = outcome(False).responses, outcome(True).responses
    for one, other in zip(whole, by_round, strict=True):
        assert replace(one, total_s=other.total_s) == other
        assert one.total_s == pytest.approx(other.total_s)


@pytest.mark.parametrize(("change", "message"), [
    (lambda data: data.update(schema_version=2), "schema_version must be 1 (is 2)"),
    (
        lambda data: data["responses"][1].update(tokens=[1, -1]),
        "responses[1].tokens[1]: must be greater than or equal to 0 (is -1)",
    ),
    (lambda data: data["responses"].pop(), "responses: 1 are missing, as ("),
    (
        lambda data: data["responses"].append(data["responses"][0]),
        "responses[4]: ('plain', 'p0', 0) is unknown or there twice",
    ),
    (lambda data: data["arms"].pop(0), "'plain' is missing"),
    (
        lambda data: data["arms"][1].update(drafter="other"),
        "'fixed:3+d' has an unknown drafter 'other'",
    ),
    (
        lambda data: data["responses"][0].update(tokens=[1] * 30),
        "responses[0]: more than 21 tokens",
    ),
])  # fmt: skip
def test_a_wrong_field_is_named(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "out.json"
    write_result(run(runners(Clock()), schedule()), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_result(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)

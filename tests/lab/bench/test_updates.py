"""Arms whose drafter learns between texts: what it costs, what is kept, and what a kill loses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decoder.model.loading import load_model
from decoder.model.runtime.linear import plain_state
from decoder.profiling.startup import ProfileChoice
from lab.bench.analysis.families import update_figures
from lab.bench.analysis.ratios import compare_arms, rate, tally_arm
from lab.bench.arms.base import Put
from lab.bench.arms.builder import ArmBuilder, DecodingOptions
from lab.bench.arms.choice import ArmNames, drafter_labels, plan_arms
from lab.bench.record import Model, Update
from lab.bench.schedule import Schedule, run_schedule
from tests.decoder.models import greedy
from tests.lab.bench import fake_bench
from tests.lab.bench.fake_bench import Clock, FakeArm, FakeDecoding, encoded, endless, schedule
from tests.lab.bench.made_bench import arm, result, settings
from tests.lab.papers.specblock.specblock_models import specblock_folder
from tests.tiny_folder import isolate, write_all

UPDATE_S = 0.5
LEARNING = arm("chain+d@adapt=always", drafter="d@adapt=always", updates="always")
FIXED = arm("chain+d", drafter="d", studies=("policies",))
MODELS = (
    Model(name="d", hash="d", kind="specblock"),
    Model(name="d@adapt=always", hash="d", kind="specblock", updates="always", same_as="d"),
)


@dataclass
class Learner(FakeArm):
    """Trains behind every second text for half a second, and rolls back behind the fourth."""

    learnt: list[str] = field(default_factory=list)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> LearningDecoding:
        return LearningDecoding(self, self.text(ids))


class LearningDecoding(FakeDecoding):
    done = False

    def steps(self, put: Put) -> Iterator[None]:
        yield from super().steps(put)
        self.done = True

    def rehearse(self) -> None:
        assert self.done
        self.runner.clock.now_s += 77.0  # timed nowhere
        self.runner.learnt.append("rehearsal")

    def update(self) -> Update:
        assert self.done
        learnt = self.runner.learnt
        learnt.append("update")
        place = learnt.count("update")
        if place % 2 == 0:
            self.runner.clock.now_s += UPDATE_S
        action = "heads" if place == 2 else "full"
        return Update(seconds=0.0, action=action, trained=place % 2 == 0, rollback=place == 4)


def runners(clock: Clock) -> list[FakeArm]:
    return [
        FakeArm(arm("plain"), clock, endless),
        FakeArm(FIXED, clock, endless, round_s=0.025, tokens_a_round=4),
        Learner(LEARNING, clock, endless, round_s=0.020, tokens_a_round=4),
    ]


def test_decoding_leaves_updates_out_and_end_to_end_pays_them() -> None:
    """20 tokens in 5 rounds of 20 ms, 50 ms before them, three updates of half a second."""
    found = fake_bench.run(runners(Clock()), schedule(6), drafters=MODELS)
    name = LEARNING.name
    assert rate(tally_arm(found, name, "decode")) == pytest.approx(20 / 0.1)
    assert rate(tally_arm(found, name, "total")) == pytest.approx(6 * 21 / (6 * 0.15 + 1.5))
    decode, whole = (compare_arms(found, name, FIXED.name, part) for part in ("decode", "total"))
    assert decode is not None and decode.pooled == pytest.approx(0.025 / 0.020)
    assert whole.pooled == pytest.approx((6 * 0.175) / (6 * 0.15 + 1.5))
    [own] = update_figures(found)
    assert (own.updater, own.fixed) == ("always", FIXED.name)
    assert (own.texts, own.updates) == ({"full": 5, "heads": 1}, {"heads": 1, "full": 2})
    assert own.rollbacks == 1
    assert own.update_s == pytest.approx(1.5)
    assert own.update_share == pytest.approx(1.5 / (1.5 + 6 * 0.15))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny target and a random SpecBlock drafter for it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("updates")
        isolate(patch, folder)
        write_all(folder / "tiny")
        specblock_folder(folder / "draft", vocab_size=260, feature_layers=[0, 1, 1])
        yield folder


@pytest.mark.slow
def test_arms_learn_apart_and_write_the_plain_text(place: Path) -> None:
    draft = str(place / "draft")
    drafters = (draft, f"{draft}@adapt=no-bandit")
    loaded = load_model(str(place / "tiny"), dtype=torch.float32, device=torch.device("cpu"))
    choice = DecodingOptions(profile=ProfileChoice(calibrate=False))
    builder = ArmBuilder(loaded, drafter_labels(drafters), choice)
    arms = plan_arms(ArmNames(policies=("chain", "fixed:12"), drafters=drafters, peers=()))
    names = [arm.name for arm in arms]
    assert names[3:] == ["chain+draft@adapt=no-bandit", "fixed:12+draft@adapt=no-bandit"]
    own = builder.runners(arms)
    plan = Schedule(
        prompts=[encoded(f"p{i}", [5, 7, 5, 9, 40 + i]) for i in range(4)], new_tokens=16,
        repeats=1, ends=builder.ends,
    )  # fmt: skip
    responses = run_schedule(own, plan)[0]
    found = result(arms, [one.prompt for one in plan.prompts], responses,
                   settings=settings(new_tokens=16), drafters=builder.drafters())  # fmt: skip
    for number, one in enumerate(found.of("plain")):
        ids = list(plan.prompts[number].ids)
        text = greedy(builder.loaded.model, ids, 16)
        assert list(one.tokens) == text[: len(one.tokens)]
        assert all(found.of(name)[number].tokens == one.tokens for name in names)
    for name in names[3:]:
        made = [one.update for one in found.of(name)]
        assert [(one.action, one.trained) for one in made] == [("full", True)] * 4
        assert all(one.seconds > 0 for one in made)
    models = [one._decoder.drafter for one in own[3:]]
    weights = [plain_state(model._serving)["lm_head.weight"] for model in models]
    assert models[0]._serving is not models[1]._serving
    assert not torch.equal(weights[0], weights[1])
    fixed = plain_state(own[1]._decoder.drafter.model)["lm_head.weight"]
    assert torch.equal(fixed, load_file(place / "draft/model.safetensors")["lm_head.weight"])
    assert [one.fixed for one in update_figures(found)] == names[1:3]
    full, updated = found.drafters
    assert (full.kind, full.updates, full.same_as) == ("specblock", "", None)
    assert (updated.updates, updated.same_as, updated.source) == (
        "no-bandit", "draft", "draft@adapt=no-bandit",
    )  # fmt: skip

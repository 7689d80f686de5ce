"""The controller benchmark's own parts: forced texts, and hindsight on a real trace."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.acceptance import constant
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth
from lab.studies.controller import Arm, run_together
from lab.studies.recorded_rounds import SIZES, Text, hindsight_of, played_of, read_trace, summary
from tests.decoder.model.test_graphs import graph_target
from tests.decoder.models import greedy, random_model, target_of

VOCAB, PROMPT, NEW = 97, [3, 1, 4, 1, 5], 60


def forced_text(seed=0):
    """A text that the model would not write by itself, with repeats to draft from."""
    random = np.random.default_rng(seed)
    part = random.integers(0, VOCAB, 12).tolist()
    return [*PROMPT, *part, *part, *random.integers(0, VOCAB, 12).tolist(), *part, *part]


def replay(text):
    return SimulatedDrafter(Truth([text]), constant(4.0), vocab=VOCAB)


class TenthANode:
    """A cost that can be checked by hand: 1 s and a tenth of a second a node."""

    def sizes(self, most):
        return np.arange(most + 1)

    def cycle_s(self, nodes, context):
        return 1.0 + 0.1 * np.asarray(nodes, dtype=float)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "chain", "fixed:7"])
@pytest.mark.parametrize("make", [replay, lambda text: NgramDrafter()], ids=["replay", "ngram"])
@pytest.mark.parametrize("open_target", [target_of, lambda model: graph_target(model)[0]])
def test_every_arm_writes_the_forced_text(policy, make, open_target):
    model, text = random_model("llama-gqa"), forced_text()
    assert greedy(model, PROMPT, 8) != text[len(PROMPT) :][:8]
    target = GivenTextTarget(open_target(model))
    target.follow(text)
    decoder = TreeDecoder(target, policy=policy, drafter=make(text), max_nodes=16)
    result = decoder.generate(PROMPT, max_new_tokens=60)
    assert result.token_ids == text[len(PROMPT) :][:60]
    assert policy == "plain" or result.stats.accepted_tokens > 5


def test_arms_take_turns_round_by_round():
    model, text = random_model("llama-gqa"), forced_text()
    order, arms = [], {}
    for policy in ("plain", "chain", "fixed:7"):
        target = GivenTextTarget(target_of(model))
        decoder = TreeDecoder(target, policy=policy, drafter=NgramDrafter(), max_nodes=16)
        decoder.on_round = lambda facts, policy=policy: order.append(policy)
        arms[policy] = Arm(decoder, 60)
    run_together(arms, text, len(PROMPT), 60)
    assert order[:6] == ["chain", "fixed:7", "plain", "fixed:7", "plain", "chain"]
    rows = {name: arm.rows[0] for name, arm in arms.items()}
    assert {row["tokens"] for row in rows.values()} == {59}
    assert {name: row["rounds"] for name, row in rows.items()} == {
        name: order.count(name) for name in arms
    }
    assert rows["plain"]["rounds"] == 59 > rows["fixed:7"]["rounds"]


def run(tmp_path, policy, make, texts):
    """The traced texts of one decoder, and a drafter like its own."""
    target, trace = GivenTextTarget(target_of(random_model("llama-gqa"))), tmp_path / "trace.jsonl"
    decoder = TreeDecoder(target, policy=policy, drafter=make(), max_nodes=16, trace=trace)
    for text in texts:
        target.follow(text)
        decoder.generate(PROMPT, max_new_tokens=NEW - 7)
    lines = read_trace(trace)
    return [
        Text(
            tokens=text[: len(PROMPT) + NEW - 7],
            prompt=len(PROMPT),
            rounds=[line for line in lines if line["text"] == number],
        )
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("nodes", [1, 7, 15])
@pytest.mark.parametrize("drafter", ["replay", "ngram"])
def test_hindsight_agrees_with_what_a_fixed_size_did(tmp_path, nodes, drafter):
    """In the very rounds that a size ran, hindsight on that size is what happened."""
    texts = [forced_text(1), forced_text(2)]
    truth = Truth(texts)

    def make():
        if drafter == "ngram":
            return NgramDrafter()
        return SimulatedDrafter(truth, constant(4.0), vocab=VOCAB)

    recorded = run(tmp_path, f"fixed:{nodes}", make, texts)
    cost = TenthANode()
    at = SIZES.index(nodes)
    for text, found in zip(recorded, hindsight_of(recorded, make(), cost), strict=True):
        assert len(text.rounds) > 5
        accepted = [record["accepted"] for record in text.rounds]
        assert (found.committed[:, at] - 1).tolist() == accepted
        verified = [1.0 + 0.1 * record["nodes"] for record in text.rounds]
        assert found.seconds[:, at] == pytest.approx(verified)
        assert np.all(found.committed[:, 0] == 1)


def test_the_summary_by_hand():
    """Two rounds; sizes cost 1, 1.1, 1.3, ... s. The first round's truth is the chain's."""
    rounds = [
        {"context": 1, "accepted": 2, "nodes": 3},
        {"context": 4, "accepted": 0, "nodes": 0},
    ]
    text = Text(tokens=[0, 1, 2, 3, 9, 9], prompt=1, rounds=rounds)
    cost = TenthANode()
    assert played_of([text], cost).tolist() == [[4.0, pytest.approx(2.3)]]
    committed = np.ones((2, len(SIZES)))
    committed[0, 2:] = 3.0
    seconds = np.tile(cost.cycle_s(SIZES, 0), (2, 1))
    found = SimpleNamespace(sizes=np.array(SIZES), committed=committed, seconds=seconds)
    result = summary([text], [found], cost)
    assert result["best_fixed"] == 3
    assert result["over_best_fixed"]["ratio"] == pytest.approx((4 / 2.3) / (4 / 2.6))
    assert result["oracle_regret"] == pytest.approx(0.0)
    assert result["best_fixed_oracle_regret"] == pytest.approx(1.0 - 2.3 / 2.6)

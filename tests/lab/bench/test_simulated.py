"""The replay drafter against its stated probabilities, and a target that writes a given text."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.acceptance import AcceptanceProcess, constant
from decoder.engine import TreeDecoder
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth
from tests.decoder.model.test_graphs import graph_target
from tests.decoder.models import greedy, random_model, request, target_of

VOCAB = 1000
FADING_RATES = tuple(0.9 * 0.93**depth for depth in range(6))


def given_process(rank1=FADING_RATES, **options):
    return AcceptanceProcess(label="a test", kind="given", rank1=rank1, **options)


def text_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def session_of(text, process, *, prompt=5, seed=0):
    drafter = SimulatedDrafter(Truth([text]), process, vocab=VOCAB, seed=seed)
    return drafter.start(text[:prompt], None)


def independent_blocks(process, count, width=40, seed=0):
    """(block, true tokens) of blocks that share no position."""
    gamma = process.gamma
    text = text_of(5 + count * gamma, seed)
    session = session_of(text, process)
    for start in range(5, len(text), gamma):
        yield session.draft(text[:start], request(gamma, width)), text[start : start + gamma]


def ranks_by_hand(confidence, tail, width):
    """The definition in the module's text, rank by rank."""
    left, hazard, result = 1.0, confidence, []
    for rank in range(1, width + 1):
        if rank > 1:
            rising = hazard / (1.0 - hazard) if hazard < 1.0 else np.inf
            hazard = min(rising, tail / rank)
        result.append(left * hazard)
        left *= 1.0 - hazard
    return result


class TestCalibration:
    @pytest.mark.parametrize("concentration", [0.3, 4.0, np.inf])
    def test_ranks_come_true_as_often_as_stated(self, concentration):
        """Chi-square over ranks 1 .. 12 and what lies behind them, at every depth."""
        process = given_process(concentration=concentration, tail=0.6)
        hits, stated, rounds = np.zeros((6, 12)), np.zeros((6, 12)), 4000
        for block, truth in independent_blocks(process, rounds, width=12):
            hits += block.tokens == truth[:, None]
            stated += block.probabilities
        hits = np.column_stack([hits, rounds - hits.sum(axis=1)])
        stated = np.column_stack([stated, rounds - stated.sum(axis=1)])
        chi_square = ((hits - stated) ** 2 / stated).sum()
        degrees = 6 * 12
        assert abs(chi_square - degrees) < 4.0 * np.sqrt(2.0 * degrees)

    def test_a_stated_confidence_is_the_frequency(self):
        """Among first tokens said to be right with about p, p of them are."""
        said, right = [], []
        for block, truth in independent_blocks(given_process(concentration=1.0), 3000):
            said.extend(block.probabilities[:, 0])
            right.extend(block.tokens[:, 0] == truth)
        said, right = np.array(said), np.array(right)
        assert said.std() > 0.25  # it is surer at some positions than at others
        for low in np.arange(0.0, 1.0, 0.1):
            inside = (said >= low) & (said < low + 0.1)
            noise = 4.0 * np.sqrt(0.25 / max(inside.sum(), 1))
            assert abs(right[inside].mean() - said[inside].mean()) < noise or not inside.any()

    @given(st.floats(0.02, 1.0), st.floats(0.05, 20.0) | st.just(np.inf), st.floats(0.0, 2.0))
    @example(rate=0.05035655382776352, concentration=0.125, tail=0.0)
    @settings(max_examples=60)
    def test_confidences_and_ranks_are_those_defined(self, rate, concentration, tail):
        process = given_process((rate,), concentration=concentration, tail=tail)
        confidences = process.confidences()
        assert confidences.mean() == pytest.approx(rate, abs=1e-9)
        assert np.all((confidences >= 0.0) & (confidences <= 1.0))
        table = process.rank_table(9)
        block = session_of(text_of(40), process).draft(text_of(40)[:20], request(1, 9))
        by_hand = ranks_by_hand(block.probabilities[0, 0], tail, 9)
        assert block.probabilities[0] == pytest.approx(by_hand, abs=1e-12)
        at = int(np.argmin(np.abs(confidences[0] - block.probabilities[0, 0])))
        assert table[0, at] == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["plain", "fixed:7"])
@pytest.mark.parametrize("open_target", [target_of, lambda model: graph_target(model)[0]])
def test_every_arm_writes_the_forced_text(policy, open_target):
    """A text that the model would not write by itself."""
    model, prompt = random_model("llama-gqa"), [3, 1, 4, 1, 5]
    text = [*prompt, *np.random.default_rng(0).integers(0, 97, 60).tolist()]
    assert greedy(model, prompt, 8) != text[5:13]
    target = GivenTextTarget(open_target(model))
    target.follow(text)
    drafter = SimulatedDrafter(Truth([text]), constant(4.0), vocab=97)
    decoder = TreeDecoder(target, policy=policy, drafter=drafter, max_nodes=16)
    result = decoder.generate(prompt, max_new_tokens=60)
    assert result.token_ids == text[5:]
    assert policy == "plain" or result.stats.accepted_tokens > 5

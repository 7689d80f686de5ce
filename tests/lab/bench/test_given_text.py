"""A target that is made to write a given text, whatever its drafter and policy."""

import numpy as np
import pytest

from costmodel.acceptance import constant
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth
from tests.decoder.model.test_graphs import graph_target
from tests.decoder.models import greedy, random_model, target_of

VOCAB, PROMPT = 97, [3, 1, 4, 1, 5]


def forced_text(seed=0):
    """A text that the model would not write by itself, with repeats to draft from."""
    random = np.random.default_rng(seed)
    part = random.integers(0, VOCAB, 12).tolist()
    return [*PROMPT, *part, *part, *random.integers(0, VOCAB, 12).tolist(), *part, *part]


def replay(text):
    return SimulatedDrafter(Truth([text]), constant(4.0), vocab=VOCAB)


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

"""Every policy with every kind of drafter: the tokens of plain greedy decoding, in float64."""

import numpy as np
import pytest

from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.policies.bastion import Bastion
from tests.decoder.models import (
    LatticeDrafter,
    OracleDrafter,
    decoder_of,
    greedy,
    random_model,
    target_of,
)

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17]
WANTED = 30
POLICIES = ["beam:3x4", "static-tree:3x2", "dynatree", "chain", "fixed:8", "bastion"]
DRAFTERS = {
    "n-gram": lambda model, truth: NgramDrafter(),
    "lattice": lambda model, truth: LatticeDrafter(97),
    "right at rank 0": lambda model, truth: OracleDrafter(truth, 97, rank=0),
    "right at rank 1": lambda model, truth: OracleDrafter(truth, 97, rank=1),
    "another model": lambda model, truth: CausalLMDrafter(
        target_of(random_model("llama-mha-tied", seed=5))
    ),
    "the target itself": lambda model, truth: CausalLMDrafter(target_of(model)),
}


class CheapTrees:
    """A cost under which drafting pays, so that bastion verifies trees."""

    def plain_s(self, context, batch=1):
        return 1.0

    def draft_s(self, context):
        return 0.0

    def sizes(self, most):
        return np.arange(most + 1)

    def cycle_s(self, nodes, context, batch=1):
        return 1.0 + 0.001 * np.asarray(nodes)


def decoder_with(model, policy, drafter):
    if policy != "bastion":
        return decoder_of(model, policy, drafter)
    decoder = decoder_of(model, "fixed:40", drafter)
    decoder.policy = Bastion(CheapTrees(), 40)
    return decoder


@pytest.fixture(scope="module")
def targets():
    """Models, sure of themselves and not, with what they say after the prompt."""
    models = {
        (family, scale): random_model(family, scale=scale)
        for family, scale in (("qwen3", 6.0), ("gpt-neox", 6.0), ("llama-gqa", 60.0))
    }
    return {key: (model, greedy(model, PROMPT, WANTED)) for key, model in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_that_of_plain_decoding(policy, drafter, targets):
    for model, truth in targets.values():
        made = DRAFTERS[drafter](model, PROMPT + truth)
        result = decoder_with(model, policy, made).generate(PROMPT, max_new_tokens=WANTED)
        assert result.token_ids == truth
        assert result.stats.drafted_tokens > 0 or drafter == "n-gram"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sure_drafter_that_is_right_saves_rounds(policy, targets):
    model, _ = targets["llama-gqa", 60.0]
    drafter = CausalLMDrafter(target_of(model))
    stats = decoder_with(model, policy, drafter).generate(PROMPT, max_new_tokens=WANTED).stats
    assert stats.rounds < 12


@pytest.mark.parametrize("policy", POLICIES)
def test_texts_together_equal_texts_alone(policy, targets):
    """Each text has a drafter cache of its own on one drafter model."""
    model, _ = targets["llama-gqa", 60.0]
    drafter = CausalLMDrafter(target_of(random_model("llama-mha-tied", seed=5)))
    prompts = [PROMPT, [0], [7] * 23]
    together = decoder_with(model, policy, drafter).generate_batch(prompts, max_new_tokens=20)
    for prompt, result in zip(prompts, together, strict=True):
        assert result.token_ids == greedy(model, prompt, 20)

"""Targets whose rotary factors depend on the length of a text, against transformers' own."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from costmodel.errors import InputError
from decoder.engine import TreeDecoder
from tests.decoder.models import SIZES, decoder_of, generated, greedy, random_model

SWITCH, WIDTH = 40, 4  # tokens with the first factors; half of a head's width
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 97, 60)]
POLICIES = ("plain", "fixed:12", "chain")


def longrope(**more):
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(WIDTH)],
        "long_factor": [3.0 + 2.0 * i for i in range(WIDTH)],
        "factor": 8.0,
        "original_max_position_embeddings": SWITCH,
    } | more


def model_of(rope, **sizes):
    fields = SIZES | {"num_key_value_heads": 2, "rope_parameters": rope} | sizes
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields)).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("borrowed", [False, True])
@pytest.mark.parametrize(("prompt", "tokens"), [
    (12, SWITCH - 12), (SWITCH + 1, 24), (SWITCH - 1, 1),
], ids=["up to the switch", "behind it", "to its edge"])  # fmt: skip
def test_longrope_on_either_side(policy, borrowed, prompt, tokens):
    truth = generated(model_of(longrope()), PROMPT[:prompt], tokens)
    assert truth == greedy(model_of(longrope()), PROMPT[:prompt], tokens)
    opened = TreeDecoder.from_pretrained if borrowed else decoder_of
    decoder = opened(model_of(longrope()), policy=policy)
    for _ in range(2):  # the second text finds the model as the first left it
        assert decoder.generate(PROMPT[:prompt], max_new_tokens=tokens).token_ids == truth


def test_a_long_prompt_is_rotated_alike_in_all_chunks(monkeypatch):
    monkeypatch.setattr("decoder.model.target.PREFILL_CHUNK", 16)
    truth = generated(model_of(longrope()), PROMPT, 12)
    for policy in POLICIES:
        decoder = decoder_of(model_of(longrope()), policy)
        assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == truth


@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_across_the_switch_is_refused(policy):
    decoder = decoder_of(model_of(longrope()), policy)
    with pytest.raises(InputError, match="rotary factors of random change behind 40 tokens") as no:
        decoder.generate(PROMPT[:30], max_new_tokens=11)
    assert "at most 10 new tokens" in str(no.value)


def test_prompts_on_both_sides_are_not_decoded_together():
    decoder = decoder_of(model_of(longrope()), "fixed:4")
    with pytest.raises(InputError, match="cannot be decoded together"):
        decoder.generate_batch([PROMPT[:10], PROMPT[:50]], max_new_tokens=4)
    both = decoder.generate_batch([PROMPT[:45], PROMPT[:50]], max_new_tokens=4)
    assert [len(one.token_ids) for one in both] == [4, 4]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "positions", "more"), [
    ("dynamic", 48, {}), ("linear", 24, {}), ("yarn", 24, {"original_max_position_embeddings": 24}),
])  # fmt: skip
def test_texts_up_to_the_last_position(policy, kind, positions, more):
    """A tree reaches behind that position, where dynamic factors of all rows would change."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0} | more
    truth = generated(model_of(rope, max_position_embeddings=positions), PROMPT[:12], 36)
    decoder = decoder_of(model_of(rope, max_position_embeddings=positions), policy)
    for _ in range(2):
        assert decoder.generate(PROMPT[:12], max_new_tokens=36).token_ids == truth
    with pytest.raises(InputError, match="exceed the 48 positions"):
        decoder.generate(PROMPT[:12], max_new_tokens=37)


def test_an_unknown_kind_is_refused():
    model = random_model("llama-gqa")
    model.model.rotary_emb.rope_type = "spiral"
    with pytest.raises(InputError, match="of the kind 'spiral' are not supported") as caught:
        decoder_of(model, "plain")
    assert "longrope" in str(caught.value)

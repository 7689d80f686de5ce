"""Logits that are NaN or infinite: an error with the token's position, never token 0."""

import re

import pytest
import torch

from costmodel.errors import InputError
from tests.decoder.models import decoder_of, random_model

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17]
TOKENS = 24


@pytest.fixture(params=["row by row", "all rows at once"])
def way(request, monkeypatch):
    at_once = request.param == "all rows at once"
    monkeypatch.setattr("decoder.acceptance.rules.argmax_at_once", lambda device: at_once)


def broken_at(text, value):
    """The position after a token that appears late and first there, and a model broken by it."""
    at = next(i for i in range(3, len(text)) if text[i] not in [*PROMPT, *text[:i]])
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[text[at]] = value
    return len(PROMPT) + at + 1, model


@pytest.mark.parametrize("policy", ["plain", "fixed:9", "chain"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_error_names_the_position(way, policy, value, temperature):
    options = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": 3}
    whole = decoder_of(random_model("llama-gqa"), "plain").generate(PROMPT, **options).token_ids
    position, model = broken_at(whole, value)
    run = decoder_of(model, policy).stream(PROMPT, **options)
    message = re.escape(f"position {position} of the text")
    with pytest.raises(InputError, match=message) as caught:
        for _ in run.rounds():
            pass
    assert "float32" in caught.value.hint
    # Whole rounds only: what was accepted in the last one is not written.
    assert run.token_ids == whole[: len(run.token_ids)]
    assert run.stats.finish == "interrupted"


def test_the_prefill_names_the_position_too(way):
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPT[-1]] = float("nan")
    with pytest.raises(InputError, match=f"position {len(PROMPT)} of the text"):
        decoder_of(model, "plain").generate(PROMPT, max_new_tokens=4)

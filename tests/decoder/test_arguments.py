"""Wrong arguments from Python: an InputError that names the argument."""

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.engine import TreeDecoder
from tests.decoder.models import random_model, target_of

PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def decoder():
    return TreeDecoder(target_of(random_model("llama-gqa")), policy="plain")


@pytest.mark.parametrize(("options", "message"), [
    ({"max_new_tokens": 8.5}, "max_new_tokens must be a whole number, got 8.5"),
    ({"max_new_tokens": "8"}, "max_new_tokens must be a whole number, got '8'"),
    ({"seed": 2**64}, "seed must lie between 0 and 2"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_k": 2.5}, "top_k must be a whole number"),
    ({"top_k": -1}, "top-k"),
    ({"top_p": 1.1}, "top-p"),
    ({"temperature": -0.1}, "temperature"),
    ({"temprature": 1.0}, "no option 'temprature'. Is it temperature?"),
    ({"stop": "end"}, "stop must be a list of texts"),
])  # fmt: skip
def test_options(decoder, options, message):
    with pytest.raises(InputError) as caught:
        decoder.generate(PROMPT, **options)
    assert message in str(caught.value)


def test_prompts(decoder):
    for prompt in (None, 3, 2.5, [1.5], ["a"], [None], torch.zeros(2, 2).int()):
        with pytest.raises(InputError, match="prompt must be a text or token ids"):
            decoder.generate(prompt)
    for prompts in (3, None, {"a": 1}, "text", lambda: 0, np.array(3)):
        with pytest.raises(InputError, match="prompts must be a list"):
            decoder.generate_batch(prompts)


@pytest.mark.parametrize(("options", "message"), [
    ({"max_nodes": 8.5}, "max_nodes must be a whole number"),
    ({"trace": 3}, "trace must be a path, got 3"),
    ({"drafter": 3}, "drafter must be a name or a Drafter, got 3"),
    ({"policy": object}, "policy must be a name or a Policy"),
    ({"profile": "a.yaml"}, "profile must be a ProfileChoice, got 'a.yaml'"),
])  # fmt: skip
def test_the_decoder_itself(options, message):
    with pytest.raises(InputError) as caught:
        TreeDecoder(target_of(random_model("llama-gqa")), **({"policy": "fixed:4"} | options))
    assert message in str(caught.value)

"""Wrong arguments from Python: an InputError that names the argument."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError, RooftreeError, shown
from decoder.acceptance.sampling import Sampling, target_distribution
from decoder.engine import TreeDecoder
from decoder.model.target import make_target
from decoder.profiling.startup import ProfileChoice
from tests.decoder.models import random_model, target_of
from tests.tiny_folder import write_tokenizer

PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def decoder():
    return TreeDecoder(target_of(random_model("llama-gqa")), policy="plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 8.5}, "max_new_tokens must be a whole number, got 8.5"),
        ({"max_new_tokens": "8"}, "max_new_tokens must be a whole number, got '8'"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"seed": 2**64}, "seed must lie between 0 and 2"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.0}, "seed must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": None}, "temperature"),
        ({"top_p": [1]}, "top_p must be a number"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"temprature": 1.0}, "no option 'temprature'. Is it temperature?"),
        ({"beams": 4}, "no option 'beams'"),
        ({"stop": "end"}, "stop must be a list of texts"),
        ({"stop": [3]}, "stop must be a list of texts"),
        ({"stop": None}, "stop must be a list of texts, got None"),
        ({"stop": 3}, "stop must be a list of texts, got 3"),
        ({"stop": {"a": 1}}, "stop must be a list of texts"),
        ({"top_k": True}, "top_k must be a whole number, got True"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_k": -(10**5000)}, "top-k must be 0 (all tokens) or more"),
        ({"seed": 10**5000}, "seed must lie between 0 and 2"),
    ],
)
def test_options(decoder, options, message):
    with pytest.raises(InputError) as caught:
        decoder.generate(PROMPT, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("prompt", [None, 3, 2.5, [1.5], ["a"], [None], torch.zeros(2, 2).int()])
def test_prompts(decoder, prompt):
    with pytest.raises(InputError, match="prompt must be a text or token ids"):
        decoder.generate(prompt)


def test_numbers_of_other_libraries_are_numbers(decoder):
    wanted = decoder.generate(PROMPT, max_new_tokens=4).token_ids
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT)):
        done = decoder.generate(prompt, max_new_tokens=np.int64(4), seed=np.uint8(1))
        assert done.token_ids == wanted


def test_text_that_is_no_unicode(decoder):
    with pytest.raises(InputError, match=r"not Unicode text \(letter 2"):
        decoder.generate("a\ud800")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nodes": 8.5}, "max_nodes must be a whole number"),
        ({"trace": 3}, "trace must be a path, got 3"),
        ({"drafter": 3}, "drafter must be a name or a Drafter, got 3"),
        ({"policy": object}, "policy must be a name or a Policy"),
        ({"profile": "a.yaml"}, "profile must be a ProfileChoice, got 'a.yaml'"),
    ],
)
def test_the_decoder_itself(options, message):
    with pytest.raises(InputError) as caught:
        TreeDecoder(target_of(random_model("llama-gqa")), **({"policy": "fixed:4"} | options))
    assert message in str(caught.value)


@pytest.mark.parametrize("prompts", [3, None, {"a": 1}, "text", lambda: 0, np.array(3)])
def test_prompts_that_are_no_list(decoder, prompts):
    with pytest.raises(InputError, match="prompts must be a list"):
        decoder.generate_batch(prompts)


def test_prompts_of_any_kind_of_list(decoder):
    wanted = [one.token_ids for one in decoder.generate_batch([PROMPT, PROMPT], max_new_tokens=3)]
    for prompts in (np.array([PROMPT, PROMPT]), iter([PROMPT, PROMPT])):
        done = decoder.generate_batch(prompts, max_new_tokens=3)
        assert [one.token_ids for one in done] == wanted


@pytest.mark.parametrize("prompt", [None, 3, [], {"a": 1}, [3], [{}], [{"role": 1}]])
def test_turns_that_are_none(tmp_path, prompt):
    loaded = replace(target_of(random_model("llama-gqa")).loaded, source=str(tmp_path))
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match="prompt"):
        TreeDecoder(make_target(loaded), policy="plain").encode(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": 2.5}, "2.5 is not a device"),
        ({"device": 2**70}, "is not a device"),
        ({"device": "\ud800"}, "is not a device"),
        ({"dtype": []}, r"\[\] is not a dtype"),
        ({"dtype": torch.int8}, "torch.int8 is not a dtype"),
    ],
)
def test_where_and_how_to_load(options, message):
    with pytest.raises(RooftreeError, match=message):
        TreeDecoder.from_pretrained("/no/such/folder", **({"device": "cpu"} | options))


def test_a_profile_that_is_no_path():
    with pytest.raises(InputError, match="path must be a path, got 3"):
        ProfileChoice(path=3)


def test_an_unknown_option_is_told_before_the_target_is_loaded():
    with pytest.raises(InputError, match="no option 'draftr'"):
        TreeDecoder.from_pretrained("/no/such/folder", draftr="ngram")


@pytest.mark.parametrize("temperature", [1e-30, 1e-31, 1e-37, 1e-39, 1e-46, 5e-324])
def test_a_cold_target_takes_its_best_token(temperature):
    """Against the limit of the softmax: one for the largest logit, halves for two of them."""
    for logits, wanted in (
        ([5000.0, -5000.0, 4999.0], [1.0, 0.0, 0.0]),
        ([-3.0, 2.0, 2.0], [0.0, 0.5, 0.5]),
    ):
        sampling = Sampling(temperature=temperature)
        assert target_distribution(torch.tensor(logits), sampling).tolist() == wanted


def test_values_are_shown_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    assert shown(8.5) == "8.5"
    assert len(shown("x" * 10_000)) <= 80
    assert len(shown(10**9999)) <= 80
    assert "Broken" in shown(Broken())

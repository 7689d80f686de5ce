"""A checkpoint's generation config and chat template: respected exactly, or refused."""

import pytest
import torch

from costmodel.errors import InputError
from decoder.engine import TreeDecoder
from tests.decoder.models import PROMPT, decoder_of, generated, random_model

OTHER = [60, 2, 60, 2, 60]
SETTINGS = [
    {"repetition_penalty": 1.4, "renormalize_logits": True},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.3, "min_new_tokens": 9, "eos_token_id": list(range(40))},
]


def configured(**settings):
    model = random_model("llama-gqa", dtype=torch.float32)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_greedy_texts_are_those_of_transformers(settings):
    expected = [generated(configured(**settings), prompt, 24) for prompt in (PROMPT, OTHER)]
    free = generated(configured(), PROMPT, 24)
    assert expected[0] != free, "the setting changes nothing here"
    for policy in ("plain", "fixed:9"):
        decoder = decoder_of(configured(**settings), policy)
        assert decoder.generate(PROMPT, max_new_tokens=24).token_ids == expected[0]
        both = decoder.generate_batch([PROMPT, OTHER], max_new_tokens=24)
        assert [one.token_ids for one in both] == expected


@pytest.mark.parametrize(("settings", "options", "problem"), [
    ({"num_beams": 3}, {}, "asks for beam search"),
    ({"guidance_scale": 2.0}, {}, "ClassifierFree.* is not applied"),
    ({"max_time": 2.0}, {}, "asks for max_time"),
    ({"no_repeat_ngram_size": "2"}, {}, "config.json cannot be used: TypeError"),
    ({"top_k": "5"}, {}, r"config.json cannot be used: .*top_k must be a number \(is '5'\)"),
    ({"temperature": True}, {}, "temperature must be a number"),
    ({"stop_strings": [1]}, {}, "stop_strings must be texts"),
    ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0}, "asks for min_p"),
    ({"do_sample": True, "typical_p": 0.9}, {"temperature": 1.0}, "asks for typical_p"),
])  # fmt: skip
def test_what_cannot_be_done_exactly_is_refused(settings, options, problem):
    decoder = decoder_of(configured(**settings), "fixed:3")
    with pytest.raises(InputError, match=problem):
        decoder.generate(PROMPT, max_new_tokens=4, **options)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}[assistant]"
)


@pytest.fixture(scope="module")
def chatty(tiny_target):
    decoder = TreeDecoder.from_pretrained(tiny_target, policy="plain", device="cpu")
    decoder.tokenizer.chat_template = TEMPLATE
    return decoder


def turn(role, content):
    return {"role": role, "content": content}


class TestChat:
    @pytest.mark.parametrize(("prompt", "options", "text"), [
        ("hi", {"chat": True}, "[user]hi[assistant]"),
        ("hi", {"system": "Be brief."}, "[system]Be brief.[user]hi[assistant]"),
        ("hi", {"template": {"enable_thinking": False}}, "[user]hi<quick>[assistant]"),
        ("hi", {"template": {"enable_thinking": True}}, "[user]hi[assistant]"),
        ([turn("user", "a"), turn("assistant", "b"), turn("user", "c")], {"system": "s"},
         "[system]s[user]a[assistant]b[user]c[assistant]"),
        ([turn("user", [{"text": "a"}, {"text": "b"}])], {}, "[user]ab[assistant]"),
        ("hi", {"chat": False, "system": None, "template": {}}, "hi"),
    ])  # fmt: skip
    def test_what_the_model_reads(self, chatty, prompt, options, text):
        ids = chatty.tokenizer(text)["input_ids"]
        assert chatty.encode(prompt, **options) == ids
        result = chatty.generate(prompt, max_new_tokens=3, **options)
        assert result.stats.prompt_tokens == len(ids)
        assert result.token_ids == chatty.generate(ids, max_new_tokens=3).token_ids
        [batched] = chatty.generate_batch([prompt], max_new_tokens=3, **options)
        assert batched.token_ids == result.token_ids

    @pytest.mark.parametrize(("prompt", "options", "problem"), [
        ("hi", {"template": {"enable_thought": False}}, "no option 'enable_thought'"),
        ([{"role": "user"}], {}, "the prompt: turn 1 has no text"),
        ([turn("user", "a"), "b"], {}, "the prompt: turn 2 has no"),
        ([turn("tool", "a")], {}, "chat template fails: .*: no tools"),
        ({"a": 1}, {}, "prompt must be a text or token ids"),
        ([{}], {}, "the prompt: turn 1 has no"),
        ([{"role": 1}], {}, "the prompt: turn 1 has no"),
        ([turn("assistant", "a")], {}, "the last turn is the assistant's"),
        ([turn("system", "a"), turn("user", "b")], {"system": "c"}, "a system turn already"),
        ([4, 5], {"system": "a"}, "token ids are not put into a chat template"),
    ])  # fmt: skip
    def test_what_is_refused(self, chatty, prompt, options, problem):
        with pytest.raises(InputError, match=problem):
            chatty.generate(prompt, max_new_tokens=3, **options)

    @pytest.mark.parametrize("template", [
        "{{ messages[7].content }}", "{% if %}", "{{ ''.__class__.__mro__ }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ])  # fmt: skip
    def test_templates_that_fail(self, chatty, monkeypatch, template):
        monkeypatch.setattr(chatty.tokenizer, "chat_template", template)
        with pytest.raises(InputError, match="chat template fails") as caught:
            chatty.encode("hi", chat=True)
        assert "\n" not in str(caught.value)

    def test_one_of_several_templates_is_taken_by_its_name(self, chatty, monkeypatch):
        templates = {"rag": "r{{ messages[0].content }}", "tool_use": "t{{ messages[0].content }}"}
        monkeypatch.setattr(chatty.tokenizer, "chat_template", templates)
        ids = chatty.encode("hi", template={"chat_template": "rag"})
        assert ids == chatty.tokenizer("rhi")["input_ids"]
        for options in {"chat": True}, {"template": {"chat_template": "other"}}:
            with pytest.raises(InputError, match=r"no chat template .(default|other)."):
                chatty.encode("hi", **options)

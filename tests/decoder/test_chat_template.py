"""Chat templates that fail are errors of one line."""

import pytest
from transformers import AutoTokenizer

from costmodel.errors import InputError
from decoder.arguments import apply_chat_template
from tests.tiny_folder import write_tokenizer

CHAT = [{"role": "user", "content": "hello"}]
BAD = {
    "{{ raise_exception('no system turn') }}": "no system turn",
    "{{ messages[7].content }}": "fails",
    "{% if %}": "fails",
    "{{ ''.__class__.__mro__ }}": "fails",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}": "fails",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("template", BAD)
def test_bad_templates(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=BAD[template]) as caught:
        apply_chat_template(tokenizer, CHAT, tokenize=False)
    assert "\n" not in str(caught.value)


def test_sound_templates_are_rendered_as_ever(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    assert apply_chat_template(tokenizer, CHAT, tokenize=False) == "<user>hello<answer>"
    wanted = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert apply_chat_template(tokenizer, CHAT, return_dict=True) == wanted

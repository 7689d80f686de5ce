"""Prompts as turns of a chat, and chat templates, which make tokens of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from costmodel.errors import InputError, reason_of, shown
from decoder.arguments import listed

Turn = Mapping[str, Any]  # a role and a content, as transformers' chat templates take them


class ChatOptions(TypedDict, total=False):
    """How a prompt is put into the chat template; `system` and `template` imply `chat`.

    chat      wrap the prompt in the tokenizer's chat template
    system    the system prompt
    template  further arguments of the template, as {"enable_thinking": False}
    """

    chat: bool
    system: str | None
    template: Mapping[str, Any] | None


def is_chat(prompt: str | Sequence[Any], options: ChatOptions) -> bool:
    """Whether a prompt goes through the chat template: turns do in any case."""
    turns = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return turns or bool(
        options.get("chat") or options.get("system") is not None or options.get("template")
    )


def chat_ids(tokenizer: Any, prompt: str | Sequence[Turn], options: ChatOptions) -> list[int]:
    """Token ids of a user's text, or of turns, up to where the assistant begins.

    Raises InputError for a tokenizer without a template, options that the template does not
    have, and turns that it refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the tokenizer has no chat template", hint="Leave --chat out.")
    turns = _turns(prompt, options.get("system"))
    more = options.get("template") or {}
    if not isinstance(more, Mapping):
        raise InputError(f"template must be a mapping of names to values, got {shown(more)}")
    text = tokenizer.get_chat_template()
    for name in more:
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise InputError(
                f"the chat template has no option '{name}'",
                hint="It would change nothing; leave it out.",
            )
    encoded = apply_chat_template(tokenizer, turns, return_dict=True, **more)
    return list(encoded["input_ids"])


def _turns(prompt: str | Sequence[Turn], system: str | None) -> list[dict[str, Any]]:
    text = isinstance(prompt, str)
    given = [{"role": "user", "content": prompt}] if text else listed("prompt", prompt, "turns")
    if not given:
        raise InputError("the prompt is empty", hint="Give a turn of the user.")
    for number, turn in enumerate(given, 1):
        named = isinstance(turn, Mapping) and all(
            isinstance(turn.get(name), str) for name in ("role", "content")
        )
        if not named:
            raise InputError(
                f"turn {number} of the prompt has no text `role` and `content`",
                hint='Write turns as {"role": "user", "content": "..."}.',
            )
    if given[-1]["role"] == "assistant":
        raise InputError(
            "the last turn is the assistant's, so nothing is left to answer",
            hint="End with a turn of the user.",
        )
    if system is None:
        return [dict(turn) for turn in given]
    if not isinstance(system, str):
        raise InputError(f"system must be a text, got {shown(system)}")
    if given[0]["role"] == "system":
        raise InputError("the prompt has a system turn already", hint="Leave the other one out.")
    return [{"role": "system", "content": system}, *(dict(turn) for turn in given)]


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """What the tokenizer's `apply_chat_template` gives, up to where the answer begins.

    Raises InputError where the template fails.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template may raise anything
        raise InputError(
            f"the tokenizer's chat template fails: {reason_of(error)}",
            hint="Leave the chat template out, or correct it beside the tokenizer.",
        ) from error

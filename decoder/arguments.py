"""Arguments of Python callers: checks that name the argument, prompts, and turns of a chat."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any, TypedDict

from costmodel.errors import InputError, reason_of, shown
from decoder.acceptance.sampling import Sampling
from decoder.names import chat_turns


def refuse_unknown(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise InputError for the first option that is not known."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InputError(
                f"there is no option '{name}'",
                hint=f"Is it {near[0]}?" if near else f"Use {', '.join(known)}.",
            )


def sampling_from(options: Mapping[str, Any]) -> Sampling:
    """The sampling that keyword arguments ask for. Raises InputError."""
    refuse_unknown(options, Sampling.__dataclass_fields__)
    return Sampling(**options)


def whole(name: str, value: Any, least: int = 1) -> int:
    """The value as an int. Raises InputError unless it is a whole number of at least `least`."""
    try:
        number = index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, got {shown(value)}") from None
    if number < least:
        raise InputError(f"{name} must be {least} or more, got {shown(value)}")
    return number


def token_ids(prompt: Any) -> list[int]:
    """The ids of a prompt that is no text. Raises InputError unless it is a list of numbers."""
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise InputError(f"prompt must be a text or token ids, got {shown(prompt)}") from None


def text_of(prompt: str) -> str:
    """The prompt. Raises InputError for an empty one, and for half of a surrogate pair in it."""
    if not prompt.strip():
        raise InputError("the prompt is empty", hint="Give some text.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is not Unicode text (letter {error.start + 1} is half of a pair)",
            hint="It was read with another encoding than its own; most files are UTF-8.",
        ) from None
    return prompt


def stop_strings(stop: Any) -> list[str]:
    """The strings. Raises InputError unless they are a list of texts."""
    texts = listed("stop", stop, "texts")
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"stop must be a list of texts, got {shown(stop)}")
    return texts


def listed(name: str, values: Any, what: str) -> list[Any]:
    """The values as a list. Raises InputError for one text, a mapping, and what is no list."""
    if not isinstance(values, (str, bytes, Mapping)):
        with suppress(TypeError):
            return list(values)
    raise InputError(f"{name} must be a list of {what}, got {shown(values)}")


def path_of(name: str, value: Any) -> Path:
    """The value as a path. Raises InputError."""
    try:
        return Path(value)
    except TypeError:
        raise InputError(f"{name} must be a path, got {shown(value)}") from None


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


def chat_options(tokenizer: Any, template: Mapping[str, Any] | None) -> ChatOptions:
    """The chat template with these options wherever the tokenizer has one; None: nowhere."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return ChatOptions(chat=template is not None and has_template, template=template)


def chat_ids(tokenizer: Any, prompt: str | Sequence[Turn], options: ChatOptions) -> list[int]:
    """Token ids of a user's text, or of turns, up to the assistant's answer. Raises InputError."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the tokenizer has no chat template", hint="Leave the template out.")
    text = isinstance(prompt, str)
    given = [{"role": "user", "content": prompt}] if text else listed("prompt", prompt, "turns")
    if not given:
        raise InputError("the prompt is empty", hint="Give a turn of the user.")
    turns, system = chat_turns(given, "the prompt"), options.get("system")
    if turns[-1]["role"] == "assistant":
        raise InputError(
            "the last turn is the assistant's, so nothing is left to answer",
            hint="End with a turn of the user.",
        )
    if system is not None:
        if not isinstance(system, str):
            raise InputError(f"system must be a text, got {shown(system)}")
        if turns[0]["role"] == "system":
            raise InputError(
                "the prompt has a system turn already", hint="Leave the other one out."
            )
        turns = [{"role": "system", "content": system}, *turns]
    more = options.get("template") or {}
    if not isinstance(more, Mapping):
        raise InputError(f"template must be a mapping of names to values, got {shown(more)}")
    # The template that transformers would take: its only one, or the one of several by name.
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {None: templates}
    usual = "tool_use" if more.get("tools") and "tool_use" in templates else "default"
    chosen = more.get("chat_template", None if None in templates else usual)
    if chosen not in templates:
        known = ", ".join(str(one) for one in templates if one)
        raise InputError(
            f"the tokenizer has no chat template {shown(chosen)}",
            hint=f"Give chat_template=NAME, of {known}" if known else "Leave chat_template out.",
        )
    for name in more:
        written = re.search(rf"\b{re.escape(name)}\b", str(templates[chosen]))
        if name != "chat_template" and not written:
            raise InputError(
                f"the chat template has no option '{name}'",
                hint="It would change nothing; leave it out.",
            )
    encoded = apply_chat_template(tokenizer, turns, return_dict=True, **more)
    return list(encoded["input_ids"])


def apply_chat_template(tokenizer: Any, messages: Sequence[Turn], **options: Any) -> Any:
    """What the tokenizer's own function gives, up to the answer. Raises InputError if it fails."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template may raise anything
        raise InputError(
            f"the tokenizer's chat template fails: {reason_of(error)}",
            hint="Leave the chat template out, or correct it beside the tokenizer.",
        ) from error

"""Checks of what a Python caller passes: errors that name the argument."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any

from costmodel.errors import InputError, shown
from decoder.acceptance.sampling import Sampling


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
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {shown(value)}")
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

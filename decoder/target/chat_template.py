"""Chat templates, which are programs that come with a checkpoint: run for so many lines at most."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from costmodel.errors import InputError, reason_of

MOST_LINES = 1_000_000  # of a template's code in one run; a long chat takes some thousand
TEMPLATE_FILE = "<template>"  # jinja2's name for a template that comes from a string


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """What the tokenizer's `apply_chat_template` gives, up to where the answer begins.

    transformers runs templates in jinja2's sandbox, which stops neither loops inside loops nor
    macros that call themselves. Raises InputError where the template fails or does not end.
    """
    try:
        with _most_lines(MOST_LINES):
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except InputError:
        raise
    except Exception as error:  # a template may raise anything
        raise InputError(
            f"the tokenizer's chat template fails: {reason_of(error)}",
            hint="Leave the chat template out, or correct it beside the tokenizer.",
        ) from error


@contextmanager
def _most_lines(most: int) -> Iterator[None]:
    """Raise InputError in a template that runs more than so many of its lines in the body.

    Python's tracing is per thread and asks once for each function called; only the code of
    templates is followed line by line.
    """
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return count if frame.f_code.co_filename == TEMPLATE_FILE else None

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += 1
        if lines > most:
            raise InputError(
                f"the tokenizer's chat template does not end within {most} lines",
                hint="Leave the chat template out, or correct it beside the tokenizer.",
            )
        return count

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

"""Prompts on the lines of a JSONL file: one text, or the turns of a chat."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from decoder.names import chat_turns

Turns = list[dict[str, Any]]


def parse_prompt(file: Path, number: int, record: Any, hint: str) -> str | Turns:
    """The text `prompt` of a line, or its `messages`. Raises InputError naming file and line."""
    fields = record if isinstance(record, dict) else {}
    prompt, turns = fields.get("prompt"), fields.get("messages")
    if turns is not None and prompt is not None:
        raise InputError(
            f"{file}, line {number} has `prompt` beside `messages`", hint="Keep one of them."
        )
    if isinstance(turns, list) and turns:
        return chat_turns(turns, f"{file}, line {number}")
    if not isinstance(prompt, str):
        raise InputError(
            f"{file}, line {number} is not a JSON object with a text `prompt` or `messages`",
            hint=hint,
        )
    if not prompt.strip():
        raise InputError(f"{file}, line {number}: the prompt is empty", hint="Give some text.")
    return prompt


class Conversation:
    """A prompt whose answers come one by one; the model answers between two turns of the user.

    asked  the text, or the turns so far; None once all is answered
    """

    def __init__(self, prompt: str | Turns) -> None:
        self.asked: str | Turns | None = prompt
        self._following: Turns = []
        if isinstance(prompt, list):
            self._ask([], prompt)

    @property
    def ends(self) -> bool:
        """Whether the next answer is the last."""
        return not self._following

    def answer(self, text: str) -> None:
        """Take the model's answer to what is asked."""
        if self.ends:
            self.asked = None
        else:
            self._ask([*self.asked, {"role": "assistant", "content": text}], self._following)

    def _ask(self, before: Turns, turns: Turns) -> None:
        pairs = pairwise(turn.get("role") for turn in turns)
        asked = next((n for n, pair in enumerate(pairs, 1) if pair == ("user",) * 2), len(turns))
        self.asked, self._following = before + turns[:asked], turns[asked:]

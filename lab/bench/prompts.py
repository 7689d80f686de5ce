"""Prompts from JSONL files: reading, checking, encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.io import MAX_JSON_BYTES, json_lines, read_bytes
from decoder.arguments import ChatOptions
from decoder.engine import SamplingOptions, TreeDecoder
from lab.bench.record import Prompt, PromptFile
from profiler.commands.generate import Turns, answer, exchanges, parse_prompt

EXAMPLE = '{"id": "a", "category": "math", "prompt": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """One line of a file; `set` is the file's name without its suffix."""

    id: str
    set: str
    category: str
    prompt: str | Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt with the token ids that every arm gets."""

    prompt: Prompt
    ids: tuple[int, ...]


def read_files(files: Sequence[Path]) -> tuple[list[PromptText], tuple[PromptFile, ...]]:
    """The texts of all files in order, and a record of each file.

    Raises InputError naming the file and line, and for repeated ids or file names.
    """
    texts: list[PromptText] = []
    infos: list[PromptFile] = []
    for file in files:
        raw = read_bytes(file, InputError, most_bytes=MAX_JSON_BYTES)
        parsed = _parse(file, raw)
        digest = hashlib.sha256(raw).hexdigest()
        infos.append(PromptFile(name=file.stem, sha256=digest, prompts=len(parsed)))
        texts += parsed
    names = [info.name for info in infos]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two prompt files are called '{twice}'", hint="Rename one of them.")
    seen: dict[str, str] = {}
    for text in texts:
        if text.id in seen:
            raise InputError(
                f"the prompt id '{text.id}' is in {seen[text.id]} and in {text.set}",
                hint="Give every prompt an id of its own.",
            )
        seen[text.id] = text.set
    return texts, tuple(infos)


def encode_texts(
    texts: Sequence[PromptText],
    encoder: TreeDecoder,
    new_tokens: int,
    chat: ChatOptions,
    sampling: SamplingOptions,
) -> list[Encoded]:
    """Token ids of every text, and of each turn that waits for an answer to the one before.

    Those answers are the encoder's, so that all arms continue the same chat.
    Raises InputError naming a prompt that is too long.
    """
    encoded = []
    for text in texts:
        parts, asked = exchanges(text.prompt), text.prompt
        options = {"max_new_tokens": new_tokens, **chat, **sampling}
        for number, part in enumerate(parts, 1):
            if number == 1:
                asked = part
            else:
                asked = [*asked, answer(encoder.generate(asked, **options).text or ""), *part]
            ids = encoder.encode(asked, **chat)
            try:
                encoder.check(ids, new_tokens)
            except InputError as error:
                raise InputError(
                    f"prompt '{text.id}' of {text.set}: {error.problem}",
                    hint="Take the prompt out, or ask for fewer --new-tokens.",
                ) from error
            prompt = Prompt(
                id=text.id if len(parts) == 1 else f"{text.id}/{number}",
                set=text.set,
                category=text.category,
                tokens=len(ids),
                hash=hash_tokens(ids),
            )
            encoded.append(Encoded(prompt=prompt, ids=tuple(ids)))
    return encoded


def training_prompts(files: Sequence[Path]) -> list[str]:
    """The texts of files of training prompts. Raises InputError for one of several turns."""
    texts = read_files(files)[0]
    turns = next((text.id for text in texts if not isinstance(text.prompt, str)), None)
    if turns is not None:
        raise InputError(f"the training prompt '{turns}' has turns", hint="Give its text alone.")
    return [str(text.prompt) for text in texts]


def hash_tokens(ids: Sequence[int]) -> str:
    """Hash of a token sequence: 16 hexadecimal digits."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def _parse(file: Path, raw: bytes) -> list[PromptText]:
    texts: list[PromptText] = []
    seen: dict[str, int] = {}
    for number, record in json_lines(file, raw, hint=f"Write one object a line, as {EXAMPLE}."):
        text = _text(file, number, record)
        if text.id in seen:
            raise InputError(
                f"{file}, line {number}: the id '{text.id}' is that of line {seen[text.id]} too",
                hint="Give every prompt an id of its own.",
            )
        seen[text.id] = number
        texts.append(text)
    if not texts:
        raise InputError(f"{file} holds no prompt", hint=f"Write one a line, as {EXAMPLE}.")
    return texts


def _text(file: Path, number: int, record: Any) -> PromptText:
    prompt = parse_prompt(file, number, record, f"Write one object a line, as {EXAMPLE}.")
    name = str(record.get("id", "")).strip() or f"{file.stem}-{number}"
    return PromptText(
        id=name, set=file.stem, category=str(record.get("category") or file.stem), prompt=prompt
    )

"""Prompts from JSONL files: which are taken, and what is wrong with a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from costmodel.errors import InputError
from profiler.bench.record import Prompt, PromptFile

EXAMPLE = '{"id": "a", "category": "math", "prompt": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One line of a file; `set` is the file's name without its suffix."""

    id: str
    set: str
    category: str
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt with the token ids that every arm gets."""

    prompt: Prompt
    ids: tuple[int, ...]


class Encoder(Protocol):
    """What turns texts into token ids; a `TreeDecoder` does."""

    def encode(self, prompt: str, chat: bool = False) -> list[int]: ...

    def check(self, ids: Sequence[int], max_new_tokens: int) -> None: ...


def read_files(
    files: Sequence[Path], per_file: int | None, seed: int
) -> tuple[list[Text], tuple[PromptFile, ...]]:
    """The texts to run, set after set in the order of their files, and what the files are.

    per_file  so many of each file, drawn by `seed`; None takes all
    Raises InputError naming the file and line, and for ids or names that are there twice.
    """
    texts: list[Text] = []
    infos: list[PromptFile] = []
    for file in files:
        raw = _read(file)
        own = _parse(file, raw)
        digest = hashlib.sha256(raw).hexdigest()
        infos.append(PromptFile(name=file.stem, sha256=digest, prompts=len(own)))
        texts += _drawn(own, per_file, seed)
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
    texts: Sequence[Text], encoder: Encoder, *, chat: bool, new_tokens: int
) -> list[Encoded]:
    """Token ids of every text. Raises InputError naming the prompt that does not fit."""
    found = []
    for text in texts:
        ids = encoder.encode(text.prompt, chat=chat)
        try:
            encoder.check(ids, new_tokens)
        except InputError as error:
            raise InputError(
                f"prompt '{text.id}' of {text.set}: {error.problem}",
                hint="Take the prompt out, or ask for fewer --new-tokens.",
            ) from error
        prompt = Prompt(
            id=text.id,
            set=text.set,
            category=text.category,
            tokens=len(ids),
            hash=hash_tokens(ids),
        )
        found.append(Encoded(prompt=prompt, ids=tuple(ids)))
    return found


def hash_tokens(ids: Sequence[int]) -> str:
    """16 hexadecimal digits that tell token sequences apart."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the prompts in {file}: {error.strerror or error}",
            hint="Check the path of --prompts.",
        ) from error


def _parse(file: Path, raw: bytes) -> list[Text]:
    try:
        lines = raw.decode("utf-8").split("\n")  # a text may hold other line ends
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 text (byte {error.start})", hint="Check the path of --prompts."
        ) from error
    texts: list[Text] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = _text(file, number, _json(line))
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


def _text(file: Path, number: int, record: Any) -> Text:
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise InputError(
            f"{file}, line {number} is not a JSON object with a text `prompt`",
            hint=f"Write one object a line, as {EXAMPLE}.",
        )
    if not prompt.strip():
        raise InputError(f"{file}, line {number}: the prompt is empty", hint="Give some text.")
    name = str(record.get("id", "")).strip() or f"{file.stem}-{number}"
    return Text(
        id=name, set=file.stem, category=str(record.get("category") or file.stem), prompt=prompt
    )


def _json(line: str) -> Any:
    """The JSON value of a line; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _drawn(texts: list[Text], per_file: int | None, seed: int) -> list[Text]:
    """`per_file` of the texts in their order, each subset equally likely."""
    if per_file is None or per_file >= len(texts):
        return texts
    random = np.random.default_rng((seed, 40961))
    chosen = random.choice(len(texts), size=per_file, replace=False)
    return [texts[index] for index in sorted(chosen)]

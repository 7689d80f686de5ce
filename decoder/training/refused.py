"""Evaluation prompts, which no drafter here may be trained on, known by hashes of their words.

`refused.txt` holds, of the beginning of every prompt of the sets it names, hashes of runs of
eight words (of one in four of them, chosen by the hash itself: Manber's sketch) and of the whole.
`python -m benchmarks.refused_prompts` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from costmodel.errors import InputError

FILE = Path(__file__).with_name("refused.txt")
WORDS = 8  # in a run
KEPT = 4  # one run in so many
DIGITS = 12  # of a hash


def sketch(text: str) -> Iterator[str]:
    """Hashes that stand for a prompt: of the whole, and of some runs of its words."""
    words = re.findall(r"\w+", text.lower())
    yield _hash(words)
    for first in range(len(words) - WORDS + 1):
        run = _hash(words[first : first + WORDS])
        if int(run, 16) % KEPT == 0:
            yield run


def refuse(prompts: Iterable[tuple[str, str]]) -> None:
    """Raise InputError naming the first prompt that belongs to an evaluation set.

    prompts  where each comes from, for the message, and its text
    """
    for where, text in prompts:
        if is_evaluation(text):
            raise InputError(
                f"{where} is, or shares {WORDS} words in a row with, an evaluation prompt",
                hint="Drafters are measured on those sets. Train on other prompts.",
            )


def is_evaluation(text: str) -> bool:
    """Whether a text is an evaluation prompt or shares a long run of words with one."""
    known = hashes()
    return any(mark in known for mark in sketch(text))


@cache
def hashes() -> frozenset[str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def _hash(words: list[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:DIGITS]

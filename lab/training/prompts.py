"""Training prompts: generated openings that the target completes, and refused evaluation prompts.

Openings from templates state a task, and drafters learn the templates by heart. Free openings are
hardly more than a word: an aligned model that is given the beginning of a user's turn completes it
(Magpie, Xu et al., 2024). Words and templates are this project's own.

No drafter may be trained on evaluation prompts. `refused.txt` holds hashes of them: of the
beginning of each, and of one run of eight words in four (chosen by the hash: Manber's sketch).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

from costmodel.errors import InputError

Kinds = Literal["templates", "free"]

CONTENT: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)
WORDS: dict[str, list[str]] = CONTENT


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a prompt: of kind maths, code, task, article or start."""

    kind: str
    text: str
    open: bool  # whether the target completes the user's turn
    chat: bool = True  # whether the chat template is applied; an article is continued without it


def make_opening(random: Random, kinds: Kinds) -> Opening:
    """One opening: from a template, or, for `free`, as often of hardly more than a word."""
    makers = TEMPLATES if kinds == "templates" else FREE
    [make] = random.choices(list(makers), weights=list(makers.values()))
    return make(random)


def maths(random: Random) -> Opening:
    name, other = random.sample(WORDS["names"], 2)
    thing, second = random.sample(WORDS["things"], 2)
    few, many, price = random.randint(2, 12), random.randint(13, 120), random.randint(2, 25)
    fields = {"name": name, "other": other, "thing": thing, "second": second, "few": few}
    fields |= {"many": many, "price": price, "role": random.choice(WORDS["roles"])}
    fields |= {"total": few + price, "product": few * price, "x": random.randint(2, 9)}
    opening = _filled("maths", random, fields)
    return Opening("maths", opening, open=not opening.endswith((".", "?")) or random.random() < 0.6)


def code(random: Random) -> Opening:
    verb, noun = random.choice(WORDS["verbs"]), random.choice(WORDS["nouns"])
    given, result = random.choice(WORDS["types"]), random.choice(WORDS["types"])
    task = f"{verb} {random.choice(WORDS['adjectives'])} {noun}".replace("  ", " ")
    arguments = ("numbers", "values", "text", "items", "n", "words", "matrix", "s")
    fields = {"given": given, "result": result, "task": task, "capital": task.capitalize()}
    fields |= {"name": task.replace(" ", "_").replace("-", "_")}
    fields |= {"argument": random.choice(arguments)}
    fields |= {"head": "from typing import List\n\n\n" if "List" in given + result else ""}
    for field, words in (("holder", "holders"), ("second_holder", "holders"),
                         ("language", "languages"), ("third_holder", "holders")):  # fmt: skip
        fields[field] = random.choice(WORDS[words])
    opening = _filled("code", random, fields)
    return Opening("code", opening, open=not opening.endswith("."))


def task(random: Random) -> Opening:
    topic, other = random.sample(WORDS["topics"], 2)
    fields = {"topic": topic, "other": other, "role": random.choice(WORDS["roles"])}
    opening = _filled("task", random, fields | {"count": random.randint(3, 7)})
    return Opening("task", opening, open=not opening.endswith((".", "?")))


def article(random: Random) -> Opening:
    topic, role = random.choice(WORDS["topics"]), random.choice(WORDS["roles"])
    fields = {"topic": topic, "title": topic.title(), "capital": topic.capitalize(), "role": role}
    fields |= {"year": random.randint(1700, 2015), "first": random.choice(WORDS["names"])}
    fields |= {"last": random.choice(WORDS["surnames"]), "chapter": random.randint(1, 40)}
    return Opening("article", _filled("article", random, fields), open=False, chat=False)


def _filled(kind: str, random: Random, fields: Mapping[str, object]) -> str:
    """One of a kind's templates with its fields."""
    return random.choice(CONTENT["templates"][kind]).format(**fields)


def start(random: Random) -> Opening:
    """The first word or words of a user's turn."""
    name, other = random.sample(WORDS["names"], 2)
    words = {"name": name, "other": other, "role": random.choice(WORDS["roles"])}
    return Opening("start", random.choice(WORDS["starts"]).format(**words), open=True)


TEMPLATES: dict[Callable[[Random], Opening], float] = {maths: 3, code: 3, task: 4, article: 1}
FREE = TEMPLATES | {start: sum(TEMPLATES.values())}


REFUSED = Path(__file__).with_name("refused.txt")
SKETCH_WORDS = 8  # in a run
SKETCH_SHARE = 4  # one run in so many is hashed
HASH_DIGITS = 12


def sketch(text: str) -> Iterator[str]:
    """The hashes of a prompt: of the whole, and of some runs of its words."""
    words = re.findall(r"\w+", text.lower())
    yield _hash(words)
    for first in range(len(words) - SKETCH_WORDS + 1):
        run = _hash(words[first : first + SKETCH_WORDS])
        if int(run, 16) % SKETCH_SHARE == 0:
            yield run


def refuse(prompts: Iterable[tuple[str, str]]) -> None:
    """Raise InputError for the first of (label, prompt) that belongs to an evaluation set."""
    for where, text in prompts:
        if is_evaluation(text):
            raise InputError(
                f"{where} is, or shares {SKETCH_WORDS} words in a row with, an evaluation prompt",
                hint="Drafters are measured on those sets. Train on other prompts.",
            )


def is_evaluation(text: str) -> bool:
    """Whether a text is an evaluation prompt or shares a long run of words with one."""
    refused = hashes()
    return any(digest in refused for digest in sketch(text))


@cache
def hashes() -> frozenset[str]:
    """The hashes of all evaluation prompts."""
    lines = REFUSED.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def _hash(words: list[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:HASH_DIGITS]

"""Training prompts: generated openings that the target completes, and refused evaluation prompts.

Openings from templates state a task, and drafters learn the templates by heart. Free openings are
hardly more than a word, and the target writes the request itself: an aligned model that is given
the beginning of a user's turn completes it (Magpie, Xu et al., 2024). Words and templates are this
project's own.

No drafter may be trained on evaluation prompts. `refused.txt` holds hashes of them: for the
beginning of each prompt, of the whole and of runs of eight words (of one run in four, chosen by
the hash itself: Manber's sketch). `sketch` makes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import yaml

from costmodel.errors import InputError

Kinds = Literal["templates", "free"]

WORDS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a prompt.

    kind   maths, code, task, article or start
    text   of the beginning
    open   whether the target completes the user's turn
    chat   whether the chat template is applied; an article is continued without it
    """

    kind: str
    text: str
    open: bool
    chat: bool = True


def make_opening(random: Random, kinds: Kinds) -> Opening:
    """One opening: from a template, or, for `free`, as often of hardly more than a word."""
    makers = TEMPLATES if kinds == "templates" else FREE
    [make] = random.choices(list(makers), weights=list(makers.values()))
    return make(random)


def maths(random: Random) -> Opening:
    name, other = random.sample(WORDS["names"], 2)
    thing, second = random.sample(WORDS["things"], 2)
    few, many, price = random.randint(2, 12), random.randint(13, 120), random.randint(2, 25)
    opening = random.choice(
        (
            f"{name} buys {few} {thing} for ${price} each and",
            f"{name} has {many} {thing}. {other} has {few} times as many.",
            f"A shop sells {many} {thing} a day at ${price} each.",
            f"A {random.choice(WORDS['roles'])} earns ${price} an hour and "
            f"works {few} hours a day.",
            f"{name} reads {few} pages of a book every day.",
            f"A train travels {many} kilometres in {few} hours.",
            f"There are {many} {thing} and {few} {second} in a box.",
            f"{name} wants to share {many} {thing} with {few} friends.",
            f"{other} is {few} years older than {name}.",
            f"A tank holds {many} litres of water and loses {few} litres every hour.",
            f"{name} bakes {few} trays of {price} {thing} each.",
            f"In a class of {many} pupils, {few} out of every {few + price} own {thing}.",
            f"A recipe for {few} people needs {price} cups of flour.",
            f"{name} saves ${price} every week. After {few} weeks",
            f"What is {many} times {price} plus {few}? Show each step.",
            f"Solve the equation {few}x + {price} = {many}.",
            f"Find the area of a rectangle {few} cm wide and {many} cm long.",
            f"If f(x) = {few}x^2 + {price}x, what is f({random.randint(2, 9)})?",
            f"What is the greatest common divisor of {many} and {few * price}?",
            f"A number is {few} more than twice another, and their sum is {many}.",
        )
    )
    return Opening("maths", opening, open=not opening.endswith((".", "?")) or random.random() < 0.6)


def code(random: Random) -> Opening:
    verb, noun = random.choice(WORDS["verbs"]), random.choice(WORDS["nouns"])
    given, result = random.choice(WORDS["types"]), random.choice(WORDS["types"])
    task = f"{verb} {random.choice(WORDS['adjectives'])} {noun}".replace("  ", " ")
    name = task.replace(" ", "_").replace("-", "_")
    argument = random.choice(("numbers", "values", "text", "items", "n", "words", "matrix", "s"))
    head = "from typing import List\n\n\n" if "List" in given + result else ""
    opening = random.choice(
        (
            f'{head}def {name}({argument}: {given}) -> {result}:\n    """',
            f'{head}def {name}({argument}: {given}) -> {result}:\n    """ {task.capitalize()}',
            f'def {name}({argument}):\n    """\n    ',
            f"Write a Python function to {task}",
            f"Write a function to {task} in a given {random.choice(WORDS['holders'])}.",
            f"Write a python function to {task} in the given {random.choice(WORDS['holders'])}.\n"
            f"Your code should pass these tests:\nassert {name}(",
            f"Write a {random.choice(WORDS['languages'])} program that can {task} in a "
            f"{random.choice(WORDS['holders'])}.",
            f"Complete the following Python code.\n\ndef {name}({argument}):\n",
            f"Explain what this code does:\n\ndef {name}({argument}):\n",
        )
    )
    return Opening("code", opening, open=not opening.endswith("."))


def task(random: Random) -> Opening:
    topic, other = random.sample(WORDS["topics"], 2)
    role, count = random.choice(WORDS["roles"]), random.randint(3, 7)
    opening = random.choice(
        (
            f"Write a short story about {topic}.",
            f"Write a blog post about {topic}, with examples and a clear structure.",
            f"Write a polite email to a {role} about {topic}.",
            f"Write a persuasive essay on {topic}.",
            f"Write a poem about {topic}.",
            f"Explain {topic} to a child.",
            f"Explain how {topic} and {other} are related.",
            f"Compare {topic} with {other}. What are the main differences?",
            f"What are the advantages and disadvantages of {topic}?",
            f"What is the history of {topic}?",
            f"Give me {count} ideas for a project on {topic}.",
            f"List {count} facts about {topic}.",
            f"Describe {topic} in one paragraph.",
            f"Imagine you are a {role} who knows {topic} well. How would you begin a talk?",
            f"Pretend to be a {role} and answer a question about {topic}.",
            f"How can a {role} make use of {topic}?",
            f"Why is {topic} important for {other}?",
            f"Design a one-week course on {topic} for a {role}.",
            f"Discuss the ethics of {topic}.",
            f"Suggest a title for an article on {topic} and outline its sections.",
            f"Rewrite this sentence in a formal style: {topic} is what everybody talks about.",
            f"Classify these as {topic} or {other}:",
            f"Extract the names and dates from this text about {topic}:",
            f"Summarise the following text on {topic}:",
            f"Correct the grammar of this paragraph about {topic}:",
            f"Translate into French: I would like to know more about {topic}.",
            f"What would happen if {topic} did not exist?",
            f"How does {topic}",
            f"Which {role} first",
            "What is the best way to",
            "",
        )
    )
    return Opening("task", opening, open=not opening.endswith((".", "?")))


def article(random: Random) -> Opening:
    topic, role, year = (
        random.choice(WORDS["topics"]),
        random.choice(WORDS["roles"]),
        random.randint(1700, 2015),
    )
    first, last = random.choice(WORDS["names"]), random.choice(WORDS["surnames"])
    opening = random.choice(
        (
            f"= {topic.title()} =\n{topic.capitalize()} is",
            f"= {first} {last} =\n{first} {last} ( born {year} ) was a {role} who",
            f"{topic.capitalize()} was first described in {year} by {first} {last}, a {role}.",
            f"CHAPTER {random.randint(1, 40)}.\n\nThe {role} had been talking of {topic} when",
            f"In the winter of {year} a {role} named {last} came to",
            f"An introduction to {topic}\n\n",
        )
    )
    return Opening("article", opening, open=False, chat=False)


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
    """Raise InputError for the first prompt that belongs to an evaluation set.

    prompts  pairs of a label for the message and the prompt's text
    """
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

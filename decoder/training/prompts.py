"""Prompts to train on, made here: openings, which the target itself completes.

Templates say what is asked for, and drafters learn them by heart; of free openings hardly more
than a word is given, and the target asks for what it likes. The words and templates are our own.
That an aligned model completes a user's turn when it is given only the beginning of one is
Magpie's observation (Xu et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import yaml

Kinds = Literal["templates", "free"]

WORDS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a prompt.

    kind   maths, code, task, article or start
    text   as far as it is given
    open   whether the target still writes the rest of the user's turn
    chat   whether it goes through the chat template; an article is simply continued
    """

    kind: str
    text: str
    open: bool
    chat: bool = True


def make_opening(random: Random, kinds: Kinds) -> Opening:
    """One opening: of a template, or among `free` ones as often of hardly more than a word."""
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
    """Hardly more than a word: what follows is what the target takes users to ask."""
    name, other = random.sample(WORDS["names"], 2)
    words = {"name": name, "other": other, "role": random.choice(WORDS["roles"])}
    return Opening("start", random.choice(WORDS["starts"]).format(**words), open=True)


TEMPLATES: dict[Callable[[Random], Opening], float] = {maths: 3, code: 3, task: 4, article: 1}
FREE = TEMPLATES | {start: sum(TEMPLATES.values())}

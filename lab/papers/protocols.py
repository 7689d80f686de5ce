"""Protocols of papers: the prompts, samples, models and methods of one table, read from YAML.

The wording of prompts is that of the authors' public code, at the commits that the files name.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from costmodel.errors import InputError
from costmodel.io import MAX_JSON_BYTES, json_lines, read_bytes, read_table, read_yaml

HERE = Path(__file__).parent
SUFFIXES = (".jsonl", ".parquet")
Record = dict[str, Any]
Turns = tuple[str, ...]  # what a user says, one text a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """One set of prompts as a paper asks it.

    name             of its file or folder in the user's copy, and of its column in the table
    text             of a prompt, around fields of its record; a record with `prompt` alone has
                     that in their place
    extra            a field, of which records that have it are asked as `text_with_extra`
    exchanges        turns of the user; 2 takes them from `turns` or from a list in `prompt`
    joined           records are joined up to an empty one or a heading of WikiText
    least, most      characters; shorter prompts are left out, longer ones cut
    rows             prompts in the published set
    samples          prompts in the paper; None for all
    split            of the published files, where a folder holds several
    """

    name: str
    text: str = "{prompt}"
    extra: str = ""
    text_with_extra: str = ""
    exchanges: int = 1
    joined: bool = False
    least: int = 1
    most: int | None = None
    rows: int | None = None
    samples: int | None = None
    split: str = "test"

    @property
    def columns(self) -> str:
        """The fields of a published record that a prompt is made of, for messages."""
        names = (name for _, name, _, _ in Formatter().parse(self.text) if name)
        return "turns" if self.exchanges > 1 else "+".join(dict.fromkeys(names))

    def prompts(self, records: Sequence[Record]) -> list[Turns]:
        """The turns of every prompt of the set."""
        if self.exchanges > 1:
            turns = [one.get("turns", one.get("prompt", "")) for one in records]
            return [(one,) if isinstance(one, str) else tuple(one) for one in turns]
        texts = [self._ask(one) for one in records]
        lines = self.joined and "prompt" not in records[0]
        texts = _joined(texts, self.least) if lines else texts
        return [(text.strip()[: self.most],) for text in texts if len(text.strip()) >= self.least]

    def _ask(self, record: Record) -> str:
        text = self.text_with_extra if record.get(self.extra) else self.text
        try:
            return text.format_map(_Fields(record))
        except (KeyError, TypeError, IndexError):
            raise InputError(
                f"a record of {self.name} has no {self.columns}, only {', '.join(record)[:200]}",
                hint="Give the set in its published format, or with a text `prompt` a line.",
            ) from None


class _Fields(dict[str, Any]):
    """A record; `prompt` stands for fields that it lacks."""

    def __missing__(self, name: str) -> Any:
        if "prompt" not in self:
            raise KeyError(name)
        return self["prompt"]


def _joined(lines: Sequence[str], least: int) -> list[str]:
    """Lines joined by spaces up to an empty one or a heading, where they are long enough."""
    texts, text = [], ""
    for line in (*lines, ""):
        if line.strip() and not line.startswith(" ="):
            text += " " + line
        elif len(text) >= least:
            texts.append(text)
            text = ""
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row of a table.

    policies  that `--policy` takes; of several, each set's fastest is the row's
    model     the drafter's part in the protocol, as `dflash`, with `@block=4` or `@adapt=bandit`
    of_set    the policy for a set, where the paper's differ
    """

    name: str
    policies: tuple[str, ...]
    model: str
    of_set: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How one table of a paper was made.

    targets         by hub id, each with its drafters by their part
    order           of a sample: `datasets` shuffles as that library with seed 0, `random` as
                    Python with seed 0, where a set has more prompts than samples; `file`: not
    tau, speedup    the paper's definitions, by their names in `lab.bench.report.published`
    template        options of the chat template; None for bare texts
    attention       of transformers' plain decoding, the paper's 1x: the first that is installed
    best_attention  the faster of all that are installed
    remarks         what no run of this project does as the paper, one sentence each
    """

    paper: str
    table: str
    targets: dict[str, dict[str, str]]
    sets: tuple[PromptSet, ...]
    methods: tuple[Method, ...]
    new_tokens: int
    order: Literal["datasets", "random", "file"]
    tau: Literal["pooled", "mean"]
    speedup: Literal["tpot", "wall", "throughput"]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    template: dict[str, Any] | None = field(default_factory=lambda: {"enable_thinking": False})
    ignore_eos: bool = False
    dtype: str = "bfloat16"
    attention: tuple[str, ...] = ("flash_attention_2", "sdpa")
    best_attention: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.paper}:{self.table}"

    def published(self) -> dict[tuple[str, str, str], dict[str, float]]:
        """The paper's figures by set: of a target with its temperature, a method, and a figure."""
        figures = {}
        for _, row in read_table(HERE / self.paper / "published.csv")[1]:
            table, temperature, target, method, figure = (row.pop(name) for name in list(row)[:5])
            if table == self.table:
                values = {name: float(value) for name, value in row.items() if value}
                figures[f"{target} {temperature}", method, figure] = values
        return figures


def find_protocol(name: str) -> Protocol:
    """The protocol `PAPER[:TABLE]`. Raises InputError listing those that there are."""
    paper, _, table = name.partition(":")
    files = {path.parent.name: read_yaml(path) for path in sorted(HERE.glob("*/protocol.yaml"))}
    tables = files.get(paper, {}).get("tables", {})
    if not tables or (table and table not in tables):
        names = ", ".join(f"{paper}:{one}" for paper in files for one in files[paper]["tables"])
        raise InputError(f"there is no protocol '{name}'", hint=f"Use one of {names}.")
    table = table or next(iter(tables))
    fields = {"paper": paper, "table": table, **files[paper]["common"], **tables[table]}
    shared = read_yaml(HERE / "sets.yaml")
    fields["sets"] = [shared.get(one["name"], {}) | one for one in fields["sets"]]
    return TypeAdapter(Protocol).validate_python(fields)


@dataclass(frozen=True, slots=True)
class SetSample:
    """The prompts of one set that a run takes: their places in the set, and their turns."""

    set: PromptSet
    sha256: str  # of the files
    rows: int  # in the files
    places: Sequence[int]
    turns: Sequence[Turns]


def take_sample(
    protocol: Protocol, chosen: PromptSet, files: Sequence[Path], most: int | None = None
) -> SetSample:
    """The paper's sample of a set in the paper's order, cut to `most` prompts.

    Raises InputError where the files hold no prompt of the set.
    """
    digest = hashlib.sha256()
    records: list[Record] = []
    for file in files:
        raw = read_bytes(file, InputError, most_bytes=MAX_JSON_BYTES)
        digest.update(raw)
        records += _records(file, raw)
    prompts = chosen.prompts(records)
    if not prompts:
        raise InputError(f"{files[0]}: holds no prompt of {chosen.name}")
    places = list(range(len(prompts)))
    wanted = chosen.samples or len(prompts)
    if wanted < len(prompts) and protocol.order == "datasets":
        places = np.random.default_rng(0).permutation(len(prompts)).tolist()
    elif wanted < len(prompts) and protocol.order == "random":
        random.Random(0).shuffle(places)
    places = places[:wanted][:most]
    turns = [prompts[place] for place in places]
    return SetSample(chosen, digest.hexdigest(), len(prompts), places, turns)


def _records(file: Path, raw: bytes) -> list[Record]:
    if file.suffix == ".parquet":
        try:
            from pyarrow import BufferReader, parquet
        except ImportError:
            hint = "pip install datasets"
            raise InputError(f"{file}: reading Parquet needs pyarrow", hint=hint) from None
        return list(parquet.read_table(BufferReader(raw)).to_pylist())
    hint = "Write one JSON object a line."
    lines = [record for _, record in json_lines(file, raw, hint=hint)]
    if not all(isinstance(record, dict) for record in lines):
        raise InputError(f"{file}: a line is not a JSON object", hint=hint)
    return lines


def find_set(folder: Path, chosen: PromptSet) -> list[Path]:
    """The files of a set: NAME.jsonl, NAME.parquet, or in the folder NAME those of its split."""
    for name in (chosen.name, chosen.name.replace("-", "_")):
        for suffix in SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return [folder / (name + suffix)]
        inside = sorted(path for path in (folder / name).rglob("*") if path.suffix in SUFFIXES)
        if inside:
            return [path for path in inside if chosen.split in path.stem] or inside
    return []

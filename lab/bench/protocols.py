"""Benchmarks by a paper's protocol: what a run takes from it, what is missing, what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from costmodel.errors import InputError
from decoder.model.loading import weights_source
from lab.bench.arms.choice import ArmNames, public_name
from lab.bench.prompts import PromptText
from lab.bench.record import PromptFile, ProtocolUse
from lab.papers.protocols import Method, Protocol, SetSample, find_set, take_sample

PART = re.compile(r"(\w+)=(.+)")
FLASH = "flash_attention_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the command line takes in place of the paper's; None where it does not.

    drafters  PART=NAME, or NAME for the paper's first part
    policies  those of the paper's to run, also as `chain@dflash@block=4`; empty for all
    samples   most prompts of each set
    """

    data: Path | None = None
    samples: int | None = None
    target: str | None = None
    drafters: Sequence[str] = ()
    policies: Sequence[str] = ()
    new_tokens: int | None = None
    temperature: float | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRun:
    """A run by a protocol.

    row      the paper's target whose figures stand beside
    models   drafters by their part
    methods  rows of the table that these drafters can fill, with the policies that are to run
    samples  prompts of the sets that are there
    missing  what the paper has and this run has not, one sentence each
    fetched  models that are not on this machine yet
    """

    protocol: Protocol
    target: str
    row: str
    models: Mapping[str, str]
    methods: Sequence[Method]
    new_tokens: int
    temperature: float
    dtype: str
    samples: Sequence[SetSample]
    missing: Sequence[str]
    fetched: Sequence[str]

    def drafter(self, method: Method) -> str:
        part, at, option = method.model.partition("@")
        return self.models[part] + at + option

    @property
    def arms(self) -> ArmNames:
        pairs = [(one, self.drafter(one)) for one in self.methods]
        flash = find_spec("flash_attn") is not None
        attention = [one for one in self.protocol.attention if flash or one != FLASH]
        return ArmNames(
            policies=[f"{policy}@{drafter}" for one, drafter in pairs for policy in one.policies],
            drafters=list(dict.fromkeys(drafter for _, drafter in pairs)),
            peers=["plain"],
            attention=attention if self.protocol.best_attention else attention[:1],
        )

    def prompts(self) -> tuple[list[PromptText], tuple[PromptFile, ...]]:
        """The prompts, set by set in the paper's order, and a record of each set's files."""
        texts = [
            PromptText(
                id=f"{sample.set.name}-{place}",
                set=sample.set.name,
                category=sample.set.name,
                prompt=turns[0]
                if len(turns) == 1
                else [{"role": "user", "content": turn} for turn in turns],
            )
            for sample in self.samples
            for place, turns in zip(sample.places, sample.turns, strict=True)
        ]
        files = tuple(
            PromptFile(name=sample.set.name, sha256=sample.sha256, prompts=sample.rows)
            for sample in self.samples
        )
        return texts, files

    @property
    def lacks(self) -> str:
        """One line about what is not there, before anything runs; empty where all is."""
        fetched = f"to be fetched: {', '.join(self.fetched)}" if self.fetched else ""
        return "; ".join([*self.missing, *filter(None, [fetched])])

    @property
    def differs(self) -> list[str]:
        """What this run takes in place of the paper's, one sentence each."""
        paper = self.protocol
        pairs: dict[str, tuple[object, object]] = {
            "target": (public_name(self.target), self.row),
            "new tokens": (self.new_tokens, paper.new_tokens),
            "dtype": (self.dtype, paper.dtype),
        }
        for part, name in self.models.items():
            pairs[part] = public_name(name), paper.targets[self.row].get(part) or "published"
        lines = [f"{name}: {ours}, not {its}" for name, (ours, its) in pairs.items() if ours != its]
        for method in self.methods:
            if method not in paper.methods:
                lines.append(f"{method.name}: {', '.join(method.policies)} alone")
        if self.temperature not in paper.temperatures:
            lines.append(f"temperature: {self.temperature:g} is in no column of the paper")
        for sample in self.samples:
            name, rows, here = sample.set.name, sample.set.rows or sample.rows, len(sample.places)
            wanted = sample.set.samples or rows
            if (wanted, rows) != (here, sample.rows):
                lines.append(f"{name}: {here} of {sample.rows} prompts, not {wanted} of {rows}")
            if any(len(turns) != sample.set.exchanges for turns in sample.turns):
                lines.append(f"{name}: prompts without all {sample.set.exchanges} turns")
        return lines

    def use(self, labels: Mapping[str, str]) -> ProtocolUse:
        """For the result; `labels` are the drafters' short names."""
        arms = {
            one.name: tuple(f"{policy}+{labels[self.drafter(one)]}" for policy in one.policies)
            for one in self.methods
        }
        notes = (*self.missing, *self.differs, *self.protocol.remarks)
        return ProtocolUse(name=self.protocol.name, row=self.row, arms=arms, differs=notes)


def plan_run(protocol: Protocol, changes: Changes) -> ProtocolRun:
    """The run of a protocol. Raises InputError naming all that is missing where nothing is left."""
    target = changes.target or next(iter(protocol.targets))
    row = target if target in protocol.targets else next(iter(protocol.targets))
    models = _models(protocol, target, changes.drafters)
    places = {one: find_set(changes.data, one) if changes.data else [] for one in protocol.sets}
    samples = [
        take_sample(protocol, one, files, changes.samples) for one, files in places.items() if files
    ]
    missing = []
    if absent := ", ".join(
        f"{one.name} ({one.columns})" for one, files in places.items() if not files
    ):
        missing.append(f"no set in {changes.data.name if changes.data else '--data'}: {absent}")
    methods = []
    for method in protocol.methods:
        wanted = set(changes.policies) or set(method.policies)
        chosen = [one for one in method.policies if wanted & {one, f"{one}@{method.model}"}]
        if not models.get(part := method.model.partition("@")[0]):
            missing.append(f"{method.name}: no drafter; give one by --drafter {part}=NAME")
        elif chosen:
            methods.append(replace(method, policies=tuple(chosen)))
    used = [target, *(models[one.model.partition("@")[0]] for one in methods)]
    if FLASH in protocol.attention and find_spec("flash_attn") is None:
        missing.append("FlashAttention 2: transformers' plain decoding runs with sdpa")
    run = ProtocolRun(
        protocol=protocol,
        target=target,
        row=row,
        models=models,
        methods=methods,
        new_tokens=changes.new_tokens or protocol.new_tokens,
        temperature=changes.temperature or 0.0,
        dtype=changes.dtype or protocol.dtype,
        samples=samples,
        missing=missing,
        fetched=[name for name in dict.fromkeys(used) if is_absent(name)],
    )
    if not samples or not methods:
        raise InputError(
            f"{protocol.name} cannot run: {'; '.join(missing)}",
            hint="Give --data FOLDER with NAME.jsonl, NAME.parquet or a folder NAME of each set, "
            "with those columns or a text `prompt`, and --drafter PART=NAME.",
        )
    return run


def _models(protocol: Protocol, target: str, drafters: Sequence[str]) -> dict[str, str]:
    """The drafters by part: those given, else the paper's where the target is the paper's."""
    parts = {one.model.partition("@")[0] for one in protocol.methods}
    first = next(iter(next(iter(protocol.targets.values()))))
    models = dict(protocol.targets.get(target, {}))
    for name in drafters:
        match = PART.fullmatch(name)
        named = match is not None and match[1] in parts
        models |= {match[1]: match[2]} if named else {first: name}
    return models


def is_absent(name: str) -> bool:
    """Whether a model has to be fetched from the hub."""
    hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)
    return hub_id is not None and weights_source(name, download=False) is None

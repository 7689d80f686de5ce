"""Benchmarks by a paper's protocol: what a run takes from it, what is missing, what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from costmodel.errors import InputError
from lab.bench.arms.choice import ArmChoice
from lab.bench.arms.drafter_names import public_name
from lab.bench.prompts import PromptText
from lab.bench.record import PromptFile, ProtocolUse
from lab.papers.protocols import Method, Protocol, SetSample, find_set, take_sample

PART = re.compile(r"(\w+)=(.+)")
FLASH = "flash_attention_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the command line takes in place of the paper's; None where it does not.

    drafters  PART=NAME, or NAME for the paper's first part
    policies  those of the paper's to run; empty for all
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
    differs  what this run takes in place of the paper's, one sentence each
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
    differs: Sequence[str]

    def drafter(self, method: Method) -> str:
        part, at, option = method.model.partition("@")
        return self.models[part] + at + option

    @property
    def arms(self) -> ArmChoice:
        pairs = [(one, self.drafter(one)) for one in self.methods]
        flash = find_spec("flash_attn") is not None
        attention = [one for one in self.protocol.attention if flash or one != FLASH]
        return ArmChoice(
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
    samples, missing = _samples(protocol, changes)
    methods = []
    for method in protocol.methods:
        chosen = [one for one in method.policies if one in changes.policies or not changes.policies]
        if not models.get(part := method.model.partition("@")[0]):
            missing.append(f"{method.name}: no drafter; give one by --drafter {part}=NAME")
        elif chosen:
            methods.append(replace(method, policies=tuple(chosen)))
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
        differs=_differences(protocol, changes, row, models, samples),
    )
    if not samples or not methods:
        raise InputError(
            f"{protocol.name} cannot run: {'; '.join(missing)}",
            hint="Give --data FOLDER with NAME.jsonl, NAME.parquet or a folder NAME of each set, "
            "and --drafter PART=NAME.",
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


def _samples(protocol: Protocol, changes: Changes) -> tuple[list[SetSample], list[str]]:
    samples, missing = [], []
    for chosen in protocol.sets:
        files = find_set(changes.data, chosen) if changes.data else []
        if files:
            samples.append(take_sample(protocol, chosen, files, changes.samples))
        else:
            place = f"in {changes.data.name}" if changes.data else "there; give --data FOLDER"
            missing.append(f"{chosen.name}: no such set {place}")
    return samples, missing


def _differences(
    protocol: Protocol,
    changes: Changes,
    row: str,
    models: Mapping[str, str],
    samples: Sequence[SetSample],
) -> list[str]:
    taken = {
        "target": (changes.target and public_name(changes.target), row),
        "new tokens": (changes.new_tokens, protocol.new_tokens),
        "dtype": (changes.dtype, protocol.dtype),
    }
    pairs = [(name, *values) for name, values in taken.items()]
    lines = [
        f"{name}: {ours}, not {paper}" for name, ours, paper in pairs if ours not in (None, paper)
    ]
    paper = protocol.targets[row]
    lines += [
        f"{part}: {public_name(name)}, not {paper.get(part) or 'a published one'}"
        for part, name in models.items()
        if name != paper.get(part)
    ]
    lines += [f"policies: {', '.join(changes.policies)} alone"] if changes.policies else []
    if (changes.temperature or 0.0) not in protocol.temperatures:
        lines.append(f"temperature: {changes.temperature:g} is in no column of the paper")
    for sample in samples:
        name, rows, here = sample.set.name, sample.set.rows or sample.rows, len(sample.places)
        wanted = sample.set.samples or rows
        if (wanted, rows) != (here, sample.rows):
            lines.append(f"{name}: {here} of {sample.rows} prompts, not {wanted} of {rows}")
        if any(len(turns) != sample.set.exchanges for turns in sample.turns):
            lines.append(f"{name}: prompts without all {sample.set.exchanges} turns")
    return lines

"""Short names of drafters, and their description in a result."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from costmodel.errors import InputError
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.factory import BLOCK, JOINT
from decoder.model.runtime.linear import plain_state
from lab.bench.record import Model
from lab.papers.blockpilot.drafter import BlockPilotDrafter
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import SpecBlockModel
from lab.papers.specblock.updates.specblock import ADAPT, split_updater


def drafter_labels(drafters: Sequence[str]) -> dict[str, str]:
    """A short name for each drafter: the last part of a folder or hub id, all parts of an ensemble.

    Folders of one name get the folder they lie in too: `full/drafter`. Raises InputError for
    no drafter, an empty name, and two drafters with one short name.
    """
    if not drafters:
        raise InputError("there is no drafter", hint="Give --drafter ngram, or leave it out.")
    paths = {Path(split[0]) for drafter in drafters for split in map(_split, _parts(drafter))}
    names = [path.name for path in paths]
    if not all(names):
        raise InputError("the drafter's name is empty", hint="Give ngram or a folder.")
    short = {path: path.name if names.count(path.name) == 1 else _longer(path) for path in paths}
    labels: dict[str, str] = {}
    for drafter in drafters:
        pairs = map(_split, _parts(drafter))
        label = JOINT.join(short[Path(base)] + option for base, option in pairs)
        if label in labels.values() or drafter in labels:
            raise InputError(
                f"two drafters are called '{label}'",
                hint="Give each once; rename one of two folders.",
            )
        labels[drafter] = label
    return labels


def _parts(drafter: str) -> list[str]:
    """The names of the drafters that are joined by `+`; of a single drafter its own."""
    if os.path.exists(drafter):
        return [drafter]
    return [part.strip() for part in drafter.split(JOINT)]


def _split(name: str) -> tuple[str, str]:
    """A drafter's name and its option, as `@block=4`; the option is empty without one."""
    match = BLOCK.fullmatch(name) or ADAPT.fullmatch(name)
    base = name if match is None else match[1]
    return base, name[len(base) :]


def _longer(path: Path) -> str:
    return "/".join(path.parts[bool(path.anchor) :][-2:])


def describe_drafters(loaded: Sequence[tuple[str, str, Drafter]]) -> tuple[Model, ...]:
    """The drafters for a result.

    loaded  (short name, name that `--drafter` takes, drafter without updates) of each
    """
    models: list[Model] = []
    for place, (label, name, drafter) in enumerate(loaded):
        earlier = (first for first, _, other in loaded[:place] if _same_weights(drafter, other))
        models.append(replace(_model(label, name, drafter), same_as=next(earlier, None)))
    return tuple(models)


def _model(label: str, name: str, drafter: Drafter) -> Model:
    block = isinstance(drafter, DFlashDrafter)
    return Model(
        name=label,
        hash=drafter.architecture_hash,
        source=public_name(name),
        kind=_kind(drafter),
        without=drafter.model.without if isinstance(drafter, SpecBlockDrafter) else (),
        block_size=drafter.block_size if block else None,
        updates=split_updater(name)[1],
    )


def _kind(drafter: Drafter) -> str:
    if isinstance(drafter, EnsembleDrafter | CausalLMDrafter):
        return "combined" if isinstance(drafter, EnsembleDrafter) else "causal"
    return re.split("[:@+]", drafter.name)[0]


def public_name(source: str) -> str:
    """A drafter's name for a result: of local folders only the last part of the path."""
    pairs = map(_split, _parts(source))
    return JOINT.join(
        (Path(base).name if os.path.isdir(base) else base) + option for base, option in pairs
    )


def _same_weights(drafter: Drafter, other: Drafter) -> bool:
    """Whether two block drafters have equal weights; BlockPilot's predictor is left out."""
    module, other_module = _module(drafter), _module(other)
    if module is None or other_module is None or module.config != other_module.config:
        return False
    first, second = plain_state(module), plain_state(other_module)
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def _module(drafter: Drafter) -> DFlashModel | SpecBlockModel | None:
    if isinstance(drafter, BlockPilotDrafter):
        return drafter.dflash.model
    return drafter.model if isinstance(drafter, DFlashDrafter | SpecBlockDrafter) else None

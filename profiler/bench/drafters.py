"""Drafters by the names that a result gives them, and what it says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from costmodel.errors import InputError
from decoder.drafters.autoregressive import AutoregressiveDrafter
from decoder.drafters.base import Drafter
from decoder.drafters.blockpilot import BlockPilotDrafter
from decoder.drafters.combined import CombinedDrafter
from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_model import DFlashModel
from decoder.drafters.eagle3 import Eagle3Drafter
from decoder.drafters.factory import ADAPT, BLOCK, JOINT
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.specblock import SpecBlockDrafter
from decoder.drafters.specblock_model import SpecBlockModel
from decoder.training.updates import split_updater
from profiler.bench.record import Model

KINDS = (
    (NgramDrafter, "ngram"),
    (DFlashDrafter, "dflash"),
    (BlockPilotDrafter, "blockpilot"),
    (SpecBlockDrafter, "specblock"),
    (Eagle3Drafter, "eagle3"),
    (AutoregressiveDrafter, "causal"),
    (CombinedDrafter, "combined"),
)


def drafter_labels(drafters: Sequence[str]) -> dict[str, str]:
    """A short name for each drafter: of a folder or hub id its last part, of two both names.

    Folders of one name are told apart by the folders they lie in: `full/drafter`.
    Raises InputError for none, an empty one, and two that are still called the same.
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
    """The names of a joined drafter, one for any other."""
    if Path(drafter).exists():
        return [drafter]
    return [part.strip() for part in drafter.split(JOINT)]


def _split(name: str) -> tuple[str, str]:
    """A drafter's name and the option behind it, as `@block=4`; empty where there is none."""
    found = BLOCK.fullmatch(name) or ADAPT.fullmatch(name)
    base = name if found is None else found[1]
    return base, name[len(base) :]


def _longer(path: Path) -> str:
    """A path's last part and the one before: none but the folder it lies in is told."""
    return "/".join(path.parts[bool(path.anchor) :][-2:])


def describe_drafters(loaded: Sequence[tuple[str, str, Drafter]]) -> tuple[Model, ...]:
    """The drafters as a result names them.

    loaded  label, what `--drafter` takes, and the drafter of each, without its updates
    """
    models: list[Model] = []
    for place, (label, name, drafter) in enumerate(loaded):
        earlier = (known for known, _, other in loaded[:place] if _same_weights(drafter, other))
        models.append(replace(_model(label, name, drafter), same_as=next(earlier, None)))
    return tuple(models)


def _model(label: str, name: str, drafter: Drafter) -> Model:
    return Model(
        name=label,
        hash=drafter.architecture_hash,
        source=public_name(name),
        kind=next((kind for type_, kind in KINDS if isinstance(drafter, type_)), ""),
        without=drafter.model.without if isinstance(drafter, SpecBlockDrafter) else (),
        block_size=drafter.block_size if isinstance(drafter, DFlashDrafter) else None,
        updates=split_updater(name)[1],
    )


def public_name(source: str) -> str:
    """A name in which folders are named without where they lie on this machine."""
    pairs = map(_split, _parts(source))
    return JOINT.join(
        (Path(base).name if Path(base).is_dir() else base) + option for base, option in pairs
    )


def _same_weights(drafter: Drafter, other: Drafter) -> bool:
    """Whether two block drafters run the same numbers; a predictor of block sizes is left out."""
    own, theirs = _module(drafter), _module(other)
    if own is None or theirs is None or own.config != theirs.config:
        return False
    first, second = own.state_dict(), theirs.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def _module(drafter: Drafter) -> DFlashModel | SpecBlockModel | None:
    if isinstance(drafter, BlockPilotDrafter):
        return drafter.dflash.model
    return drafter.model if isinstance(drafter, DFlashDrafter | SpecBlockDrafter) else None

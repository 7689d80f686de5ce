"""Drafters by name: what `--drafter` and `TreeDecoder(drafter=...)` take.

`load_drafter` tries the functions of `RESOLVERS` in order; a further kind of name is one more
function there. Drafters with a model are imported when one is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from costmodel.errors import InputError
from costmodel.io import folder_of
from decoder.drafters.base import Drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.extensions import DRAFTERS, checkpoint_formats, extension_names, make_extension
from decoder.model.demo_model import DEMO_NAME, demo_model_folder, has_demo_model
from decoder.model.target import Target

JOINT = "+"  # between two drafters that are combined

# The trained drafter that comes with the package, for the demo model.
DEMO = "demo"
DEMO_DRAFTER = Path(__file__).parents[1] / "demo"

# Drafters that need no checkpoint.
NAMED: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}

BLOCK = re.compile(r"(.+)@block=(\d{1,4})", re.ASCII)  # a DFlash drafter and its block size


def load_drafter(name: str, target: Target) -> Drafter:
    """The drafter of a name, a checkpoint folder or a hub id, for this target.

    `ngram` reads the text alone; `demo` is the trained drafter of the package for its demo model.
    Two names joined by `+` make an ensemble, the cheaper one first: `ngram+FOLDER`. A DFlash
    drafter with `@block=N` after its name drafts blocks of another size: `FOLDER@block=4`.
    Raises InputError if nothing has this name, if the checkpoint is of no known kind or
    damaged, or if it belongs to another target.
    """
    for resolve in RESOLVERS:
        drafter = resolve(name, target)
        if drafter is not None:
            return drafter
    raise InputError(f"the config.json of {name} is not that of a drafter", hint=_hint())


def _ensemble(name: str, target: Target) -> Drafter | None:
    """Two names joined by `+`, unless a folder has that name."""
    if JOINT not in name or os.path.exists(name):
        return None
    names = name.split(JOINT)
    if len(names) != 2 or not all(part.strip() for part in names):
        raise InputError(
            f"{name} does not name two drafters",
            hint=f"Join two by {JOINT}, the cheaper one first, as ngram{JOINT}FOLDER.",
        )
    from decoder.drafters.ensemble import EnsembleDrafter

    first, second = (load_drafter(part.strip(), target) for part in names)
    return EnsembleDrafter(first, second)


def _with_suffix(name: str, target: Target) -> Drafter | None:
    """A name followed by `@block=N`."""
    if not name.strip():
        raise InputError("the drafter's name is empty", hint=_hint())
    sized = BLOCK.fullmatch(name)
    if sized is None:
        return None
    from decoder.drafters.dflash.drafter import DFlashDrafter

    drafter = load_drafter(sized[1], target)
    if not isinstance(drafter, DFlashDrafter):
        raise InputError(
            f"'{name}': only a DFlash drafter can draft blocks of another size", hint=_hint()
        )
    return DFlashDrafter(drafter.target, drafter.model, int(sized[2]))


def _named(name: str, target: Target) -> Drafter | None:
    """A drafter that needs no checkpoint."""
    return NAMED[name]() if name in NAMED else None


def _checkpoint(name: str, target: Target) -> Drafter | None:
    """A checkpoint folder or hub id, or the package's own for `demo` and the demo model's name."""
    name = shipped(name)
    if name == DEMO_NAME and has_demo_model():
        name = str(demo_model_folder())
    from decoder.drafters.published import load_published

    return load_published(name, target)


def _extension(name: str, target: Target) -> Drafter | None:
    """A drafter of another package, by `package:Class` or by its entry point's name."""
    if name == DEMO or folder_of(name) is not None:
        return None
    return make_extension(name, DRAFTERS, Drafter, target=target)


# Each gives the drafter, or None for a name of another kind; `_checkpoint` takes any name.
RESOLVERS: tuple[Callable[[str, Target], Drafter | None], ...] = (
    _ensemble,
    _with_suffix,
    _named,
    _extension,
    _checkpoint,
)


def shipped(name: str) -> str:
    """The folder of the package's drafter for `demo`; any other name unchanged."""
    return str(DEMO_DRAFTER) if name == DEMO else name


def _hint() -> str:
    from decoder.drafters.published import KINDS

    formats = checkpoint_formats()
    labels = ", ".join((*(kind.label for kind in KINDS), *formats))
    names = (name for name in extension_names(DRAFTERS) if name not in formats)
    return (
        f"Use {', '.join((*NAMED, *names))} or {DEMO}, package:Class for a "
        f"drafter of your own, or a folder or hub id of {labels}; a DFlash drafter's "
        f"name with @block=N behind it drafts blocks of N, and two drafters joined by {JOINT} are "
        "combined."
    )

"""Drafters by name: what `--drafter` and `TreeDecoder(drafter=...)` take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.io import folder_of
from costmodel.plugins import plugin_names
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.checkpoint import architectures, find_config
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.eagle3.drafter import Eagle3Drafter
from decoder.drafters.eagle3.model import is_eagle1, is_eagle3, joined_features
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.extensions import DRAFTERS, checkpoint_formats, make_extension
from decoder.model.demo_model import DEMO_NAME, demo_model_folder, has_demo_model
from decoder.model.target import Target


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of checkpoint.

    recognise  tells it from the fields of config.json
    load       makes the drafter from the folder or hub id, for a target
    """

    label: str
    recognise: Callable[[Mapping[str, Any]], bool]
    load: Callable[[str, Target], Drafter]


def is_causal_lm(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a whole language model."""
    suffixes = ("ForCausalLM", "LMHeadModel")
    return any(str(name).endswith(suffixes) for name in architectures(published))


def _causal_lm(name: str, target: Target) -> Drafter:
    """A causal LM, unless the tensors of its folder are those of an EAGLE drafter."""
    folder = folder_of(name)
    joined = joined_features(folder) if folder is not None else 0
    if joined == 2:  # a hidden state and an embedding
        raise _eagle1(name)
    return Eagle3Drafter(target, name) if joined else CausalLMDrafter.from_pretrained(name, target)


def _eagle1(name: str) -> InputError:
    return InputError(
        f"{name} is a drafter of the first EAGLE, which is not supported",
        hint="Use an EAGLE-3 drafter of the same target.",
    )


# In this order: a config of EAGLE-3 may be called a causal language model's.
KINDS = (
    Kind("a DFlash or JetSpec drafter", DFlashConfig.recognises, DFlashDrafter.from_pretrained),
    Kind("an EAGLE-3 drafter", is_eagle3, lambda name, target: Eagle3Drafter(target, name)),
    Kind("a causal language model", is_causal_lm, _causal_lm),
)


def load_published(name: str, target: Target) -> Drafter | None:
    """The drafter of a checkpoint folder or hub id; None if its config.json is of no kind.

    Raises InputError if nothing has this name, or if the checkpoint is damaged or belongs to
    another target.
    """
    published = find_config(name)
    # Other packages first: a config.json may have all fields of a kind here and some more.
    for extension in checkpoint_formats().values():
        if extension.recognises(published):
            return extension.from_pretrained(name, target)
    if is_eagle1(published):
        raise _eagle1(name)
    for kind in KINDS:
        if kind.recognise(published):
            return kind.load(name, target)
    return None


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
    if JOINT in name and not os.path.exists(name):
        names = name.split(JOINT)
        if len(names) != 2 or not all(part.strip() for part in names):
            raise InputError(
                f"{name} does not name two drafters",
                hint=f"Join two by {JOINT}, the cheaper one first, as ngram{JOINT}FOLDER.",
            )
        return EnsembleDrafter(*(load_drafter(part.strip(), target) for part in names))
    if not name.strip():
        raise InputError("the drafter's name is empty", hint=_hint())
    if (sized := BLOCK.fullmatch(name)) is not None:
        trained = load_drafter(sized[1], target)
        if not isinstance(trained, DFlashDrafter):
            raise InputError(
                f"'{sized[1]}': only a DFlash drafter can draft blocks of another size",
                hint=_hint(),
            )
        return type(trained)(trained.target, trained.model, int(sized[2]))
    if name in NAMED:
        return NAMED[name]()
    if name != DEMO and folder_of(name) is None:
        extension: Drafter | None = make_extension(name, DRAFTERS, Drafter, target=target)
        if extension is not None:
            return extension
    name = shipped(name)
    if name == DEMO_NAME and has_demo_model():
        name = str(demo_model_folder())
    drafter = load_published(name, target)
    if drafter is None:
        raise InputError(f"the config.json of {name} is not that of a drafter", hint=_hint())
    return drafter


def shipped(name: str) -> str:
    """The folder of the package's drafter for `demo`; any other name unchanged."""
    return str(DEMO_DRAFTER) if name == DEMO else name


def _hint() -> str:
    formats = checkpoint_formats()
    labels = ", ".join((*(kind.label for kind in KINDS), *formats))
    names = (name for name in plugin_names(DRAFTERS) if name not in formats)
    return (
        f"Use {', '.join((*NAMED, *names))} or {DEMO}, package:Class for a "
        f"drafter of your own, or a folder or hub id of {labels}; a DFlash drafter's "
        f"name with @block=N behind it drafts blocks of N, and two drafters joined by {JOINT} are "
        "combined."
    )

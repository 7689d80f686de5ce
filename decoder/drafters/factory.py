"""Drafters by name: what `--drafter` and `TreeDecoder(drafter=...)` take."""

from __future__ import annotations

import os
import re
from pathlib import Path

from costmodel.errors import InputError
from costmodel.io import folder_of
from costmodel.plugins import plugin_names
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.checkpoint import architectures, find_config
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.eagle3 import Eagle3Drafter, is_eagle1, is_eagle3, joined_features
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.extensions import DRAFTERS, checkpoint_formats, make_extension
from decoder.model.demo_model import DEMO_NAME, demo_model_folder, has_demo_model
from decoder.model.target import Target

LABELS = ("a DFlash or JetSpec drafter", "an EAGLE-3 drafter", "a causal language model")
CAUSAL_LM = ("ForCausalLM", "LMHeadModel")  # endings of architectures
JOINT = "+"  # between two drafters that are combined
# The trained drafter that comes with the package, for the demo model.
DEMO = "demo"
DEMO_DRAFTER = Path(__file__).parents[1] / "demo"
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
    if name == NgramDrafter.name:
        return NgramDrafter()
    if name != DEMO and folder_of(name) is None:
        extension: Drafter | None = make_extension(name, DRAFTERS, Drafter, target=target)
        if extension is not None:
            return extension
    if name == DEMO:
        name = str(DEMO_DRAFTER)
    elif name == DEMO_NAME and has_demo_model():
        name = str(demo_model_folder())
    published = find_config(name)
    # Other packages first: a config.json may have all fields of a kind here and some more.
    for form in (*checkpoint_formats().values(), DFlashDrafter):
        if form.recognises(published):
            return form.from_pretrained(name, target)
    eagle3, named = is_eagle3(published), architectures(published)
    causal = not eagle3 and any(str(one).endswith(CAUSAL_LM) for one in named)
    # What calls itself a causal LM may have the tensors of an EAGLE drafter.
    folder = folder_of(name) if causal else None
    joined = 0 if folder is None else joined_features(folder)
    if is_eagle1(published) or joined == 2:  # a hidden state and an embedding
        raise InputError(
            f"{name} is a drafter of the first EAGLE, which is not supported",
            hint="Use an EAGLE-3 drafter of the same target.",
        )
    if eagle3 or joined:
        return Eagle3Drafter(target, name)
    if causal:
        return CausalLMDrafter.from_pretrained(name, target)
    raise InputError(f"the config.json of {name} is not that of a drafter", hint=_hint())


def _hint() -> str:
    formats = checkpoint_formats()
    labels = ", ".join((*LABELS, *formats))
    names = (name for name in plugin_names(DRAFTERS) if name not in formats)
    return (
        f"Use {', '.join((NgramDrafter.name, *names))} or {DEMO}, package:Class for a "
        f"drafter of your own, or a folder or hub id of {labels}; a DFlash drafter's "
        f"name with @block=N behind it drafts blocks of N, and two drafters joined by {JOINT} are "
        "combined."
    )

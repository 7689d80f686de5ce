"""From the text of `--drafter` to a drafter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from decoder.demo_model import DEMO_NAME, demo_model_folder, has_demo_model
from decoder.drafters.autoregressive import AutoregressiveDrafter
from decoder.drafters.base import Drafter
from decoder.drafters.blockpilot import BlockPilotDrafter
from decoder.drafters.blockpilot_model import is_blockpilot
from decoder.drafters.checkpoint import find_config
from decoder.drafters.combined import CombinedDrafter
from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_config import is_dflash
from decoder.drafters.eagle3 import Eagle3Drafter
from decoder.drafters.eagle3_model import is_eagle3
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.specblock import SpecBlockDrafter
from decoder.drafters.specblock_model import is_specblock
from decoder.target import Target


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of checkpoint: how its config.json is recognised, and what loads it.

    load  from the folder or hub id and the target it drafts for
    """

    label: str
    recognise: Callable[[Mapping[str, Any]], bool]
    load: Callable[[str, Target], Drafter]


def is_causal_lm(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a whole language model."""
    architectures = published.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


JOINT = "+"  # between two drafters that are combined

# The trained drafter that comes with the package, for the demo model.
DEMO = "demo"
DEMO_DRAFTER = Path(__file__).parents[1] / "demo"

# Drafters that need no checkpoint.
NAMED: Mapping[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}

BLOCK = re.compile(r"(.+)@block=(\d{1,4})", re.ASCII)  # a DFlash drafter and its block size
ADAPT = re.compile(r"(.+)@adapt=(.*)")  # a drafter that is updated between texts, and how

# In this order: a SpecBlock config has an EAGLE-3 one's fields too, and an EAGLE-3 config may
# also call itself a causal language model.
KINDS = (
    Kind("a BlockPilot predictor", is_blockpilot, BlockPilotDrafter.from_pretrained),
    Kind("a DFlash drafter", is_dflash, lambda name, target: DFlashDrafter(target, name)),
    Kind("a SpecBlock drafter", is_specblock, lambda name, target: SpecBlockDrafter(target, name)),
    Kind("an EAGLE-3 drafter", is_eagle3, lambda name, target: Eagle3Drafter(target, name)),
    Kind("a causal language model", is_causal_lm, AutoregressiveDrafter.from_pretrained),
)


def load_drafter(name: str, target: Target) -> Drafter:
    """The drafter of a name, a checkpoint folder or a hub id, for this target.

    `demo` is the drafter for the demo model that comes with the package. Two names joined by
    `+` are combined, the cheaper one first: `ngram+FOLDER`.
    A DFlash drafter drafts another block than that of its training with `@block=N` behind
    its name, as in `FOLDER@block=4`.
    Raises InputError where nothing is found, where its kind is not known, where the
    checkpoint is damaged, and where it belongs to another target.
    """
    if JOINT in name and not Path(name).exists():
        return _combined(name.split(JOINT), target)
    if not name.strip():
        raise InputError("the drafter's name is empty", hint=_hint())
    adapted = ADAPT.fullmatch(name)
    if adapted is not None:
        raise InputError(
            f"'{name}': a drafter is updated between the texts of `rooftree bench` only",
            hint=f"Use {adapted[1]} here; in Python, decoder.training.updates.updated wraps one.",
        )
    sized = BLOCK.fullmatch(name)
    if sized is not None:
        return _with_block(load_drafter(sized[1], target), int(sized[2]), name)
    if name in NAMED:
        return NAMED[name]()
    name = shipped(name)
    if name == DEMO_NAME and has_demo_model():
        name = str(demo_model_folder())
    published = find_config(name)
    for kind in KINDS:
        if kind.recognise(published):
            return kind.load(name, target)
    raise InputError(f"the config.json of {name} is not that of a drafter", hint=_hint())


def shipped(name: str) -> str:
    """The folder of the drafter that comes with the package for `demo`, else the name."""
    return str(DEMO_DRAFTER) if name == DEMO else name


def _combined(names: list[str], target: Target) -> CombinedDrafter:
    if len(names) != 2 or not all(name.strip() for name in names):
        raise InputError(
            f"{JOINT.join(names)} does not name two drafters",
            hint=f"Join two by {JOINT}, the cheaper one first, as ngram{JOINT}FOLDER.",
        )
    first, second = (load_drafter(name.strip(), target) for name in names)
    return CombinedDrafter(first, second, ranks=target.ranks)


def _with_block(drafter: Drafter, size: int, name: str) -> Drafter:
    if not isinstance(drafter, DFlashDrafter):
        raise InputError(
            f"'{name}': only a DFlash drafter can draft blocks of another size", hint=_hint()
        )
    return DFlashDrafter(drafter.target, drafter.model, size)


def _hint() -> str:
    labels = ", ".join(kind.label for kind in KINDS)
    return (
        f"Use {', '.join(NAMED)} or {DEMO}, or a folder or hub id of {labels}; a DFlash drafter's "
        f"name with @block=N behind it drafts blocks of N, and two drafters joined by {JOINT} are "
        "combined."
    )

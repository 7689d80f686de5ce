"""The published formats of drafter checkpoints, each with its drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.errors import InputError
from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.checkpoint import architectures, find_config
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import is_dflash
from decoder.drafters.eagle3.drafter import Eagle3Drafter
from decoder.drafters.eagle3.model import is_eagle3
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import BlockPilotDrafter, is_blockpilot
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import is_released, is_specblock


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


def refuse_released_specblock(name: str, target: Target) -> Drafter:
    """Raise InputError: the released SpecBlock computes something else than this package's."""
    raise InputError(
        f"'{name}' is a SpecBlock checkpoint in its authors' format, which is not read: it has "
        "K prefix rows a token and another rank head",
        hint="`rooftree train-drafter --kind specblock` trains one for this decoder.",
    )


# In this order: a SpecBlock config has an EAGLE-3 one's fields too, and an EAGLE-3 config may
# also call itself a causal language model.
KINDS = (
    Kind("a BlockPilot predictor", is_blockpilot, BlockPilotDrafter.from_pretrained),
    Kind("a DFlash drafter", is_dflash, lambda name, target: DFlashDrafter(target, name)),
    Kind("a released SpecBlock drafter", is_released, refuse_released_specblock),
    Kind("a SpecBlock drafter", is_specblock, lambda name, target: SpecBlockDrafter(target, name)),
    Kind("an EAGLE-3 drafter", is_eagle3, lambda name, target: Eagle3Drafter(target, name)),
    Kind("a causal language model", is_causal_lm, CausalLMDrafter.from_pretrained),
)


def load_published(name: str, target: Target) -> Drafter | None:
    """The drafter of a checkpoint folder or hub id; None if its config.json is of no kind.

    Raises InputError if nothing has this name, or if the checkpoint is damaged or belongs to
    another target.
    """
    published = find_config(name)
    for kind in KINDS:
        if kind.recognise(published):
            return kind.load(name, target)
    return None

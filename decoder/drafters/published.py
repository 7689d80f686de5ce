"""The published formats of drafter checkpoints, each with its drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decoder.drafters.base import Drafter
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.checkpoint import architectures, find_config
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import is_dflash
from decoder.drafters.eagle3.drafter import Eagle3Drafter
from decoder.drafters.eagle3.model import is_eagle3
from decoder.extensions import checkpoint_formats
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


# In this order: an EAGLE-3 config may also call itself a causal language model.
KINDS = (
    Kind("a DFlash drafter", is_dflash, lambda name, target: DFlashDrafter(target, name)),
    Kind("an EAGLE-3 drafter", is_eagle3, lambda name, target: Eagle3Drafter(target, name)),
    Kind("a causal language model", is_causal_lm, CausalLMDrafter.from_pretrained),
)


def load_published(name: str, target: Target) -> Drafter | None:
    """The drafter of a checkpoint folder or hub id; None if its config.json is of no kind.

    Raises InputError if nothing has this name, or if the checkpoint is damaged or belongs to
    another target.
    """
    published = find_config(name)
    # Other packages first: a config.json may have all fields of an EAGLE-3 one and some more.
    for extension in checkpoint_formats().values():
        if extension.recognises(published):
            drafter: Drafter = extension.from_pretrained(name, target)
            return drafter
    for kind in KINDS:
        if kind.recognise(published):
            return kind.load(name, target)
    return None

"""`FOLDER@adapt=HOW`: which drafters can be updated while they serve, and what decides on it.

Apart from `decoder.drafters.factory`, since updates read what the engine generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import numpy as np
import torch

from costmodel.errors import InputError
from decoder.drafters.base import Drafter
from decoder.drafters.factory import ADAPT
from decoder.drafters.specblock import SpecBlockDrafter
from decoder.training.adaptation import AdaptiveDrafter
from decoder.training.bandit import AlwaysUpdate, Bandit, BanditSettings, Updater
from decoder.training.specblock_adaptation import adaptive_specblock

# The SpecBlock paper's bandit and baseline (A.4), and the two ablations of its table 2.
UPDATERS: Mapping[str, Callable[[np.random.Generator], Updater]] = {
    "bandit": lambda random: Bandit(BanditSettings(), random),
    "always": lambda random: AlwaysUpdate(),
    "no-bandit": lambda random: AlwaysUpdate(every=1),
    "no-heads": lambda random: Bandit(BanditSettings(actions=("full",)), random),
}


def split_updater(name: str) -> tuple[str, str]:
    """What `--drafter` takes without `@adapt=HOW`, and HOW; empty where it has none.

    Raises InputError for an unknown HOW.
    """
    found = ADAPT.fullmatch(name)
    if found is None:
        return name, ""
    if found[2] not in UPDATERS:
        raise InputError(
            f"'{name}': '{found[2]}' does not say how a drafter is updated",
            hint=f"Use @adapt={', @adapt='.join(UPDATERS)}.",
        )
    return found[1], found[2]


def updatable(drafter: Drafter, name: str) -> SpecBlockDrafter:
    """The drafter. Raises InputError where no update of its kind is known."""
    if not isinstance(drafter, SpecBlockDrafter):
        raise InputError(
            f"'{name}': only a SpecBlock drafter can be updated while it serves",
            hint="Leave @adapt out, or train one with `rooftree train-drafter --kind specblock`.",
        )
    return drafter


def updated(drafter: SpecBlockDrafter, how: str, random: np.random.Generator) -> AdaptiveDrafter:
    """A copy of the drafter that is updated between texts; the one given stays as it is.

    how     a name of `UPDATERS`
    random  for the bandit's exploration
    """
    with torch.inference_mode(False):
        own = SpecBlockDrafter(drafter.target, deepcopy(drafter.model), drafter.growth)
    return adaptive_specblock(own, UPDATERS[how](random))

"""From a target to a SpecBlock drafter in a folder, as `recipe` does for DFlash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from decoder.drafters.specblock import SpecBlockDrafter
from decoder.drafters.specblock_model import SpecBlockModel, save_specblock
from decoder.loading import LoadedModel
from decoder.training.corpus import Collecting
from decoder.training.loop import Say, Settings
from decoder.training.recipe import Trained, begun, gather, learn
from decoder.training.specblock import SpecBlockObjective
from decoder.training.specblock_start import SpecBlockSettings, first_model, frequent_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBlockRecipe:
    """Everything that decides which drafter comes out.

    vocabulary  tokens of the reduced vocabulary, which takes the place of `drafter.tokens`
    settings    the paper's clip of 0.5, beside this project's other defaults
    start       a trained drafter to go on from, as `load_drafter` takes it; its sizes then count
    """

    collecting: Collecting = field(default_factory=Collecting)
    vocabulary: int = 8192
    drafter: SpecBlockSettings = field(default_factory=SpecBlockSettings)
    settings: Settings = field(default_factory=lambda: Settings(learning_rate=1.5e-3, clip=0.5))
    start: str | None = None


def train_specblock(
    loaded: LoadedModel,
    folder: Path,
    recipe: SpecBlockRecipe,
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Trained:
    """Collect, train and save a SpecBlock drafter; what `folder` has is gone on with.

    prompts  to train on; none: the ones made here
    Raises InputError for evaluation prompts, for a folder of another recipe, and for a start
    that does not fit the target.
    """
    first = None if recipe.start is None else _begun_model(loaded, recipe.start)
    texts = gather(loaded, folder, recipe.collecting, prompts, say)
    kept = frequent_tokens(texts[0], recipe.vocabulary, loaded.architecture.vocab)
    wanted = replace(recipe.drafter, tokens=kept)
    generator = torch.Generator().manual_seed(recipe.settings.seed)
    model = first or first_model(loaded, wanted, generator)
    objective = SpecBlockObjective(loaded, wanted, model)
    trained = learn(loaded, folder, texts, objective, recipe.settings, say)
    save_specblock(trained.folder, objective.model.bfloat16())
    return trained


def _begun_model(loaded: LoadedModel, start: str) -> SpecBlockModel:
    """A trained drafter in float32, its head learning only where it is its own."""
    drafter = begun(loaded, start, SpecBlockDrafter, "SpecBlock")
    model = drafter.model.float().requires_grad_()
    model.lm_head.weight.requires_grad_(model.config.own_head)
    return model

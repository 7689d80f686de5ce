"""Training of a block drafter into a folder, and the steps that all kinds of drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from costmodel.errors import InputError
from decoder.device import parse_dtype, select_device
from decoder.drafters.dflash.drafter import DFlashDrafter, check_fit
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.factory import load_drafter
from decoder.model.loading import LoadedModel, default_target, load_model
from decoder.model.making import make_target
from lab.training.corpus import Collecting, TrainingText, collect, read_corpus, split
from lab.training.dflash import (
    DFlashObjective,
    fresh_config,
    fresh_model,
    head_tokens,
    trainable_copy,
)
from lab.training.features import Examples
from lab.training.kinds import KINDS
from lab.training.loop import Objective, Say, TrainingSettings, train

Kind = TypeVar("Kind")
DRAFTER = "drafter"  # folder of the finished drafter, beside the texts and the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings that determine the trained drafter.

    drafter  sizes and loss of its kind: a `DFlashTraining` or `SpecBlockSettings`
    start    name of a trained drafter to continue from, whose sizes then apply; DFlash's backbone
             serves any kind
    kind     of block drafter
    """

    drafter: Any
    kind: str = "dflash"
    collecting: Collecting = field(default_factory=Collecting)
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    start: str | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained drafter.

    folder   config.json and model.safetensors, as `--drafter` takes them
    texts    numbers of training texts and of held-out texts
    tokens   of the training texts that the target wrote
    history  a row for each validation (lab/training/loop.py)
    """

    folder: Path
    texts: tuple[int, int]
    tokens: int
    history: list[dict[str, float]]


def load_target(name: str | None) -> LoadedModel:
    """A target with pretrained weights, downloaded if needed; None: the default of the device."""
    device = select_device(None)
    dtype, name = parse_dtype(None, device), name or default_target(device)
    return load_model(name, weights="pretrained", dtype=dtype, device=device, download=True)


def train_dflash(
    loaded: LoadedModel,
    folder: Path,
    recipe: Recipe,
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Trained:
    """Collect texts, train and save a block drafter; a run that `folder` holds is continued.

    prompts  to train on; none for generated ones
    Raises InputError for evaluation prompts, for a folder of another recipe, and for a start
    that does not fit the target.
    """
    kind, sizes = KINDS[recipe.kind], recipe.drafter
    start = None if recipe.start is None else _begun_model(loaded, recipe.start, recipe.kind)
    mask, shifted = mask_token(loaded), True
    if start is not None:
        begun = start.config
        mask, shifted = begun.mask_token_id, begun.shifted
        # Rows of Domino are always shifted, so that its first one drafts as well.
        block = begun.block_size - (recipe.kind == "domino" and not shifted)
        layers, read = begun.layers, begun.target_layer_ids
        sizes = replace(sizes, layers=layers, block_size=block, target_layers=read)
    published = fresh_config(loaded, sizes, mask, recipe.kind, shifted=shifted)
    config = kind.drafter.model_type.config_type.parse(published)
    check_fit(config, make_target(loaded, owned=False))
    texts = gather(loaded, folder, recipe.collecting, prompts, say)
    if start is None or start.head_tokens is None:
        tokens = head_tokens(texts[0], sizes.vocabulary, loaded.architecture.vocab)
    else:
        tokens = torch.from_numpy(start.head_tokens)
    if start is not None and start.config.name == recipe.kind:
        model = start
    else:
        model = fresh_model(loaded, config, recipe.settings.seed, tokens)
        if start is not None:
            model.load_state_dict(start.state_dict(), strict=False)
    if kind.added is None:  # without tables that belong to the tokens of its head
        model.head_tokens = tokens.numpy()
    objective = DFlashObjective(loaded, model, recipe.drafter)
    trained = learn(loaded, folder, texts, objective, recipe.settings, say)
    model.bfloat16().save(trained.folder)
    return trained


def _begun_model(loaded: LoadedModel, start: str, kind: str) -> DFlashModel:
    """A trained drafter in float32, of this kind or one of DFlash."""
    model = trainable_copy(begun(loaded, start, DFlashDrafter, "block").model)
    config = model.config
    windows = any(window for window, _ in config.kinds)
    changed = windows or config.embedding_scale != 1 or config.logit_scale != 1
    if changed or config.softcap or config.name not in (kind, "dflash"):
        raise InputError(
            f"the drafter {start} is of the kind {config.name}, or has windows, scales or a cap",
            hint=f"Begin from one of {kind} or dflash without these, or without --from.",
        )
    return model


def begun(loaded: LoadedModel, start: str, kind: type[Kind], label: str) -> Kind:
    """The trained drafter to continue from. Raises InputError if it is of another kind."""
    drafter = load_drafter(start, make_target(loaded, owned=False))
    if not isinstance(drafter, kind):
        raise InputError(f"{start} is no {label} drafter", hint="Choose its --kind.")
    return drafter


def gather(
    loaded: LoadedModel, folder: Path, wanted: Collecting, prompts: Sequence[str], say: Say
) -> tuple[list[TrainingText], list[TrainingText]]:
    """Training texts and held-out texts, collected as far as the folder lacks them."""
    collect(loaded, folder / "texts", wanted, prompts, say)
    return split(read_corpus(folder / "texts", loaded.architecture.vocab))


def learn(
    loaded: LoadedModel,
    folder: Path,
    texts: tuple[list[TrainingText], list[TrainingText]],
    objective: Objective,
    settings: TrainingSettings,
    say: Say,
) -> Trained:
    """Train an objective's model in place, for a drafter that the caller then saves.

    The features lie beside the texts, so that drafters whose folders link to texts share them.
    """
    beside = (folder / "texts").resolve().parent
    training, held_out = (Examples(loaded, side, objective.layers, beside) for side in texts)
    history = train(objective, training, held_out, settings, folder, say)
    written = sum(len(text.tokens) - text.prompt_tokens for text in texts[0])
    return Trained(folder / DRAFTER, (len(training), len(held_out)), written, history)


def mask_token(loaded: LoadedModel) -> int:
    """A token that does not occur in texts, for the masks of a block.

    The last special token that neither begins, ends nor pads a text; without one, the last of
    the vocabulary, which most models do not use.
    """
    tokenizer = loaded.tokenizer()
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    free = [number for number, token in added.items() if token.special and number not in used]
    return max(free, default=loaded.architecture.vocab - 1)

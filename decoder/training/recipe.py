"""From a target to a drafter in a folder: texts, features, training, the published format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decoder.drafters.dflash_model import DFlashModel, save_dflash
from decoder.loading import LoadedModel
from decoder.training.corpus import Collecting, collect, read_corpus, split
from decoder.training.dflash import (
    DFlashObjective,
    DFlashTraining,
    fresh_config,
    fresh_model,
    head_tokens,
)
from decoder.training.features import Examples
from decoder.training.loop import Say, Settings, train

DRAFTER = "drafter"  # folder of the finished drafter, beside the texts and the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides which drafter comes out."""

    collecting: Collecting = field(default_factory=Collecting)
    drafter: DFlashTraining = field(default_factory=DFlashTraining)
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished drafter.

    folder      config.json and model.safetensors, as `--drafter` takes them
    texts       to train on, and held out; with the tokens that the target wrote in them
    history     a row for each validation (decoder/training/loop.py)
    """

    folder: Path
    texts: tuple[int, int]
    tokens: int
    history: list[dict[str, float]]


def train_dflash(
    loaded: LoadedModel,
    folder: Path,
    recipe: Recipe,
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Trained:
    """Collect, train and save a DFlash drafter for this target; what `folder` has is gone on with.

    prompts  to train on; none: the ones made here
    Raises InputError for evaluation prompts and for a folder of another recipe.
    """
    collect(loaded, folder / "texts", recipe.collecting, prompts, say)
    training, held_out = split(read_corpus(folder / "texts"))
    published = fresh_config(loaded, recipe.drafter, mask_token(loaded))
    model = fresh_model(loaded, published, recipe.settings.seed)
    vocab = loaded.architecture.vocab
    kept = head_tokens(training, recipe.drafter.vocabulary, vocab)
    objective = DFlashObjective(loaded, model, recipe.drafter, kept)
    layers = [number + 1 for number in model.config.target_layer_ids]
    history = train(
        objective,
        Examples(loaded, training, layers, folder),
        Examples(loaded, held_out, layers, folder),
        recipe.settings,
        folder,
        say,
    )
    finished = save_trained(folder / DRAFTER, model)
    written = sum(len(text.tokens) - text.prompt_tokens for text in training)
    return Trained(finished, (len(training), len(held_out)), written, history)


def save_trained(folder: Path, model: DFlashModel) -> Path:
    """Write the drafter in bfloat16, in the published format."""
    save_dflash(folder, model.bfloat16())
    return folder


def mask_token(loaded: LoadedModel) -> int:
    """A token that texts do not hold, for the masks of a block.

    The last special one that neither begins, ends nor pads; else the last of the vocabulary,
    which in most models is a filler.
    """
    tokenizer = loaded.tokenizer()
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    free = [number for number, token in added.items() if token.special and number not in used]
    return max(free, default=loaded.architecture.vocab - 1)

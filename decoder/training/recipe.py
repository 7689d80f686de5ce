"""From a target to a drafter in a folder: texts, features, training, the published format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from costmodel.errors import InputError
from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_model import DFlashModel, save_dflash
from decoder.drafters.factory import load_drafter
from decoder.loading import LoadedModel
from decoder.target import Target
from decoder.training.corpus import Collecting, Text, collect, read_corpus, split
from decoder.training.dflash import (
    DFlashObjective,
    DFlashTraining,
    fresh_config,
    fresh_model,
    head_tokens,
)
from decoder.training.features import Examples
from decoder.training.loop import Objective, Say, Settings, train

Kind = TypeVar("Kind")
DRAFTER = "drafter"  # folder of the finished drafter, beside the texts and the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides which drafter comes out.

    start  a trained drafter to go on from, as `load_drafter` takes it; its sizes then count
    """

    collecting: Collecting = field(default_factory=Collecting)
    drafter: DFlashTraining = field(default_factory=DFlashTraining)
    settings: Settings = field(default_factory=Settings)
    start: str | None = None


class FeatureObjective(Objective, Protocol):
    """One whose model reads hidden states of the target, by their indices."""

    layers: tuple[int, ...]


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
    Raises InputError for evaluation prompts, for a folder of another recipe, and for a start
    that does not fit the target.
    """
    model = _first_model(loaded, recipe)
    texts = gather(loaded, folder, recipe.collecting, prompts, say)
    vocab = loaded.architecture.vocab
    kept = head_tokens(texts[0], recipe.drafter.vocabulary, vocab)
    model.head_tokens = kept.numpy()
    objective = DFlashObjective(loaded, model, recipe.drafter, kept)
    trained = learn(loaded, folder, texts, objective, recipe.settings, say)
    save_dflash(trained.folder, model.bfloat16())
    return trained


def _first_model(loaded: LoadedModel, recipe: Recipe) -> DFlashModel:
    """The drafter that training begins with, in float32."""
    if recipe.start is None:
        published = fresh_config(loaded, recipe.drafter, mask_token(loaded))
        return fresh_model(loaded, published, recipe.settings.seed)
    model = begun(loaded, recipe.start, DFlashDrafter, "DFlash").model.float()
    if set(model.config.kinds) != {(None, False)}:
        raise InputError(
            f"the drafter {recipe.start} has layers with windows or causal attention",
            hint="Training knows full attention within a block; begin without --from.",
        )
    return model.requires_grad_()


def begun(loaded: LoadedModel, start: str, kind: type[Kind], called: str) -> Kind:
    """The trained drafter to go on from. Raises InputError where it is of another kind."""
    drafter = load_drafter(start, Target(loaded, owned=False))
    if not isinstance(drafter, kind):
        raise InputError(f"{start} is no {called} drafter", hint="Choose its --kind.")
    return drafter


def gather(
    loaded: LoadedModel, folder: Path, wanted: Collecting, prompts: Sequence[str], say: Say
) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out, collected where the folder lacks them."""
    collect(loaded, folder / "texts", wanted, prompts, say)
    return split(read_corpus(folder / "texts"))


def learn(
    loaded: LoadedModel,
    folder: Path,
    texts: tuple[list[Text], list[Text]],
    objective: FeatureObjective,
    settings: Settings,
    say: Say,
) -> Trained:
    """Train an objective's model in place; where its drafter is to be saved, and how it went."""
    training, held_out = (Examples(loaded, side, objective.layers, folder) for side in texts)
    history = train(objective, training, held_out, settings, folder, say)
    written = sum(len(text.tokens) - text.prompt_tokens for text in texts[0])
    return Trained(folder / DRAFTER, (len(training), len(held_out)), written, history)


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

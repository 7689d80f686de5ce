"""From a DFlash drafter to a BlockPilot predictor in a folder: prompts, sweep, training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from costmodel.errors import InputError
from decoder.drafters.blockpilot_model import save_predictor
from decoder.drafters.dflash import DFlashDrafter
from decoder.target import Target
from decoder.training.blockpilot import PilotResult, PilotTraining, drafter_name, train_predictor
from decoder.training.blockpilot_data import Sweep, collect_sweeps
from decoder.training.corpus import read_corpus
from decoder.training.refused import refuse

SWEEPS, PILOT = "sweeps", "pilot"  # folders of what is collected, and of the predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRecipe:
    """Everything that decides which predictor comes out, prompts aside."""

    sweep: Sweep = field(default_factory=Sweep)
    training: PilotTraining = field(default_factory=PilotTraining)


def train_blockpilot(
    target: Target,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    recipe: PilotRecipe,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, PilotResult]:
    """Sweep, train and save; the folder that `--drafter` takes, and how it went.

    drafter  folder or hub id of a DFlash drafter
    prompts  token ids, as `prompts_of_texts` or `prompts_of_corpus` give them
    A run that was stopped goes on. Raises InputError for a folder of another recipe.
    """
    dflash = DFlashDrafter(target, drafter)
    sweeps = collect_sweeps(target, dflash.model, prompts, recipe.sweep, folder / SWEEPS, say)
    place = folder / PILOT
    result = train_predictor(
        sweeps, drafter_name(drafter, place), recipe.training, str(target.device)
    )
    save_predictor(place, result.predictor)
    return place, result


def prompts_of_texts(target: Target, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, in the chat template where there is one.

    Raises InputError where one belongs to a set on which drafters are measured.
    """
    refuse((f"training prompt {number}", text) for number, text in enumerate(texts, 1))
    tokenizer = target.loaded.tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return [list(tokenizer(text)["input_ids"]) for text in texts]
    turns = [[{"role": "user", "content": text}] for text in texts]
    return [
        list(
            tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
        for turn in turns
    ]


def prompts_of_corpus(folder: Path, most: int) -> list[list[int]]:
    """The first different prompts of texts that `train-drafter` collected, evaluation-free."""
    if most < 1:
        raise InputError(f"1 prompt or more is needed, got {most}")
    prompts = (text.tokens[: text.prompt_tokens] for text in read_corpus(folder))
    return [list(prompt) for prompt in dict.fromkeys(prompts)][:most]

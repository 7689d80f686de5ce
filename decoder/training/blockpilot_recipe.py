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
from decoder.training.blockpilot_data import Source, Sweep, collect_sweeps
from decoder.training.blockpilot_decoding import Decoding
from decoder.training.blockpilot_known import Known
from decoder.training.corpus import Text, read_corpus
from decoder.training.refused import refuse

SWEEPS, PILOT = "sweeps", "pilot"  # folders of what is collected, and of the predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRecipe:
    """Everything that decides which predictor comes out, prompts aside."""

    sweep: Sweep = field(default_factory=Sweep)
    training: PilotTraining = field(default_factory=PilotTraining)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The first `most` texts of different prompts in a folder that `train-drafter` collected."""

    folder: Path
    most: int

    def texts(self) -> list[Text]:
        """Evaluation prompts were left out when they were collected; InputError without any."""
        if self.most < 1:
            raise InputError(f"1 prompt or more is needed, got {self.most}")
        first: dict[tuple[int, ...], Text] = {}
        for text in read_corpus(self.folder):
            first.setdefault(text.tokens[: text.prompt_tokens], text)
        return list(first.values())[: self.most]


def train_blockpilot(
    target: Target,
    drafter: str,
    prompts: Sequence[Sequence[int]] | Corpus,
    folder: Path,
    recipe: PilotRecipe,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, PilotResult]:
    """Sweep, train and save; the folder that `--drafter` takes, and how it went.

    drafter  folder or hub id of a DFlash drafter
    prompts  token ids, as `prompts_of_texts` gives them, to decode; or texts that are known
    A run that was stopped goes on. Raises InputError for a folder of another recipe.
    """
    dflash = DFlashDrafter(target, drafter)
    source: Source
    if isinstance(prompts, Corpus):
        source = Known(target, dflash.model, prompts.texts(), recipe.sweep)
    else:
        source = Decoding(target, dflash.model, prompts, recipe.sweep)
    sweeps = collect_sweeps(source, folder / SWEEPS, say)
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

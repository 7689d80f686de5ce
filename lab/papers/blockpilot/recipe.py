"""Training of BlockPilot's predictor into a folder: texts, sweep, classifier of block sizes.

Zhang et al., "BlockPilot", 2.3 and 3.1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.io import folder_of
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import (
    HIDDEN,
    LAYERS,
    BlockPredictor,
    PilotConfig,
    save_predictor,
)
from lab.papers.blockpilot.sweeps import (
    Best,
    BlockSizeSample,
    Sweep,
    Sweeper,
    best_candidates,
    by_block_size,
)
from lab.training.corpus import TrainingText

PILOT = "pilot"  # folder of the predictor
SAY_EVERY = 50  # texts


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotTraining:
    """The settings of a predictor's training; Adam, epochs and learning rate as in the paper (3.1).

    texts           most texts to learn from
    hidden, layers  of the predictor
    dropout         as in the published code
    batch           samples a step; not given in the paper
    held_out        share of the samples that are used to choose the epoch; at 0 the last is kept
    best            the criterion for the best block size
    """

    texts: PositiveInt = 1000
    epochs: PositiveInt = 100
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-5
    batch: PositiveInt = 32
    hidden: PositiveInt = HIDDEN
    layers: PositiveInt = LAYERS
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    best: Best = "length"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotFigures:
    """Mean acceptance lengths over some samples, bonus token included.

    chosen     with the block sizes that the predictor chooses
    fixed      with each candidate for all samples, [candidates]
    hindsight  with the best candidate of each sample
    right      share of samples for which the predictor gives the label
    """

    samples: int
    chosen: float
    fixed: tuple[float, ...]
    hindsight: float
    right: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotResult:
    """A trained predictor, its epoch (from 1), and its figures.

    held_out  of the samples by which the epoch was chosen, so biased by that; None without any
    """

    predictor: BlockPredictor
    epoch: int
    trained: PilotFigures
    held_out: PilotFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotRecipe:
    """All settings that determine the trained predictor, but for the prompts."""

    sweep: Sweep = field(default_factory=Sweep)
    training: PilotTraining = field(default_factory=PilotTraining)


def distinct(texts: Sequence[TrainingText], most: int) -> list[TrainingText]:
    """The first texts of up to `most` different prompts."""
    first: dict[tuple[int, ...], TrainingText] = {}
    for text in texts:
        first.setdefault(text.tokens[: text.prompt_tokens], text)
    return list(first.values())[:most]


def train_blockpilot(
    target: Target,
    drafter: str,
    texts: Sequence[TrainingText],
    folder: Path,
    recipe: PilotRecipe,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, PilotResult, list[dict[str, float]]]:
    """Sweep, train and save a predictor; returns its folder, the result, and figure 3.

    drafter  folder or hub id of a DFlash drafter
    texts    that the target wrote, of different prompts
    """
    model, settings = DFlashDrafter(target, drafter).model, recipe.training
    sweeper, samples = Sweeper(target, model, texts, recipe.sweep), []
    for number in range(len(texts)):
        samples.append(sweeper.sample(number))
        if not (number + 1) % SAY_EVERY:
            say(f"text {number + 1} of {len(texts)}")
    place, vocab = folder / PILOT, target.architecture.vocab
    config = PilotConfig(
        drafter=drafter_name(drafter, place),
        drafter_hash=model.config.hash(vocab),
        block_size=model.config.block_size,
        candidates=sweeper.candidates,
        vocab=vocab,
        hidden=settings.hidden,
        layers=settings.layers,
        input=recipe.sweep.input,
        width=len(samples[0].input) if samples else None,
    )
    costs = sweeper.cycle_s[1:] if settings.best == "rate" and samples else None
    labels = best_candidates(samples, costs)
    result = train_predictor(samples, labels, config, settings, str(target.device))
    save_predictor(place, result.predictor)
    return place, result, by_block_size(samples, sweeper.candidates, sweeper.cycle_s)


def train_predictor(
    samples: list[BlockSizeSample],
    labels: torch.Tensor,
    config: PilotConfig,
    settings: PilotTraining,
    device: str = "cpu",
) -> PilotResult:
    """A predictor that learns from samples.

    labels  [samples]: the index of the best candidate; -1 for samples without one
    Minimises the cross-entropy of equation (8). All draws come from one generator, so a seed
    gives the same weights on the same machine. Raises InputError if no sample has a label.
    """
    usable = [index for index, label in enumerate(labels.tolist()) if label >= 0]
    generator = torch.Generator().manual_seed(settings.seed)
    order = [usable[i] for i in torch.randperm(len(usable), generator=generator).tolist()]
    held_out = order[: int(len(order) * settings.held_out)]
    training = order[len(held_out) :]
    if not training:
        raise InputError(
            "no text tells which block size is best",
            hint="Give more texts, and more than one new token of each.",
        )
    with torch.device("meta"):
        model = BlockPredictor(config)
    model.to_empty(device="cpu").draw(generator)
    model.to(device)

    def figures(rows: list[int]) -> PilotFigures:
        return measure(model, [samples[row] for row in rows], labels[rows])

    inputs = torch.stack([samples[row].input for row in training])
    pairs = (inputs.to(device), labels[training].to(device))
    score = (lambda: figures(held_out).chosen) if held_out else None
    epoch = _fit(model, pairs, score, settings, generator)
    return PilotResult(
        predictor=model.eval().requires_grad_(False),
        epoch=epoch,
        trained=figures(training),
        held_out=figures(held_out) if held_out else None,
    )


@torch.inference_mode()
def measure(
    model: BlockPredictor, samples: Sequence[BlockSizeSample], labels: torch.Tensor
) -> PilotFigures:
    """The figures of a predictor on samples that all have a label [samples]."""
    inputs = torch.stack([sample.input for sample in samples])
    chosen = model(inputs.to(model.scores.weight.device)).argmax(-1).cpu()
    lengths = torch.stack([sample.lengths for sample in samples])  # [samples, candidates]
    return PilotFigures(
        samples=len(samples),
        chosen=float(lengths.gather(1, chosen[:, None]).mean()),
        fixed=tuple(lengths.mean(0).tolist()),
        hindsight=float(lengths.amax(1).mean()),
        right=float((chosen == labels.cpu()).double().mean()),
    )


def drafter_name(drafter: str, folder: Path) -> str:
    """The drafter's name in a predictor's config: a hub id, or a path relative to `folder`."""
    place = folder_of(drafter)
    return drafter if place is None else os.path.relpath(place.resolve(), folder.resolve())


def _fit(
    model: BlockPredictor,
    pairs: tuple[torch.Tensor, torch.Tensor],
    score: Callable[[], float] | None,
    settings: PilotTraining,
    generator: torch.Generator,
) -> int:
    """Train in place; returns the epoch with the highest score, or the last without scores.

    pairs  inputs [samples, width] and labels [samples]
    """
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    inputs, labels = pairs
    best, best_epoch, weights = -1.0, settings.epochs, None
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(len(labels), generator=generator)
        for rows in order.to(labels.device).split(settings.batch):
            scores = model(inputs[rows], settings.dropout, generator)
            optimiser.zero_grad()
            functional.cross_entropy(scores, labels[rows]).backward()
            optimiser.step()
        if score is not None and (value := score()) > best:
            best, best_epoch = value, epoch
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if weights is not None:
        model.load_state_dict(weights)
    return best_epoch

"""Training of BlockPilot's predictor: a classifier of block sizes (Zhang et al., 2.3, 3.1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from costmodel.errors import InputError
from decoder.drafters.blockpilot_model import HIDDEN, LAYERS, BlockPredictor, PilotConfig
from decoder.training.blockpilot_data import Best, Sample, Sweeps, best_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotTraining:
    """How a predictor is trained; Adam, epochs and learning rate are the paper's (3.1).

    hidden, layers  of the predictor
    dropout         as in the published code
    batch           samples a step; the paper does not say
    held_out        share of the samples that only choose among epochs; with none of them the
                    last epoch is kept
    best            what makes a block size the best
    """

    epochs: int = 100
    learning_rate: float = 1e-5
    batch: int = 32
    hidden: int = HIDDEN
    layers: int = LAYERS
    dropout: float = 0.2
    held_out: float = 0.1
    best: Best = "length"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotFigures:
    """How a predictor does on some samples: mean acceptance lengths, with the bonus token.

    chosen    with the block sizes it chooses
    fixed     with each candidate for all, [candidates]
    hindsight with the best candidate of each sample
    right     share of samples whose label it gives
    """

    samples: int
    chosen: float
    fixed: tuple[float, ...]
    hindsight: float
    right: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotResult:
    """A trained predictor, the epoch it is of (from 1), and its figures.

    held_out  of the samples that chose the epoch, so not free of that choice; None where
              there were none
    """

    predictor: BlockPredictor
    epoch: int
    trained: PilotFigures
    held_out: PilotFigures | None


def train_predictor(
    sweeps: Sweeps, drafter: str, settings: PilotTraining, device: str = "cpu"
) -> PilotResult:
    """A predictor for the collection's drafter, `drafter` being where that lies.

    Minimises the cross-entropy of equation 8. Every draw comes from one generator, so that
    a seed gives the same weights on the same machine. Raises InputError where no sample
    has a label.
    """
    labels = best_candidates(sweeps.samples, settings.best)
    usable = [index for index, label in enumerate(labels.tolist()) if label >= 0]
    generator = torch.Generator().manual_seed(settings.seed)
    order = [usable[i] for i in torch.randperm(len(usable), generator=generator).tolist()]
    held = order[: int(len(order) * settings.held_out)]
    own = order[len(held) :]
    if not own:
        raise InputError(
            "no prompt of the collection tells which block size is best",
            hint="Collect more prompts, and more than one new token of each.",
        )
    config = PilotConfig(
        drafter=drafter,
        drafter_hash=sweeps.drafter_hash,
        block_size=sweeps.block_size,
        candidates=sweeps.candidates,
        vocab=sweeps.vocab,
        hidden=settings.hidden,
        layers=settings.layers,
    )
    with torch.device("meta"):
        model = BlockPredictor(config)
    model.to_empty(device="cpu").draw(generator)
    model.to(device)
    inputs = torch.stack([sample.logits for sample in sweeps.samples]).to(device)
    epoch = _fit(
        model, _Data(inputs, labels.to(device), own, held, sweeps.samples), settings, generator
    )

    def figures(rows: list[int]) -> PilotFigures:
        return measure(model, [sweeps.samples[row] for row in rows], labels[rows])

    return PilotResult(
        predictor=model.eval().requires_grad_(False),
        epoch=epoch,
        trained=figures(own),
        held_out=figures(held) if held else None,
    )


@torch.inference_mode()
def measure(model: BlockPredictor, samples: Sequence[Sample], labels: torch.Tensor) -> PilotFigures:
    """What the predictor's choices give on samples that all have a label [samples]."""
    inputs = torch.stack([sample.logits for sample in samples])
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
    """How a predictor in `folder` names its drafter: a folder by the way to it."""
    there = Path(drafter).expanduser()
    return os.path.relpath(there.resolve(), folder.resolve()) if there.is_dir() else drafter


@dataclass(frozen=True, slots=True)
class _Data:
    inputs: torch.Tensor  # [samples, vocab]
    labels: torch.Tensor
    own: list[int]
    held: list[int]
    samples: list[Sample]


def _fit(
    model: BlockPredictor, data: _Data, settings: PilotTraining, generator: torch.Generator
) -> int:
    """Train in place; the epoch that is kept, whose choices are longest where held out."""
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    best, kept, weights = -1.0, settings.epochs, None
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(len(data.own), generator=generator).tolist()
        for first in range(0, len(order), settings.batch):
            rows = [data.own[i] for i in order[first : first + settings.batch]]
            scores = model(data.inputs[rows], settings.dropout, generator)
            optimiser.zero_grad()
            functional.cross_entropy(scores, data.labels[rows]).backward()
            optimiser.step()
        if not data.held:
            continue
        held = [data.samples[row] for row in data.held]
        length = measure(model, held, data.labels[data.held]).chosen
        if length > best:
            best, kept = length, epoch
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if weights is not None:
        model.load_state_dict(weights)
    return kept

"""The training loop: examples in a fixed order, checkpoints, and exact continuation."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Annotated, Protocol

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn

from costmodel.errors import InputError
from costmodel.io import write_atomic
from decoder.tree.draft_tree import DraftTree
from lab.training.features import Example

CHECKPOINT = "checkpoint.pt"
LENGTH = {"steps", "epochs", "save_every"}  # settings that may differ when a run is continued
Say = Callable[[str], None]
Share = Annotated[float, Field(ge=0, lt=1)]


class Objective(Protocol):
    """A model to train, with its loss and its validation, on hidden states of these layers."""

    model: nn.Module
    layers: tuple[int, ...]

    def loss(
        self, example: Example, generator: torch.Generator, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """A scalar loss with a gradient, and figures to report; randomness from the generator."""

    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Figures of held-out examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The settings of the optimiser and of the run.

    steps       optimiser steps of `batch` examples each
    epochs      passes over the texts, in place of `steps`
    warmup      steps of rising learning rate, or below 1 their share; then it falls as a cosine
                to a tenth
    betas       of AdamW
    clip        largest norm of the gradient
    autocast    whether products are in bfloat16 (weights and sums stay in float32)
    save_every  steps between checkpoints, and between validations
    """

    steps: PositiveInt = 2000
    epochs: PositiveInt | None = None
    batch: PositiveInt = 4
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-3
    warmup: NonNegativeFloat = 100
    betas: tuple[Share, Share] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0
    autocast: bool = True
    save_every: PositiveInt = 200
    seed: NonNegativeInt = 0


def train(
    objective: Objective,
    training: Sequence[Example],
    validation: Sequence[Example],
    settings: TrainingSettings,
    folder: Path,
    say: Say = lambda line: None,
) -> list[dict[str, float]]:
    """Train `objective.model` in place; returns the validations, one every `save_every` steps.

    A checkpoint of the same settings in the folder is continued, also with more steps than
    before. The examples and the randomness of a step depend on the seed and its number alone.
    Raises InputError for no examples, and for a checkpoint that is damaged, of other settings,
    or past the wanted number of steps.
    """
    if not training:
        raise InputError("there is no text to train on", hint="Collect more prompts.")
    if settings.epochs is not None:
        steps = -(-settings.epochs * len(training) // settings.batch)
        settings = replace(settings, steps=steps)
    folder.mkdir(parents=True, exist_ok=True)
    model = objective.model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rate, decay = settings.learning_rate, settings.weight_decay
    optimiser = torch.optim.AdamW(trained, rate, settings.betas, weight_decay=decay, fused=True)
    history = _resume(folder, model, optimiser, settings)
    first = int(history[-1]["step"]) if history else 0
    if first:
        say(f"going on behind step {first}")
    device = next(model.parameters()).device
    spent_s = history[-1]["seconds"] if history else 0.0
    started_s = perf_counter() - spent_s
    sums: Counter[str] = Counter()  # of figures since the last validation
    counted = 0
    for step in range(first, settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, settings)
        generator = torch.Generator(device).manual_seed(settings.seed * 1_000_003 + step)
        # One context for the whole step, so that weights are cast to bfloat16 once.
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            for index in chosen(step, len(training), settings):
                loss, figures = objective.loss(training[index], generator, step)
                (loss / settings.batch).backward()
                sums.update(figures | {"loss": float(loss.detach())})
                counted += 1
        nn.utils.clip_grad_norm_(trained, settings.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        done = step + 1
        if done % settings.save_every == 0 or done == settings.steps:
            row = {"step": float(done), "seconds": perf_counter() - started_s}
            row |= {name: total / counted for name, total in sums.items()}
            row |= objective.validate(validation)
            sums, counted = Counter(), 0
            if not math.isfinite(row["loss"]):
                raise InputError(
                    f"the loss is not a finite number before step {done}",
                    hint="Train with a lower learning rate; the last checkpoint is kept.",
                )
            history.append(row)
            _save(folder, model, optimiser, settings, history)
            say(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    return history


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a tenth."""
    warmup = settings.warmup if settings.warmup >= 1 else int(settings.warmup * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def chosen(step: int, examples: int, settings: TrainingSettings) -> list[int]:
    """The indices of a step's examples; each example comes once before any comes again."""
    places = range(step * settings.batch, (step + 1) * settings.batch)
    return [
        int(np.random.default_rng([settings.seed, epoch]).permutation(examples)[within])
        for epoch, within in (divmod(place, examples) for place in places)
    ]


def accepted_depth(tree: DraftTree, truth: Iterable[int]) -> int:
    """The depth of the path in a draft tree that a text continues with."""
    row = depth = 0
    for token in truth:
        row = tree.child(row, int(token))
        if row < 0:
            break
        depth += 1
    return depth


def _save(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    settings: TrainingSettings,
    history: list[dict[str, float]],
) -> None:
    """Replace the checkpoint in one step, and write the history."""
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
    state |= {"settings": asdict(settings), "history": history}
    buffer = BytesIO()  # the errors of torch's own writer do not tell of a full disk
    torch.save(state, buffer)
    write_atomic(folder / CHECKPOINT, buffer.getvalue(), InputError)
    write_atomic(folder / "history.json", json.dumps(history, indent=1) + "\n", InputError)


def _resume(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, settings: TrainingSettings
) -> list[dict[str, float]]:
    place = folder / CHECKPOINT
    if not place.exists():
        return []
    try:
        state = torch.load(place, map_location="cpu", weights_only=True)
        stored, history = dict(state["settings"]), state["history"]
        done = int(history[-1]["step"])
    except Exception as error:  # torch's reader fails in many ways
        raise InputError(
            f"{place} cannot be read ({type(error).__name__})",
            hint="It is damaged; remove it to begin again.",
        ) from error
    other = [name for name, value in asdict(settings).items() if stored.get(name) != value]
    if set(other) - LENGTH:
        raise InputError(
            f"{place} was trained with other settings: {', '.join(other)}",
            hint="Choose another folder, or remove the checkpoint to begin again.",
        )
    if done > settings.steps:
        raise InputError(
            f"{place} has {done} steps behind it, and {settings.steps} were asked for",
            hint=f"Ask for {done} steps or more, or choose another folder.",
        )
    try:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{place} belongs to another drafter",
            hint="Choose another folder, or the same layers, block and feature layers.",
        ) from error
    return list(history)

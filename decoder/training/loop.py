"""The training loop: examples in a fixed order, checkpoints, and the same end after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from costmodel.errors import InputError
from costmodel.files import replacing
from decoder.training.features import Example

CHECKPOINT = "checkpoint.pt"
LENGTH = {"steps", "save_every"}  # settings in which a run that is gone on with may differ
Say = Callable[[str], None]


class Objective(Protocol):
    """What is trained and what it is trained for."""

    model: nn.Module

    def loss(
        self, example: Example, generator: torch.Generator, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """A scalar with a gradient, and figures to report; randomness from the generator."""

    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Figures of held-out examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and how fast to train.

    steps          optimiser steps of `batch` examples each
    warmup         steps of rising learning rate; it falls as a cosine afterwards, to a tenth
    clip           largest norm of the gradient
    autocast       compute products in bfloat16 (weights and sums stay in float32)
    save_every     steps between checkpoints, and between validations
    """

    steps: int = 2000
    batch: int = 4
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    autocast: bool = True
    save_every: int = 200
    seed: int = 0


def train(
    objective: Objective,
    training: Sequence[Example],
    validation: Sequence[Example],
    settings: Settings,
    folder: Path,
    say: Say = lambda line: None,
) -> list[dict[str, float]]:
    """Train `objective.model` in place; the validations, one for every `save_every` steps.

    A folder that holds a checkpoint of the same settings is gone on with, also with more steps
    than it was to have: the learning rate then follows the longer run from there. Which examples
    and what randomness a step uses depends on the seed and its number alone.
    Raises InputError for no examples, for a checkpoint that is damaged or of other settings, and
    for one that has more steps behind it than are wanted.
    """
    if not training:
        raise InputError("there is no text to train on", hint="Collect more prompts.")
    folder.mkdir(parents=True, exist_ok=True)
    model = objective.model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(
        trained,
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    history = _resume(folder, model, optimiser, settings)
    first = int(history[-1]["step"]) if history else 0
    if first:
        say(f"going on behind step {first}")
    device = next(model.parameters()).device
    spent_s = history[-1]["seconds"] if history else 0.0
    started_s, sums = perf_counter() - spent_s, Sums()
    for step in range(first, settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, settings)
        generator = torch.Generator(device).manual_seed(settings.seed * 1_000_003 + step)
        # One context for the whole step, so that weights are cast to bfloat16 once.
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            for index in chosen(step, len(training), settings):
                loss, figures = objective.loss(training[index], generator, step)
                (loss / settings.batch).backward()
                sums.add(figures | {"loss": float(loss.detach())})
        nn.utils.clip_grad_norm_(trained, settings.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        done = step + 1
        if done % settings.save_every == 0 or done == settings.steps:
            row = {"step": float(done), "seconds": perf_counter() - started_s}
            row |= sums.means() | objective.validate(validation)
            history.append(row)
            _save(folder, model, optimiser, settings, history)
            say(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    return history


def learning_rate(step: int, settings: Settings) -> float:
    """Of a step: up in a line, then down as half a cosine to a tenth."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def chosen(step: int, examples: int, settings: Settings) -> list[int]:
    """The examples of a step: every one comes once before any comes again."""
    indices = []
    for place in range(step * settings.batch, (step + 1) * settings.batch):
        epoch, within = divmod(place, examples)
        indices.append(
            int(np.random.default_rng([settings.seed, epoch]).permutation(examples)[within])
        )
    return indices


class Sums:
    """Means of figures since they were last asked for."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._count = 0

    def add(self, figures: dict[str, float]) -> None:
        self._count += 1
        for name, value in figures.items():
            self._totals[name] = self._totals.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        found = {name: total / self._count for name, total in self._totals.items()}
        self._totals, self._count = {}, 0
        return found


def _save(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    settings: Settings,
    history: list[dict[str, float]],
) -> None:
    """All or nothing: the last checkpoint stays until the new one is whole."""
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "settings": asdict(settings),
        "history": history,
    }
    with replacing(folder / CHECKPOINT) as part:
        torch.save(state, part)
    (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


def _resume(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, settings: Settings
) -> list[dict[str, float]]:
    place = folder / CHECKPOINT
    if not place.exists():
        return []
    try:
        state: dict[str, Any] = torch.load(place, map_location="cpu", weights_only=True)
        known, history = state["settings"], state["history"]
        done = int(history[-1]["step"])
    except (OSError, RuntimeError, UnpicklingError, EOFError, LookupError, TypeError) as error:
        raise InputError(
            f"{place} cannot be read ({type(error).__name__})",
            hint="It is damaged; remove it to begin again.",
        ) from error
    other = [name for name, value in asdict(settings).items() if known.get(name) != value]
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
    except (RuntimeError, ValueError, LookupError) as error:
        raise InputError(
            f"{place} belongs to another drafter",
            hint="Choose another folder, or the same layers, block and feature layers.",
        ) from error
    return list(history)

"""Training of BlockPilot's predictor into a folder: sweeps of block sizes, and a classifier.

The paper decodes every prompt with every block size (Zhang et al., "BlockPilot", 2.3). At T = 0 a
text is the same whatever is drafted, so the accepted tokens of a round are those in which the
block drafted at its bonus token agrees with the text. At other temperatures the walk rule draws
the target's token at every position and goes on while the block has it, so the same holds along a
text that the target sampled, and all sizes see the same draws. So blocks of a text that the target
wrote are drafted together, as in training, and the rounds are counted. Only the seconds of a round
are measured, by decoding after one prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.io import folder_of
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.engine import TreeDecoder
from decoder.model.target import Target
from lab.papers.blockpilot.drafter import (
    HIDDEN,
    LAYERS,
    LEAST_BLOCK,
    RADIUS,
    BlockPredictor,
    Input,
    PilotConfig,
    local_candidates,
    save_predictor,
)
from lab.training.corpus import TrainingText
from lab.training.dflash import DFlashObjective, DFlashTraining, trainable_copy

# The criterion for the best block size: the acceptance length (equation 3 of the paper), or the
# acceptance length over the time of a cycle (equation 1).
Best = Literal["length", "rate"]
MOST_ROWS = 4096  # drafted together


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The settings of a sweep.

    radius          k: candidates are B - k..B + k
    max_new_tokens  of each text
    template        options of the chat template of new texts
    temperature     of the texts; at 0 they are greedy
    input           that the predictor reads
    """

    radius: Annotated[int, Field(ge=1, le=64)] = RADIUS
    max_new_tokens: Annotated[int, Field(ge=2)] = 256
    template: dict[str, Any] = field(default_factory=dict)
    temperature: NonNegativeFloat = 0.0
    input: Input = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeSample:
    """One prompt of a sweep.

    input    float32 [width]: the target's logits or hidden states after the prompt
    decoded  new tokens without the first, which comes from the prefill
    rounds   int64 [candidates]: verifications
    """

    input: torch.Tensor
    decoded: int
    rounds: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor | None:
        """tau [candidates], tokens a verification with the bonus token; None without any."""
        if int(self.rounds.min()) == 0:
            return None
        return self.decoded / self.rounds.double()


class Sweeper:
    """Makes the sample of each text.

    cycle_s  float64 [1 + candidates]: seconds of a round of plain decoding, and with each block
             size, from the first sample on
    Raises InputError for a drafter whose blocks cannot be drafted together.
    """

    def __init__(
        self, target: Target, model: DFlashModel, texts: Sequence[TrainingText], sweep: Sweep
    ) -> None:
        if any(window or causal for window, causal in model.config.kinds):
            raise InputError(
                "blocks of this drafter see a window or only rows before them, and are drafted "
                "together only where they see all",
                hint="Choose a DFlash drafter with full attention within its blocks.",
            )
        self.prompts = [list(text.tokens[: text.prompt_tokens]) for text in texts]
        self.candidates = local_candidates(model.config.block_size, sweep.radius)
        self._target, self._model, self._texts, self._sweep = target, model, texts, sweep
        self._objective = DFlashObjective(
            target.loaded, trainable_copy(model), DFlashTraining(), target.head_weight()
        )
        self.cycle_s: torch.Tensor | None = None

    @torch.no_grad()
    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the text with this number, cut where decoding would stop."""
        text, target, length = self._texts[number], self._target, self._sweep.max_new_tokens
        prompt = self.prompts[number]
        if self.cycle_s is None:
            self.cycle_s = self._measured_cycle_s(prompt)
        tokens = torch.tensor(text.tokens[: len(prompt) + length], device=target.device)
        target.reserve(len(tokens) + 1)
        logits, features = self._read(tokens[: len(prompt)])
        last = features[-1]
        features = torch.cat((features, self._read(tokens[len(prompt) :])[1]))
        bonus = torch.arange(len(prompt), len(tokens) - 1, device=target.device)
        rounds = torch.tensor(
            [self._rounds(tokens, features, bonus, size) for size in self.candidates]
        )
        return BlockSizeSample(
            input=(last if self._sweep.input == "hidden" else logits).float().cpu(),
            decoded=len(tokens) - len(prompt) - 1,
            rounds=rounds,
        )

    def _measured_cycle_s(self, prompt: Sequence[int]) -> torch.Tensor:
        cycles_s, sweep = [], self._sweep
        for size in (1, *self.candidates):
            drafter = DFlashDrafter(self._target, self._model, max(size, LEAST_BLOCK))
            policy = "plain" if size == 1 else "chain"
            decoder = TreeDecoder(self._target, drafter=drafter, policy=policy, acceptance="walk")
            stats = decoder.generate(
                prompt, max_new_tokens=sweep.max_new_tokens, temperature=sweep.temperature
            ).stats
            cycles_s.append(stats.decode_s / max(stats.rounds, 1))
        return torch.tensor(cycles_s, dtype=torch.float64)

    def _read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [vocab] after the next tokens, and their features [tokens, layers * hidden]."""
        logits, features = self._target.prefill(tokens), self._target.features()
        if features is None:
            raise InputError("the hidden states of the target cannot be read")
        return logits.clone(), features.clone()

    def _rounds(
        self, tokens: torch.Tensor, features: torch.Tensor, bonus: torch.Tensor, size: int
    ) -> int:
        """Verifications with this block size, from the first bonus token to the text's end."""
        if len(bonus) == 0:
            return 0
        bfloat16 = self._target.dtype == torch.bfloat16
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            accepted = [
                length
                for anchors in bonus.split(max(MOST_ROWS // size, 1))
                for length in self._objective.accepted(tokens, features, anchors, size).tolist()
            ]
        at, count = 0, 0
        while at < len(accepted):
            at, count = at + 1 + accepted[at], count + 1
        return count


def best_candidates(
    samples: Sequence[BlockSizeSample], cycle_s: torch.Tensor | None = None
) -> torch.Tensor:
    """The label of each sample [samples]: the index of its best candidate; -1 without one.

    cycle_s  [candidates], for the best acceptance length over the time of a cycle
    Among equals the smallest block is the best, as in the published code (AMAP-ML/BlockPilot,
    data_analysis/max_value_counter.py). A text that ended with its first token has no label.
    """
    costs = 1.0 if cycle_s is None else cycle_s
    labels = []
    for sample in samples:
        lengths = sample.lengths
        labels.append(-1 if lengths is None else int((lengths / costs).numpy().argmax()))
    return torch.tensor(labels)


def by_block_size(
    samples: Sequence[BlockSizeSample], candidates: Sequence[int], cycle_s: torch.Tensor
) -> list[dict[str, float]]:
    """Figure 3 of the paper: a block of 1, which is plain decoding, and each candidate.

    Of each the mean acceptance length, the speed-up over plain decoding (equation 2), and the
    share of prompts for which its acceptance length is the best, of equals the smallest block.
    cycle_s  [1 + candidates], as `Sweeper.cycle_s`
    """
    names = ("block_size", "length", "over_plain", "best_for")
    lengths = [sample.lengths for sample in samples if sample.lengths is not None]
    table = functional.pad(torch.stack(lengths), (1, 0), value=1.0)  # [samples, 1 + candidates]
    best = np.bincount(table.numpy().argmax(1), minlength=len(cycle_s)) / len(table)
    speeds = table.mean(0) * cycle_s[0] / cycle_s
    columns = ((1, *candidates), table.mean(0).tolist(), speeds.tolist(), best.tolist())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


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
    settings: tuple[Sweep, PilotTraining],
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, PilotResult, list[dict[str, float]]]:
    """Sweep, train and save a predictor; returns its folder, the result, and figure 3.

    drafter  folder or hub id of a DFlash drafter
    texts    that the target wrote, of different prompts
    """
    model, (sweep, training) = DFlashDrafter(target, drafter).model, settings
    sweeper, samples = Sweeper(target, model, texts, sweep), []
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
        hidden=training.hidden,
        layers=training.layers,
        input=sweep.input,
        width=len(samples[0].input) if samples else None,
    )
    costs = sweeper.cycle_s[1:] if training.best == "rate" and samples else None
    labels = best_candidates(samples, costs)
    result = train_predictor(samples, labels, config, training, str(target.device))
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

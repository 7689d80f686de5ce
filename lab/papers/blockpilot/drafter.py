"""BlockPilot: a DFlash drafter with a block size predicted for each text (Zhang et al.).

After the prefill a predictor chooses the block size from the target's logits at the prompt's
last token, for the whole text (section 2.4). Target, drafter and verification stay the same.

The predictor (section 2.3) follows the published code where the paper leaves a choice
(AMAP-ML/BlockPilot, utils/predict.py): raw logits, two layers of which the second is residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from costmodel.io import expanded, folder_of
from decoder.drafters.base import Drafter, Draws
from decoder.drafters.checkpoint import (
    MOST_LAYERS,
    Fields,
    Weights,
    architectures,
    checkpoint_folder,
    find_config,
    load_weights,
    save_checkpoint,
    stored_model,
)
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.drafter import DFlashDrafter, DFlashSession
from decoder.model.target import Target


class BlockPilotDrafter(Drafter):
    """Drafts as its DFlash drafter does, with the block size that the predictor chooses.

    `max_depth` is that of the largest candidate. The cost of a draft is taken to be that of the
    trained block size, in the middle of the candidates, so the hash is the DFlash drafter's. A
    session that starts without logits, as when a draft is timed, keeps the trained block size.
    Raises InputError if the predictor was trained for another drafter.
    """

    name = "blockpilot"
    draws: Draws = "whole"

    def __init__(self, dflash: DFlashDrafter, predictor: BlockPredictor) -> None:
        check_fit(predictor, dflash)
        self.dflash = dflash
        self.predictor = predictor
        self.max_depth = predictor.config.candidates[-1] - 1
        self.feature_layers = dflash.feature_layers
        self.architecture_hash = dflash.architecture_hash

    @staticmethod
    def recognises(published: Mapping[str, Any]) -> bool:
        """Whether a config.json is that of a BlockPilot predictor."""
        return ARCHITECTURE in architectures(published)

    @classmethod
    def from_pretrained(cls, name: str, target: Target) -> BlockPilotDrafter:
        """The predictor in a folder or of a hub id, with the DFlash drafter named in its config."""
        folder = checkpoint_folder(name)
        predictor = stored_model(folder, target, load_predictor)
        name = predictor.config.drafter
        source = str(folder_of(folder / expanded(name)) or name)
        if not DFlashConfig.recognises(find_config(source)):
            raise InputError(
                f"{folder} chooses block sizes for {name}, which is no DFlash drafter",
                hint="Correct 'drafter' in its config.json.",
            )
        return cls(DFlashDrafter(target, source), predictor)

    def start(
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> BlockPilotSession:
        return BlockPilotSession(self, features, logits)


class BlockPilotSession(DFlashSession):
    """A DFlash session with the block size that the predictor chooses for its text."""

    def __init__(
        self, drafter: BlockPilotDrafter, features: torch.Tensor | None, logits: torch.Tensor | None
    ) -> None:
        """logits: [vocab] of the prompt's last token; None for the trained block size"""
        super().__init__(drafter.dflash, features)
        self.block_size: int | None = None  # the predictor's choice
        if logits is not None:
            hidden = features is not None and drafter.predictor.config.input == "hidden"
            self.block_size = drafter.predictor.block_size(features[-1] if hidden else logits)
            self.set_block_size(self.block_size)


def check_fit(predictor: BlockPredictor, dflash: DFlashDrafter) -> None:
    """Raise InputError unless the predictor was trained for such a drafter."""
    config, drafter = predictor.config, dflash.model.config
    vocab = dflash.target.architecture.vocab
    fields = {
        "block size": (config.block_size, drafter.block_size),
        "hash": (config.drafter_hash, drafter.hash(vocab)),
        "vocabulary": (config.vocab, vocab),
    }
    problems = [
        f"its {name} is {expected} and the drafter's {actual}"
        for name, (expected, actual) in fields.items()
        if expected != actual
    ]
    if problems:
        raise InputError(
            f"the BlockPilot predictor was not trained for this drafter: {'; '.join(problems)}",
            hint="Train a predictor for this drafter, or name the one it was trained for.",
        )


ARCHITECTURE = "BlockPilotPredictor"
HIDDEN, LAYERS, RADIUS = 2048, 2, 2  # the paper's defaults (tables 3 and 4)
LEAST_BLOCK = 2  # a block of 1 drafts nothing
MOST_TIMES = 2  # the largest block over that of training, as in the paper's sweep
# What a predictor reads: the target's logits, raw or in the two ways of table 5, where "normalised"
# is to a mean of 0 and a variance of 1; or the drafter's features, of the prompt's last token.
Input = Literal["logits", "softmax", "normalised", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotConfig:
    """The fields of a predictor's config.json.

    drafter       the DFlash drafter it was trained for: a hub id, or a folder, which may be
                  relative to the predictor's
    drafter_hash  of that drafter at its trained block size
    block_size    B: the trained block size
    candidates    the block sizes it chooses from, ascending
    width         of its input; None for the vocabulary
    """

    drafter: str
    drafter_hash: str
    block_size: int
    candidates: tuple[int, ...]
    vocab: int
    hidden: int = HIDDEN
    layers: int = LAYERS
    input: Input = "logits"
    width: int | None = None

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> PilotConfig:
        """Read a config.json. Raises InputError with the field that is wrong."""
        fields = Fields(published, where)
        block_size = fields.whole("block_size", least=LEAST_BLOCK)
        if published.get("input", "logits") not in get_args(Input):
            raise fields.wrong("input", f"one of {', '.join(get_args(Input))}")
        return cls(
            drafter=_text(fields, "drafter"),
            drafter_hash=_text(fields, "drafter_hash"),
            block_size=block_size,
            candidates=_candidates(fields, block_size),
            vocab=fields.whole("vocab_size"),
            hidden=fields.whole("hidden_size"),
            layers=fields.whole("num_layers", most=MOST_LAYERS),
            input=published.get("input", "logits"),
            width=fields.whole("input_size", fields.whole("vocab_size")),
        )

    def published(self) -> dict[str, Any]:
        """The fields as they are in config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "drafter": self.drafter,
            "drafter_hash": self.drafter_hash,
            "block_size": self.block_size,
            "candidates": list(self.candidates),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_layers": self.layers,
            "input": self.input,
            "input_size": self.width or self.vocab,
        }


def local_candidates(block_size: int, radius: int = RADIUS) -> tuple[int, ...]:
    """Block sizes B - k..B + k (equation 4 of the paper), without those that draft nothing."""
    least = max(block_size - radius, LEAST_BLOCK)
    return tuple(range(least, min(block_size + radius, MOST_TIMES * block_size) + 1))


class BlockPredictor(nn.Module):
    """The network that scores candidate block sizes by the target's state after the prompt."""

    def __init__(self, config: PilotConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width or config.vocab, *[config.hidden] * config.layers]
        self.layers = nn.ModuleList(
            nn.Linear(width, config.hidden) for width in widths[: config.layers]
        )
        self.scores = nn.Linear(config.hidden, len(config.candidates))

    def forward(
        self, rows: torch.Tensor, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Scores [..., candidates] of logits or features [..., width].

        generator  of the dropout, on the CPU, so that draws do not depend on the device
        """
        if self.config.input == "softmax":
            rows = rows.softmax(-1)
        elif self.config.input == "normalised":
            rows = functional.layer_norm(rows, rows.shape[-1:])
        for number, layer in enumerate(self.layers):
            changed = _dropped(functional.relu(layer(rows)), dropout, generator)
            rows = changed + rows if number else changed
        return self.scores(rows)

    @torch.inference_mode()
    def block_size(self, row: torch.Tensor) -> int:
        """The candidate with the highest score (equation 9) for a row [width]."""
        weight = self.scores.weight
        scores = self(row.to(weight.device, weight.dtype))
        return self.config.candidates[int(scores.argmax())]

    def draw(self, generator: torch.Generator) -> None:
        """Initialise the weights as the published code does."""
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.xavier_uniform_(self.scores.weight, generator=generator)
        nn.init.zeros_(self.scores.bias)


def load_predictor(
    folder: Path, published: Mapping[str, Any], like: torch.Tensor
) -> BlockPredictor:
    """The predictor in a folder, on the device and in the dtype of `like`. Raises InputError."""
    config = PilotConfig.parse(published, f"{folder / 'config.json'}")
    with torch.device("meta"):
        model = BlockPredictor(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = Weights(folder)
    weights.check(shapes)
    load_weights(model, weights.read(shapes, like.device), like.dtype)
    return model


def save_predictor(folder: Path, model: BlockPredictor) -> None:
    """Write config.json and model.safetensors, which `load_predictor` reads."""
    save_checkpoint(folder, model.config.published(), model.state_dict())


def _dropped(rows: torch.Tensor, share: float, generator: torch.Generator | None) -> torch.Tensor:
    """Dropout: a share of the values becomes 0, and the others grow so that the mean stays."""
    if share == 0.0:
        return rows
    mask = torch.empty(rows.shape).bernoulli_(1.0 - share, generator=generator)
    return rows * mask.to(rows) / (1.0 - share)


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise fields.wrong(name, "a text")
    return value


def _candidates(fields: Fields, block_size: int) -> tuple[int, ...]:
    sizes, most = fields.get("candidates"), MOST_TIMES * block_size
    whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)
    if not whole or not sizes or sizes != sorted(set(sizes)):
        raise fields.wrong("candidates", "a list of block sizes, ascending,")
    if sizes[0] < LEAST_BLOCK or sizes[-1] > most:
        raise fields.wrong("candidates", f"block sizes of {LEAST_BLOCK} to {most}")
    return tuple(sizes)

"""BlockPilot's predictor: a block size from the target's logits behind the prompt.

Zhang et al., "BlockPilot", 2.3. What the paper leaves open is as in the published code
(AMAP-ML/BlockPilot, utils/predict.py): "two layers" are two of the hidden width, the second
with a residual connection, before the one that gives the scores; ReLU; the input is the
logits as they are, neither normed nor softmaxed (table 5); dropout 0.2 in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from decoder.drafters.checkpoint import Fields, Weights, load_weights, save_checkpoint

ARCHITECTURE = "BlockPilotPredictor"
HIDDEN, LAYERS, RADIUS = 2048, 2, 2  # the paper's defaults (tables 3 and 4)
LEAST_BLOCK = 2  # a block of 1 drafts nothing
MOST_TIMES = 2  # the largest block over that of training, as in the paper's sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotConfig:
    """What config.json of a predictor says.

    drafter       the DFlash drafter it was trained for: a folder, relative to that of the
                  predictor where there is one, or its hub id
    drafter_hash  of that drafter at its trained block size
    block_size    B, that of the drafter's training
    candidates    the block sizes it chooses from, ascending
    """

    drafter: str
    drafter_hash: str
    block_size: int
    candidates: tuple[int, ...]
    vocab: int
    hidden: int = HIDDEN
    layers: int = LAYERS

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> PilotConfig:
        """Read a config.json. Raises InputError naming the field that is wrong."""
        fields = Fields(published, where)
        block_size = fields.whole("block_size", least=LEAST_BLOCK)
        return cls(
            drafter=_text(fields, "drafter"),
            drafter_hash=_text(fields, "drafter_hash"),
            block_size=block_size,
            candidates=_candidates(fields, block_size),
            vocab=fields.whole("vocab_size"),
            hidden=fields.whole("hidden_size"),
            layers=fields.whole("num_layers"),
        )

    def published(self) -> dict[str, Any]:
        """The same as config.json has it."""
        return {
            "architectures": [ARCHITECTURE],
            "drafter": self.drafter,
            "drafter_hash": self.drafter_hash,
            "block_size": self.block_size,
            "candidates": list(self.candidates),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_layers": self.layers,
        }


def local_candidates(block_size: int, radius: int = RADIUS) -> tuple[int, ...]:
    """B - k..B + k (equation 4 of the paper), without blocks that draft nothing."""
    least = max(block_size - radius, LEAST_BLOCK)
    return tuple(range(least, min(block_size + radius, MOST_TIMES * block_size) + 1))


def is_blockpilot(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a BlockPilot predictor."""
    return ARCHITECTURE in (published.get("architectures") or ())


class BlockPredictor(nn.Module):
    """Scores of the candidate block sizes from logits."""

    def __init__(self, config: PilotConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.vocab, *[config.hidden] * config.layers]
        self.layers = nn.ModuleList(
            nn.Linear(width, config.hidden) for width in widths[: config.layers]
        )
        self.scores = nn.Linear(config.hidden, len(config.candidates))

    def forward(
        self, logits: torch.Tensor, dropout: float = 0.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Scores [..., candidates] of logits [..., vocab]; dropout is drawn from `generator`.

        generator  on the CPU, so that the draws are the same wherever the weights lie
        """
        rows = logits
        for number, layer in enumerate(self.layers):
            changed = _dropped(functional.relu(layer(rows)), dropout, generator)
            rows = changed + rows if number else changed
        return self.scores(rows)

    @torch.inference_mode()
    def block_size(self, logits: torch.Tensor) -> int:
        """The candidate with the highest score (equation 9) for logits [vocab]."""
        weight = self.scores.weight
        scores = self(logits.to(weight.device, weight.dtype))
        return self.config.candidates[int(scores.argmax())]

    def draw(self, generator: torch.Generator) -> None:
        """New weights, as the published code draws them."""
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.xavier_uniform_(self.scores.weight, generator=generator)
        nn.init.zeros_(self.scores.bias)


def load_predictor(
    folder: Path, published: Mapping[str, Any], like: torch.Tensor
) -> BlockPredictor:
    """The predictor in a folder, on the device and in the dtype of `like`.

    published  its config.json
    Raises InputError where config.json or the tensors are damaged.
    """
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
    """Rows with a share of the values at 0 and the others larger by as much."""
    if share == 0.0:
        return rows
    kept = torch.empty(rows.shape).bernoulli_(1.0 - share, generator=generator)
    return rows * kept.to(rows) / (1.0 - share)


def _text(fields: Fields, name: str) -> str:
    value = fields.values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise fields.wrong(name, "a text")
    return value


def _candidates(fields: Fields, block_size: int) -> tuple[int, ...]:
    sizes, most = fields.values.get("candidates"), MOST_TIMES * block_size
    whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)
    if not whole or not sizes or sizes != sorted(set(sizes)):
        raise fields.wrong("candidates", "a list of block sizes, ascending,")
    if sizes[0] < LEAST_BLOCK or sizes[-1] > most:
        raise fields.wrong("candidates", f"block sizes of {LEAST_BLOCK} to {most}")
    return tuple(sizes)

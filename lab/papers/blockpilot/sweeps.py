"""Sweeps of block sizes over prompts, the training data of BlockPilot's predictor.

Zhang et al., "BlockPilot", 2.3: for every prompt the target's logits after it, and the rounds that
decoding takes with each candidate block size. Each prompt has a file, so a run that was stopped
continues with the first missing prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from costmodel.errors import InputError
from costmodel.io import read_json, write_atomic
from lab.papers.blockpilot.drafter import RADIUS

SETTINGS = "collection.json"
DTYPES = {
    "prompt": torch.int64,
    "logits": torch.float32,
    "decoded": torch.int64,
    "rounds": torch.int64,
    "decode_s": torch.float64,
}

# The criterion for the best block size: the acceptance length (equation 3 of the paper), or the
# acceptance length over the time of a cycle (equation 1).
Best = Literal["length", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The settings of a sweep.

    radius          k: candidates are B - k..B + k
    max_new_tokens  of each text
    """

    radius: Annotated[int, Field(ge=1, le=64)] = RADIUS
    max_new_tokens: Annotated[int, Field(ge=2)] = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeSample:
    """One prompt of a sweep.

    prompt    int64 [tokens]
    logits    float32 [vocab] of the target after the prompt
    decoded   int64 [candidates]: new tokens without the first, which comes from the prefill
    rounds    int64 [candidates]: verifications
    decode_s  float64 [candidates]: seconds of these
    """

    prompt: torch.Tensor
    logits: torch.Tensor
    decoded: torch.Tensor
    rounds: torch.Tensor
    decode_s: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor | None:
        """tau [candidates], tokens a verification with the bonus token; None without any."""
        if int(self.rounds.min()) == 0:
            return None
        return self.decoded.double() / self.rounds.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """A collection in a folder.

    drafter_hash  of the DFlash drafter at its trained block size
    """

    block_size: int
    candidates: tuple[int, ...]
    vocab: int
    drafter_hash: str
    samples: list[BlockSizeSample]


class Source(Protocol):
    """The source of a collection's samples."""

    prompts: Sequence[Sequence[int]]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal for a collection to be continued."""

    def sample(self, number: int) -> BlockSizeSample:
        """The sample of the prompt with this number."""


def collect_sweeps(
    source: Source, folder: Path, say: Callable[[str], None] = lambda line: None
) -> Sweeps:
    """Collect the samples that the folder lacks; returns all.

    Raises InputError if the folder was collected with other settings or other prompts, and if a
    file in it is damaged.
    """
    settings = _claim(folder, source.settings)
    for number, prompt in enumerate(source.prompts):
        place = folder / f"{number:06}.safetensors"
        if not place.exists():
            _write(place, source.sample(number))
            say(f"prompt {number + 1} of {len(source.prompts)}")
        elif not torch.equal(_read(place, settings).prompt, torch.tensor(list(prompt))):
            raise InputError(
                f"{place} was collected with another prompt",
                hint="Give the prompts of the first run in the same order, or a new folder.",
            )
    return read_sweeps(folder)


def read_sweeps(folder: Path) -> Sweeps:
    """The collection in a folder, its samples in the order of the prompts.

    Raises InputError if there is none or a file is damaged.
    """
    settings = _settings_of(folder)
    places = sorted(folder.glob("*.safetensors"))
    if not places:
        raise InputError(f"{folder} holds no prompts", hint="Collect some first.")
    return Sweeps(
        block_size=settings["block_size"],
        candidates=tuple(settings["candidates"]),
        vocab=settings["vocab"],
        drafter_hash=settings["drafter_hash"],
        samples=[_read(place, settings) for place in places],
    )


def cycle_s(samples: Sequence[BlockSizeSample]) -> torch.Tensor:
    """Seconds of a cycle with each candidate [candidates], pooled over all prompts.

    The times of one prompt are noisy, and a cycle takes nearly the same after any prompt.
    """
    spent_s = torch.stack([sample.decode_s for sample in samples]).sum(0)
    return spent_s / torch.stack([sample.rounds for sample in samples]).sum(0)


def best_candidates(samples: Sequence[BlockSizeSample], best: Best = "length") -> torch.Tensor:
    """The label of each sample [samples]: the index of its best candidate; -1 without one.

    Among equals the smallest block is the best, as in the published code (AMAP-ML/BlockPilot,
    data_analysis/max_value_counter.py). A text that ended with its first token has no label.
    """
    costs = cycle_s(samples) if best == "rate" else 1.0
    labels = []
    for sample in samples:
        lengths = sample.lengths
        labels.append(-1 if lengths is None else int((lengths / costs).numpy().argmax()))
    return torch.tensor(labels)


def _claim(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Write the settings into the folder; InputError if it has others. Returns those stored."""
    if not (folder / SETTINGS).exists():
        write_atomic(folder / SETTINGS, json.dumps(wanted, indent=2) + "\n", InputError)
    stored = _settings_of(folder)
    other = [name for name in wanted | stored if stored.get(name) != wanted.get(name)]
    if other:
        listed = ", ".join(
            f"{name} {stored.get(name)} instead of {wanted.get(name)}" for name in other
        )
        raise InputError(
            f"{folder} was collected in another way: {listed}",
            hint="Use the same settings, or a new folder.",
        )
    return stored


def _settings_of(folder: Path) -> dict[str, Any]:
    place = folder / SETTINGS
    if not place.exists():
        raise InputError(f"{folder} holds no collection", hint="Collect one first.")
    settings = read_json(place, hint="Collect anew.")
    needed = {"block_size": int, "candidates": list, "vocab": int, "drafter_hash": str}
    if not isinstance(settings, dict) or not all(
        isinstance(settings.get(name), kind) for name, kind in needed.items()
    ):
        raise InputError(f"{place} is damaged", hint="Collect anew.")
    return settings


def _write(place: Path, sample: BlockSizeSample) -> None:
    tensors = {name: getattr(sample, name) for name in DTYPES}
    write_atomic(place, save(tensors), InputError)


def _read(place: Path, settings: dict[str, Any]) -> BlockSizeSample:
    """A sample from its file; InputError if it is damaged or not of these settings."""
    try:
        with safe_open(place, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in DTYPES}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"cannot read {place}: {error}", hint="Remove it; the next run collects it again."
        ) from error
    each = (len(settings["candidates"]),)
    shapes = {"logits": (settings["vocab"],), "decoded": each, "rounds": each, "decode_s": each}
    shapes["prompt"] = (tensors["prompt"].numel(),)
    for name, dtype in DTYPES.items():
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shapes[name]:
            raise InputError(
                f"{place} holds {name} of another type or shape than was collected",
                hint="Remove it; the next run collects it again.",
            )
    return BlockSizeSample(**tensors)

"""What BlockPilot's predictor learns from: how well each block size does after each prompt.

Zhang et al., "BlockPilot", 2.3: for every prompt the target's logits behind it, and whole
speculative decoding once for each candidate block size. A file a prompt, so that a run that
was stopped goes on with the first prompt that is missing. The same seed gives the same data,
but for the seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from costmodel.errors import InputError
from costmodel.files import replacing
from decoder.drafters.blockpilot_model import RADIUS

SETTINGS = "collection.json"
DTYPES = {
    "prompt": torch.int64,
    "logits": torch.float32,
    "decoded": torch.int64,
    "rounds": torch.int64,
    "decode_s": torch.float64,
}

# What makes a block size the best: the acceptance length (equation 3 of the paper), or the
# acceptance length over what a cycle costs (equation 1).
Best = Literal["length", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How block sizes are compared.

    radius          k: candidates are B - k..B + k
    max_new_tokens  of each text
    policy          chooses the trees; the paper verifies the block's single path
    seed            of texts at a temperature above 0; the number of the prompt is added
    """

    radius: int = RADIUS
    max_new_tokens: int = 256
    policy: str = "chain"
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt of a sweep; the last three of each candidate, [candidates].

    prompt    int64 [tokens]
    logits    float32 [vocab] of the target behind the prompt
    decoded   int64: new tokens without the first, which comes from the prefill
    rounds    int64: verifications
    decode_s  float64: seconds of them
    """

    prompt: torch.Tensor
    logits: torch.Tensor
    decoded: torch.Tensor
    rounds: torch.Tensor
    decode_s: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor | None:
        """tau, tokens a verification with the bonus token [candidates]; None without any."""
        if int(self.rounds.min()) == 0:
            return None
        return self.decoded.double() / self.rounds.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """A collection as it lies in its folder.

    drafter_hash  of the DFlash drafter at its trained block size
    """

    block_size: int
    candidates: tuple[int, ...]
    vocab: int
    drafter_hash: str
    samples: list[Sample]


class Source(Protocol):
    """Where the samples of a collection come from."""

    prompts: Sequence[Sequence[int]]

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for a collection to be gone on with."""

    def sample(self, number: int) -> Sample:
        """What each block size did behind the prompt of this number."""


def collect_sweeps(
    source: Source, folder: Path, say: Callable[[str], None] = lambda line: None
) -> Sweeps:
    """A sample of every prompt, unless the folder has it.

    Raises InputError where the folder was collected in another way or with other prompts,
    and where a file in it is damaged.
    """
    claimed = _claim(folder, source.settings)
    for number, prompt in enumerate(source.prompts):
        place = folder / f"{number:06}.safetensors"
        if not place.exists():
            _write(place, source.sample(number))
            say(f"prompt {number + 1} of {len(source.prompts)}")
        elif not torch.equal(_read(place, claimed).prompt, torch.tensor(list(prompt))):
            raise InputError(
                f"{place} was collected with another prompt",
                hint="Give the prompts of the first run in the same order, or a new folder.",
            )
    return read_sweeps(folder)


def read_sweeps(folder: Path) -> Sweeps:
    """The collection in a folder, its samples in the order of the prompts.

    Raises InputError where there is none or a file is damaged.
    """
    claimed = _claimed(folder)
    places = sorted(folder.glob("*.safetensors"))
    if not places:
        raise InputError(f"{folder} holds no prompts", hint="Collect some first.")
    return Sweeps(
        block_size=claimed["block_size"],
        candidates=tuple(claimed["candidates"]),
        vocab=claimed["vocab"],
        drafter_hash=claimed["drafter_hash"],
        samples=[_read(place, claimed) for place in places],
    )


def cycle_s(samples: Sequence[Sample]) -> torch.Tensor:
    """Seconds of a cycle with each candidate [candidates], pooled over all prompts.

    Times of one prompt are noisy, and a cycle costs nearly the same after any prompt.
    """
    spent_s = torch.stack([sample.decode_s for sample in samples]).sum(0)
    return spent_s / torch.stack([sample.rounds for sample in samples]).sum(0)


def best_candidates(samples: Sequence[Sample], best: Best = "length") -> torch.Tensor:
    """The label of each sample [samples], an index into the candidates; -1 without one.

    Of equals the smallest block is the best, as in the published code (AMAP-ML/BlockPilot,
    data_analysis/max_value_counter.py). A text that ended with its first token has no label.
    """
    costs = cycle_s(samples) if best == "rate" else 1.0
    labels = []
    for sample in samples:
        lengths = sample.lengths
        labels.append(-1 if lengths is None else int((lengths / costs).numpy().argmax()))
    return torch.tensor(labels)


def _claim(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Say in the folder how it is collected; InputError where it says something else."""
    if not (folder / SETTINGS).exists():
        text = json.dumps(wanted, indent=2) + "\n"
        _replace(folder / SETTINGS, lambda part: part.write_text(text, encoding="utf-8"))
    found = _claimed(folder)
    other = [name for name in wanted | found if found.get(name) != wanted.get(name)]
    if other:
        told = ", ".join(
            f"{name} {found.get(name)} instead of {wanted.get(name)}" for name in other
        )
        raise InputError(
            f"{folder} was collected in another way: {told}",
            hint="Use the same settings, or a new folder.",
        )
    return found


def _claimed(folder: Path) -> dict[str, Any]:
    place = folder / SETTINGS
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{folder} holds no collection", hint="Collect one first.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {place}: {error}", hint="Collect anew.") from error
    needed = {"block_size": int, "candidates": list, "vocab": int, "drafter_hash": str}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), kind) for name, kind in needed.items()
    ):
        raise InputError(f"{place} is damaged", hint="Collect anew.")
    return found


def _write(place: Path, sample: Sample) -> None:
    tensors = {name: getattr(sample, name) for name in DTYPES}
    _replace(place, lambda part: save_file(tensors, part))


def _replace(place: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all, so that a run that is killed leaves no half of one."""
    try:
        with replacing(place) as part:
            write(part)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {place}: {error}") from error


def _read(place: Path, claimed: dict[str, Any]) -> Sample:
    try:
        with safe_open(place, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in DTYPES}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"cannot read {place}: {error}", hint="Remove it; the next run collects it again."
        ) from error
    each = (len(claimed["candidates"]),)
    shapes = {"logits": (claimed["vocab"],), "decoded": each, "rounds": each, "decode_s": each}
    shapes["prompt"] = (tensors["prompt"].numel(),)
    for name, dtype in DTYPES.items():
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shapes[name]:
            raise InputError(
                f"{place} holds {name} of another type or shape than was collected",
                hint="Remove it; the next run collects it again.",
            )
    return Sample(**tensors)

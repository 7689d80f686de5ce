"""What BlockPilot's predictor learns from: how well each block size does after each prompt.

Zhang et al., "BlockPilot", 2.3: for every prompt the target's logits behind it, and whole
speculative decoding once for each candidate block size. A file a prompt, so that a run that
was stopped goes on with the first prompt that is missing. The same seed gives the same data,
but for the seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from costmodel.errors import InputError
from costmodel.files import replacing
from decoder.drafters.blockpilot_model import RADIUS, local_candidates
from decoder.drafters.dflash import DFlashDrafter
from decoder.drafters.dflash_model import DFlashModel
from decoder.engine import TreeDecoder
from decoder.target import Target

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


def collect_sweeps(
    target: Target,
    model: DFlashModel,
    prompts: Sequence[Sequence[int]],
    sweep: Sweep,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> Sweeps:
    """Decode every prompt with every candidate block size, unless the folder has it.

    prompts  token ids, chat template included
    Raises InputError where the folder was collected in another way or with other prompts,
    and where a file in it is damaged.
    """
    decoders = _decoders(target, model, sweep)
    claimed = _claim(folder, target, model, sweep)
    for number, prompt in enumerate(prompts):
        place = folder / f"{number:06}.safetensors"
        wanted = torch.tensor(list(prompt))
        if place.exists():
            if not torch.equal(_read(place, claimed).prompt, wanted):
                raise InputError(
                    f"{place} was collected with another prompt",
                    hint="Give the prompts of the first run in the same order, or a new folder.",
                )
            continue
        _write(place, _sweep(decoders, wanted, sweep, sweep.seed + number))
        say(f"prompt {number + 1} of {len(prompts)}")
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


def _decoders(target: Target, model: DFlashModel, sweep: Sweep) -> list[TreeDecoder]:
    """A decoder for each candidate; they share the target and the weights."""
    return [
        TreeDecoder(target, drafter=DFlashDrafter(target, model, size), policy=sweep.policy)
        for size in local_candidates(model.config.block_size, sweep.radius)
    ]


def _sweep(
    decoders: Sequence[TreeDecoder], prompt: torch.Tensor, sweep: Sweep, seed: int
) -> Sample:
    target, ids = decoders[0].target, prompt.tolist()
    decoders[0].check(ids, sweep.max_new_tokens)
    target.reserve(len(ids) + 1)
    logits = target.prefill(prompt.to(target.device)).float().cpu()
    stats = [
        decoder.generate(
            ids, max_new_tokens=sweep.max_new_tokens, temperature=sweep.temperature, seed=seed
        ).stats
        for decoder in decoders
    ]
    return Sample(
        prompt=prompt,
        logits=logits,
        decoded=torch.tensor([own.new_tokens - 1 for own in stats]),
        rounds=torch.tensor([own.rounds for own in stats]),
        decode_s=torch.tensor([own.decode_s for own in stats], dtype=torch.float64),
    )


def _claim(folder: Path, target: Target, model: DFlashModel, sweep: Sweep) -> dict[str, Any]:
    """Say in the folder how it is collected; InputError where it says something else."""
    vocab, block_size = target.architecture.vocab, model.config.block_size
    wanted = {
        "target": target.loaded.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter_hash": model.config.hash(vocab),
        "vocab": vocab,
        "block_size": block_size,
        "candidates": list(local_candidates(block_size, sweep.radius)),
        **asdict(sweep),
    }
    if not (folder / SETTINGS).exists():
        text = json.dumps(wanted, indent=2) + "\n"
        _replace(folder / SETTINGS, lambda part: part.write_text(text, encoding="utf-8"))
    found = _claimed(folder)
    other = [name for name in wanted if found.get(name) != wanted[name]]
    if other:
        told = ", ".join(f"{name} {found.get(name)} instead of {wanted[name]}" for name in other)
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

"""The parts of the GPU suite (lab/studies/gpu_suite.py): their sizes, order and limits.

A part gets the suite's scale, its target and runtime, and a folder for its files, and returns
a result of JSON values. Weights are random, which takes the same time and needs no download.
Acceptance is simulated at published rates, and labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from costmodel.errors import RooftreeError
from decoder.device import parse_dtype, select_device
from decoder.model.loading import LoadedModel, load_model
from decoder.model.making import make_target
from decoder.model.target import Target

SEED = 20262  # of weights, held-out points and texts; the calibration uses another


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of all measurements; the defaults are those of a GPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    targets: tuple[str, ...] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
    small: str = "Qwen/Qwen3-0.6B"
    runtimes: tuple[str, ...] = ("graphs", "eager")
    exact_dtype: str = "float32"
    other_dtype: str = "float16"
    contexts: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    max_nodes: int = 1024
    batches: tuple[int, ...] = (1, 4, 16)
    budget_s: float = 90.0
    held_out_s: float = 60.0
    plain_contexts: tuple[int, ...] = (64, 1024, 4096, 16384)
    verify_rows: tuple[int, ...] = (1, 16, 64, 128, 256)
    verify_context: int = 1024
    prompt_tokens: int = 1024
    new_tokens: int = 256
    texts: int = 3
    tests: tuple[str, ...] = ("-m", "gpu")
    kernel_rows: tuple[int, ...] = (1, 16, 64, 256)
    attention_contexts: tuple[int, ...] = (1024, 8192, 32768)
    repeats: int = 30
    compared_texts: int = 20
    fixed: tuple[int, ...] = (1, 3, 7, 15, 31, 63, 127, 255)


TINY = Scale(
    device="cpu", dtype="float32", targets=(), small="", runtimes=("eager",),
    other_dtype="bfloat16", contexts=(16, 64), max_nodes=15, batches=(1, 2), budget_s=2.0,
    held_out_s=2.0, plain_contexts=(16, 64), verify_rows=(1, 8), verify_context=32,
    prompt_tokens=12, new_tokens=24, texts=2, attention_contexts=(32,), compared_texts=2,
    tests=("-k", "test_taking_turns_changes_the_first"), kernel_rows=(3,), repeats=2,
    fixed=(3, 7),
)  # fmt: skip


# Seconds that a part of each kind should take on an H100; twice that it may.
PLANNED_S = {
    "smoke": 40, "kernels": 150, "calibrate": 135, "logits": 25, "forwards": 20, "replay": 55,
    "held-out": 65, "texts": 30, "launches": 25, "drafters": 40, "tests": 120,
}  # fmt: skip
# Parts of one target that one process measures; it takes so long to import, load and check.
TOGETHER = ("logits", "forwards", "replay", "held-out", "texts", "launches", "drafters")
START_S = 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement: a kind, a target and a runtime; `dtype` where it is not the scale's."""

    kind: str
    target: str = ""
    runtime: str = ""
    dtype: str = ""

    @property
    def name(self) -> str:
        label = self.target.rstrip("/").rpartition("/")[2].lower()
        fields = (self.kind, label, self.runtime, self.dtype)
        return ".".join(field for field in fields if field)

    @property
    def planned_s(self) -> float:
        return PLANNED_S[self.kind]


def all_parts(scale: Scale) -> list[Part]:
    """All parts in order of value.

    First whether it works and is correct, then the first target under the first runtime whole,
    then the other targets, runtimes and dtypes. Calibrations come before what reads their
    profile. A machine that is given back early has then measured what is needed most.
    """
    first, runtime = scale.targets[0], scale.runtimes[0]
    parts = [Part("smoke", scale.small or first, runtime), Part("kernels")]
    parts += [Part(kind, first, runtime) for kind in ("calibrate", *TOGETHER)]
    parts.append(Part("logits", first, runtime, scale.exact_dtype))
    parts.append(Part("tests"))
    for target in scale.targets[1:]:
        parts += [Part(kind, target, runtime) for kind in ("calibrate", "logits", "forwards")]
    for other in scale.runtimes[1:]:
        parts += [Part(kind, first, other) for kind in ("logits", "forwards")]
    parts += [Part(kind, first, runtime, scale.other_dtype) for kind in ("logits", "forwards")]
    return parts


def processes(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that one process measures after another; logits first, of a model still whole."""

    def model(part: Part) -> tuple[str, ...]:
        together = part.kind in TOGETHER
        return (part.target, part.runtime, part.dtype) if together else (part.name,)

    groups = [list(group) for _, group in groupby(parts, model)]
    return [sorted(group, key=lambda part: part.kind != "logits") for group in groups]


def planned_s(group: Sequence[Part]) -> float:
    """Seconds that a process should take."""
    return START_S + sum(part.planned_s for part in group)


def load(part: Part, scale: Scale) -> LoadedModel:
    """The part's model on its device, always with the same random weights."""
    device = select_device(scale.device)
    torch.manual_seed(SEED)
    dtype = parse_dtype(dtype_of(part, scale), device)
    return load_model(part.target, weights="random", dtype=dtype, device=device)


def dtype_of(part: Part, scale: Scale) -> str:
    return part.dtype or scale.dtype


_OPENED: dict[tuple[str, ...], Target] = {}  # the target of the process


def open_target(
    part: Part, scale: Scale, before: Callable[[LoadedModel], None] | None = None
) -> Target:
    """The part's target, as parts before it left it; `before` sees its model as it is loaded."""
    key = (part.target, part.runtime, dtype_of(part, scale), scale.device)
    if before is not None or key not in _OPENED:
        _OPENED.clear()
        loaded = load(part, scale)
        if before is not None:
            before(loaded)
        _OPENED[key] = make_target(loaded, runtime=part.runtime)
    return _OPENED[key]


def random_texts(vocab: int, scale: Scale) -> list[list[int]]:
    """Texts of random tokens, prompt and continuation."""
    random = np.random.default_rng(SEED)
    length = scale.prompt_tokens + scale.new_tokens
    return [random.integers(0, vocab, length).tolist() for _ in range(scale.texts)]


def profile_path(part: Part, folder: Path) -> Path:
    """The profile written by the calibration of the same target and runtime."""
    path = folder.parent / replace(part, kind="calibrate", dtype="").name / "profile.yaml"
    if not path.is_file():
        raise RooftreeError(
            f"there is no profile for {part.name}", hint="Run the calibration's part first."
        )
    return path

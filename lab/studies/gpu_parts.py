"""The parts of the GPU suite (lab/studies/gpu_suite.py): their sizes, order and limits.

A part gets the suite's scale, its target and runtime, and a folder for its files, and returns
a result of JSON values. Weights are random, which takes the same time and needs no download.
Acceptance is simulated at published rates, and labelled so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    brief_budget_s: float = 30.0
    plain_contexts: tuple[int, ...] = (64, 1024, 4096, 16384)
    verify_rows: tuple[int, ...] = (1, 16, 64, 128, 256)
    verify_context: int = 1024
    prompt_tokens: int = 1024
    new_tokens: int = 256
    texts: int = 3
    tests: tuple[str, ...] = ("-m", "gpu")
    kernel_rows: tuple[int, ...] = (1, 16, 64, 256)
    repeats: int = 50
    fixed: tuple[int, ...] = (1, 3, 7, 15, 31, 63, 127, 255)


TINY = Scale(
    device="cpu", dtype="float32", targets=(), small="", runtimes=("eager",),
    other_dtype="bfloat16", contexts=(16, 64), max_nodes=15, batches=(1, 2), budget_s=2.0,
    brief_budget_s=1.0, plain_contexts=(16, 64), verify_rows=(1, 8), verify_context=32,
    prompt_tokens=12, new_tokens=24, texts=2,
    tests=("-k", "test_joined_weights_share_their_memory"), kernel_rows=(3,), repeats=2,
    fixed=(3, 7),
)  # fmt: skip


# Seconds that a part of each kind may take; loading 16 GB of random weights is part of it.
LIMITS_S = {
    "smoke": 120, "kernels": 150, "logits": 150, "calibrate": 270, "forwards": 120,
    "held-out": 150, "replay": 200, "launches": 100, "drafters": 150, "tests": 300,
    "peers": 240, "brief": 150,
}  # fmt: skip


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
    def limit_s(self) -> float:
        return LIMITS_S[self.kind]


def all_parts(scale: Scale) -> list[Part]:
    """All parts in order of value.

    First whether it works and is correct, then the first target under the first runtime whole,
    then the other targets, runtimes and dtypes. Calibrations come before what reads their
    profile. A machine that is given back early has then measured what is needed most.
    """
    first, runtime = scale.targets[0], scale.runtimes[0]
    parts = [Part("smoke", scale.small or first, runtime), Part("kernels")]
    parts += [Part(kind, first, runtime) for kind in ("logits", "calibrate", "forwards")]
    parts += [Part(kind, first, runtime) for kind in ("held-out", "replay", "launches", "drafters")]
    parts.append(Part("logits", first, runtime, scale.exact_dtype))
    parts += [Part("tests"), Part("peers", first)]
    for target in scale.targets[1:]:
        parts += [Part(kind, target, runtime) for kind in ("logits", "calibrate", "forwards")]
        parts += [Part(kind, target, runtime) for kind in ("held-out", "replay")]
    parts.append(Part("brief", first, runtime))
    for other in scale.runtimes[1:]:
        parts += [Part(kind, first, other) for kind in ("logits", "calibrate", "forwards")]
    parts += [Part(kind, first, runtime, scale.other_dtype) for kind in ("logits", "forwards")]
    return parts


def load(part: Part, scale: Scale) -> LoadedModel:
    """The part's model on its device, always with the same random weights."""
    device = select_device(scale.device)
    torch.manual_seed(SEED)
    dtype = parse_dtype(dtype_of(part, scale), device)
    return load_model(part.target, weights="random", dtype=dtype, device=device)


def dtype_of(part: Part, scale: Scale) -> str:
    return part.dtype or scale.dtype


def open_target(part: Part, scale: Scale) -> Target:
    return make_target(load(part, scale), runtime=part.runtime)  # type: ignore[arg-type]


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

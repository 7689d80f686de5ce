"""Which parts the GPU suite has, and how large everything in them is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is: full size on a GPU, tiny to try the suite on a CPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    targets: tuple[str, ...] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
    runtimes: tuple[str, ...] = ("graphs", "eager")
    contexts: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    max_nodes: int = 1024
    batches: tuple[int, ...] = (1, 4, 16)
    budget_s: float = 30.0
    plain_contexts: tuple[int, ...] = (64, 1024, 4096, 16384)
    verify_rows: tuple[int, ...] = (1, 16, 64, 128, 256)
    verify_context: int = 1024
    prompt_tokens: int = 1024
    new_tokens: int = 256
    texts: int = 4
    fixed: tuple[int, ...] = (1, 3, 7, 15, 31, 63, 127, 255)


TINY = Scale(
    device="cpu",
    dtype="float32",
    targets=(),
    runtimes=("eager",),
    contexts=(16, 64),
    max_nodes=15,
    batches=(1, 2),
    budget_s=2.0,
    plain_contexts=(16, 64),
    verify_rows=(1, 8),
    verify_context=32,
    prompt_tokens=12,
    new_tokens=24,
    texts=2,
    fixed=(3, 7),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to measure: a kind, and the target and runtime it is about."""

    kind: str
    target: str = ""
    runtime: str = ""

    @property
    def name(self) -> str:
        label = self.target.rstrip("/").rpartition("/")[2].lower()
        return ".".join(part for part in (self.kind, label, self.runtime) if part)


def all_parts(scale: Scale) -> list[Part]:
    """Every part in the order of its worth, tests first and those that need a profile later."""
    parts = [Part("tests")]
    for target in scale.targets:
        for runtime in scale.runtimes:
            parts += [
                Part("calibrate", target, runtime),
                Part("forwards", target, runtime),
                Part("held-out", target, runtime),
                Part("replay", target, runtime),
            ]
    return parts

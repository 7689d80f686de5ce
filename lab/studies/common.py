"""Shared parts of the studies: prompt sets, the record of the machine, stored results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from costmodel.errors import InputError
from costmodel.io import read_yaml
from lab.bench.analysis.ratios import bootstrap_interval, rate_ratios
from lab.bench.environment import environment as environment

RESULTS = Path(__file__).parent / "results"
AVX2 = {"ROOFTREE_CPU": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# Servers and speed-ups that others measured.
PUBLISHED = read_yaml(Path(__file__).with_name("published.yaml"))
PROMPTS = Path(__file__).parents[3] / "shared" / "prompts"


def read_prompts(name: str, count: int) -> list[dict[str, str]]:
    """The first `count` prompts of one set of real text, from ../shared/prompts."""
    path = PROMPTS / f"{name}.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is not here: this benchmark needs the prompt sets")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def store(name: str, result: dict[str, Any]) -> Path:
    """Write a result to lab/studies/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"stored {path}")
    return path


def greedy(model: Any, prompt: Sequence[int], new_tokens: int, **options: Any) -> list[int]:
    """transformers' own greedy text."""
    ids = torch.tensor([prompt])
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    output = model.generate(ids, max_new_tokens=new_tokens, **options)
    text: list[int] = output[0, len(prompt) :].tolist()
    return text


def pooled_ratio(arm: ArrayLike, base: ArrayLike) -> dict[str, Any]:
    """Ratio of two arms' pooled rates, with the bootstrap interval of `rooftree bench`.

    arm, base: [texts, 2] tokens and seconds of the same texts in the same order. The interval
    is None for a single text. Raises InputError for arms of different texts.
    """
    first, second = np.asarray(arm, dtype=np.float64), np.asarray(base, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 2 or first.shape[1] != 2 or not len(first):
        raise InputError("paired arms need tokens and seconds of the same texts")
    table = np.hstack([first, second])
    return {
        "ratio": float(rate_ratios(table.sum(axis=0))),
        "interval_95": list(bootstrap_interval(table)) if len(table) > 1 else None,
    }

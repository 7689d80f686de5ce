"""Shared parts of the benchmark scripts: prompt sets, environment record, stored results."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from costmodel.io import now_utc
from decoder.device import fingerprint, select_device
from profiler.measure.machine import collect, observe

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parents[3] / "shared" / "prompts"


def read_prompts(name: str, count: int) -> list[dict[str, str]]:
    """The first `count` prompts of one set of real text, from ../shared/prompts."""
    path = PROMPTS / f"{name}.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is not here: this benchmark needs the prompt sets")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def environment(device_name: str | None = None) -> dict[str, Any]:
    """The machine, its state and the versions of the software."""
    device = select_device(device_name)
    key = fingerprint(device)
    metadata = collect(device.index or 0 if device.type == "cuda" else None)
    return {
        "created_utc": now_utc(),
        "device": key.name,
        "threads": key.threads,
        "instruction_set": key.instruction_set,
        "system": platform.system(),
        "load_average": os.getloadavg(),
        "busy": [process.name for process in observe().processes],
        **{
            name: value
            for name, value in metadata.fields.items()
            if isinstance(value, (str, int, float)) and "uuid" not in name
        },
    }


def store(name: str, result: dict[str, Any]) -> Path:
    """Write a result to lab/studies/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"stored {path}")
    return path

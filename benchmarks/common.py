"""What every benchmark script shares: prompts, provenance and stored results."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decoder.device import fingerprint, select_device
from profiler.device import collect, observe

RESULTS = Path(__file__).parent / "results"
PROMPTS = Path(__file__).parents[2] / "shared" / "prompts"


def read_prompts(name: str, count: int) -> list[dict[str, str]]:
    """The first prompts of one set of real text; the folder lies beside the checkout."""
    path = PROMPTS / f"{name}.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} is not here: this benchmark needs the prompt sets")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def environment(device_name: str | None = None) -> dict[str, Any]:
    """The machine and versions that a number belongs to."""
    device = select_device(device_name)
    found = fingerprint(device)
    metadata = collect(device.index or 0 if device.type == "cuda" else None)
    return {
        "created_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": found.name,
        "threads": found.threads,
        "instruction_set": found.instruction_set,
        "system": platform.system(),
        "load_average": os.getloadavg(),
        "busy": [process.name for process in observe().processes],
        **{
            key: value
            for key, value in metadata.fields.items()
            if isinstance(value, (str, int, float)) and "uuid" not in key
        },
    }


def store(name: str, result: dict[str, Any]) -> Path:
    """Write a result with its environment to benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"stored {path}")
    return path

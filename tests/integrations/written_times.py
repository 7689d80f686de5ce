"""Files as other tools write them, from times that are simple formulas."""

import json
from pathlib import Path

ROWS, CONTEXTS, BATCHES = (1, 2, 4, 8, 16, 32), (256, 1024, 4096), (1, 4)


def forward_s(rows: int, context: int, batch: int) -> float:
    """Seconds of a forward of Qwen3-8B on one H100, roughly."""
    return 6.5e-3 + 2e-5 * rows * batch + 4e-8 * context * batch


def write_points(path: Path, factor: float = 1.0, batches: tuple[int, ...] = BATCHES) -> Path:
    """A CSV of every shape, its times multiplied by `factor`."""
    shapes = [(rows, context, batch) for batch in batches for context in CONTEXTS for rows in ROWS]
    lines = [f"{r},{c},{b},{forward_s(r, c, b) * 1e3 * factor!r}" for r, c, b in shapes]
    path.write_text("\n".join(["new_tokens,context_tokens,batch,milliseconds", *lines]))
    return path


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

"""Reader of `llama-bench -o jsonl` (llama.cpp, tools/llama-bench).

A line is one test. `-p` tests are one forward of `n_prompt` rows on `n_depth` cached tokens, `-n`
tests are `n_gen` plain steps. Times are in nanoseconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from costmodel.catalog import slugify
from costmodel.errors import InputError, shown
from costmodel.imports.table import ImportedTable, Record, ShapeTimes, WeightFormat
from costmodel.io import MAX_TABLE_BYTES, json_lines, read_bytes

_HINT = "Write it with `llama-bench -p 1,2,4,8,16 -n 0 -d 256,1024 -o jsonl`"
# One profile is of one build, model and setting.
_SETTINGS = (
    "build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "n_threads", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "flash_attn",
)  # fmt: skip
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_llama_bench(path: Path, context: int | None = None) -> ImportedTable:
    """All tests of one setting. Raises InputError."""
    raw = read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES)
    records = [
        Record(value, f"{path}, line {number}", hint=_HINT)
        for number, value in json_lines(path, raw, hint=_HINT)
    ]
    if not records:
        raise InputError(f"{path} is empty", hint=_HINT)
    first, times = records[0], ShapeTimes(path, hint=_HINT)
    for record in records:
        for name in _SETTINGS:
            if record.fields.get(name) != first.fields.get(name):
                raise InputError(
                    f"{record.at}: {name} is {shown(record.fields.get(name))}, but"
                    f" {shown(first.fields.get(name))} before: a profile is of one setting",
                    hint="Keep the lines of one setting in a file",
                )
        _add_test(times, record)
    on_gpu = first.text("backends") != "CPU"
    return ImportedTable(
        points=times.points(),
        tool="llama-bench",
        version=_build(first),
        runtime="external",
        lacks=("the LM head of all rows but the last",),
        left_out=times.left_out,
        weights=_weights(first),
        processor=first.text("gpu_info" if on_gpu else "cpu_info"),
        threads=None if on_gpu else first.whole("n_threads", 1),
        parameters=first.whole("model_n_params", 1),
        model=Path(first.text("model_filename")).name,
    )


def _build(record: Record) -> str | None:
    """The build; None for one that was made outside of a checkout, which does not know its own."""
    commit, number = record.text("build_commit"), record.whole("build_number")
    return None if commit == "unknown" else f"llama.cpp {commit} ({number})"


def _add_test(times: ShapeTimes, record: Record) -> None:
    rows, steps, depth = (record.whole(name) for name in ("n_prompt", "n_gen", "n_depth"))
    if (rows > 0) == (steps > 0):
        times.leave_out("of a prompt and its answer together")
        return
    if rows > min(record.whole("n_batch", 1), record.whole("n_ubatch", 1)):
        times.leave_out("of more rows than one forward holds (n_batch, n_ubatch)")
        return
    samples = record.numbers("samples_ns") if "samples_ns" in record.fields else []
    whole_s = (median(samples) if samples else record.positive("avg_ns")) * 1e-9
    count = max(steps, 1)
    times.add(
        (max(rows, 1), depth + (count - 1) // 2, 1),
        whole_s / count,
        samples_s=[sample * 1e-9 / count for sample in samples],
    )


def _weights(record: Record) -> WeightFormat:
    """From the model's type, such as `llama 8B BF16` or `qwen3 8B Q4_K - Medium`."""
    kind = record.text("model_type")
    plain = re.search(r"\b(BF16|F16|F32)$", kind)
    if plain is not None:
        return WeightFormat(dtype=_PLAIN_DTYPES[plain[1]])  # type: ignore[arg-type]
    mean_bytes = record.whole("model_size", 1) / record.whole("model_n_params", 1)
    name = slugify(kind.split(" ", 2)[-1])
    return WeightFormat(dtype="float16", quantization=name, weight_bytes=mean_bytes)

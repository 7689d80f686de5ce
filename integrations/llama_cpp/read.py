"""Forward times in files of llama.cpp's own tools.

`llama-bench -o jsonl`: a line is one test. `-p` tests are one forward of `n_prompt` rows on
`n_depth` cached tokens, `-n` tests are `n_gen` plain steps. Times are in nanoseconds.

`llama-batched-bench`: PP prompt and TG generated tokens for each of B sequences. It names neither
weights nor build, so a file also holds `llama-bench`'s table of the same model, as llama.cpp's
scripts/bench-models.sh writes both.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from costmodel.catalog import slugify
from costmodel.errors import InputError, shown
from costmodel.imports import ImportedTable, ShapeTimes, TableRecord
from costmodel.io import MAX_TABLE_BYTES, json_lines, read_bytes, text_of

_LLAMA_HINT = "Write it with `llama-bench -p 1,2,4,8,16 -n 0 -d 256,1024 -o jsonl`"
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
        TableRecord(value, f"{path}, line {number}", hint=_LLAMA_HINT)
        for number, value in json_lines(path, raw, hint=_LLAMA_HINT)
    ]
    if not records:
        raise InputError(f"{path} is empty", hint=_LLAMA_HINT)
    first, times = records[0], ShapeTimes(path, hint=_LLAMA_HINT)
    for record in records:
        for name in _SETTINGS:
            if record.fields.get(name) != first.fields.get(name):
                raise InputError(
                    f"{record.at}: {name} is {shown(record.fields.get(name))}, but"
                    f" {shown(first.fields.get(name))} before: a profile is of one setting",
                    hint="Keep the lines of one setting in a file",
                )
        rows, steps, depth = (record.whole(name) for name in ("n_prompt", "n_gen", "n_depth"))
        if (rows > 0) == (steps > 0):
            times.left_out["of a prompt and its answer together"] += 1
            continue
        if rows > min(record.whole("n_batch", 1), record.whole("n_ubatch", 1)):
            times.left_out["of more rows than one forward holds (n_batch, n_ubatch)"] += 1
            continue
        samples = record.numbers("samples_ns") if "samples_ns" in record.fields else []
        whole_s = (median(samples) if samples else record.positive("avg_ns")) * 1e-9
        count = max(steps, 1)
        times.add(
            (max(rows, 1), depth + (count - 1) // 2, 1),
            whole_s / count,
            samples_s=[sample * 1e-9 / count for sample in samples],
        )
    on_gpu, limit = _on_gpu(first), first.fields.get("n_gpu_layers")
    all_layers = not isinstance(limit, int) or limit < 0  # it is not said, or -1
    # One that was made outside of a checkout does not know its own build.
    commit, number = first.text("build_commit"), first.whole("build_number")
    return ImportedTable(
        points=times.points(),
        tool="llama-bench",
        version=None if commit == "unknown" else f"llama.cpp {commit} ({number})",
        runtime="external",
        lacks=("the LM head of all rows but the last",),
        left_out=times.left_out,
        **_weight_format(
            first.text("model_type"), first.positive("model_size"), first.positive("model_n_params")
        ),
        processor=first.text("gpu_info" if on_gpu else "cpu_info"),
        threads=None if on_gpu else first.whole("n_threads", 1),
        parameters=int(first.positive("model_n_params")),
        gpu_layers=None if all_layers or not on_gpu else limit,
        model=Path(first.text("model_filename")).name,
    )


def _on_gpu(record: TableRecord) -> bool:
    """Whether all of it ran on one GPU, and not on this machine's CPU. Raises InputError."""
    backends = {name.strip() for name in record.text("backends").split(",")}
    if not backends - {"CPU", "BLAS"}:
        return False
    gpus = [name for name in record.text("gpu_info").split(",") if name.strip()]
    problem = ""
    if "RPC" in backends:
        problem = "it ran on other machines too (RPC)"
    elif len(gpus) > 1 and record.fields.get("split_mode") != "none":
        problem = f"it ran on {len(gpus)} GPUs"
    elif str(record.fields.get("n_gpu_layers")) == "0" or record.fields.get("n_cpu_moe"):
        problem = "layers ran on the CPU (n_gpu_layers, n_cpu_moe)"
    elif record.fields.get("tensor_buft_overrides", "none") not in ("", "none", None):
        problem = "tensors were kept elsewhere (tensor_buft_overrides)"
    elif record.fields.get("devices") == "none":
        problem = "no GPU was used (devices)"
    elif record.fields.get("no_kv_offload"):
        problem = "its KV cache was in the CPU's memory (no_kv_offload)"
    if problem:
        raise InputError(
            f"{record.at}: {problem}: no profile of one device",
            hint="Run llama-bench with `-ngl 99 -sm none`, for a CPU without its GPU backend",
        )
    return True


def _weight_format(kind: str, model_bytes: float, parameters: float) -> dict[str, Any]:
    """From the model's type, such as `llama 8B BF16` or `qwen3 8B Q4_K - Medium`."""
    plain = re.search(r"\b(BF16|F16|F32)$", kind)
    if plain is not None:
        return {"dtype": _PLAIN_DTYPES[plain[1]]}
    name = slugify(kind.split(" ", 2)[-1])
    return {"dtype": "float16", "quantization": name, "weight_bytes": model_bytes / parameters}


_BATCHED_HINT = (
    "Write it with llama.cpp's scripts/bench-models.sh, and keep the part of one model: the tables"
    " of llama-batched-bench and llama-bench, and the build"
)
# Whole numbers that int takes, decimal ones, and those above 0.
_WHOLE, _DECIMAL, _ABOVE_0 = r"\d{1,9}", r"\d{1,9}\.\d{1,9}", r"(?=[.\d]*[1-9])\d{1,9}\.\d{1,9}"
_BATCHED_ROW = re.compile(
    rf"\| *({_WHOLE}) \| *({_WHOLE}) \| *({_WHOLE}) \| *{_WHOLE} \| *({_DECIMAL}) \| *{_DECIMAL}"
    rf" \| *({_DECIMAL}) \|.*"
)
_BENCH_ROW = re.compile(
    rf"\| (?P<kind>\S.*?) +\| *(?P<size>{_ABOVE_0}) (?P<unit>[MG])iB \| *(?P<count>{_ABOVE_0})"
    rf" (?P<of>[MB]) \| (?P<backend>\S+) .*?\| *(?P<test>pp|tg)(?P<tokens>{_WHOLE})"
    rf"(?: @ d(?P<depth>{_WHOLE}))? \| *(?P<rate>{_ABOVE_0}) ± .*"
)


def read_batched_bench(path: Path, context: int | None = None) -> ImportedTable:
    """Prompts and plain steps of several sequences. Raises InputError."""
    text = text_of(read_bytes(path, InputError, most_bytes=MAX_TABLE_BYTES), "replace")
    lines = [line.strip() for line in text.splitlines()]
    named = re.findall(rf"\b(n_\w+|is_\w+) = ({_WHOLE})\b", text)
    settings = {name: int(value) for name, value in named}
    rows = [match.groups() for match in map(_BATCHED_ROW.fullmatch, lines) if match]
    tests = [match for match in map(_BENCH_ROW.fullmatch, lines) if match]
    builds = set(re.findall(r"^build: (\w+) \((\d+)\)", text, re.MULTILINE))
    models = {(test["kind"], test["size"], test["count"], test["backend"]) for test in tests}
    if not rows or "n_ubatch" not in settings or len(models) != 1 or len(builds) != 1:
        raise InputError(
            f"{path} has {len(rows)} rows of llama-batched-bench, {len(models)} models of"
            f" llama-bench and {len(builds)} builds",
            hint=_BATCHED_HINT,
        )
    ((commit, number),), first = builds, tests[0]
    times = ShapeTimes(path, hint=_BATCHED_HINT)
    one_forward = min(settings["n_ubatch"], settings.get("n_batch", settings["n_ubatch"]))
    in_parts = "of a prompt in several forwards, or the first of all, which warms up"
    for index, row in enumerate(rows):
        prompt, steps, batch = (int(count) for count in row[:3])
        if settings.get("is_pp_shared") or not batch:
            times.left_out["of a prompt that sequences share, or of no sequence"] += 1
            continue
        if index and 0 < prompt * batch <= one_forward:
            times.add((prompt, 0, batch), float(row[3]))
        elif prompt:
            times.left_out[in_parts] += 1
        if steps:
            times.add((1, prompt + (steps - 1) // 2, batch), float(row[4]) / steps)
    for test in tests:
        tokens, depth, rate = int(test["tokens"]), int(test["depth"] or 0), float(test["rate"])
        if test["test"] == "tg":
            times.add((1, depth + (tokens - 1) // 2, 1), 1 / rate)
        elif tokens <= one_forward:
            times.add((tokens, depth, 1), tokens / rate)
        else:
            times.left_out[in_parts] += 1
    model_bytes = float(first["size"]) * 2 ** {"M": 20, "G": 30}[first["unit"]]
    parameters = float(first["count"]) * {"M": 1e6, "B": 1e9}[first["of"]]
    return ImportedTable(
        points=times.points(),
        tool="llama-batched-bench",
        version=f"llama.cpp {commit} ({number})",
        runtime="external",
        lacks=(
            "verifications: several rows of a sequence were timed as prompts only",
            "the LM head of all rows but the last",
        ),
        left_out=times.left_out,
        **_weight_format(first["kind"], model_bytes, parameters),
        threads=settings.get("n_threads") if first["backend"] == "CPU" else None,
        parameters=round(parameters),
        model=first["kind"],
    )

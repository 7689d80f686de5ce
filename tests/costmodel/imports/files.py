"""Files as other tools write them, from times that are simple formulas."""

from __future__ import annotations

import json
from pathlib import Path

ROWS, CONTEXTS, BATCHES = (1, 2, 4, 8, 16, 32), (256, 1024, 4096), (1, 4)


def forward_s(rows: int, context: int, batch: int) -> float:
    """Seconds of a forward of Qwen3-8B on one H100, roughly."""
    return 6.5e-3 + 2e-5 * rows * batch + 4e-8 * context * batch


def vllm_case(rows: int, context: int, batch: int, **changed) -> dict:
    """One case as `run_case` and `main` of vllm/lab/studies/forward/main.py (0.33.0) write it.

    Half of the requests have 10 cached tokens more, and half 10 fewer, as its jitter draws them.
    """
    median_us = forward_s(rows, context, batch) * 1e6
    cached = [context + (10 if i % 2 else -10) * (batch > 1) for i in range(batch)]
    latency = {
        "timer": "graph_events",
        "median": median_us,
        "sample_spread_pct": 0.2,
        "mean": median_us,
        "std": 1.0,
        "min": median_us - 2,
        "p90": median_us + 2,
        "count": 5,
        "samples_us": [round(median_us + step, 2) for step in (-2, -1, 0, 1, 2)],
    }
    rank = {
        "num_tokens": rows * batch,
        "kv_blocks": 10,
        "routing": "real",
        "stage": "target_only",
        "latency_us": latency,
    }
    request = {"query_len": rows, "num_draft_tokens": rows - 1, "chunked": False}
    return {
        "case": f"b{batch}r{rows}c{context}",
        "requests": [{**request, "kv_len": rows + one} for one in cached],
        "median_us": median_us,
        "ranks": [rank],
    } | changed


def vllm_cases() -> list[dict]:
    return [vllm_case(r, c, b) for b in BATCHES for c in CONTEXTS for r in ROWS]


def one_batch_lines() -> list[dict]:
    """Lines as sglang/benchmark/one_batch.py (0.5.23) writes them."""
    return [
        {
            "run_name": "default",
            "batch_size": batch,
            "input_len": prompt,
            "output_len": 17,
            "prefill_latency": forward_s(prompt, 0, batch),
            "prefill_throughput": 1.0,
            "median_decode_latency": forward_s(1, prompt + 8, batch),
            "median_decode_throughput": 1.0,
            "total_latency": 1.0,
            "overall_throughput": 1.0,
        }
        for batch in BATCHES
        for prompt in (128, 512, 2048)
    ]


def nvidia_rows(**changed) -> list[dict]:
    """Rows of schema aic_fpm_forward_perf, with the columns that AIConfigurator 0.12 matches by."""
    common = {
        "model_path": "Qwen/Qwen3-8B",
        "system": "h100_sxm",
        "backend": "vllm",
        "backend_version": "0.25.1",
        "gemm_quant_mode": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "tp": 1,
        "pp": 1,
        "dp": 1,
    } | changed
    rows = []
    for batch in BATCHES:
        for context in CONTEXTS:
            for new in (0, 64, 256):  # 0: decoding
                rows.append(
                    common
                    | {
                        "workload_kind": "prefill" if new else "decode",
                        "batch_size": batch,
                        "total_prefill_tokens": new * batch,
                        "total_kv_read_tokens": context * batch,
                        "latency_ms": forward_s(max(new, 1), context, batch) * 1e3,
                    }
                )
    return rows


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path

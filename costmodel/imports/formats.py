"""The formats of `rooftree fit --from`, and the reader of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from costmodel.imports.csv_points import read_csv
from costmodel.imports.llama_bench import read_llama_bench
from costmodel.imports.nvidia_forward import read_nvidia_forward
from costmodel.imports.sglang import read_dspark, read_one_batch
from costmodel.imports.table import ImportedTable, ReadOptions
from costmodel.imports.vllm_forward import read_vllm_forward

READERS: dict[str, Callable[[Path, ReadOptions], ImportedTable]] = {
    "csv": read_csv,
    "vllm-forward": read_vllm_forward,
    "llama-bench": read_llama_bench,
    "sglang-one-batch": read_one_batch,
    "sglang-dspark": read_dspark,
    "nvidia-forward": read_nvidia_forward,
}

"""Our Triton kernels compiled ahead of time for every GPU architecture, without a GPU.

    python -m tests.decoder.model.compiled_kernels [--capabilities 80 90 ...]

The launches of a forward are recorded on CPU tensors, so that each kernel is compiled with the
argument types, divisibility hints and constants that a real launch passes. The table holds the
registers, spilled bytes and shared memory that the assembler reports, and is stored by Triton's
version in lab/studies/results/compiled_kernels.json, beside those of other versions.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

from decoder.model.attention import RowBlock
from decoder.model.kv_cache import CacheShape, KVCache
from decoder.model.runtime import kernels
from decoder.model.runtime.tables import RowTables, needed_words
from lab.bench.environment import environment

# Bytes of shared memory that one program may use (CUDA C++ Programming Guide, technical
# specifications by compute capability).
SHARED_BYTES = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
STORED = Path(__file__).parents[3] / "lab/studies/results/compiled_kernels.json"
KERNELS = ("_attend_part", "_merge_parts", "_rms_norm", "_swiglu", "_rotate_and_store")
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
ALIGNMENT = 16  # bytes or elements for which Triton makes a kernel of its own
OPTIONS = ("num_warps", "num_stages")


Layer = namedtuple("Layer", "heads kv_heads width hidden ffn normed")
LAYERS = {
    "qwen3-8b": Layer(heads=32, kv_heads=8, width=128, hidden=4096, ffn=12288, normed=True),
    "llama-3.2-1b": Layer(heads=32, kv_heads=8, width=64, hidden=2048, ffn=8192, normed=False),
    "gemma-7b": Layer(heads=16, kv_heads=16, width=256, hidden=3072, ffn=24576, normed=False),
}
ROWS = (1, 4, 8, 16, 64)  # of a forward: every block size of the launch plan


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch: the kernel, its arguments by name, and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def source(self) -> ASTSource:
        """What Triton compiles for these arguments, specialised as its launcher does."""
        kept = {one.name for one in self.kernel.params if one.do_not_specialize}
        signature, fixed, hints = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            whole = type(value) is int and name not in kept
            if parameter.is_constexpr or (whole and value == 1):
                signature[name], fixed[(index,)] = "constexpr", value
                continue
            kind = "fp32" if isinstance(value, float) else "i32"
            signature[name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else kind
            if isinstance(value, torch.Tensor) or (whole and value % ALIGNMENT == 0):
                hints[(index,)] = [["tt.divisibility", ALIGNMENT]]
        return ASTSource(self.kernel, signature, fixed, hints)


class _Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any, launched: list[Launched]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*values: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            arguments = dict(zip(self._kernel.arg_names, values, strict=False)) | named
            self._launched.append(Launched(self._kernel, arguments, options))

        return launch


@contextmanager
def recorded() -> Iterator[list[Launched]]:
    """Launches of our kernels inside the block are kept and not run."""
    launched: list[Launched] = []
    stand_ins = {name: _Recorder(getattr(kernels, name), launched) for name in KERNELS}
    with mock.patch.multiple(kernels, **stand_ins):
        yield launched


def launches(layer: Layer, rows: int, dtype: torch.dtype) -> list[Launched]:
    """The launches of one decoder layer for a forward of `rows` rows."""
    device = torch.device("cpu")
    shape = CacheShape(layers=1, kv_heads=layer.kv_heads, head_dim=layer.width)
    cache = KVCache(shape, capacity=1024, sequences=1, dtype=dtype, device=device)
    numbers = np.arange(rows, dtype=np.int64)  # a chain: each row is the child of the one before
    block = RowBlock(0, numbers, numbers, None)
    tables = RowTables(rows, 1, needed_words(cache, [block]), device)
    tables.fill(cache, [block])
    keys, values = cache.data[0]

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype)

    norm, angles = empty(layer.width), empty(rows, layer.width)
    norms = (norm, norm, 1e-6) if layer.normed else None
    with recorded() as launched:
        hidden = empty(rows, layer.hidden)
        kernels.add_rms_norm(hidden, None, empty(layer.hidden), 1e-6)
        kernels.add_rms_norm(hidden, hidden, empty(layer.hidden), 1e-6)
        qkv = empty(rows, (layer.heads + 2 * layer.kv_heads) * layer.width)
        query = kernels.rotate_and_store(qkv, (angles, angles), norms, keys, values, tables)
        kernels.table_attention(query, keys, values, tables, layer.width**-0.5)
        kernels.swiglu(empty(rows, 2 * layer.ffn))
    return launched


def assemble(launched: Launched, capability: int) -> dict[str, int]:
    """Compile one launch: registers, spilled bytes and shared memory of a program."""
    target = GPUTarget("cuda", capability, 32)
    compiled = compile(launched.source, target=target, options=launched.options)
    shared = {"shared_bytes": int(compiled.metadata.shared)}
    return resources(compiled.asm["ptx"], capability) | shared


def resources(ptx: str, capability: int) -> dict[str, int]:
    """Registers a thread and spilled bytes, from the report of the assembler that Triton uses."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        report = subprocess.run(
            [get_ptxas(capability).path, "-v", f"--gpu-name={target.group(1)}",
             str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.findall(r"(\d+) bytes spill stores", report)
    return {"registers": int(registers.group(1)), "spilled_bytes": sum(map(int, spilled))}


def table(capabilities: list[int], names: list[str] | None = None) -> list[dict[str, Any]]:
    """One row for each different kernel, layer and architecture."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in names or list(LAYERS):
        for dtype in (torch.bfloat16, torch.float32):
            for count in ROWS:
                for launched in launches(LAYERS[name], count, dtype):
                    for capability in capabilities:
                        source = launched.source
                        key = (source.hash(), tuple(launched.options.items()), capability)
                        if key not in rows:
                            rows[key] = {
                                "kernel": launched.kernel.__name__, "layer": name,
                                "dtype": str(dtype).removeprefix("torch."), "rows": count,
                                "capability": capability, **assemble(launched, capability),
                                "shared_limit_bytes": SHARED_BYTES[capability],
                            }  # fmt: skip
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(SHARED_BYTES))
    options = parser.parse_args()
    rows = table(options.capabilities)
    over = [row for row in rows if row["shared_bytes"] > row["shared_limit_bytes"]]
    made = {"environment": environment("cpu"), "kernels": rows, "over_the_limit": len(over)}
    others = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    stored = others | {f"triton {triton.__version__}": made}
    STORED.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Triton kernels: correct in the interpreter, and compiled for the GPUs that they are meant for.

CUDA builds of PyTorch bring Triton; beside a CPU build it comes with the `dev` extra.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoder.model.runtime.fused import triton_version
from tests.decoder.table_cases import TableCase

ROOT = Path(__file__).parents[3]
MOST_SPILLED_BYTES = 128  # of a thread
WIDE_EXACT = ("float32", "gemma-7b")  # heads of 256 lanes; Triton 3.6 spills 204 bytes
SIZES = (16, 32), (256, 32), (16, 8, 9)  # 4 and 64 packed rows of 16 sequences, and keys
needs_triton = pytest.mark.skipif(
    not triton_version(), reason="triton is not installed (the dev extra brings it)"
)


@needs_triton
@pytest.mark.slow
def test_the_kernels_in_the_interpreter():
    """In a process of its own, because importing the kernels chooses the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "tests/decoder/interpreted_kernels.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-7b"])
def test_row_counts_make_no_kernel_of_their_own(name):
    """Rows, words and parts vary from round to round; only the block's size chooses a kernel."""
    from decoder.model.runtime.kernels import plan_launch
    from tests.decoder.model.compiled_kernels import LAYERS, launches

    def compiled(rows):
        made = launches(LAYERS[name], rows, torch.bfloat16)
        return {launched.source.hash() for launched in made}

    few, many, keys = (torch.empty(*sizes, 128).half() for sizes in SIZES)
    assert [plan_launch(rows, keys).block_rows for rows in (few, many)] == [16, 64]
    assert compiled(33) == compiled(47) == compiled(64) == compiled(200) == compiled(1025)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name"), [
    (80, "qwen3-8b"), (86, "gemma-7b"), (90, "qwen3-8b"), (100, "gemma-7b"), (120, "gemma-7b"),
])  # fmt: skip
def test_every_kernel_compiles_for_every_architecture(capability, name):
    """As launched: with the divisibility hints and constants of a forward of 64 rows."""
    from tests.decoder.model.compiled_kernels import LAYERS, SHARED_BYTES, assemble, launches

    made = launches(LAYERS[name], 64, torch.bfloat16)
    assert {launched.kernel.__name__ for launched in made} == {
        "_attend_part", "_merge_parts", "_rms_norm", "_swiglu", "_rotate_and_store"
    }  # fmt: skip
    for launched in made:
        used = assemble(launched, capability)
        assert used["shared_bytes"] <= SHARED_BYTES[capability], launched.kernel.__name__
        assert used["registers"] <= 255 and used["spilled_bytes"] <= MOST_SPILLED_BYTES


@needs_triton
@pytest.mark.parametrize("version", ["3.6.0", "3.7.0"])  # what users of torch 2.11 to 2.13 have
def test_the_stored_table_has_every_kernel_on_every_architecture(version):
    """`compiled_kernels.py` beside this file writes it anew where a kernel has changed."""
    from tests.decoder.model.compiled_kernels import KERNELS, LAYERS, SHARED_BYTES, STORED

    rows = json.loads(STORED.read_text(encoding="utf-8"))[f"triton {version}"]["kernels"]
    compiled = {(row["kernel"], row["capability"]) for row in rows}
    assert compiled == {(name, capability) for name in KERNELS for capability in SHARED_BYTES}
    assert {row["layer"] for row in rows} == set(LAYERS)
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    for row in rows:
        most = MOST_SPILLED_BYTES * (2 if (row["dtype"], row["layer"]) == WIDE_EXACT else 1)
        assert row["shared_bytes"] <= SHARED_BYTES[row["capability"]]
        assert row["registers"] <= 255 and row["spilled_bytes"] <= most


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_on_the_device(dtype):
    from decoder.model.runtime.kernels import table_attention

    for seed in range(20):
        rows = {"rows": [12, 1 + seed, 3], "prefixes": [90 - seed, 0, 64], "pending": seed % 4}
        sizes = {"padding": seed % 3, "kv_heads": 2, "group": 1 + seed % 4, "width": 32}
        made = TableCase(rows | sizes | {"seed": seed}, dtype=dtype, device="cuda")
        output = table_attention(made.query, made.keys, made.values, made.tables, made.width**-0.5)
        truth = made.truth()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        given = output[: len(truth)].double()
        torch.testing.assert_close(given, truth, atol=tolerance, rtol=tolerance)

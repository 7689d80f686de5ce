"""Our Triton kernels: right in the interpreter, and compiled for the GPUs they are meant for.

Triton comes with CUDA builds of PyTorch; the CPU build needs `pip install triton`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoder.runtime.triton_support import kernels_usable, triton_installed
from tests.decoder.table_cases import TableCase

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    not triton_installed(), reason="triton is not installed (`pip install triton`)"
)


@needs_triton
def test_the_kernels_in_the_interpreter():
    """In a process of its own, since the interpreter is chosen when kernels are imported."""
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


def assembled_for(capability, kernel, types, fixed):
    """The kernel compiled without a GPU: Triton brings its own assembler.

    types  of the arguments that are not int32, fixed are compile-time constants
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(fixed, "constexpr")
    compiled = compile(
        ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", capability, 32)
    )
    assert len(compiled.asm["cubin"]) > 0
    return compiled


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_the_attention_kernel_compiles(capability, element):
    """For the A100, and for the H100 and H200."""
    from decoder.runtime import triton_attention as kernels

    exact = element == "fp32"
    fixed = {
        "GROUP": 4, "WIDTH": 128, "PADDED_WIDTH": 128, "PARTS": 16, "WORD_BITS": 32,
        "BLOCK_ROWS": kernels.EXACT_MOST_ROWS if exact else kernels.MOST_ROWS,
        "BLOCK_KEYS": kernels.EXACT_KEYS if exact else kernels.KEYS,
        "EXACT": exact,
    }  # fmt: skip
    types = dict.fromkeys(("query", "keys", "values"), f"*{element}")
    types |= dict.fromkeys(("starts", "counts", "prefixes", "tails", "bits"), "*i32")
    types |= {"partial": "*fp32", "lse": "*fp32", "scale": "fp32"}
    compiled = assembled_for(capability, kernels._attend_part, types, fixed)
    assert compiled.metadata.shared <= 99 << 10  # what a program may use on every such GPU


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "floats", "fixed"),
    [
        ("_rms_norm", ("rows", "weight", "output"), {"BLOCK": 4096}),
        ("_swiglu", ("gate_up", "output"), {"BLOCK": 1024}),
        (
            "_rotate_and_store",
            ("qkv", "cosines", "sines", "query_norm", "key_norm", "query", "keys", "values"),
            {"HALF": 64, "BLOCK": 64, "NORMED": True},
        ),
    ],
)
def test_the_layer_kernels_compile(name, floats, fixed):
    from decoder.runtime import triton_layers as kernels

    types = dict.fromkeys(floats, "*bf16")
    if name != "_swiglu":
        types["epsilon"] = "fp32"
    if name == "_rotate_and_store":
        types |= {"owners": "*i64", "slots": "*i64"}
    assembled_for(90, getattr(kernels, name), types, fixed)


@needs_triton
@pytest.mark.slow
def test_the_merge_kernel_compiles():
    from decoder.runtime import triton_attention as kernels

    types = {"partial": "*fp32", "lse": "*fp32", "output": "*bf16"}
    fixed = {"WIDTH": 128, "PADDED_WIDTH": 128, "PARTS": 17, "PADDED_PARTS": 32}
    assembled_for(90, kernels._merge_parts, types, fixed)


def test_no_kernel_is_used_on_a_cpu():
    assert not kernels_usable(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_on_the_device(dtype):
    from decoder.runtime.triton_attention import table_attention

    for seed in range(20):
        made = TableCase(
            {
                "rows": [12, 1 + seed, 3], "prefixes": [90 - seed, 0, 64], "pending": seed % 4,
                "padding": seed % 3, "kv_heads": 2, "group": 1 + seed % 4, "width": 32,
                "seed": seed,
            },
            dtype=dtype,
            device="cuda",
        )  # fmt: skip
        found = table_attention(made.query, made.keys, made.values, made.tables, made.width**-0.5)
        truth = made.truth()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            found[: len(truth)].double(), truth, atol=tolerance, rtol=tolerance
        )

"""The processor's abilities, asked here by everything that depends on them.

`ROOFTREE_CPU=avx2`, for tests, lets any CPU pass for one without AVX-512 and bfloat16, in child
processes too. The libraries have their own switches: `ATEN_CPU_CAPABILITY=avx2` (torch),
`ONEDNN_MAX_CPU_ISA=AVX2` and `NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=`.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numba
import torch

VARIABLE = "ROOFTREE_CPU"


@dataclass(frozen=True, slots=True)
class Cpu:
    """
    instruction_set  torch's name for the vectors in use: avx512, avx2, sve256, default, ...
    bfloat16         products in bfloat16 are faster than in float32
    amx              there are tiles for matrix products
    pairs            compiled functions may multiply bfloat16 numbers in pairs (AVX-512)
    """

    instruction_set: str
    bfloat16: bool = False
    amx: bool = False
    pairs: bool = False

    @property
    def label(self) -> str:
        """The instruction set with `bf16` and `amx`, a hard key of profiles."""
        extras = [name for name, there in (("bf16", self.bfloat16), ("amx", self.amx)) if there]
        return "+".join([self.instruction_set, *extras])


def this_cpu() -> Cpu:
    """This process's CPU, or the one that the environment lets it pass for."""
    name = os.environ.get(VARIABLE)
    return Cpu(name) if name else _detected()


@cache
def _detected() -> Cpu:
    vectors = torch.backends.cpu.get_cpu_capability().lower()
    amx = torch.cpu._is_amx_tile_supported()
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # on x86 also where it is emulated
    if platform.machine().lower() in ("x86_64", "amd64"):
        supported = supported and (amx or torch.cpu._is_avx512_bf16_supported())
    features = llvm.get_host_cpu_features()
    pairs = supported and features.get("avx512bf16", False) and not numba.config.CPU_NAME
    return Cpu(vectors, bfloat16=supported, amx=amx, pairs=pairs)


@cache
def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    part = f"{fields.get('CPU implementer', '')} {fields.get('CPU part', '')}".strip()  # on Arm
    return " ".join(filter(None, (platform.processor() or platform.machine(), part)))

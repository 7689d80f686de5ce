"""Our Triton kernels at the sizes of a layer of Qwen3-8B, each beside PyTorch's operations.

Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from decoder.model.attention import RowBlock, TreeVisible
from decoder.model.kv_cache import KVCache
from decoder.model.runtime import kernels
from decoder.model.runtime.fused import reference_table_attention
from decoder.model.runtime.tables import LayerCache, RowTables, needed_words

HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 4096, 12288, 32, 8, 128
EPSILON = 1e-6

Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A kernel's call, and the same in float32 operations of PyTorch."""

    name: str
    rows: int
    kernel: Call
    reference: Call


@dataclass(frozen=True, slots=True)
class _CacheShape:
    layers: int = 1
    kv_heads: int = KV_HEADS
    head_dim: int = WIDTH


class Noise:
    """Random tensors of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(self.dtype)


def kernel_cases(
    counts: tuple[int, ...], context: int, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """The cases of each row count, behind `context` cached tokens."""
    noise = Noise(device, dtype)
    for rows in counts:
        yield from _small_cases(noise, rows)
        yield from _attention_cases(noise, rows, context)


def _small_cases(noise: Noise, rows: int) -> Iterator[KernelCase]:
    x, added, weight = noise(rows, HIDDEN), noise(rows, HIDDEN), noise(HIDDEN)
    gate_up = noise(rows, 2 * FFN)

    def normed(values: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values.float(), (HIDDEN,), weight.float(), EPSILON)

    def gated() -> tuple[torch.Tensor, ...]:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up,)

    yield KernelCase(
        name="rms_norm",
        rows=rows,
        kernel=lambda: (kernels.rms_norm(x, weight, EPSILON),),
        reference=lambda: (normed(x),),
    )
    yield KernelCase(
        name="add_rms_norm",
        rows=rows,
        kernel=lambda: kernels.add_rms_norm(x, added, weight, EPSILON),
        reference=lambda: (x + added, normed(x + added)),
    )
    yield KernelCase(
        name="swiglu", rows=rows, kernel=lambda: (kernels.swiglu(gate_up),), reference=gated
    )


def _attention_cases(noise: Noise, rows: int, context: int) -> Iterator[KernelCase]:
    cache = KVCache(
        _CacheShape(), capacity=context + rows, sequences=1, dtype=noise.dtype, device=noise.device
    )
    cache.data.copy_(noise(*cache.data.shape))
    cache.lengths = [context]
    random = np.random.default_rng(rows)
    parents = np.array([random.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    visible = TreeVisible(parents) if rows > 1 else None
    numbers = np.arange(rows, dtype=np.int64)
    block = RowBlock(0, numbers, numbers, visible)
    tables = RowTables(rows, 1, needed_words(cache, [block]), noise.device)
    tables.fill(cache, [block])
    keys, values = cache.data[0]
    query, scale = noise(rows, HEADS, WIDTH), WIDTH**-0.5
    yield KernelCase(
        name="table_attention",
        rows=rows,
        kernel=lambda: (kernels.table_attention(query, keys, values, tables, scale),),
        reference=lambda: (
            reference_table_attention(query.float(), keys.float(), values.float(), tables, scale),
        ),
    )
    yield _rotation_case(noise, rows, LayerCache(keys, values, tables.owners, tables.slots))


def _rotation_case(noise: Noise, rows: int, layer: LayerCache) -> KernelCase:
    qkv, norms = noise(rows, (HEADS + 2 * KV_HEADS) * WIDTH), (noise(WIDTH), noise(WIDTH))
    angles = noise(rows, WIDTH // 2).float().repeat(1, 2)
    cosines, sines = angles.cos().to(noise.dtype), angles.sin().to(noise.dtype)

    def stored() -> tuple[torch.Tensor, ...]:
        query = kernels.rotate_and_store(qkv, (cosines, sines), (*norms, EPSILON), layer)
        place = (layer.owners, slice(None), layer.slots)
        return query, layer.keys[place], layer.values[place]

    def reference() -> tuple[torch.Tensor, ...]:
        heads = qkv.float().view(rows, -1, WIDTH).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        turned = []
        for part, weight in zip(heads, norms, strict=False):
            normed = functional.rms_norm(part, (WIDTH,), weight.float(), EPSILON)
            cosine, sine = cosines.float()[:, None], sines.float()[:, None]
            turned.append(normed * cosine + rotate_half(normed) * sine)
        return turned[0], turned[1], heads[2]

    return KernelCase(name="rotate_and_store", rows=rows, kernel=stored, reference=reference)

"""The small operations of a decoder layer as one Triton kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decoder.runtime.tables import LayerCache

GATED_COLUMNS = 1024  # columns of one program of `swiglu`


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm of [rows, hidden] in float32, rounded before the weight as in
    transformers."""
    columns = rows.shape[1]
    output = torch.empty(len(rows), columns, dtype=rows.dtype, device=rows.device)
    _rms_norm[(len(rows),)](
        rows, weight, output, rows.stride(0), columns, epsilon,
        BLOCK=triton.next_power_of_2(columns),
    )  # fmt: skip
    return output


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * ffn], gate first: [rows, ffn]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, GATED_COLUMNS))](gate_up, output, width, BLOCK=GATED_COLUMNS)
    return output


def rotate_and_store(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cache: LayerCache,
) -> torch.Tensor:
    """Norm and rotate queries and keys, store keys and values, and return the queries.

    qkv      [rows, (heads + 2 kv_heads) * head_dim], contiguous
    angles   cosines and sines [rows, head_dim], contiguous
    norms    weights [head_dim] of the query's and the key's norm, and epsilon
    returns  [rows, heads, head_dim]
    """
    kv_heads, width = cache.keys.shape[1], cache.keys.shape[3]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, epsilon = norms or (angles[0], angles[0], 0.0)  # not read without norms
    _rotate_and_store[(len(qkv), heads + 2 * kv_heads)](
        qkv, angles[0], angles[1], query_norm, key_norm, epsilon,
        query, cache.keys, cache.values, cache.owners, cache.slots,
        cache.keys.stride(0), cache.keys.stride(1), cache.keys.stride(2),
        heads, kv_heads,
        HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2), NORMED=norms is not None,
    )  # fmt: skip
    return query


@triton.jit
def _rms_norm(  # noqa: PLR0913 - a kernel takes its tensors one by one
    rows, weight, output, row_stride, columns, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < columns
    raw = tl.load(rows + row * row_stride + lanes, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    kept = scaled.to(raw.dtype).to(tl.float32)
    w = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * columns + lanes, (kept * w).to(raw.dtype), mask=inside)


@triton.jit
def _swiglu(gate_up, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    gate = tl.load(gate_up + row * 2 * width + lanes, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + lanes, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    active = (x * tl.sigmoid(x)).to(gate.dtype).to(tl.float32)
    tl.store(output + row * width + lanes, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _rotate_and_store(  # noqa: PLR0913 - a kernel takes its tensors one by one
    qkv, cosines, sines, query_norm, key_norm, epsilon,
    query, keys, values, owners, slots,
    key_sequence, key_head, key_slot,
    heads, kv_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: queries first, then keys, then values, in halves."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    source = qkv + (row * (heads + 2 * kv_heads) + part) * 2 * HALF + lanes
    raw = tl.load(source, mask=inside, other=0.0)
    low = raw.to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if part < heads + kv_heads:
        if NORMED:
            mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF)
            shrink = tl.rsqrt(mean + epsilon)
            low = (low * shrink).to(raw.dtype).to(tl.float32)
            high = (high * shrink).to(raw.dtype).to(tl.float32)
            if part < heads:
                low *= tl.load(query_norm + lanes, mask=inside, other=0.0).to(tl.float32)
                high *= tl.load(query_norm + HALF + lanes, mask=inside, other=0.0).to(tl.float32)
            else:
                low *= tl.load(key_norm + lanes, mask=inside, other=0.0).to(tl.float32)
                high *= tl.load(key_norm + HALF + lanes, mask=inside, other=0.0).to(tl.float32)
        angle = row * 2 * HALF + lanes
        low_cos = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
        low_sin = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
        high_cos = tl.load(cosines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        high_sin = tl.load(sines + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        turned = low * low_cos - high * low_sin
        high = high * high_cos + low * high_sin
        low = turned
    place = (
        tl.load(owners + row) * key_sequence
        + (part - heads) % kv_heads * key_head
        + tl.load(slots + row) * key_slot
        + lanes
    )
    if part < heads:
        goal = query + (row * heads + part) * 2 * HALF + lanes
        tl.store(goal, low.to(raw.dtype), mask=inside)
        tl.store(goal + HALF, high.to(raw.dtype), mask=inside)
    elif part < heads + kv_heads:
        tl.store(keys + place, low.to(raw.dtype), mask=inside)
        tl.store(keys + place + HALF, high.to(raw.dtype), mask=inside)
    else:
        tl.store(values + place, low.to(raw.dtype), mask=inside)
        tl.store(values + place + HALF, high.to(raw.dtype), mask=inside)

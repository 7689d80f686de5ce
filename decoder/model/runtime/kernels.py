"""Triton kernels: tree attention over row tables, and the small operations of a decoder layer.

Attention: a program reads one part of one sequence's keys for one KV head, and its query rows
are the packed query heads of some rows. The committed prefix is cut into parts of equal size,
which every row sees, so they need no mask. The tail of pending and new rows is one more part,
masked by the rows' ancestor bits. A second kernel merges the parts by their log-sum-exp, as in
split softmax (Dao et al., FlashAttention; Flash-Decoding). Library kernels for many queries do
not cut the prefix and leave most of the memory's bandwidth unused. Lengths are read from device
tensors, so that a captured launch is valid for every context.

Importing this module needs Triton, which CPU builds of PyTorch do not bring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from costmodel.errors import InputError
from decoder.model.runtime.tables import RowTables
from decoder.tree.draft_tree import WORD

LEAST_ROWS = 16  # packed rows of a program: the least that a matrix unit takes
MOST_ROWS = 64
KEYS = 64  # keys that a program reads at a time
# float32 products at full accuracy need more registers and shared memory.
EXACT_MOST_ROWS = 16
EXACT_KEYS = 16
WIDE = 128  # lanes of a head beyond which blocks are halved, to fit the shared memory
WIDEST = 256  # lanes of a head for which the kernel is compiled and checked
MOST_PARTS = 64
MERGED_PARTS = 16  # parts that the merge reads at a time
WAVES = 2  # programs a processor, so that a short one does not leave it idle
PROCESSORS_WITHOUT_GPU = 4  # in the interpreter, to have several parts there too
GATED_COLUMNS = 1024  # columns of one program of `swiglu`
TURNED_HEADS = 8  # heads of one row in one program of `rotate_and_store`
COLUMNS_A_WARP = 512  # of a norm: more warps have more loads in flight
MOST_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The division of attention into programs.

    block_rows, block_keys  packed rows of a program, and keys that it reads at a time
    parts                   of the prefix
    stages                  blocks of keys in flight; two leave room for two programs of 64 rows
                            a processor
    """

    block_rows: int
    block_keys: int
    parts: int
    stages: int = 2


def plan_launch(query: Tensor, keys: Tensor) -> Launch:
    """Enough parts of the prefix to occupy the device, at most one for each block of keys.

    Programs fit the 99 KiB of shared memory that one has on the smallest GPUs
    (`tests/decoder/model/compiled_kernels.py` compiles them for each architecture).
    Shapes as in `table_attention`.
    """
    (rows, heads, width), (sequences, kv_heads, slots, _) = query.shape, keys.shape
    group, exact, wide = heads // kv_heads, query.dtype == torch.float32, width > WIDE
    most, block_keys = (EXACT_MOST_ROWS, EXACT_KEYS) if exact else (MOST_ROWS, KEYS)
    if wide:
        most, block_keys = max(most // 2, LEAST_ROWS), max(block_keys // 2, EXACT_KEYS)
    each = triton.cdiv(rows, sequences) * group  # of one sequence, in the mean
    block_rows = min(max(triton.next_power_of_2(each), LEAST_ROWS), most)
    # The sequences' rows together make about as many blocks as one sequence's would.
    programs = max(triton.cdiv(rows * group, block_rows), sequences) * kv_heads
    processors = PROCESSORS_WITHOUT_GPU
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(torch.cuda.current_device())
        processors = here.multi_processor_count
    parts = triton.cdiv(WAVES * processors, programs)
    parts = max(1, min(parts, MOST_PARTS, triton.cdiv(slots, block_keys)))
    stages = 2 if exact or wide or block_rows >= MOST_ROWS else 3
    return Launch(block_rows=block_rows, block_keys=block_keys, parts=parts, stages=stages)


def table_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: RowTables,
    scale: float,
    launch: Launch | None = None,
) -> Tensor:
    """Attention of the rows in the tables.

    query         [rows, heads, head_dim], the last axis contiguous
    keys, values  [sequences, kv_heads, slots, head_dim], of equal strides, likewise
    returns       [rows, heads, head_dim]
    Raises InputError for float64, which the matrix units do not take.
    """
    if query.dtype == torch.float64:
        raise InputError("the attention kernel takes no float64", hint="Use --dtype float32.")
    rows, heads, width = query.shape
    sequences, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    launch = launch or plan_launch(query, keys)
    blocks = triton.cdiv(rows * group, launch.block_rows)  # for one sequence that has all rows
    parts = launch.parts + 1
    partial = torch.empty(parts, rows, heads, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
    padded_width = max(triton.next_power_of_2(width), 16)
    _attend_part[(blocks, kv_heads, sequences * parts)](
        query, keys, values,
        tables.starts, tables.counts, tables.prefixes, tables.tails, tables.bits,
        partial, lse, scale,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        rows, tables.bits.shape[1], launch.parts,
        GROUP=group, WIDTH=width, PADDED_WIDTH=padded_width,
        BLOCK_ROWS=launch.block_rows, BLOCK_KEYS=launch.block_keys, WORD_BITS=WORD,
        EXACT=query.dtype == torch.float32, num_stages=launch.stages,
    )  # fmt: skip
    output = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    _merge_parts[(rows, heads)](
        partial, lse, output, rows, heads, parts,
        WIDTH=width, PADDED_WIDTH=padded_width, BLOCK_PARTS=MERGED_PARTS,
    )  # fmt: skip
    return output


# Row counts, words and parts differ from launch to launch; a kernel made for each of their values
# and divisors would be compiled again and again.
@triton.jit(do_not_specialize=["rows", "words", "parts"])
def _attend_part(  # noqa: PLR0913 - a kernel takes its tensors one by one
    query, keys, values,
    starts, counts, prefixes, tails, bits,
    partial, lse, scale,
    query_row, query_head, key_sequence, key_head, key_slot,
    rows, words, parts,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, WORD_BITS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One block of packed rows over one part of their sequence's keys.

    Parts 0 .. parts - 1 are of the prefix; the last part is the tail. Writes the normalised
    output to partial [parts + 1, rows, heads, width] and its log-sum-exp beside it, or for a part
    without keys the log-sum-exp alone.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, part = tl.program_id(2) // (parts + 1), tl.program_id(2) % (parts + 1)
    count = tl.load(counts + sequence)
    if block * BLOCK_ROWS >= count * GROUP:
        return
    prefix = tl.load(prefixes + sequence)
    is_tail = part == parts
    share = tl.cdiv(tl.cdiv(prefix, parts), BLOCK_KEYS) * BLOCK_KEYS
    first = tl.where(is_tail, prefix, part * share)
    end = tl.where(is_tail, prefix + tl.load(tails + sequence), tl.minimum(first + share, prefix))

    packed = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = packed < count * GROUP
    row = tl.load(starts + sequence) + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    if first >= end:  # the prefix has fewer blocks of keys than parts
        place = (part.to(tl.int64) * rows + row) * tl.num_programs(1) * GROUP + head
        tl.store(lse + place, float("-inf"), mask=valid)
        return
    lanes = tl.arange(0, PADDED_WIDTH)
    q = tl.load(
        query + row[:, None] * query_row + head[:, None] * query_head + lanes[None, :],
        mask=valid[:, None] & (lanes < WIDTH)[None, :],
        other=0.0,
    )
    base = sequence.to(tl.int64) * key_sequence + kv_head * key_head
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, PADDED_WIDTH), tl.float32)
    for at in range(first, end, BLOCK_KEYS):
        slot = at + tl.arange(0, BLOCK_KEYS)
        inside = slot < end
        places = base + slot[:, None] * key_slot + lanes[None, :]
        there = inside[:, None] & (lanes < WIDTH)[None, :]
        k = tl.load(keys + places, mask=there, other=0.0)
        if EXACT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, tl.trans(k)) * scale
        seen = inside[None, :] & valid[:, None]
        if is_tail:
            bit = slot - prefix
            word = tl.load(
                bits + row[:, None] * words + (bit // WORD_BITS)[None, :], mask=seen, other=0
            )
            seen = seen & (((word >> (bit % WORD_BITS)[None, :]) & 1) == 1)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no key yet
        weights = tl.exp(scores - pivot[:, None])
        fading = tl.exp(largest - pivot)
        total = total * fading + tl.sum(weights, 1)
        v = tl.load(values + places, mask=there, other=0.0)
        if EXACT:
            added = tl.dot(weights, v, input_precision="ieee")
        else:
            added = tl.dot(weights.to(v.dtype), v)
        mixed = mixed * fading[:, None] + added
        largest = now
    safe = tl.where(total == 0.0, 1.0, total)
    place = (part.to(tl.int64) * rows + row) * tl.num_programs(1) * GROUP + head
    tl.store(
        partial + place[:, None] * WIDTH + lanes[None, :],
        mixed / safe[:, None],
        mask=valid[:, None] & (lanes < WIDTH)[None, :],
    )
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), largest + tl.log(safe)), mask=valid)


@triton.jit(do_not_specialize=["rows", "heads", "parts"])
def _merge_parts(  # noqa: PLR0913 - a kernel takes its tensors one by one
    partial, lse, output, rows, heads, parts,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The merged output of one row and head: parts weighted by their share of the softmax."""
    place = tl.program_id(0) * heads + tl.program_id(1)
    lanes = tl.arange(0, PADDED_WIDTH)
    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros((PADDED_WIDTH,), tl.float32)
    for first in range(0, parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        places = part.to(tl.int64) * rows * heads + place
        logs = tl.load(lse + places, mask=part < parts, other=float("-inf"))
        now = tl.maximum(largest, tl.max(logs, 0))
        pivot = tl.where(now == float("-inf"), 0.0, now)  # no key in any part so far
        weights = tl.exp(logs - pivot)
        fading = tl.exp(largest - pivot)
        outputs = tl.load(
            partial + places[:, None] * WIDTH + lanes[None, :],
            mask=(logs > float("-inf"))[:, None] & (lanes < WIDTH)[None, :],
            other=0.0,
        )
        mixed = mixed * fading + tl.sum(outputs * weights[:, None], 0)
        total = total * fading + tl.sum(weights, 0)
        largest = now
    tl.store(
        output + place * WIDTH + lanes,
        (mixed / total).to(output.dtype.element_ty),
        mask=lanes < WIDTH,
    )


def add_rms_norm(
    rows: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The sum of two [rows, hidden], and its root-mean-square norm in float32.

    Both are rounded as in transformers, the norm before the weight is applied.
    """
    columns = rows.shape[1]
    output = torch.empty(len(rows), columns, dtype=rows.dtype, device=rows.device)
    total = rows if added is None else torch.empty_like(output)
    block = triton.next_power_of_2(columns)
    _rms_norm[(len(rows),)](
        rows, rows if added is None else added, weight, total, output,
        rows.stride(0), columns, epsilon,
        BLOCK=block, ADDED=added is not None,
        num_warps=min(max(block // COLUMNS_A_WARP, 1), MOST_WARPS),
    )  # fmt: skip
    return total, output


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [rows, ffn] of gate and up [rows, 2 * ffn]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, GATED_COLUMNS))](gate_up, output, width, BLOCK=GATED_COLUMNS)
    return output


def rotate_and_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    tables: RowTables,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values, return the queries.

    qkv           [rows, (heads + 2 kv_heads) * head_dim], contiguous
    angles        cosines and sines [rows, head_dim], contiguous
    norms         weights [head_dim] of the query's and the key's norm, and epsilon; None without
    keys, values  of the cache, as in `table_attention`
    returns       [rows, heads, head_dim]
    """
    kv_heads, width = keys.shape[1], keys.shape[3]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, epsilon = norms or (angles[0], angles[0], 0.0)  # not read without norms
    _rotate_and_store[(len(qkv), triton.cdiv(heads + 2 * kv_heads, TURNED_HEADS))](
        qkv, angles[0], angles[1], query_norm, key_norm, epsilon,
        query, keys, values, tables.owners, tables.slots,
        keys.stride(0), keys.stride(1), keys.stride(2),
        heads, kv_heads,
        HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2), HEADS=TURNED_HEADS,
        NORMED=norms is not None,
    )  # fmt: skip
    return query


@triton.jit
def _rms_norm(  # noqa: PLR0913 - a kernel takes its tensors one by one
    rows, added, weight, total, output, row_stride, columns, epsilon,
    BLOCK: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The norm of one row; with ADDED of its sum with a contiguous row, which is stored too."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < columns
    raw = tl.load(rows + row * row_stride + lanes, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(added + row * columns + lanes, mask=inside, other=0.0)
        raw = (raw.to(tl.float32) + more.to(tl.float32)).to(raw.dtype)
        tl.store(total + row * columns + lanes, raw, mask=inside)
    x = raw.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    rounded = scaled.to(raw.dtype).to(tl.float32)
    w = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * columns + lanes, (rounded * w).to(raw.dtype), mask=inside)


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
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row, in halves: query heads first, then key heads, then value heads."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    lane = lanes < HALF
    inside = lane & (part < heads + 2 * kv_heads)
    source = qkv + (row * (heads + 2 * kv_heads) + part) * 2 * HALF + lanes
    raw_low = tl.load(source, mask=inside, other=0.0)
    raw_high = tl.load(source + HALF, mask=inside, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    is_query, is_value = part < heads, part >= heads + kv_heads
    if NORMED:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        shrink = tl.rsqrt(mean + epsilon)[:, None]
        low = (low * shrink).to(raw_low.dtype).to(tl.float32)
        high = (high * shrink).to(raw_low.dtype).to(tl.float32)
        low_query = tl.load(query_norm + lanes, mask=lane, other=0.0).to(tl.float32)
        high_query = tl.load(query_norm + HALF + lanes, mask=lane, other=0.0).to(tl.float32)
        low_key = tl.load(key_norm + lanes, mask=lane, other=0.0).to(tl.float32)
        high_key = tl.load(key_norm + HALF + lanes, mask=lane, other=0.0).to(tl.float32)
        low *= tl.where(is_query, low_query, low_key)
        high *= tl.where(is_query, high_query, high_key)
    angle = row * 2 * HALF + lanes
    low_cos = tl.load(cosines + angle, mask=lane, other=0.0).to(tl.float32)
    low_sin = tl.load(sines + angle, mask=lane, other=0.0).to(tl.float32)
    high_cos = tl.load(cosines + angle + HALF, mask=lane, other=0.0).to(tl.float32)
    high_sin = tl.load(sines + angle + HALF, mask=lane, other=0.0).to(tl.float32)
    turned_low = (low * low_cos - high * low_sin).to(raw_low.dtype)
    turned_high = (high * high_cos + low * high_sin).to(raw_low.dtype)

    goal = query + (row * heads + part) * 2 * HALF + lanes
    tl.store(goal, turned_low, mask=inside & is_query)
    tl.store(goal + HALF, turned_high, mask=inside & is_query)
    place = (
        tl.load(owners + row) * key_sequence
        + (part - heads) % kv_heads * key_head
        + tl.load(slots + row) * key_slot
        + lanes
    )
    is_key = (part >= heads) & (part < heads + kv_heads)
    tl.store(keys + place, turned_low, mask=inside & is_key)
    tl.store(keys + place + HALF, turned_high, mask=inside & is_key)
    tl.store(values + place, raw_low, mask=inside & is_value)
    tl.store(values + place + HALF, raw_high, mask=inside & is_value)

"""Tree attention as Triton kernels: a part of the keys each, then merged by log-sum-exp.

Every program attends with some rows of one sequence, the query heads of one KV head packed
as further rows, over one part of the keys: an equal share of the committed prefix, which
all rows see, so without a mask, or the tail of pending and new rows under its ancestor
bits. Shares are even for one row as for many, where library kernels for many queries read
the whole prefix in one program and leave most of the memory's bandwidth unused. Lengths
are read from device tensors, so that a captured launch serves every context.

The merge is that of split softmax (Dao et al., FlashAttention; Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from costmodel.errors import InputError
from decoder.ancestors import WORD
from decoder.runtime.tables import RowTables

LEAST_ROWS = 16  # packed rows of a program: the least that a matrix unit takes
MOST_ROWS = 64
KEYS = 64  # keys that a program reads at a time
# float32 products at full accuracy need far more registers and shared memory.
EXACT_MOST_ROWS = 16
EXACT_KEYS = 32
MOST_PARTS = 64
WAVES = 2  # programs a processor, so that a short one does not leave it idle
PROCESSORS_WITHOUT_GPU = 4  # in the interpreter, to have several parts there too


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the work is cut.

    block_rows, block_keys  packed rows of a program, and keys that it reads at a time
    parts                   of the prefix
    """

    block_rows: int
    block_keys: int
    parts: int


def plan_launch(query: torch.Tensor, keys: torch.Tensor) -> Launch:
    """Enough parts of the prefix to occupy the device, none shorter than a block of keys.

    Shapes as in `table_attention`.
    """
    (rows, heads, _), (sequences, kv_heads, slots, _) = query.shape, keys.shape
    exact = query.dtype == torch.float32
    packed, most = rows * (heads // kv_heads), EXACT_MOST_ROWS if exact else MOST_ROWS
    block_rows = min(max(triton.next_power_of_2(packed), LEAST_ROWS), most)
    block_keys = EXACT_KEYS if exact else KEYS
    # Sequences share the rows, so together they have about as many blocks as one would.
    programs = max(triton.cdiv(packed, block_rows), sequences) * kv_heads
    parts = triton.cdiv(WAVES * _processors(), programs)
    most_parts = min(MOST_PARTS, triton.cdiv(slots, block_keys))
    return Launch(
        block_rows=block_rows, block_keys=block_keys, parts=max(1, min(parts, most_parts))
    )


def _processors() -> int:
    if not torch.cuda.is_available():
        return PROCESSORS_WITHOUT_GPU
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def table_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RowTables,
    scale: float,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Attention of the rows that the tables describe.

    query         [rows, heads, head_dim], the last axis contiguous
    keys, values  [sequences, kv_heads, slots, head_dim], of one layout, likewise
    returns       [rows, heads, head_dim]
    Raises InputError for float64, which the matrix units do not take.
    """
    if query.dtype == torch.float64:
        raise InputError("the attention kernel takes no float64", hint="Use --dtype float32.")
    rows, heads, width = query.shape
    sequences, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    launch = launch or plan_launch(query, keys)
    blocks = triton.cdiv(rows * group, launch.block_rows)  # one sequence may have all rows
    parts = launch.parts + 1
    partial = torch.empty(parts, rows, heads, width, dtype=torch.float32, device=query.device)
    lse = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
    padded_width = max(triton.next_power_of_2(width), 16)
    _attend_part[(blocks, kv_heads, sequences * parts)](
        query, keys, values,
        tables.starts, tables.counts, tables.prefixes, tables.tails, tables.bits,
        partial, lse, scale,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        rows, tables.bits.shape[1],
        GROUP=group, WIDTH=width, PADDED_WIDTH=padded_width, PARTS=launch.parts,
        BLOCK_ROWS=launch.block_rows, BLOCK_KEYS=launch.block_keys, WORD_BITS=WORD,
        EXACT=query.dtype == torch.float32,
    )  # fmt: skip
    output = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    _merge_parts[(rows, heads)](
        partial, lse, output, rows, heads,
        WIDTH=width, PADDED_WIDTH=padded_width,
        PARTS=parts, PADDED_PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return output


@triton.jit
def _attend_part(  # noqa: PLR0913 - a kernel takes its tensors one by one
    query, keys, values,
    starts, counts, prefixes, tails, bits,
    partial, lse, scale,
    query_row, query_head, key_sequence, key_head, key_slot,
    rows, words,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, WORD_BITS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One block of packed rows over one part of their sequence's keys.

    Parts 0 .. PARTS - 1 are of the prefix; part PARTS is the tail. Writes the normalised
    output to partial [PARTS + 1, rows, heads, width] and its log-sum-exp beside it.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, part = tl.program_id(2) // (PARTS + 1), tl.program_id(2) % (PARTS + 1)
    count = tl.load(counts + sequence)
    if block * BLOCK_ROWS >= count * GROUP:
        return
    prefix = tl.load(prefixes + sequence)
    is_tail = part == PARTS
    share = tl.cdiv(tl.cdiv(prefix, PARTS), BLOCK_KEYS) * BLOCK_KEYS
    first = tl.where(is_tail, prefix, part * share)
    end = tl.where(is_tail, prefix + tl.load(tails + sequence), tl.minimum(first + share, prefix))

    packed = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = packed < count * GROUP
    row = tl.load(starts + sequence) + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
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
            place = slot - prefix
            word = tl.load(
                bits + row[:, None] * words + (place // WORD_BITS)[None, :], mask=seen, other=0
            )
            seen = seen & (((word >> (place % WORD_BITS)[None, :]) & 1) == 1)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        pivot = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet
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
    place = part.to(tl.int64) * rows * tl.num_programs(1) * GROUP
    place = place + row * tl.num_programs(1) * GROUP + head
    tl.store(
        partial + place[:, None] * WIDTH + lanes[None, :],
        mixed / safe[:, None],
        mask=valid[:, None] & (lanes < WIDTH)[None, :],
    )
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), largest + tl.log(safe)), mask=valid)


@triton.jit
def _merge_parts(  # noqa: PLR0913 - a kernel takes its tensors one by one
    partial, lse, output, rows, heads,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """One row and head: the parts' outputs weighted by their shares of the softmax."""
    place = tl.program_id(0) * heads + tl.program_id(1)
    parts, lanes = tl.arange(0, PADDED_PARTS), tl.arange(0, PADDED_WIDTH)
    places = parts.to(tl.int64) * rows * heads + place
    logs = tl.load(lse + places, mask=parts < PARTS, other=float("-inf"))
    weights = tl.exp(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    found = tl.load(
        partial + places[:, None] * WIDTH + lanes[None, :],
        mask=(parts < PARTS)[:, None] & (lanes < WIDTH)[None, :],
        other=0.0,
    )
    merged = tl.sum(found * weights[:, None], 0)
    tl.store(
        output + place * WIDTH + lanes,
        merged.to(output.dtype.element_ty),
        mask=lanes < WIDTH,
    )

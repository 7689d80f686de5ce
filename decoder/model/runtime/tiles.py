"""Products of a CPU by weights in blocks: bfloat16 in pairs, float32, or int8 with scales.

A step of few rows takes the time of reading the weights, so they are kept as small as they are
given, and widened in registers. One pass over a block serves up to MOST_ROWS rows. Each output is
summed in float32 in the order of the inputs, so a row's result does not depend on the number of
rows. Inputs in bfloat16 are multiplied in pairs where the CPU has an instruction for that.
"""

# ruff: noqa: PLR0913 - compiled functions take arrays and places one by one
from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import Any

import numba
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional

from decoder.cpu import this_cpu
from decoder.jit import jit, parts_of, run_shared

LANES = 16  # of a vector
VECTORS = 3  # of outputs that are summed at once
OUTPUTS = VECTORS * LANES  # of a block, which one thread takes at once
WIDE = this_cpu().instruction_set.startswith("avx512")  # 32 registers of a block's sums, or 8
MOST_ROWS = 8 if WIDE else 6  # of a tile: its sums stay in registers
LARGE_BYTES = 2 << 20  # of a page
SHARES = 4  # of each thread in what is left of a product
WORTH = 1 << 18  # weights times rows from which threads are worth their start


def pack(weight: Tensor) -> Tensor:
    """The weight [out, in] as blocks [blocks, in, OUTPUTS], of bfloat16 [blocks, in / 2, OUTPUTS].

    A pair of inputs' weights is an int32, the first in its lower half. Outputs are padded with
    zeros to whole blocks, inputs to whole pairs.
    """
    pairs = weight.dtype == torch.bfloat16
    odd = weight.shape[1] % 2 if pairs else 0
    padded = functional.pad(weight, (0, odd, 0, -len(weight) % OUTPUTS))
    if pairs:
        padded = padded.view(torch.int32)
    rows = padded.view(-1, OUTPUTS, padded.shape[1])
    return room(len(rows), rows.shape[2], OUTPUTS, like=padded).copy_(rows.transpose(1, 2))


def room(*shape: int, like: Tensor) -> Tensor:
    """Memory for weights, in large pages where there are some: a read of it waits less for tables.

    The plain sum over 256 MB is 1.2 to 1.4 times as fast so.
    """
    size_bytes = prod(shape) * like.itemsize
    if size_bytes < LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def is_bfloat16(weight: Tensor) -> bool:
    """Whether all weights are bfloat16 numbers."""
    return torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)


def padded(numbers: Tensor) -> Tensor:
    """A number of each output, with zeros for whole blocks."""
    return functional.pad(numbers, (0, -len(numbers) % OUTPUTS))


def unpacked(blocks: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight [out, in]."""
    weight = blocks.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()
    return (weight.view(torch.bfloat16) if blocks.dtype == torch.int32 else weight)[:, :inputs]


def rows_of(blocks: Tensor, numbers: Tensor, inputs: int) -> Tensor:
    """Rows [..., in] of the weight by their numbers [...]."""
    rows = blocks[numbers // OUTPUTS, :, numbers % OUTPUTS]
    return (rows.view(torch.bfloat16) if blocks.dtype == torch.int32 else rows)[..., :inputs]


def add_product(out: Tensor, inputs: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """Add inputs [rows, in], in float32 or bfloat16, times the weight to out, float32.

    out     [rows, blocks * OUTPUTS]
    scales  float32 [blocks * OUTPUTS] of int8 weights
    """
    given = inputs.detach()
    if blocks.dtype == torch.int32:
        given = functional.pad(given, (0, given.shape[1] % 2))
    paired = blocks.dtype == torch.int32 and given.dtype == torch.bfloat16 and this_cpu().pairs
    given = given.contiguous().view(torch.int32) if paired else given.float().contiguous()
    count = torch.get_num_threads() if blocks.numel() * len(inputs) >= WORTH else 1
    arrays = blocks.numpy(), scales.numpy(), given.numpy(), out.numpy()
    run_shared(multiply, *arrays, 0, phases=1, threads=count)


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


INTEGER, SINGLE, WORD = ir.IntType(64), ir.FloatType(), ir.IntType(32)
VECTOR, WORDS = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)
BYTES, HALVES = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_BFloat16(), 2 * LANES)
CONTRACT = ("contract",)
DOTS = "llvm.x86.avx512bf16.dpbf16ps.512"


def number(value: int) -> Any:
    return ir.Constant(INTEGER, value)


def spread(b: Any, pointer: Any, lanes: int = LANES) -> Any:
    """The number at a pointer in all lanes."""
    undefined = ir.Constant(ir.VectorType(pointer.type.pointee, lanes), ir.Undefined)
    value = b.insert_element(undefined, b.load(pointer), number(0))
    zeros = ir.Constant(ir.VectorType(WORD, lanes), [0] * lanes)
    return b.shuffle_vector(value, undefined, zeros)


def loaded(b: Any, pointer: Any, kind: Any) -> Any:
    """The vector at a pointer, which need not be aligned."""
    return b.load(b.bitcast(pointer, kind.as_pointer()), align=1)


def multiply_add(b: Any, left: Any, right: Any, total: Any) -> Any:
    return b.fadd(total, b.fmul(left, right, flags=CONTRACT), flags=CONTRACT)


def dots(b: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the products of pairs of bfloat16 numbers, of which a vector of words holds LANES."""
    kind = ir.FunctionType(VECTOR, [VECTOR, HALVES, HALVES])
    function = cgutils.get_or_insert_function(b.module, kind, DOTS)
    return b.call(function, [total, b.bitcast(left, HALVES), b.bitcast(right, HALVES)])


def loop(b: Any, count: Any, step: int, starts: list[Any], body: Any) -> list[Any]:
    """Write `for i in range(0, count, step): sums = body(i, sums)`, at least once round."""
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
    b.branch(inside)
    b.position_at_end(inside)
    i, sums = b.phi(INTEGER), [b.phi(start.type) for start in starts]
    totals: list[Any] = body(i, sums)
    following = b.add(i, number(step))
    for value, first, later in ((i, number(0), following), *zip(sums, starts, totals, strict=True)):
        value.add_incoming(first, before)
        value.add_incoming(later, inside)
    branch, module = b.cbranch(b.icmp_signed("<", following, count), inside, after), b.module
    rolled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    name = ir.values.MDValue(module, (), str(len(module.metadata)))
    name.operands = name, rolled  # LLVM's name of a loop is its own first operand
    branch.set_metadata("llvm.loop", name)
    b.position_at_end(after)
    return totals


@intrinsic
def _tile(
    typing: Any, blocks: Any, scales: Any, block: Any, inputs: Any, row: Any, rows: Any, out: Any
) -> Any:
    """A block times up to MOST_ROWS rows, added to `out` in vector registers."""
    kinds = blocks.dtype, inputs.dtype

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        arrays = [
            context.make_array(signature.args[i])(context, b, values[i]) for i in (0, 1, 3, 6)
        ]
        end = b.append_basic_block("tiled")
        choice = b.switch(values[5], end)
        for count in range(1, MOST_ROWS + 1):
            case = b.append_basic_block("rows")
            choice.add_case(count, case)
            b.position_at_end(case)
            at_once = VECTORS if WIDE else min(max(4 // count, 1), VECTORS)
            for first in range(0, VECTORS, at_once):
                vectors = range(first, min(first + at_once, VECTORS))
                _emit_tile(b, arrays, (values[2], values[4], count), vectors, kinds)
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return numba.types.void(blocks, scales, block, inputs, row, rows, out), emit


def _emit_tile(b: Any, arrays: Any, place: Any, vectors: range, kinds: Any) -> None:
    """Write a tile in LLVM's language: for each input, load its weights, and multiply and add.

    place    the numbers of the block, and of the first row; how many rows
    vectors  of the block's outputs
    kinds    of numba, of the weights and the inputs
    """
    weights, scales, inputs, out = arrays
    stored = {numba.types.int32: WORDS, numba.types.float32: VECTOR}.get(kinds[0], BYTES)
    steps, outputs = b.extract_value(weights.shape, 1), b.extract_value(out.shape, 1)
    width, block_width = b.extract_value(inputs.shape, 1), number(OUTPUTS)

    def at(pointer: Any, index: Any, row_width: Any, more: Any) -> Any:
        return b.gep(pointer, [b.add(b.mul(index, row_width), more)])

    rows, first = [b.add(place[1], number(r)) for r in range(place[2])], b.mul(place[0], steps)
    sources = [at(weights.data, first, block_width, number(i * LANES)) for i in vectors]
    given = [at(inputs.data, row, width, number(0)) for row in rows]
    columns = [b.add(b.mul(place[0], block_width), number(i * LANES)) for i in vectors]
    places = [at(out.data, row, outputs, column) for row in rows for column in columns]
    for place in places:
        _prefetch(b, place)

    def add(step: Any, sums: list[Any]) -> list[Any]:
        read = []
        for source in sources:
            if len(vectors) < VECTORS:  # the processor foresees a stream without gaps
                _prefetch(b, at(source, b.add(step, steps), block_width, number(0)))
            read.append(loaded(b, at(source, step, block_width, number(0)), stored))
        if stored is WORDS and kinds[1] == numba.types.int32:
            one_row = [spread(b, b.gep(one, [step])) for one in given]
            terms = [(one, weight) for one in one_row for weight in read]
            return [dots(b, total, *both) for total, both in zip(sums, terms, strict=True)]
        for half in range(2 if stored is WORDS else 1):
            place = b.add(b.mul(step, number(2)), number(half)) if stored is WORDS else step
            wide = [_widened(b, one, half) for one in read]
            one_row = [spread(b, b.gep(one, [place])) for one in given]
            terms = [(one, weight) for one in one_row for weight in wide]
            sums = [multiply_add(b, *both, total) for total, both in zip(sums, terms, strict=True)]
        return sums

    totals = loop(b, steps, 1, [ir.Constant(VECTOR, [0.0] * LANES)] * len(places), add)
    for i, (total, place) in enumerate(zip(totals, places, strict=True)):
        if stored is BYTES:
            factor = b.gep(scales.data, [columns[i % len(columns)]])
            total = b.fmul(total, loaded(b, factor, VECTOR))
        total = b.fadd(loaded(b, place, VECTOR), total)
        b.store(total, b.bitcast(place, VECTOR.as_pointer()), align=4)


def _widened(b: Any, stored: Any, half: int) -> Any:
    """Weights in float32: int8 or float32 ones, or one half of each pair of bfloat16 ones."""
    if stored.type == VECTOR:
        return stored
    if stored.type == BYTES:
        return b.sitofp(stored, VECTOR)
    if half:
        return b.bitcast(b.and_(stored, ir.Constant(WORDS, [0xFFFF0000] * LANES)), VECTOR)
    return b.bitcast(b.shl(stored, ir.Constant(WORDS, [16] * LANES)), VECTOR)


def _prefetch(b: Any, pointer: Any) -> None:
    """Ask for memory that is read soon; the end of the weights may lie before it."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    function = b.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    b.call(function, [b.bitcast(pointer, byte), *(ir.Constant(WORD, n) for n in (0, 2, 1))])


@jit
def multiply(blocks, scales, inputs, out, phase, claims, count):
    """`add_product` as a phase of `count` threads' work."""
    rows = len(inputs)
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    for block in parts_of(claims, phase, len(blocks), SHARES * count):
        row = 0
        for left in range(groups, 0, -1):
            some = (rows - row + left - 1) // left
            _tile(blocks, scales, block, inputs, row, some, out)
            row += some

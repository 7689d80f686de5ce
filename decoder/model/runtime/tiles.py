"""Products of a CPU by weights in blocks: bfloat16 in pairs, float32, or int8 with scales.

A step of few rows takes the time of reading the weights, so they are kept as small as they are
given, and widened in registers. One pass over a block serves up to MOST_ROWS rows. Each output is
summed in float32 in the order of the inputs, so a row's result does not depend on the number of
rows. Inputs in bfloat16 are multiplied in pairs where the CPU has an instruction for that.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from torch.nn import functional

from decoder import threads
from decoder.cpu import this_cpu
from decoder.jit import jit

LANES = 16  # outputs of a block
UNIT = 2  # blocks that one thread takes at once
WIDE = this_cpu().instruction_set.startswith("avx512")  # 32 registers of a block's sums, or 8
MOST_ROWS = 8 if WIDE else 6  # of a tile: its sums stay in registers
CLAIMS = 8  # of each thread in a product


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] as blocks [blocks, in, LANES]; of bfloat16 pairs [blocks, in / 2, LANES].

    A pair of inputs' weights is an int32, the first in its lower half. Outputs are padded with
    zeros to whole units of blocks, inputs to whole pairs.
    """
    pairs = weight.dtype == torch.bfloat16
    odd = weight.shape[1] % 2 if pairs else 0
    padded = functional.pad(weight, (0, odd, 0, -len(weight) % (UNIT * LANES)))
    if pairs:
        padded = padded.view(torch.int32)
    return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether all weights are bfloat16 numbers."""
    return torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight)


def padded(numbers: torch.Tensor) -> torch.Tensor:
    """A number of each output, with zeros for whole units of blocks."""
    return functional.pad(numbers, (0, -len(numbers) % (UNIT * LANES)))


def unpacked(blocks: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The weight [out, in]."""
    weight = blocks.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()
    return (weight.view(torch.bfloat16) if blocks.dtype == torch.int32 else weight)[:, :inputs]


def rows_of(blocks: torch.Tensor, numbers: torch.Tensor, inputs: int) -> torch.Tensor:
    """Rows [..., in] of the weight by their numbers [...]."""
    rows = blocks[numbers // LANES, :, numbers % LANES]
    return (rows.view(torch.bfloat16) if blocks.dtype == torch.int32 else rows)[..., :inputs]


def add_product(
    out: torch.Tensor, inputs: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor
) -> None:
    """Add inputs [rows, in], in float32 or bfloat16, times the weight to out, float32.

    out     [rows, blocks * LANES]
    scales  float32 [blocks * LANES] of int8 weights
    """
    given = inputs_of(inputs.detach(), blocks)
    count = threads.threads_of(blocks.numel() * len(inputs))
    arrays = blocks.numpy(), scales.numpy(), given.numpy(), out.numpy()
    threads.run(multiply, *arrays, 0, phases=1, threads=count)


def inputs_of(inputs: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Inputs [rows, in] as tiles take them: float32, or bfloat16 in pairs as int32."""
    if blocks.dtype == torch.int32:
        inputs = functional.pad(inputs, (0, inputs.shape[1] % 2))
        if inputs.dtype == torch.bfloat16 and this_cpu().pairs:
            return inputs.contiguous().view(torch.int32)
    return inputs.float().contiguous()


def _tile(rows: int) -> Any:
    """A compiled function: UNIT blocks times `rows` rows, added to `out` in vector registers."""
    at_once = UNIT if WIDE or rows <= MOST_ROWS // UNIT else 1

    @intrinsic
    def tile(
        typing: Any, blocks: Any, scales: Any, block: Any, inputs: Any, row: Any, out: Any
    ) -> Any:
        signature = numba.types.void(blocks, scales, block, inputs, row, out)
        kinds = blocks.dtype, inputs.dtype

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = [
                context.make_array(signature.args[i])(context, builder, values[i])
                for i in (0, 1, 3, 5)
            ]
            for first in range(0, UNIT, at_once):
                block = builder.add(values[2], ir.Constant(ir.IntType(64), first))
                _emit_tile(builder, arrays, (block, values[4]), (rows, at_once), kinds)
            return context.get_dummy_value()

        return signature, emit

    return tile


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"


INTEGER, SINGLE, WORD = ir.IntType(64), ir.FloatType(), ir.IntType(32)
VECTOR, WORDS = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)
BYTES, HALVES = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(BFloat16(), 2 * LANES)
CONTRACT = ("contract",)
DOTS = "llvm.x86.avx512bf16.dpbf16ps.512"


def number(value: int) -> Any:
    return ir.Constant(INTEGER, value)


def spread(b: Any, pointer: Any) -> Any:
    """The number at a pointer in all lanes."""
    kind = ir.VectorType(pointer.type.pointee, LANES)
    value = b.insert_element(ir.Constant(kind, ir.Undefined), b.load(pointer), number(0))
    return b.shuffle_vector(value, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def loaded(b: Any, pointer: Any, kind: Any) -> Any:
    """The vector at a pointer, which need not be aligned."""
    return b.load(b.bitcast(pointer, kind.as_pointer()), align=1)


def multiply_add(b: Any, left: Any, right: Any, total: Any) -> Any:
    return b.fadd(total, b.fmul(left, right, flags=CONTRACT), flags=CONTRACT)


def _emit_tile(b: Any, arrays: Any, first: Any, size: tuple[int, int], kinds: Any) -> None:
    """Write a tile in LLVM's language: for each input, load its weights, and multiply and add.

    first  the number of the first block, and of the first row
    size   the number of rows, and of blocks
    kinds  of numba, of the weights and the inputs
    """
    weights, scales, inputs, out = arrays
    pairs = kinds[0] == numba.types.int32
    stored = {numba.types.int32: WORDS, numba.types.float32: VECTOR, numba.types.int8: BYTES}[
        kinds[0]
    ]
    rows, count = range(size[0]), range(size[1])
    steps, outputs = b.extract_value(weights.shape, 1), b.extract_value(out.shape, 1)
    width, lanes = b.extract_value(inputs.shape, 1), number(LANES)

    def at(pointer: Any, index: Any, row_width: Any, more: Any = None) -> Any:
        place = b.mul(index, row_width)
        return b.gep(pointer, [place if more is None else b.add(place, more)])

    blocks = [b.add(first[0], number(i)) for i in count]
    sources = [at(weights.data, block, b.mul(steps, lanes)) for block in blocks]
    given = [at(inputs.data, b.add(first[1], number(r)), width) for r in rows]
    places = [
        [at(out.data, b.add(first[1], number(r)), outputs, b.mul(block, lanes)) for block in blocks]
        for r in rows
    ]
    if stored is BYTES:
        factors = [loaded(b, at(scales.data, block, lanes), VECTOR) for block in blocks]
    starts = [[loaded(b, place, VECTOR) for place in row] for row in places]
    before, body = b.block, b.append_basic_block("tile")
    after = b.append_basic_block("tile_end")
    b.branch(body)
    b.position_at_end(body)
    step = b.phi(INTEGER)
    step.add_incoming(number(0), before)
    sums = [[b.phi(VECTOR) for _ in count] for _ in rows]
    totals = [list(row) for row in sums]
    read = []
    for source in sources:
        _prefetch(b, at(source, b.add(step, b.mul(steps, number(UNIT))), lanes))
        read.append(loaded(b, at(source, step, lanes), stored))
    if pairs and kinds[1] == numba.types.int32:
        dots = ir.FunctionType(VECTOR, [VECTOR, HALVES, HALVES])
        function = cgutils.get_or_insert_function(b.module, dots, DOTS)
        for r in rows:
            value = b.bitcast(spread(b, b.gep(given[r], [step])), HALVES)
            for i in count:
                halves = b.bitcast(read[i], HALVES)
                totals[r][i] = b.call(function, [totals[r][i], value, halves])
    else:
        for half in range(2 if pairs else 1):
            place = b.add(b.mul(step, number(2)), number(half)) if pairs else step
            wide = [_widened(b, one, half) for one in read]
            if stored is BYTES:
                wide = [b.fmul(one, factor) for one, factor in zip(wide, factors, strict=True)]
            for r in rows:
                value = spread(b, b.gep(given[r], [place]))
                for i in count:
                    totals[r][i] = multiply_add(b, value, wide[i], totals[r][i])
    for r in rows:
        for i in count:
            sums[r][i].add_incoming(starts[r][i], before)
            sums[r][i].add_incoming(totals[r][i], body)
    following = b.add(step, number(1))
    step.add_incoming(following, body)
    b.cbranch(b.icmp_signed("<", following, steps), body, after)
    b.position_at_end(after)
    for r in rows:
        for i in count:
            b.store(totals[r][i], b.bitcast(places[r][i], VECTOR.as_pointer()), align=4)


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


_one, _two, _three, _four = _tile(1), _tile(2), _tile(3), _tile(4)
_five, _six, _seven, _eight = _tile(5), _tile(6), _tile(7), _tile(8)


@jit
def multiply(blocks, scales, inputs, out, phase, claims, count):  # type: ignore[no-untyped-def]
    """`add_product` as a phase of `count` threads' work."""
    units, rows = len(blocks) // UNIT, len(inputs)
    size = max(units // (CLAIMS * count), 1)
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    while True:
        first = threads.claim(claims, phase, size)
        if first >= units:
            break
        last = min(first + size, units)
        for block in range(first * UNIT, last * UNIT, UNIT):
            row = 0
            for group in range(groups):
                left = groups - group
                some = (rows - row + left - 1) // left
                if some == 1:
                    _one(blocks, scales, block, inputs, row, out)
                elif some == 2:
                    _two(blocks, scales, block, inputs, row, out)
                elif some == 3:
                    _three(blocks, scales, block, inputs, row, out)
                elif some == 4:
                    _four(blocks, scales, block, inputs, row, out)
                elif some == 5:
                    _five(blocks, scales, block, inputs, row, out)
                elif some == 6:
                    _six(blocks, scales, block, inputs, row, out)
                elif some == 7:
                    _seven(blocks, scales, block, inputs, row, out)
                else:
                    _eight(blocks, scales, block, inputs, row, out)
                row += some
        threads.done(claims, phase, last - first)
    threads.wait(claims, phase, units)

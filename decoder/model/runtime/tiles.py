"""Float32 products of a CPU by weights in blocks: float32, bfloat16 or int8 numbers.

A step of few rows takes the time of reading the weights. Weights that are bfloat16 numbers, as
published ones mostly are, are kept so and widened, which is exact, as they are read. One pass over
the weights serves up to six rows. Each output is summed in the order of the inputs, so that a row's
result does not depend on the number of rows.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numba
import torch
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch.nn import functional

from decoder.jit import jit

LANES = 16  # outputs of a block
UNIT = 2  # blocks that one thread takes at once
MOST_ROWS = 6  # of a tile: its sums stay in the 16 registers of AVX2
_LOCK = Lock()  # numba's simplest threads serve one caller


def smallest(weight: torch.Tensor) -> torch.Tensor:
    """The float32 weight, in bfloat16 where that is exact."""
    small = weight.to(torch.bfloat16)
    return small if torch.equal(small.to(weight.dtype), weight) else weight


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] as blocks [blocks, in, LANES] of its dtype.

    Outputs are padded with zeros to whole units of blocks.
    """
    padded = functional.pad(weight, (0, 0, 0, -len(weight) % (UNIT * LANES)))
    return padded.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()


def unpacked(blocks: torch.Tensor, outputs: int) -> torch.Tensor:
    """The weight [out, in] in float32."""
    return blocks.transpose(1, 2).flatten(0, 1)[:outputs].float()


def rows_of(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows [..., in] of the weight in float32, by their numbers [...]."""
    return blocks[numbers // LANES, :, numbers % LANES].float()


def product(inputs: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Outputs [rows, blocks * LANES] of inputs [rows, in] in float32."""
    out = torch.empty(len(inputs), len(blocks) * LANES)
    bits = blocks.view(torch.uint16) if blocks.dtype == torch.bfloat16 else blocks
    stored: NDArray[Any] = bits.numpy()
    arrays = stored, inputs.detach().contiguous().numpy(), out.numpy()
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if threads == 1:
        _units(*arrays, 0, len(blocks) // UNIT)
        return out
    with _LOCK:
        numba.set_num_threads(threads)
        _parallel_units(*arrays, threads)
    return out


def _tile(rows: int, count: int) -> Any:
    """A compiled function: `count` blocks times `rows` rows, summed in vector registers."""

    @intrinsic
    def tile(typing: Any, blocks: Any, block: Any, inputs: Any, row: Any, out: Any) -> Any:
        signature = numba.types.void(blocks, block, inputs, row, out)
        bits = {numba.types.float32: 32, numba.types.uint16: 16, numba.types.int8: 8}[blocks.dtype]

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = [
                context.make_array(signature.args[i])(context, builder, values[i])
                for i in (0, 2, 4)
            ]
            _emit_tile(builder, arrays, (values[1], values[3]), (rows, count), bits)
            return context.get_dummy_value()

        return signature, emit

    return tile


def _emit_tile(b: Any, arrays: Any, first: Any, size: tuple[int, int], bits: int) -> None:
    """Write a tile in LLVM's language: for each input, load its weights, and multiply and add.

    bits  of a stored number
    """
    weights, inputs, out = arrays
    integer, single = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(single, LANES)
    wide = ir.VectorType(ir.IntType(32), LANES)
    stored = vector if bits == 32 else ir.VectorType(ir.IntType(bits), LANES)
    undefined, zero = ir.Constant(vector, ir.Undefined), ir.Constant(vector, [0.0] * LANES)
    rows, count = range(size[0]), range(size[1])
    width, outputs = b.extract_value(inputs.shape, 1), b.extract_value(out.shape, 1)

    def at(pointer: Any, index: Any, row_width: Any, more: Any = None) -> Any:
        place = b.mul(index, row_width)
        return b.gep(pointer, [place if more is None else b.add(place, more)])

    def number(value: int) -> Any:
        return ir.Constant(integer, value)

    lanes = number(LANES)
    block_size = b.mul(width, lanes)
    sources = [at(weights.data, b.add(first[0], number(i)), block_size) for i in count]
    numbers = [at(inputs.data, b.add(first[1], number(r)), width) for r in rows]
    before, body = b.block, b.append_basic_block("tile")
    after = b.append_basic_block("tile_end")
    b.branch(body)
    b.position_at_end(body)
    step = b.phi(integer)
    step.add_incoming(number(0), before)
    sums = [[b.phi(vector) for _ in count] for _ in rows]
    loaded = []
    for source in sources:
        _prefetch(b, at(source, b.add(step, b.mul(width, number(UNIT))), lanes))
        value = b.load(b.bitcast(at(source, step, lanes), stored.as_pointer()), align=bits // 8)
        if bits == 16:
            shift = ir.Constant(wide, [16] * LANES)
            value = b.bitcast(b.shl(b.zext(value, wide), shift), vector)
        elif bits == 8:
            value = b.sitofp(value, vector)
        loaded.append(value)
    for r in rows:
        value = b.insert_element(undefined, b.load(b.gep(numbers[r], [step])), number(0))
        value = b.shuffle_vector(value, undefined, ir.Constant(wide, [0] * LANES))
        for i in count:
            term = b.fmul(value, loaded[i], flags=("contract",))
            total = b.fadd(sums[r][i], term, flags=("contract",))
            sums[r][i].add_incoming(zero, before)
            sums[r][i].add_incoming(total, body)
            sums[r][i] = total
    following = b.add(step, number(1))
    step.add_incoming(following, body)
    b.cbranch(b.icmp_signed("<", following, width), body, after)
    b.position_at_end(after)
    for r in rows:
        for i in count:
            column = b.mul(b.add(first[0], number(i)), lanes)
            place = at(out.data, b.add(first[1], number(r)), outputs, column)
            b.store(sums[r][i], b.bitcast(place, vector.as_pointer()), align=4)


def _prefetch(b: Any, pointer: Any) -> None:
    """Ask for memory that is read soon; the end of the weights may lie before it."""
    byte, switch = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, switch, switch, switch])
    function = b.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    b.call(function, [b.bitcast(pointer, byte), *(ir.Constant(switch, n) for n in (0, 2, 1))])


_one, _two, _three = _tile(1, 2), _tile(2, 2), _tile(3, 2)
_four, _five, _six = _tile(4, 1), _tile(5, 1), _tile(6, 1)


@jit
def _units(blocks, inputs, out, first, last):  # type: ignore[no-untyped-def]
    """The outputs of the units from `first` to before `last`."""
    rows = len(inputs)
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    for block in range(first * UNIT, last * UNIT, UNIT):
        row = 0
        for group in range(groups):
            left = groups - group
            size = (rows - row + left - 1) // left
            if size == 1:
                _one(blocks, block, inputs, row, out)
            elif size == 2:
                _two(blocks, block, inputs, row, out)
            elif size == 3:
                _three(blocks, block, inputs, row, out)
            else:
                for one in range(block, block + UNIT):
                    if size == 4:
                        _four(blocks, one, inputs, row, out)
                    elif size == 5:
                        _five(blocks, one, inputs, row, out)
                    else:
                        _six(blocks, one, inputs, row, out)
            row += size


def _in_parts(blocks, inputs, out, parts):  # type: ignore[no-untyped-def]
    units = len(blocks) // UNIT
    for part in numba.prange(parts):
        _units(blocks, inputs, out, part * units // parts, (part + 1) * units // parts)


_parallel_units = jit(_in_parts, parallel=True)

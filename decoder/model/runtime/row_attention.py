"""Attention of one row at a time on a CPU, compiled: the same for a row among any others.

A row's keys are taken in the order of their positions, so its sums have one order wherever the keys
lie. Arrays are of float32 numbers or of bfloat16 ones (as uint16, or as pairs in int32), with
places in them as if they were flat.
"""

# ruff: noqa: PLR0913 - compiled functions take arrays and places one by one
from __future__ import annotations

from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from decoder.jit import jit_inner, jit_sums
from decoder.model.runtime.tiles import (
    SINGLE,
    WIDE,
    WORD,
    WORDS,
    dots,
    loaded,
    loop,
    multiply_add,
    number,
    spread,
)

LANES = 8  # numbers of a head that are summed side by side; a head's width is a multiple
WIDE_LANES = 16  # of wide heads
PARTS = 4 if WIDE else 2  # vectors of wide heads that are mixed at once
PAIRED = 32  # numbers of a head that are multiplied in pairs at once
KEYS = 4  # of which scores are made at once
BLOCK = 64  # keys that all heads of a group read before the next are read

_LOG2_E = np.float32(1.4426950408889634)
_RANGE = np.float32(126)  # of exponents
INT = numba.types.int64


def _data(context: Any, builder: Any, signature: Any, values: Any, *arrays: int) -> list[Any]:
    data = [context.make_array(signature.args[i])(context, builder, values[i]).data for i in arrays]
    bits = ir.IntType(16).as_pointer()
    return [builder.bitcast(one, bits) if one.type.pointee == WORD else one for one in data]


def _widened(b: Any, pointer: Any, lanes: int) -> Any:
    """So many numbers at a pointer, in float32."""
    kind, wide = ir.VectorType(SINGLE, lanes), ir.VectorType(WORD, lanes)
    if pointer.type.pointee == SINGLE:
        return loaded(b, pointer, kind)
    halves = loaded(b, pointer, ir.VectorType(pointer.type.pointee, lanes))
    return b.bitcast(b.shl(b.zext(halves, wide), ir.Constant(wide, [16] * lanes)), kind)


@intrinsic
def at(typing: Any, numbers: Any, place: Any) -> Any:
    """The number at a place that is not negative, in float32."""

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        value = b.load(b.gep(*_data(context, b, signature, values, 0), [values[1]]))
        if value.type == SINGLE:
            return value  # a scalar, since LLVM makes no wider vectors of a vector of one
        return b.bitcast(b.shl(b.zext(value, WORD), WORD(16)), SINGLE)

    return numba.types.float32(numbers, INT), emit


@intrinsic
def put(typing: Any, numbers: Any, place: Any, value: Any) -> Any:
    """Write a float32 number, rounded half to even where numbers are bfloat16."""

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        pointer, value = b.gep(*_data(context, b, signature, values, 0), [values[1]]), values[2]
        if pointer.type.pointee != SINGLE:
            bits = b.bitcast(value, WORD)
            odd = b.and_(b.lshr(bits, WORD(16)), WORD(1))
            bits = b.lshr(b.add(b.add(bits, WORD(0x7FFF)), odd), WORD(16))
            value = b.trunc(bits, pointer.type.pointee)
        b.store(value, pointer)
        return context.get_dummy_value()

    return numba.types.void(numbers, INT, numba.types.float32), emit


@intrinsic
def _number_of(typing: Any, bits: Any) -> Any:
    """The float32 number of these bits."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], SINGLE)

    return numba.types.float32(numba.types.int32), emit


@jit_inner
def keep(numbers, place, out, start, count):
    """Copy numbers, to an array of any kind."""
    for i in range(count):
        put(out, start + i, at(numbers, place + i))


@jit_inner
def exponential(value):
    """e to the power of a float32 number, by a polynomial of 2^f and an exponent."""
    power = min(max(value * _LOG2_E, -_RANGE), _RANGE)
    whole = np.floor(power)
    part = power - whole
    total = np.float32(1.8775767e-3)
    total = total * part + np.float32(8.9893397e-3)
    total = total * part + np.float32(5.5826318e-2)
    total = total * part + np.float32(2.4015361e-1)
    total = total * part + np.float32(6.9315308e-1)
    total = total * part + np.float32(9.9999994e-1)
    return total * _number_of((np.int32(whole) + np.int32(127)) << np.int32(23))


def _folded(b: Any, one: Any, other: Any, *lanes: list[int]) -> Any:
    """The sum of two selections of lanes of a pair of vectors."""
    kind = ir.VectorType(WORD, len(lanes[0]))
    return b.fadd(*(b.shuffle_vector(one, other, ir.Constant(kind, some)) for some in lanes))


def _sums(b: Any, vectors: list[Any]) -> Any:
    """The sums of four vectors' lanes side by side, each in the same order."""
    lanes = vectors[0].type.count
    while lanes > 4:
        lanes //= 2
        halves = list(range(lanes)), list(range(lanes, 2 * lanes))
        vectors = [_folded(b, one, one, *halves) for one in vectors]
    pairs = [_folded(b, *vectors[i : i + 2], [0, 4, 1, 5], [2, 6, 3, 7]) for i in (0, 2)]
    return _folded(b, *pairs, [0, 1, 4, 5], [2, 3, 6, 7])


@intrinsic
def _score(
    typing: Any, query: Any, start: Any, keys: Any, first: Any, last: Any, width: Any, out: Any,
    place: Any,
) -> Any:  # fmt: skip
    """Products of a query with KEYS keys to out[place ...]; the last stands for those behind it.

    Bfloat16 queries have bfloat16 keys, and are multiplied in pairs.
    """
    paired = query.dtype == numba.types.int32
    lanes = WIDE_LANES if paired else LANES

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        query, keys, out = _data(context, b, signature, values, 0, 2, 6)
        _, start, _, first, last, width, _, place = values
        sources = []
        for i in range(KEYS):
            key = b.add(first, b.mul(width, number(i)))
            sources.append(b.gep(keys, [b.select(b.icmp_signed("<", key, last), key, last)]))

        def add(part: Any, sums: list[Any]) -> list[Any]:
            given, read = b.gep(query, [b.add(start, part)]), [b.gep(s, [part]) for s in sources]
            if paired:
                left, right = loaded(b, given, WORDS), [loaded(b, key, WORDS) for key in read]
                return [dots(b, sums[i], left, right[i]) for i in range(KEYS)]
            left, right = _widened(b, given, lanes), [_widened(b, key, lanes) for key in read]
            return [multiply_add(b, left, right[i], sums[i]) for i in range(KEYS)]

        zeros = [ir.Constant(ir.VectorType(SINGLE, lanes), [0.0] * lanes)] * KEYS
        sums = _sums(b, loop(b, width, PAIRED if paired else lanes, zeros, add))
        b.store(sums, b.bitcast(b.gep(out, [place]), sums.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return numba.types.void(query, INT, keys, INT, INT, INT, out, INT), emit


def _mix(lanes: int, parts: int, heads: int = 1) -> Any:
    """A compiled function: so many vectors of weighted values, added to `out` for such heads."""
    vector = ir.VectorType(SINGLE, lanes)

    @intrinsic
    def mix(
        typing: Any, weights: Any, place: Any, size: Any, values: Any, first: Any, width: Any,
        count: Any, out: Any, start: Any,
    ) -> Any:  # fmt: skip
        """weights[h * size + place ...] times `count` values, the first of them at `first`."""

        def emit(context: Any, b: Any, signature: Any, given: Any) -> Any:
            weights, values, out = _data(context, b, signature, given, 0, 3, 7)
            _, place, size, _, first, width, count, _, start = given
            rows = [b.gep(weights, [b.add(place, b.mul(size, number(h)))]) for h in range(heads)]
            goals = [b.gep(out, [b.add(start, b.mul(width, number(h)))]) for h in range(heads)]
            targets = [b.gep(goal, [number(lanes * i)]) for goal in goals for i in range(parts)]

            def add(key: Any, sums: list[Any]) -> list[Any]:
                spreads = [spread(b, b.gep(row, [key]), lanes) for row in rows]
                source = b.gep(values, [b.add(first, b.mul(key, width))])
                read = [
                    _widened(b, b.gep(source, [number(lanes * i)]), lanes) for i in range(parts)
                ]
                terms = zip(sums, product(spreads, read), strict=True)
                return [multiply_add(b, *both, total) for total, both in terms]

            totals = loop(b, count, 1, [loaded(b, target, vector) for target in targets], add)
            for target, total in zip(targets, totals, strict=True):
                b.store(total, b.bitcast(target, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return numba.types.void(weights, INT, INT, values, INT, INT, INT, out, INT), emit

    return mix


_mix_few, _mix_many, _mix_pair = _mix(LANES, 1), _mix(WIDE_LANES, PARTS), _mix(WIDE_LANES, PARTS, 2)


@jit_inner
def add_scores(query, start, group, keys, first, count, width, scores, size, place):
    """Scores of `group` queries from `start` on with `count` keys: scores[h * size + place ...]."""
    last = first + (count - 1) * width
    for key in range(0, count, KEYS):
        for h in range(group):
            out = h * size + place + key
            _score(query, start + h * width, keys, first + key * width, last, width, scores, out)


@jit_inner
def add_mixed(weights, size, place, group, values, first, count, width, out):
    """Add `count` values weighted by weights[h * size + place ...] to out[h * width ...]."""
    for block in range(0, count, BLOCK):
        some, source = min(count - block, BLOCK), first + block * width
        for h in range(group):
            weight, part, goal = h * size + place + block, 0, h * width
            while part + WIDE_LANES * PARTS <= width:
                key, to = source + part, goal + part
                if h % 2 == 0 and h + 1 < group:  # with the next head, of the same values
                    _mix_pair(weights, weight, size, values, key, width, some, out, to)
                elif h % 2 == 0:
                    _mix_many(weights, weight, size, values, key, width, some, out, to)
                part += WIDE_LANES * PARTS
            while part < width:
                key, to = source + part, goal + part
                _mix_few(weights, weight, size, values, key, width, some, out, to)
                part += LANES


@jit_sums
def _total(numbers, first, count):
    """The sum of numbers, in an order that depends on their number alone."""
    total = np.float32(0)
    for i in range(count):
        total += at(numbers, first + i)
    return total


@jit_sums
def _largest(numbers, first, count):
    largest = np.float32(-np.inf)
    for i in range(count):
        largest = max(largest, at(numbers, first + i))
    return largest


@jit_inner
def softmax(scores, first, count):
    """Exponentials of scores less the largest, in place; returns their sum."""
    largest = _largest(scores, first, count)
    for i in range(count):
        put(scores, first + i, exponential(at(scores, first + i) - largest))
    return _total(scores, first, count)

"""Attention of one row at a time on a CPU, compiled: the same for a row among any others.

A row's keys are slots that it sees, and copies of those further on, in the order of their
positions. So its sums have one order wherever its keys lie. Arrays are flat, with places in them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, overload

from decoder.cpu import this_cpu
from decoder.jit import jit, jit_sums
from decoder.model.runtime.tiles import (
    DOTS,
    INTEGER,
    SINGLE,
    WORD,
    BFloat16,
    loaded,
    multiply_add,
    number,
)

LANES = 8  # numbers of a head that are summed side by side; a head's width is a multiple
WIDE_LANES, PARTS = 16, 4  # of wide heads, and vectors of them that are mixed at once
PAIRED = 32  # numbers of a head that are multiplied in pairs at once
KEYS = 4  # of which scores are made at once
BLOCK = 64  # keys that all heads of a group read before the next are read

_UPPER = np.uint32(16)  # a bfloat16 number is the upper half of a float32 one
_LOG2_E = np.float32(1.4426950408889634)
_RANGE = np.float32(126)  # of exponents
_PAIRS = this_cpu().pairs


def _cast(kind: Any, to: Any) -> Any:
    """A function that takes the bits of a number as those of another kind."""

    @intrinsic
    def cast(typing: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(to))

        return to(kind), emit

    return cast


bits_of = _cast(numba.types.float32, numba.types.uint32)
number_of = _cast(numba.types.uint32, numba.types.float32)


@intrinsic
def at(typing: Any, numbers: Any, place: Any) -> Any:
    """numbers[place] of a flat array, by a place that is not negative."""

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, b, values[0])
        return b.load(b.gep(array.data, [values[1]]))

    return numbers.dtype(numbers, numba.types.int64), emit


@intrinsic
def put(typing: Any, numbers: Any, place: Any, value: Any) -> Any:
    """numbers[place] = value of the same kind."""

    def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, b, values[0])
        b.store(values[2], b.gep(array.data, [values[1]]))
        return context.get_dummy_value()

    return numba.types.void(numbers, numba.types.int64, numbers.dtype), emit


@jit
def _rounded(value):  # type: ignore[no-untyped-def]
    """The bits of a float32 number rounded to bfloat16, half to even."""
    bits = bits_of(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> _UPPER) & np.uint32(1))) >> _UPPER)


def keep(numbers: Any, place: Any, out: Any, out_place: Any, count: Any) -> None:
    """Write float32 numbers to an array of them, or of bfloat16 ones as bits."""


@overload(keep)
def _keep(numbers: Any, place: Any, out: Any, out_place: Any, count: Any) -> Any:
    def rounded(numbers: Any, place: Any, out: Any, out_place: Any, count: Any) -> None:
        for i in range(count):
            put(out, out_place + i, _rounded(at(numbers, place + i)))

    def same(numbers: Any, place: Any, out: Any, out_place: Any, count: Any) -> None:
        for i in range(count):
            put(out, out_place + i, at(numbers, place + i))

    return rounded if out.dtype == numba.types.uint16 else same


@jit
def exponential(value):  # type: ignore[no-untyped-def]
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
    return total * number_of(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


def _widened(b: Any, pointer: Any, lanes: int) -> Any:
    """So many numbers of float32 or bfloat16 at a pointer, in float32."""
    kind, wide = ir.VectorType(SINGLE, lanes), ir.VectorType(WORD, lanes)
    if pointer.type.pointee == SINGLE:
        return loaded(b, pointer, kind)
    halves = loaded(b, pointer, ir.VectorType(pointer.type.pointee, lanes))
    return b.bitcast(b.shl(b.zext(halves, wide), ir.Constant(wide, [16] * lanes)), kind)


def _folded(b: Any, one: Any, other: Any, *lanes: tuple[int, ...]) -> Any:
    """The sum of two selections of lanes of a pair of vectors."""
    kind = ir.VectorType(WORD, len(lanes[0]))
    return b.fadd(*(b.shuffle_vector(one, other, ir.Constant(kind, list(some))) for some in lanes))


def _sums(b: Any, vectors: list[Any]) -> Any:
    """The sums of four vectors' lanes side by side, each in the same order."""
    lanes = vectors[0].type.count
    while lanes > 4:
        lanes //= 2
        halves = tuple(range(lanes)), tuple(range(lanes, 2 * lanes))
        vectors = [_folded(b, one, one, *halves) for one in vectors]
    pairs = [_folded(b, *vectors[i : i + 2], (0, 4, 1, 5), (2, 6, 3, 7)) for i in (0, 2)]
    return _folded(b, *pairs, (0, 1, 4, 5), (2, 3, 6, 7))


def _scores(paired: bool) -> Any:
    """A compiled function: products of a query with KEYS keys.

    paired  whether queries and keys are bfloat16 numbers that are multiplied in pairs
    """
    lanes = WIDE_LANES if paired else LANES
    vector = ir.VectorType(SINGLE, lanes)
    halves = ir.VectorType(BFloat16(), 2 * lanes)

    @intrinsic
    def scores(
        typing: Any, query: Any, start: Any, keys: Any, first: Any, last: Any, width: Any,
        out: Any, place: Any,
    ) -> Any:  # fmt: skip
        """To out[place ...]. The last key stands for those behind it."""

        def emit(context: Any, b: Any, signature: Any, values: Any) -> Any:
            query, keys, out = (
                context.make_array(signature.args[i])(context, b, values[i]) for i in (0, 2, 6)
            )
            _, start, _, first, last, width, _, place = values
            sources = []
            for i in range(KEYS):
                key = b.add(first, b.mul(width, number(i)))
                key = b.select(b.icmp_signed("<", key, last), key, last)
                sources.append(b.gep(keys.data, [key]))
            before, body, after = (
                b.block,
                b.append_basic_block("score"),
                b.append_basic_block("end"),
            )
            b.branch(body)
            b.position_at_end(body)
            part = b.phi(INTEGER)
            totals = [b.phi(vector) for _ in sources]
            given = b.gep(query.data, [b.add(start, part)])
            for total, source in zip(totals, sources, strict=True):
                key = b.gep(source, [part])
                if paired:
                    kind = ir.FunctionType(vector, [vector, halves, halves])
                    dots = cgutils.get_or_insert_function(b.module, kind, DOTS)
                    both = loaded(b, given, halves), loaded(b, key, halves)
                    more = b.call(dots, [total, *both])
                else:
                    both = _widened(b, given, lanes), _widened(b, key, lanes)
                    more = multiply_add(b, *both, total)
                total.add_incoming(ir.Constant(vector, [0.0] * lanes), before)
                total.add_incoming(more, body)
            following = b.add(part, number(2 * lanes if paired else lanes))
            part.add_incoming(number(0), before)
            part.add_incoming(following, body)
            b.cbranch(b.icmp_signed("<", following, width), body, after)
            b.position_at_end(after)
            sums = _sums(b, [total.incomings[1][0] for total in totals])
            b.store(sums, b.bitcast(b.gep(out.data, [place]), sums.type.as_pointer()), align=4)
            return context.get_dummy_value()

        integer = numba.types.int64
        places = integer, keys, integer, integer, integer, out, integer
        return numba.types.void(query, *places), emit

    return scores


def _mix(lanes: int, parts: int) -> Any:
    """A compiled function: so many vectors of weighted values, added to `out`."""
    vector = ir.VectorType(SINGLE, lanes)

    @intrinsic
    def mix(
        typing: Any, weights: Any, place: Any, values: Any, first: Any, width: Any, count: Any,
        out: Any, start: Any,
    ) -> Any:  # fmt: skip
        """weights[place ...] times `count` values of which `first` is the place of the first."""

        def emit(context: Any, b: Any, signature: Any, given: Any) -> Any:
            weights, values, out = (
                context.make_array(signature.args[i])(context, b, given[i]) for i in (0, 2, 6)
            )
            _, place, _, first, width, count, _, start = given
            targets = [
                b.bitcast(b.gep(out.data, [b.add(start, number(lanes * i))]), vector.as_pointer())
                for i in range(parts)
            ]
            starts = [b.load(target, align=4) for target in targets]
            before, body, after = b.block, b.append_basic_block("mix"), b.append_basic_block("end")
            b.branch(body)
            b.position_at_end(body)
            key = b.phi(INTEGER)
            totals = [b.phi(vector) for _ in range(parts)]
            undefined = ir.Constant(vector, ir.Undefined)
            weight = b.load(b.gep(weights.data, [b.add(place, key)]))
            weight = b.insert_element(undefined, weight, number(0))
            zeros = ir.Constant(ir.VectorType(WORD, lanes), [0] * lanes)
            weight = b.shuffle_vector(weight, undefined, zeros)
            source, sums = b.add(first, b.mul(key, width)), []
            for i, total in enumerate(totals):
                value = b.gep(values.data, [b.add(source, number(lanes * i))])
                sums.append(multiply_add(b, weight, _widened(b, value, lanes), total))
                total.add_incoming(starts[i], before)
                total.add_incoming(sums[i], body)
            following = b.add(key, number(1))
            key.add_incoming(number(0), before)
            key.add_incoming(following, body)
            b.cbranch(b.icmp_signed("<", following, count), body, after)
            b.position_at_end(after)
            for target, one in zip(targets, sums, strict=True):
                b.store(one, target, align=4)
            return context.get_dummy_value()

        integer = numba.types.int64
        places = integer, values, integer, integer, integer, out, integer
        return numba.types.void(weights, *places), emit

    return mix


_scores_alone, _scores_in_pairs = _scores(False), _scores(True)
_mix_few, _mix_many = _mix(LANES, 1), _mix(WIDE_LANES, PARTS)


def _score(query, start, keys, first, last, width, out, place):  # type: ignore[no-untyped-def]
    """Scores of KEYS keys, in pairs where the arrays are of bfloat16 numbers."""


@overload(_score)
def _score_of(query, start, keys, first, last, width, out, place):  # type: ignore[no-untyped-def]
    def paired(query, start, keys, first, last, width, out, place):  # type: ignore[no-untyped-def]
        if width % PAIRED == 0:
            _scores_in_pairs(query, start, keys, first, last, width, out, place)
        else:
            _scores_alone(query, start, keys, first, last, width, out, place)

    def alone(query, start, keys, first, last, width, out, place):  # type: ignore[no-untyped-def]
        _scores_alone(query, start, keys, first, last, width, out, place)

    both = query.dtype == keys.dtype == numba.types.uint16
    return paired if both and _PAIRS else alone


@jit
def add_scores(query, start, group, keys, first, count, width, scores, size, place):  # type: ignore[no-untyped-def]
    """Scores of `group` queries from `start` on with `count` keys to scores[h * size + place ...]."""
    last = first + (count - 1) * width
    for key in range(0, count, KEYS):
        for h in range(group):
            out = h * size + place + key
            _score(query, start + h * width, keys, first + key * width, last, width, scores, out)


@jit
def add_mixed(weights, size, place, group, values, first, count, width, out):  # type: ignore[no-untyped-def]
    """Add `count` values weighted by weights[h * size + place ...] to out[h * width ...]."""
    for block in range(0, count, BLOCK):
        some, source = min(count - block, BLOCK), first + block * width
        for h in range(group):
            weight, part = h * size + place + block, 0
            while part + WIDE_LANES * PARTS <= width:
                _mix_many(
                    weights, weight, values, source + part, width, some, out, h * width + part
                )
                part += WIDE_LANES * PARTS
            while part < width:
                _mix_few(weights, weight, values, source + part, width, some, out, h * width + part)
                part += LANES


@jit_sums
def _total(numbers, first, count):  # type: ignore[no-untyped-def]
    """The sum of numbers, in an order that depends on their number alone."""
    total = np.float32(0)
    for i in range(count):
        total += at(numbers, first + i)
    return total


@jit_sums
def _largest(numbers, first, count):  # type: ignore[no-untyped-def]
    largest = np.float32(-np.inf)
    for i in range(count):
        largest = max(largest, at(numbers, first + i))
    return largest


@jit
def softmax(scores, first, count):  # type: ignore[no-untyped-def]
    """Exponentials of scores less the largest, in place; returns their sum."""
    largest = _largest(scores, first, count)
    for i in range(count):
        put(scores, first + i, exponential(at(scores, first + i) - largest))
    return _total(scores, first, count)

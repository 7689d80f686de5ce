"""Norms and rotations of few rows on a CPU, each in one compiled call.

torch composes them of six to nine calls, which take longer than the numbers do where rows are
few. Results in bfloat16 are torch's bit for bit: rounded in the same places, and summed in the same
order. Those in float32 are equal but for rounding.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.jit import jit
from decoder.model.attention import ForwardPlan, Segment

MOST_NUMBERS = 1 << 16  # in rows; for more of them torch's several threads are faster

Bits = NDArray[np.uint16]  # bfloat16 numbers, which NumPy does not have
Numbers = NDArray[np.float32]

LANES = (16, 8, 4, 1)
CHECKED_ROWS = 200

_UPPER = np.uint32(16)  # a bfloat16 number is the upper half of a float32 one
_LEVELS = 4  # of sums of sums


def are_few(rows: torch.Tensor) -> bool:
    """Whether this module is for rows [rows, hidden] of a forward."""
    return rows.dtype in (torch.bfloat16, torch.float32) and rows.numel() <= MOST_NUMBERS


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bits of a bfloat16 tensor on the CPU, the numbers of another; both share memory."""
    bits: Bits = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return bits


@cache
def sum_lanes(width: int) -> int:
    """The numbers in a vector of this CPU, as torch's sums over `width` tell; 0 if none fits.

    They decide the order in which a row is summed.
    """
    rows = torch.randn(CHECKED_ROWS, width, generator=torch.Generator().manual_seed(width))
    wanted = rows.pow(2).mean(-1).tolist()
    for lanes in LANES:
        if [_mean_square(row, lanes) for row in rows.numpy()] == wanted:
            return lanes
    return 0


class FewNorm(NamedTuple):
    """An RMSNorm: its weight [width], or one a head [heads, width], and its eps.

    lanes  of torch's sums of this width, see `sum_lanes`; any in float32
    """

    weight: Numbers
    eps: np.float32
    lanes: int

    @classmethod
    def of(cls, weight: torch.Tensor, eps: float) -> FewNorm:
        numbers: Numbers = weight.detach().float().numpy()
        lanes = sum_lanes(numbers.shape[-1]) if weight.dtype == torch.bfloat16 else 1
        return cls(numbers, np.float32(eps), lanes)


NO_NORM = FewNorm(np.empty((0, 0), np.float32), np.float32(0), 1)


class FewRows:
    """The rows of one forward, and memory that its layers use in turn.

    What `norm` and `attend` return holds until the next call.
    """

    def __init__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, plan: ForwardPlan
    ) -> None:
        """
        rows          [rows, hidden], an example
        cosine, sine  [rows, head_dim], the first half of the sines negated
        """
        self._normed = torch.empty_like(rows)
        self._normed_bits = bits_of(self._normed)
        rotation = bits_of(cosine), bits_of(sine)
        self._parts = [_Part(segment, rotation) for segment in plan.segments]

    def norm(self, rows: torch.Tensor, norm: FewNorm) -> torch.Tensor:
        """RMSNorm of rows [rows, hidden], rounded before and after they are scaled."""
        norm_rows = _norm_rows if rows.dtype == torch.bfloat16 else _norm_single_rows
        norm_rows(bits_of(rows), norm, self._normed_bits)
        return self._normed

    def attend(self, layer: int, qkv: torch.Tensor, norms: FewNorm, scale: float) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, and attend: [rows, heads * head_dim].

        qkv    [rows, heads + 2 * kv_heads, head_dim]
        norms  of queries and keys, before they are rotated
        """
        bits = bits_of(qkv)
        parts = [part.attend(layer, bits, norms, scale) for part in self._parts]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return mixed.transpose(1, 2).reshape(len(qkv), -1)


class _Part:
    """The rows of one sequence."""

    def __init__(self, segment: Segment, rotation: tuple[Bits, Bits]) -> None:
        self._segment, self._rows = segment, segment.rows
        self._rotation = rotation[0][segment.rows], rotation[1][segment.rows]
        self._cache = bits_of(segment.cache.data)[:, :, segment.sequence]

    def attend(self, layer: int, qkv: Bits, norms: FewNorm, scale: float) -> torch.Tensor:
        """[1, heads, rows, head_dim], see `FewRows.attend`."""
        qkv = qkv[self._rows]
        rows, heads, width = qkv.shape
        heads -= 2 * self._cache.shape[2]
        single = qkv.dtype == np.float32
        queries = torch.empty(
            1, heads, rows, width, dtype=torch.float32 if single else torch.bfloat16
        )
        cache, start = self._cache[layer], self._segment.start
        rotate_rows = _rotate_single_rows if single else _rotate_rows
        rotate_rows(qkv, self._rotation, norms, bits_of(queries)[0], cache, start)
        return self._segment.attend(layer, queries, scale)


@jit
def _rounded(bits):  # type: ignore[no-untyped-def]
    """The bits of a float32 number rounded to bfloat16, half to even."""
    odd = (bits >> _UPPER) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


@jit
def _mean_square(numbers, lanes):  # type: ignore[no-untyped-def]
    """The mean of squares in the order of torch's sums (ATen/native/cpu/SumKernel.cpp).

    Four vectors are summed side by side; sums of 16 or more of them go to a next level.
    """
    wide, size = 4 * lanes, len(numbers) // lanes // 4
    sums = np.zeros((_LEVELS, wide), np.float32)
    power = max(4, int(np.ceil(np.log2(max(size, 1)))) // _LEVELS)
    step = 0
    while step + (1 << power) <= size:
        for _ in range(1 << power):
            for c in range(wide):
                number = numbers[step * wide + c]
                sums[0, c] += number * number
            step += 1
        for level in range(1, _LEVELS):
            for c in range(wide):
                sums[level, c] += sums[level - 1, c]
                sums[level - 1, c] = 0
            if step & (((1 << power) - 1) << (level * power)):
                break
    for i in range(step, size):
        for c in range(wide):
            number = numbers[i * wide + c]
            sums[0, c] += number * number
    for level in range(1, _LEVELS):
        for c in range(wide):
            sums[0, c] += sums[level, c]
    vectors = len(numbers) // lanes
    for i in range(4 * size, vectors):
        for c in range(lanes):
            number = numbers[i * lanes + c]
            sums[0, c] += number * number
    for c in range(lanes, wide):
        sums[0, c % lanes] += sums[0, c]
    total = np.float32(0)
    for i in range(vectors * lanes, len(numbers)):
        total += numbers[i] * numbers[i]
    for c in range(lanes):
        total += sums[0, c]
    return total / np.float32(len(numbers))


@jit
def _norm(bits, numbers, weight, eps, lanes):  # type: ignore[no-untyped-def]
    """RMSNorm, in place, of a row as bits and as numbers, which share memory."""
    factor = np.float32(1) / np.sqrt(_mean_square(numbers, lanes) + eps)
    for i in range(len(bits)):
        numbers[i] *= factor
    for i in range(len(bits)):
        bits[i] = _rounded(bits[i])
    for i in range(len(bits)):
        numbers[i] *= weight[i]


@jit
def _norm_rows(rows, norm, out):  # type: ignore[no-untyped-def]
    bits = np.empty(rows.shape[1], np.uint32)
    numbers = bits.view(np.float32)
    for r in range(len(rows)):
        for i in range(len(bits)):
            bits[i] = np.uint32(rows[r, i]) << _UPPER
        _norm(bits, numbers, norm.weight, norm.eps, norm.lanes)
        for i in range(len(bits)):
            out[r, i] = np.uint16(_rounded(bits[i]) >> _UPPER)


@jit
def _rotate_rows(qkv, rotation, norms, queries, cache, start):  # type: ignore[no-untyped-def]
    """See `FewRows.attend`; writes queries [heads, rows, head_dim].

    cache  a layer's keys and values [2, kv_heads, slots, head_dim]; written from `start` on
    """
    keys, values = cache
    cosine, sine = rotation
    width, half, heads = qkv.shape[2], qkv.shape[2] // 2, len(queries)
    bits, swapped_bits = np.empty(width, np.uint32), np.empty(width, np.uint32)
    numbers, swapped = bits.view(np.float32), swapped_bits.view(np.float32)
    cosine_bits, sine_bits = np.empty(width, np.uint32), np.empty(width, np.uint32)
    cosines, sines = cosine_bits.view(np.float32), sine_bits.view(np.float32)
    for r in range(len(qkv)):
        for i in range(width):
            cosine_bits[i] = np.uint32(cosine[r, i]) << _UPPER
            sine_bits[i] = np.uint32(sine[r, i]) << _UPPER
        for h in range(heads + len(keys)):
            for i in range(width):
                bits[i] = np.uint32(qkv[r, h, i]) << _UPPER
            if len(norms.weight):
                _norm(bits, numbers, norms.weight[h], norms.eps, norms.lanes)
                for i in range(width):
                    bits[i] = _rounded(bits[i])
            for i in range(half):
                swapped_bits[i] = bits[half + i]
                swapped_bits[half + i] = bits[i]
            for i in range(width):
                numbers[i] *= cosines[i]
                swapped[i] *= sines[i]
            for i in range(width):
                bits[i] = _rounded(bits[i])
                swapped_bits[i] = _rounded(swapped_bits[i])
            for i in range(width):
                numbers[i] += swapped[i]
            if h < heads:
                for i in range(width):
                    queries[h, r, i] = np.uint16(_rounded(bits[i]) >> _UPPER)
            else:
                for i in range(width):
                    keys[h - heads, start + r, i] = np.uint16(_rounded(bits[i]) >> _UPPER)
        for h in range(len(values)):
            for i in range(width):
                values[h, start + r, i] = qkv[r, heads + len(keys) + h, i]


@jit
def _norm_single(row, weight, eps, out):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for number in row:
        total += number * number
    factor = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    for i in range(len(row)):
        out[i] = row[i] * factor * weight[i]


@jit
def _norm_single_rows(rows, norm, out):  # type: ignore[no-untyped-def]
    for r in range(len(rows)):
        _norm_single(rows[r], norm.weight, norm.eps, out[r])


@jit
def _rotate_single_rows(qkv, rotation, norms, queries, cache, start):  # type: ignore[no-untyped-def]
    """`_rotate_rows` in float32."""
    keys, values = cache
    cosine, sine = rotation
    width, half, heads = qkv.shape[2], qkv.shape[2] // 2, len(queries)
    head = np.empty(width, np.float32)
    for r in range(len(qkv)):
        for h in range(heads + len(keys)):
            if len(norms.weight):
                _norm_single(qkv[r, h], norms.weight[h], norms.eps, head)
            else:
                for i in range(width):
                    head[i] = qkv[r, h, i]
            out = queries[h, r] if h < heads else keys[h - heads, start + r]
            for i in range(half):
                out[i] = head[i] * cosine[r, i] + head[half + i] * sine[r, i]
                out[half + i] = head[half + i] * cosine[r, half + i] + head[i] * sine[r, half + i]
        for h in range(len(values)):
            for i in range(width):
                values[h, start + r, i] = qkv[r, heads + len(keys) + h, i]

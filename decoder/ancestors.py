"""Which rows of a tree see which: written out, or as bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.jit import jit

WORD = 32  # rows in one word of a bit mask


def visibility(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[N + 1, N + 1]: row i sees row j when j is i itself or an ancestor of i.

    parents  int64 [N]  row of each node's parent: 0 is the root, i + 1 is node i
    """
    return _visibility(parents)


def ancestor_bits(parents: NDArray[np.int64], words: int) -> NDArray[np.int32]:
    """The same as a bit mask [N + 1, words]: row j is bit j % 32 of word j // 32.

    Raises InputError where so few words cannot hold N + 1 rows.
    """
    if words * WORD <= len(parents):
        raise InputError(f"{words} words of {WORD} bits cannot hold {len(parents) + 1} rows")
    return _ancestor_bits(parents, words).view(np.int32)


def pack_bits(visible: NDArray[np.bool_], words: int) -> NDArray[np.int32]:
    """A visibility [rows, keys] as a bit mask [rows, words]; words as in `ancestor_bits`."""
    rows, keys = visible.shape
    if words * WORD < keys:
        raise InputError(f"{words} words of {WORD} bits cannot hold {keys} keys")
    padded = np.zeros((rows, words * WORD), dtype=np.bool_)
    padded[:, :keys] = visible
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@jit
def _visibility(parents):  # type: ignore[no-untyped-def]
    rows = len(parents) + 1
    visible = np.zeros((rows, rows), np.bool_)
    visible[0, 0] = True
    for node in range(rows - 1):
        row = node + 1
        visible[row, : parents[node] + 1] = visible[parents[node], : parents[node] + 1]
        visible[row, row] = True
    return visible


@jit
def _ancestor_bits(parents, words):  # type: ignore[no-untyped-def]
    rows = len(parents) + 1
    bits = np.zeros((rows, words), np.uint32)
    bits[0, 0] = np.uint32(1)
    for row in range(1, rows):
        above = parents[row - 1]
        for word in range(above // 32 + 1):
            bits[row, word] = bits[above, word]
        bits[row, row // 32] |= np.uint32(1) << np.uint32(row % 32)
    return bits

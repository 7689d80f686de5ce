"""The binary heap that best-first searches share."""

from __future__ import annotations

from decoder.jit import jit_inner


@jit_inner
def sift_down(keys, items, size):  # type: ignore[no-untyped-def]
    """Restore a binary heap, the largest key on top, after its top entry has changed.

    The heap is two arrays: keys and items [size].
    """
    hole, key, item = 0, keys[0], items[0]
    while True:
        below = 2 * hole + 1
        if below >= size:
            break
        if below + 1 < size and keys[below + 1] > keys[below]:
            below += 1
        if keys[below] <= key:
            break
        keys[hole] = keys[below]
        items[hole] = items[below]
        hole = below
    keys[hole] = key
    items[hole] = item


@jit_inner
def sift_up(keys, items, hole):  # type: ignore[no-untyped-def]
    """Restore a binary heap after an entry was added at `hole`, its end."""
    key, item = keys[hole], items[hole]
    while hole > 0:
        above = (hole - 1) // 2
        if keys[above] >= key:
            break
        keys[hole] = keys[above]
        items[hole] = items[above]
        hole = above
    keys[hole] = key
    items[hole] = item

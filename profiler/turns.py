"""Things that go on side by side, a step of each in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


def in_turn(going: Mapping[Key, Iterator[Item]], turned: int = 1) -> Iterator[tuple[Key, Item]]:
    """One item of each iterator in turn until all have ended, under the iterator's key.

    The order is turned by one each time, so that none is always behind the same other.

    turned  by how many it is turned the first time
    """
    left = dict(going)
    while left:
        order, first = list(left), turned % len(left)
        for key in order[first:] + order[:first]:
            try:
                yield key, next(left[key])
            except StopIteration:
                del left[key]
        turned += 1

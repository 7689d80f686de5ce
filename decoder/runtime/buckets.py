"""The row counts that captured forwards are padded to."""

from __future__ import annotations

from bisect import bisect_left

from costmodel.errors import InputError

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1025)


def bucket(rows: int) -> int | None:
    """The smallest bucket that holds `rows` rows; None beyond the largest.

    Raises InputError for less than one row.
    """
    if rows < 1:
        raise InputError(f"a forward needs one row or more, not {rows}")
    index = bisect_left(BUCKETS, rows)
    return BUCKETS[index] if index < len(BUCKETS) else None


def padded_rows(rows: int, sequences: int) -> int | None:
    """Rows that a forward of `rows` rows over some sequences is padded to, all together.

    The rows of the sequences lie end to end, so they are padded as one: to the bucket of
    their mean, once a sequence. None where that is beyond the largest bucket.
    """
    mean = bucket(-(-rows // sequences))
    return None if mean is None else mean * sequences

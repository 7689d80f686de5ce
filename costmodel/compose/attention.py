"""Attention of new rows over cached tokens, from measured attention without a cache.

Published tables hold attention of one row over c cached tokens (generation) and of s rows with an
empty cache (context), never of s rows over c. A flash-attention kernel works in tiles: a tile of M
rows of one head walks over all keys, one tile a multiprocessor, so

    seconds(s, c) = context(s) + c x key_s x waves,   waves = ceil(heads x ceil(s / M) / SMs)

with key_s the time of a tile for one key. The additive form, the wave count and M were fitted to
chunked attention measured on other devices (`integrations/llmservingsim`).

A verification of few rows leaves most multiprocessors idle in that form. Kernels made for it
(FlashAttention 3, Flash-Decoding, TensorRT-LLM's, this decoder's own) pack the query heads of one
key-value head into tiles and split the keys over all multiprocessors (`Attention.splitting_keys`),
so that attention takes the longer of one row's time, which reads the same keys, and

    seconds(s, c) = one row's start + context(s) - context(1) + c x busy_key_s x filled tiles / SMs

where a tile is filled by fragments of 64 rows, as generation tables show at every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from costmodel.errors import InputError
from costmodel.statistics import Array, extend_linear

# (heads, kv_heads) -> {(batch, tokens): seconds}
AttentionTable = Mapping[tuple[int, int], Mapping[tuple[int, int], float]]

# Rows that a kernel for few rows computes at a time.
FRAGMENT_ROWS = 64
_OUTLIER = 2.0  # times that of half the heads at twice the batch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileForm:
    """Tiling of an attention kernel.

    `tile_rows`: rows of a tile; `splits_keys`: the query heads of one key-value head share tiles,
    and all multiprocessors share the keys of all tiles.
    """

    tile_rows: int
    splits_keys: bool = False

    def tiles(
        self, rows: ArrayLike, heads: int, kv_heads: int, batch: int = 1, *, step: int = 0
    ) -> Array:
        """Number of tiles of one attention call, for each of `rows`.

        step  rows that are computed at a time [default: a whole tile]
        """
        s, step = np.asarray(rows, dtype=np.float64), step or self.tile_rows
        packed, groups = (s * (heads / kv_heads), kv_heads) if self.splits_keys else (s, heads)
        count = batch * groups * np.ceil(packed / step) * step / self.tile_rows
        return np.asarray(count, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """Seconds of one layer's attention on one device.

    `generation`: by (batch, cached tokens), one row a sequence; `context`: by (batch, rows), with
    an empty cache. `key_s`: seconds of one tile for one key while no tile waits; `busy_key_s`: the
    same while every multiprocessor always has a tile.
    """

    generation: AttentionTable
    context: AttentionTable
    form: TileForm
    sm_count: int
    key_s: float
    busy_key_s: float

    def splitting_keys(self) -> Attention:
        """The same attention in the form that a verification of few rows runs."""
        form = dataclasses.replace(self.form, splits_keys=True)
        return dataclasses.replace(self, form=form)

    def seconds(
        self, rows: int, context: ArrayLike, batch: int, heads: int, kv_heads: int
    ) -> Array:
        """Seconds of `rows` rows a sequence over each `context` [contexts]. Raises InputError."""
        cached = np.asarray(context, dtype=np.float64)
        one_row = self._one_row(cached, batch, heads, kv_heads)
        if rows == 1:
            return one_row
        empty = self.on_nothing(rows, batch, heads, kv_heads)
        more = max(empty - self.on_nothing(1, batch, heads, kv_heads), 0.0)
        if self.form.splits_keys:  # the kernel of one row, whose start is not that of prompts
            empty = float(self._one_row(np.ones(1), batch, heads, kv_heads)[0]) + more
        walked = empty + self.per_key_s(rows, batch, heads, kv_heads) * cached
        # Keys and values are read at least once, as for one row.
        return np.maximum(walked, one_row + more)

    def on_nothing(self, rows: int, batch: int, heads: int, kv_heads: int) -> float:
        """Seconds of `rows` rows a sequence with an empty cache."""
        table, times = _pick(self.context, heads, kv_heads, "context")
        return float(interpolate(table, np.array([rows]), batch * times)[0])

    def per_key_s(self, rows: int, batch: int, heads: int, kv_heads: int) -> float:
        """Seconds that each cached token adds for more than one row."""
        if self.form.splits_keys:
            fragment = min(FRAGMENT_ROWS, self.form.tile_rows)
            filled = float(self.form.tiles(rows, heads, kv_heads, batch, step=fragment))
            return self.busy_key_s * filled / self.sm_count
        tiles = float(self.form.tiles(rows, heads, kv_heads, batch))
        return max(self.key_s, self.busy_key_s * float(np.ceil(tiles / self.sm_count)))

    def _one_row(self, cached: Array, batch: int, heads: int, kv_heads: int) -> Array:
        table, times = _pick(self.generation, heads, kv_heads, "generation")
        measured = interpolate(table, np.maximum(cached, 1), batch * times)
        lengths = sorted(tokens for b, tokens in table if b == 1)
        if not self.form.splits_keys or len(lengths) < 2:
            return measured
        first, last = lengths[0], lengths[-1]
        if (table[1, last] - table[1, first]) / (last - first) <= 0.5 * self.key_s:
            return measured  # the table's kernel splits one row's keys too
        empty = self.on_nothing(1, batch, heads, kv_heads)
        split = empty + self.per_key_s(1, batch, heads, kv_heads) * cached
        return np.asarray(np.minimum(measured, split), dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentTable:
    """Seconds of one layer's latent attention by one device's heads: {(batch, tokens): seconds}.

    `generation`: of one row a sequence over cached tokens; `context`: of prompts. `projects`: its
    products, norms and indexer were timed with it. `source`: whose kernels, for people.
    """

    generation: Mapping[int, Mapping[tuple[int, int], float]]
    context: Mapping[int, Mapping[tuple[int, int], float]]
    projects: bool
    source: str


def rising(table: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """{(batch, tokens): seconds} in which none exceeds that of more tokens or sequences.

    Where a table falls, the longer time is the noise: a kernel is delayed, never hurried.
    """
    risen: dict[tuple[int, int], float] = {}
    of_batch: dict[int, float] = {}
    of_tokens: dict[int, float] = {}
    for (batch, tokens), measured_s in sorted(table.items(), reverse=True):
        seconds = min(measured_s, of_batch.get(batch, np.inf), of_tokens.get(tokens, np.inf))
        risen[batch, tokens] = of_batch[batch] = of_tokens[tokens] = seconds
    return risen


def checked(tables: AttentionTable) -> AttentionTable:
    """The tables without times over twice those of half the heads at twice the batch."""
    sound: dict[tuple[int, int], Mapping[tuple[int, int], float]] = {}
    for (heads, kv_heads), table in sorted(tables.items()):
        half = sound.get((heads // 2, kv_heads // 2), {}) if heads % 2 == kv_heads % 2 == 0 else {}
        beside = {(b, n): half.get((2 * b, n), s) for (b, n), s in table.items()}
        sound[heads, kv_heads] = {
            place: beside[place] if s > _OUTLIER * beside[place] else s
            for place, s in table.items()
        }
    return sound


def _pick(
    tables: AttentionTable, heads: int, kv_heads: int, label: str
) -> tuple[Mapping[tuple[int, int], float], int]:
    """The table of these heads, or of half as many at twice the batch, and so on.

    Heads do not meet, so that both are the same work. Else that of the smallest larger ones; of
    32 and 16 heads it is of 48 and 48 on a B200, and 5.6 times too slow. Raises InputError.
    """
    times = 1
    while not heads % times and not kv_heads % times:
        if (pair := (heads // times, kv_heads // times)) in tables:
            return tables[pair], times
        times *= 2
    larger = [pair for pair in tables if pair[0] >= heads and pair[1] >= kv_heads]
    if not larger:
        raise InputError(
            f"the {label} attention table has nothing as large as {heads} heads with"
            f" {kv_heads} key-value heads",
            hint="Measure the target with `rooftree calibrate`",
        )
    return tables[min(larger, key=lambda pair: (pair[0] * pair[1], pair))], 1


def interpolate(table: Mapping[tuple[int, int], float], tokens: Array, batch: int) -> Array:
    """Interpolation, linear over tokens and logarithmic over batches; proportional beyond both."""
    batches = sorted({b for b, _ in table})
    upper = min(int(np.searchsorted(batches, batch)), len(batches) - 1)
    high = batches[upper]
    if high == batch or upper == 0:
        return _over_tokens(table, tokens, high)
    if batch > high:
        return _over_tokens(table, tokens, high) * (batch / high)
    low = batches[upper - 1]
    share = np.log(batch / low) / np.log(high / low)
    below, above = _over_tokens(table, tokens, low), _over_tokens(table, tokens, high)
    return np.asarray(np.exp((1 - share) * np.log(below) + share * np.log(above)))


def _over_tokens(table: Mapping[tuple[int, int], float], tokens: Array, batch: int) -> Array:
    curve = sorted((n, s) for (b, n), s in table.items() if b == batch)
    x, y = np.array(curve, dtype=np.float64).T
    return extend_linear(x, y, tokens)

"""One forward of a target, summed from measured operators."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.architecture import ModelArchitecture
from costmodel.compose.operators import OperatorTables
from costmodel.errors import InputError
from costmodel.roofline import Roofline, distinct_experts

Array = NDArray[np.float64]

# Profiles keep six digits: what is at the bound must not be rounded below it.
_ROUNDING = 1.0 + 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComposedForward:
    """Seconds of forwards of one target: kernel times only, no host and no gaps.

    `tensor_parallel` devices share heads, FFN and vocabulary evenly; the sum is one device's,
    with two all-reduces a layer where they were measured.
    """

    architecture: ModelArchitecture
    tables: OperatorTables
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        a, tp = self.architecture, self.tensor_parallel
        if tp < 1 or a.heads % tp or a.kv_heads % tp:
            raise InputError(
                f"tensor_parallel {tp} does not divide {a.heads} heads and {a.kv_heads}"
                " key-value heads"
            )
        if a.ffn % tp:
            raise InputError(f"tensor_parallel {tp} does not divide the FFN width {a.ffn}")
        if self.tables.head_dim != a.head_dim:
            raise InputError(
                f"the attention tables are for heads of size {self.tables.head_dim},"
                f" {a.name} has {a.head_dim}"
            )
        measured = self.tables.tensor_parallel
        if measured is not None and measured != tp:
            raise InputError(f"these operator tables are of tensor_parallel {measured}, not {tp}")
        if a.experts:
            if tp > 1:
                raise InputError("experts are composed on one device only")
            self.tables.expert_table(a)

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: int = 1) -> Array:
        """Of each row count on each context [rows, contexts]; never below the physical bound."""
        counts = np.atleast_1d(np.asarray(rows, dtype=np.float64))
        cached = np.atleast_1d(np.asarray(context, dtype=np.float64))
        fixed = self.linear_s(counts * batch) + self.lm_head_s(counts * batch)
        total = fixed[:, None] + np.stack([self.attention_s(int(s), cached, batch) for s in counts])
        bound = self._bound().seconds(counts[:, None], cached[None, :], batch)
        return np.maximum(total, _ROUNDING * bound)

    def prefill_s(self, tokens: ArrayLike) -> Array:
        """Of a prompt of so many tokens; the LM head runs on the last one only."""
        counts = np.atleast_1d(np.asarray(tokens, dtype=np.float64))
        tables, a, tp = self.tables, self.architecture, self.tensor_parallel
        heads = a.heads // tp, a.kv_heads // tp
        attention = [tables.attention.on_nothing(int(s), 1, *heads) for s in counts]
        last = self.lm_head_s(np.ones(1))
        total: Array = self.linear_s(counts) + a.layers * np.array(attention) + last
        return total

    def attention_s(self, rows: int, context: Array, batch: int = 1) -> Array:
        """Of all layers' attention, for one row count on each context."""
        a, tp = self.architecture, self.tensor_parallel
        if a.sliding_window is not None:
            context = np.minimum(context, a.sliding_window)
        one = self.tables.attention.seconds(rows, context, batch, a.heads // tp, a.kv_heads // tp)
        # Timed alone, a cache of keys and values that fits into the L2 is read out of it.
        cached_bytes = 4.0 * batch * context * a.kv_width / tp
        read_s = cached_bytes / self.tables.matmul.read_bytes_per_s
        return np.asarray(a.layers * np.maximum(one, read_s), dtype=np.float64)

    def lm_head_s(self, rows: Array) -> Array:
        """Of the LM head over so many rows in all."""
        a = self.architecture
        return self.tables.matmul.seconds(rows, a.vocab // self.tensor_parallel, a.hidden)

    def linear_s(self, rows: Array) -> Array:
        """Of everything but attention and LM head, for so many rows in all."""
        a, small = self.architecture, self.tables.small
        layer = self._projections_s(rows) + self._ffn_s(rows)
        layer = layer + 2 * small.seconds("norm", rows, a.hidden)
        ends = small.seconds("embedding", rows, a.hidden) + small.seconds("norm", rows, a.hidden)
        total: Array = a.layers * (layer + 2 * self._all_reduce_s(rows)) + ends
        return total

    def products(self) -> list[tuple[str, int, int]]:
        """(name, n, k) of a layer's matrix products and of the LM head, on one device."""
        a, tp = self.architecture, self.tensor_parallel
        query, key = a.query_width // tp, a.kv_width // tp
        if self.tables.fused:
            found = [("query, key and value", query + 2 * key, a.hidden)]
        else:
            found = [("query", query, a.hidden), ("key", key, a.hidden), ("value", key, a.hidden)]
        found.append(("output", a.hidden, query))
        if a.experts:
            found.append(("router", a.experts, a.hidden))
        elif self.tables.fused or not a.gated_ffn:
            found.append(("gate and up", (a.ffn_matrices - 1) * a.ffn // tp, a.hidden))
        else:
            found += [("gate", a.ffn // tp, a.hidden), ("up", a.ffn // tp, a.hidden)]
        if not a.experts:
            found.append(("down", a.hidden, a.ffn // tp))
        return [*found, ("LM head", a.vocab // tp, a.hidden)]

    def extrapolated(self) -> list[str]:
        """The products that lie outside the measured sizes, one text each."""
        outside = [(name, self.tables.matmul.outside(n, k)) for name, n, k in self.products()]
        return [f"{name} ({text})" for name, text in outside if text]

    def _projections_s(self, rows: Array) -> Array:
        a, tp, small = self.architecture, self.tensor_parallel, self.tables.small
        names = ("query, key and value", "query", "key", "value", "output")
        total = self._products_s(rows, names)
        heads_width = (a.query_width + a.kv_width) // tp
        if a.qk_norm:
            total = total + small.seconds("norm", rows, heads_width)
        return total + small.seconds("rotary", rows, heads_width)

    def _ffn_s(self, rows: Array) -> Array:
        a, small = self.architecture, self.tables.small
        if a.experts:
            measured = self.tables.expert_table(a).seconds(a, rows)
            moved = 2.0 * a.expert_parameters * distinct_experts(a, rows)
            read_s = moved / self.tables.matmul.read_bytes_per_s
            return self._products_s(rows, ("router",)) + np.maximum(measured, read_s)
        total = self._products_s(rows, ("gate and up", "gate", "up", "down"))
        return total + small.seconds("activation", rows, a.ffn // self.tensor_parallel)

    def _products_s(self, rows: Array, names: tuple[str, ...]) -> Array:
        total = np.zeros_like(rows)
        for name, n, k in self.products():
            if name in names:
                total = total + self.tables.matmul.seconds(rows, n, k)
        return total

    def _all_reduce_s(self, rows: Array) -> Array:
        if self.tensor_parallel == 1 or self.tensor_parallel not in self.tables.all_reduce:
            return np.zeros_like(rows)
        size, seconds = self.tables.all_reduce[self.tensor_parallel]
        moved = rows * self.architecture.hidden
        beyond = np.maximum(moved / size[-1], 1.0)
        return np.asarray(np.interp(moved, size, seconds) * beyond, dtype=np.float64)

    def _bound(self) -> Roofline:
        return Roofline(
            architecture=self.architecture,
            peaks=self.tables.device.peaks,
            count="physical",
            tensor_parallel=self.tensor_parallel,
        )

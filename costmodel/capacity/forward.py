"""Seconds of a server's steps: what every device of a group does, kernel times only."""

from __future__ import annotations

import dataclasses

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.capacity.steps import Card, Origin, StepSeconds
from costmodel.compose.serving_tables import Precision, ServingTables
from costmodel.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingForward:
    """One target on `tensor_parallel` devices that share heads, FFN and vocabulary evenly.

    Norms, rotary embedding and activation are left to the overhead per layer that is fitted.
    """

    architecture: ModelArchitecture
    tables: ServingTables
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        a, tp = self.architecture, self.tensor_parallel
        if tp < 1 or a.heads % tp or a.kv_heads % tp or a.ffn % tp:
            raise InputError(
                f"tensor_parallel {tp} does not divide {a.heads} heads, {a.kv_heads} key-value"
                f" heads and the FFN width {a.ffn}"
            )
        if a.experts:
            raise InputError("capacity is planned for dense targets only")
        if self.tables.head_dim != a.head_dim:
            raise InputError(
                f"the attention tables are for heads of size {self.tables.head_dim},"
                f" {a.name} has {a.head_dim}"
            )

    @property
    def precision(self) -> Precision:
        """What weights and cache are stored in."""
        return self.tables.precision

    @property
    def card(self) -> Card:
        """The device."""
        device = self.tables.device
        return Card(name=device.name, memory_bytes=device.memory_bytes, power_w=device.tdp_w)

    @property
    def origin(self) -> Origin:
        """The tables; their error is part of that of the servers they were scored on."""
        return Origin(kind="operators", text=self.tables.source, error=0.0)

    def decode(self, batch: float, context: float, rows: int = 1) -> StepSeconds:
        """`rows` new rows for each of `batch` sequences with `context` cached tokens each."""
        a, tp, total = self.architecture, self.tensor_parallel, batch * rows
        head = self.tables.head_s(np.array([float(total)]), a.vocab // tp, a.hidden)
        return StepSeconds(
            products=self._products_s(total) + float(head[0]),
            attention=self._decode_attention_s(batch, context, rows),
            all_reduce=self._all_reduce_s(total),
        )

    def prompt(self, tokens: float, batch: float, chunks: int) -> StepSeconds:
        """What a prompt of so many tokens adds to `chunks` steps that decode `batch` sequences.

        The weights are read anyway by a step that decodes; `batch` 0 is a step of its own.
        """
        part = tokens / chunks
        products = self._products_s(part + batch) - self._products_s(batch)
        all_reduce = self._all_reduce_s(part + batch) - self._all_reduce_s(batch)
        a, tp = self.architecture, self.tensor_parallel
        heads, kv_heads = a.heads // tp, a.kv_heads // tp
        attention = self.tables.attention.on_nothing(int(tokens), 1, heads, kv_heads)
        return StepSeconds(
            products=chunks * products,
            attention=a.layers * attention,
            all_reduce=chunks * all_reduce,
        )

    def _products_s(self, tokens: float) -> float:
        a, tp = self.architecture, self.tensor_parallel
        if tokens <= 0:
            return 0.0
        rows = np.array([float(tokens)])
        query, key = a.query_width // tp, a.kv_width // tp
        shapes = (
            (query + 2 * key, a.hidden),
            (a.hidden, query),
            ((a.ffn_matrices - 1) * a.ffn // tp, a.hidden),
            (a.hidden, a.ffn // tp),
        )
        layer = sum(float(self.tables.product_s(rows, n, k)[0]) for n, k in shapes)
        return a.layers * layer

    def _decode_attention_s(self, batch: float, context: float, rows: int) -> float:
        a, tp = self.architecture, self.tensor_parallel
        if a.sliding_window is not None:
            context = min(context, a.sliding_window)
        # The table holds whole batches: between two of them its logarithm is interpolated.
        measured = self.tables.attention.seconds(
            rows, [context], max(round(batch), 1), a.heads // tp, a.kv_heads // tp
        )
        moved = 2.0 * batch * context * a.kv_width / tp * self.tables.precision.cache_bytes
        return a.layers * max(float(measured[0]), moved / self.tables.read_bytes_per_s)

    def _all_reduce_s(self, tokens: float) -> float:
        if self.tensor_parallel == 1 or tokens <= 0:
            return 0.0
        values = np.array([tokens * self.architecture.hidden])
        one = float(self.tables.all_reduce_s(values, self.tensor_parallel)[0])
        return 2 * self.architecture.layers * one

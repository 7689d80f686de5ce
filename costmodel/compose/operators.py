"""A target's forward, summed from operator tables."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from costmodel.architecture import ModelArchitecture
from costmodel.compose.attention import LatentTable, interpolate
from costmodel.compose.tables import ExpertTable, OperatorTables
from costmodel.errors import InputError
from costmodel.roofline import Roofline, distinct_experts
from costmodel.statistics import Array
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, layer_bytes

# Rows of a tile of the chunk rule. Up to it a tree takes the time of a chain: both solve one
# triangular system, under the ancestors' mask or the causal one. Behind it a chain carries its
# state from tile to tile, which branches cannot share.
CHUNK_ROWS = 64
_ALL_USED = 0.99  # share of the experts in use, from which on all are
BLOCK_COLUMNS = 128  # that share a scale in fp8_block
# One layer's latent attention and recurrence, where no table is read: seconds of launches, and
# shares of the bandwidth and of the FLOPs' time that come to it. The first fit operator tables of
# SGLang's decoding kernel for 16 to 128 heads, up to 128 sequences of 8191 tokens, on H100 and B200
# within a fifth, but not on an L40S with 128 heads; of the second, convolutions were measured.
_LATENT_S, _LATENT_READ, _LATENT_FLOPS = 15e-6, 0.9, 0.5
_STATE_S, _STATE_RATE = 10e-6, 0.1
# Profiles keep six digits; this factor keeps a time at the roofline from being rounded below it.
ROUNDING = 1.0 + 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComposedForward:
    """Kernel seconds of a target's forwards, without host time and gaps.

    `tensor_parallel` devices share heads, FFN and vocabulary evenly, with two all-reduces a layer
    where they were measured. `data_parallel` groups, each with sequences of its own, share the
    experts: seconds are of one group, with as many rows in the others, and an all-reduce stands for
    the rows' way to the experts and back. With `expert_parallel` a device has whole experts,
    otherwise a part of each. Raises InputError for a target that cannot be split so.
    """

    architecture: ModelArchitecture
    tables: OperatorTables
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        a, tables, tp, dp = self.architecture, self.tables, self.tensor_parallel, self.data_parallel
        n, undivided = max(tp, 1), f"tensor_parallel {tp} does not divide"
        part = 0 if self.expert_parallel else a.expert_ffn // (n * dp)
        checks = (
            (tp < 1 or a.heads % n or (a.kv_heads % n and n % a.kv_heads),
             f"{undivided} {a.heads} heads and {a.kv_heads} key-value heads", ""),
            (a.sparse_layers < a.ffn_layers and a.ffn % n,
             f"{undivided} the FFN width {a.ffn}", ""),
            (not a.experts and (dp > 1 or self.expert_parallel),
             f"{a.name} has no experts to share",
             "Data-parallel groups of it are servers of their own: leave the option out"),
            (a.shared_ffn % n, f"{undivided} the FFN width {a.shared_ffn}", ""),
            (tables.weights == "fp8_block" and part % BLOCK_COLUMNS,
             f"blocks of {BLOCK_COLUMNS} do not divide the {part} columns of an expert that a"
             " device has", "Give whole experts: --enable-expert-parallel"),
            (tables.head_dim != a.head_dim and not a.latent_rank,
             f"the attention tables are for heads of size {tables.head_dim},"
             f" {a.name} has {a.head_dim}", ""),
            (tables.tensor_parallel not in (None, tp),
             f"these operator tables are of tensor_parallel {tables.tensor_parallel}, not {tp}",
             ""),
            (a.recurrent and (a.state_heads % n or a.state_inner % n),
             f"{undivided} {a.state_heads} heads of a state", ""),
            (a.experts % dp, f"data_parallel {dp} does not divide {a.experts} experts", ""),
        )  # fmt: skip
        for refused, problem, hint in checks:
            if refused:
                raise InputError(problem, hint=hint)

    @property
    def devices(self) -> int:
        """Devices that share the experts, or all weights."""
        return self.tensor_parallel * self.data_parallel

    @property
    def group(self) -> ModelArchitecture:
        """What one data-parallel group holds: with its rows as many of its experts are in use."""
        a, count = self.architecture, self.architecture.experts // self.data_parallel
        return dataclasses.replace(a, experts=count, active_experts=min(count, a.active_experts))

    @property
    def experts_balanced(self) -> bool:
        """Whether the experts' times are those of the expected number of distinct ones."""
        return self._experts().balanced and self._experts().skewed is None

    @property
    def experts_form(self) -> str:
        """What the experts' times are of, where no sound table has those of their own weights."""
        if not self.architecture.experts:
            return ""
        return "bytes and FLOPs" if self._experts().estimated else self._experts().form

    def _experts(self) -> ExpertTable:
        devices = self.devices
        split = (1, devices) if self.expert_parallel else (devices, 1)
        return self.tables.expert_table(self.architecture, split)

    @property
    def _heads(self) -> tuple[int, int]:
        a, tp = self.architecture, self.tensor_parallel
        return a.heads // tp, max(a.kv_heads // tp, 1)

    def verifying(self) -> ComposedForward:
        """The same target with attention as a verification of few rows runs it."""
        attention = self.tables.attention.splitting_keys()
        tables = dataclasses.replace(self.tables, attention=attention)
        return dataclasses.replace(self, tables=tables)

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: int = 1) -> Array:
        """Seconds of `rows` over `context` [rows, contexts], at least the physical roofline's."""
        counts = np.atleast_1d(np.asarray(rows, dtype=np.float64))
        cached = np.atleast_1d(np.asarray(context, dtype=np.float64))
        fixed = self.linear_s(counts * batch) + self.lm_head_s(counts * batch)
        fixed = fixed + self.recurrent_s(counts, batch)
        total = fixed[:, None] + np.stack([self.attention_s(int(s), cached, batch) for s in counts])
        bound = self.roofline("physical").seconds(counts[:, None], cached[None, :], batch)
        return np.maximum(total, ROUNDING * bound)

    def prefill_s(self, tokens: ArrayLike) -> Array:
        """Seconds of prompts of `tokens` [tokens]; the LM head runs on the last token only.

        Under a sliding window of w the pairs of row and key are 2 tokens / w - 1 times those of w
        tokens.
        """
        counts = np.atleast_1d(np.asarray(tokens, dtype=np.float64))
        a, table = self.architecture, self.tables.attention
        if a.latent_rank:
            attention = a.attention_layers * self._latent_prompts_s(counts)
        else:
            attention = np.array([table.on_nothing(int(s), 1, *self._heads) for s in counts])
            every = a.attention_layers * attention
            if (window := a.sliding_window) is not None:
                windowed = table.on_nothing(window, 1, *self._heads) * (2 * counts / window - 1)
                full = a.full_layers * a.full_score_ratio * attention
                full = full + (a.layers - a.full_layers) * np.minimum(windowed, attention)
                every = np.where(counts <= window, every, full)
            attention = every
        last = self.lm_head_s(np.ones(1))
        total: Array = self.linear_s(counts) + self.recurrent_s(counts) + attention + last
        return total

    def recurrent_s(self, rows: Array, batch: int = 1) -> Array:
        """Seconds of all convolutions and delta rules over `rows` of each sequence [rows].

        States are read and written once, in float32. Of several rows the chunk rule counts, which
        stands for a verification with the replay of what was accepted before.
        """
        a, tp = self.architecture, self.tensor_parallel
        if not a.recurrent:
            return np.zeros_like(rows)
        table = self.tables.recurrent_table(a, tp)
        moved_s = 2 * 4 * a.state_values / tp * batch / self.tables.read_bytes_per_s
        if table is None:
            row_flops = a.recurrent_row_flops / a.recurrent_layers - 2 * a.recurrent_matrices
            rate = _STATE_RATE * self.tables.device.peak_flops_per_s * tp
            layer_s = _STATE_S + moved_s + batch * rows * row_flops / rate
        else:
            layer_s = np.maximum(table.seconds(rows, batch), moved_s)
        return np.asarray(a.recurrent_layers * layer_s, dtype=np.float64)

    @property
    def estimated(self) -> tuple[str, ...]:
        """The parts that no table was read of, whose times are of bytes and FLOPs."""
        a, parts = self.architecture, unread_parts(self.architecture)
        unread = self.tables.recurrent_table(a, self.tensor_parallel) is None
        if self.latent is not None:
            parts.remove("latent attention")
        if a.recurrent and unread and "recurrent layers" not in parts:
            parts.append("recurrent layers")
        return (*parts, *(["experts"] if a.experts and self._experts().estimated else ()))

    @property
    def latent(self) -> LatentTable | None:
        """The measured latent attention of this target, where there is one."""
        return self.tables.latent_table(self.architecture, self.tensor_parallel)

    def _latent_s(self, rows: int, tokens: Array, batch: int) -> Array:
        """One layer's latent attention over `tokens` for each row [tokens], keys absorbed.

        Each further row adds its multiplications. What was timed with the products is without them.
        """
        a, device, table = self.architecture, self.tables.device, self.latent
        seen = np.minimum(tokens, a.index_topk) if a.index_topk else tokens
        flops = 2 * batch * seen * sum(a.attention_widths) / self.tensor_parallel
        row_s = _LATENT_FLOPS * flops / device.peak_flops_per_s
        if table is None:
            moved = CACHE_BYTES[self.tables.cache] * batch * seen * a.cached_width
            one_s = _LATENT_S + row_s + moved / (_LATENT_READ * device.peak_bytes_per_s)
            one_s = one_s + self._indexer_s(batch * tokens, batch * tokens)
        else:
            one_s = interpolate(table.generation[self._heads[0]], np.maximum(tokens, 1), batch)
            if table.projects:
                one_s = np.maximum(one_s - self._projections_s(np.array([float(batch)])), 0.0)
        return np.asarray(one_s + (rows - 1) * row_s, dtype=np.float64)

    def _indexer_s(self, tokens: Array, pairs: Array) -> Array:
        """A layer's mean seconds of choosing tokens: products, scores of `pairs`, the best ones."""
        a, peaks = self.architecture, self.tables.peaks
        share = a.index_layers / a.attention_layers
        moved = WEIGHT_BYTES[self.tables.weights] * a.index_parameters / a.attention_layers
        read_s = (moved + share * a.index_dim * tokens) / (_LATENT_READ * peaks.bytes_per_s)
        scores_s = share * 2 * pairs * a.index_heads * a.index_dim / peaks.flops_per_s
        return np.asarray(2 * share * _LATENT_S + read_s + scores_s, dtype=np.float64)

    def _latent_prompts_s(self, tokens: Array) -> Array:
        """One layer's latent attention in prompts of `tokens` [tokens], keys and values made."""
        a, table = self.architecture, self.latent
        if table is not None:
            whole_s = interpolate(table.context[self._heads[0]], tokens, 1)
            made_s = self._projections_s(tokens) if table.projects else 0.0
            return np.asarray(np.maximum(whole_s - made_s, 0.0), dtype=np.float64)
        pairs = tokens * np.minimum(tokens / 2, a.index_topk or np.inf)
        flops = 2 * a.heads * (a.head_dim + a.value_dim) * pairs / self.tensor_parallel
        seconds = _LATENT_S + flops / (_LATENT_FLOPS * self.tables.device.peak_flops_per_s)
        return np.asarray(seconds + self._indexer_s(tokens, tokens**2 / 2), dtype=np.float64)

    def attention_s(self, rows: int, context: Array, batch: int = 1) -> Array:
        """Seconds of all layers' attention, for one row count over each context [contexts]."""
        a = self.architecture
        if a.latent_rank:
            return a.attention_layers * self._latent_s(rows, context + rows / 2, batch)
        if a.sliding_window is None:
            return a.attention_layers * self._layer_attention_s(rows, context, batch)
        seen = np.minimum(context, a.sliding_window)
        windowed = (a.layers - a.full_layers) * self._layer_attention_s(rows, seen, batch)
        if not a.full_layers:
            return windowed
        wider = max(a.full_score_ratio, a.full_cached_width / a.cached_width)
        return windowed + wider * a.full_layers * self._layer_attention_s(rows, context, batch)

    def _layer_attention_s(self, rows: int, context: Array, batch: int) -> Array:
        a, tp = self.architecture, min(self.tensor_parallel, self.architecture.kv_heads)
        layer_s = self.tables.attention.seconds(rows, context, batch, *self._heads)
        # Timed alone, keys and values that fit into the L2 cache are read from it; not in a model.
        cached_bytes = CACHE_BYTES[self.tables.cache] * batch * context * a.cached_width / tp
        read_s = cached_bytes / self.tables.read_bytes_per_s
        return np.asarray(np.maximum(layer_s, read_s), dtype=np.float64)

    def lm_head_s(self, rows: Array) -> Array:
        """Seconds of the LM head over `rows` [rows], all sequences together."""
        a, table = self.architecture, self.tables.head or self.tables.matmul
        return table.seconds(rows, a.vocab // self.tensor_parallel, a.hidden)

    def linear_s(self, rows: Array) -> Array:
        """Seconds of all but attention and LM head over `rows` [rows], all sequences together."""
        a, tables, small = self.architecture, self.tables, self.tables.small
        layer = a.layer_norms * small.seconds("norm", rows, a.hidden)
        ends = small.seconds("embedding", rows, a.hidden) + small.seconds("norm", rows, a.hidden)
        attention_s = self._all_reduce_s(rows, self.tensor_parallel)
        ffn_s = self._all_reduce_s(rows * self.data_parallel, self.devices)
        mixers = a.layers if a.ffn_layers == a.layers else a.layers - a.ffn_layers
        layers = a.layers * layer + mixers * attention_s + a.ffn_layers * ffn_s
        layers = layers + 2 * a.other_weights / tables.read_bytes_per_s
        layers = layers + a.attention_layers * self._projections_s(rows)
        if a.recurrent:
            names = "state input", "state gates", "state output"
            normed_s = small.seconds("norm", rows, a.state_inner // self.tensor_parallel)
            layers = layers + a.recurrent_layers * (self._products_s(rows, names) + normed_s)
        total: Array = layers + self._ffn_s(rows) + ends
        return total

    def products(self) -> list[tuple[str, int, int]]:
        """(name, n, k) of a layer's matrix products and of the LM head, on one device."""
        a, tp, heads = self.architecture, self.tensor_parallel, self._heads[0]
        value, key = a.query_width // tp, a.head_dim * self._heads[1]
        query = value * (2 if a.gated_attention else 1)
        if a.latent_rank:  # keys are absorbed
            shapes = [("key and value", a.cached_width, a.hidden)]
            if a.query_rank:
                shapes = [("query, key and value", a.cached_width + a.query_rank, a.hidden)]
            shapes += [
                ("query", heads * a.head_dim, a.query_rank or a.hidden),
                ("key", a.latent_rank, heads * (a.head_dim - a.rope_dim)),
                ("value", heads * a.value_dim, a.latent_rank),
            ]
            value = heads * a.value_dim
        elif self.tables.fused:
            shapes = [("query, key and value", query + 2 * key, a.hidden)]
        else:
            shapes = [("query", query, a.hidden), ("key", key, a.hidden), ("value", key, a.hidden)]
        shapes.append(("output", a.hidden, value))
        if a.recurrent:
            gates = a.state_heads * (2 if a.recurrent == "gated_delta" else 1) // tp
            made = (a.recurrent_matrices // a.hidden - a.state_inner) // tp
            shapes.append(("state input", made - gates, a.hidden))
            shapes += [("state gates", gates, a.hidden)] if gates else []
            shapes.append(("state output", a.hidden, a.state_inner // tp))
        if a.experts:
            shapes.append(("router", a.experts + a.shared_gate, a.hidden))
        if a.shared_ffn:
            shapes += self._dense_products(a.shared_ffn)
        if a.sparse_layers < a.ffn_layers:
            shapes += self._dense_products(a.ffn)
        return [*shapes, ("LM head", a.vocab // tp, a.hidden)]

    def _dense_products(self, width: int) -> list[tuple[str, int, int]]:
        a, split = self.architecture, width // self.tensor_parallel
        if self.tables.fused or not a.gated_ffn:
            first = [("gate and up", (a.ffn_matrices - 1) * split, a.hidden)]
        else:
            first = [("gate", split, a.hidden), ("up", split, a.hidden)]
        return [*first, ("down", a.hidden, split)]

    def extrapolated(self) -> list[str]:
        """One text per product whose size lies outside the measured ones."""
        outside = [(name, self.tables.matmul.outside(n, k)) for name, n, k in self.products()]
        return [f"{name} ({text})" for name, text in outside if text]

    def _projections_s(self, rows: Array) -> Array:
        a, tp, small = self.architecture, self.tensor_parallel, self.tables.small
        names = ("query, key and value", "key and value", "query", "key", "value", "output")
        total = self._products_s(rows, names)
        heads_width = a.query_width // tp + a.head_dim * self._heads[1]
        if a.qk_norm:
            total = total + small.seconds("norm", rows, heads_width)
        if a.latent_rank:
            total = total + small.seconds("norm", rows, a.query_rank + a.latent_rank)
        if a.gated_attention:
            total = total + small.seconds("activation", rows, a.query_width // tp)
        return total + small.seconds("rotary", rows, heads_width)

    def _ffn_s(self, rows: Array) -> Array:
        a = self.architecture
        total = np.zeros_like(rows)
        if a.sparse_layers < a.ffn_layers:
            total = (a.ffn_layers - a.sparse_layers) * self._dense_ffn_s(rows, a.ffn)
        if not a.experts:
            return total
        layer = self._products_s(rows, ("router",))
        if a.shared_ffn:
            layer = layer + self._dense_ffn_s(rows, a.shared_ffn)
        return np.asarray(total + a.sparse_layers * layer + self.experts_s(rows), dtype=np.float64)

    def experts_s(self, rows: Array) -> Array:
        """Seconds of all layers' experts [rows], those of the other groups' rows included."""
        a, everywhere = self.architecture, rows * self.data_parallel
        used, tokens = distinct_experts(a, everywhere) / self.devices, everywhere
        if self.expert_parallel and self.devices > 1:
            used = self._most_experts(used)
            share = np.minimum(used * self.devices / a.experts, _ALL_USED)
            as_many = np.log1p(-share) / np.log1p(-a.active_experts / a.experts)
            tokens = np.maximum(everywhere, as_many)  # that use as many on every device
        measured = self._experts().seconds(a, tokens)
        moved = WEIGHT_BYTES[self.tables.weights] * a.expert_parameters * used
        read_s = moved / self.tables.read_bytes_per_s
        return np.asarray(a.sparse_layers * np.maximum(measured, read_s), dtype=np.float64)

    def _most_experts(self, mean: Array) -> Array:
        """Experts in use on the device that has most of them, where each has `mean` on average.

        All wait for it. Which of a device's whole experts are in use is near to independent: the
        largest of as many normal counts is expected (Blom's approximation).
        """
        each, count = self.architecture.experts / self.devices, self.devices
        most = mean + ndtri((count - 0.375) / (count + 0.25)) * np.sqrt(mean * (1 - mean / each))
        return np.asarray(np.minimum(most, each), dtype=np.float64)

    def _dense_ffn_s(self, rows: Array, width: int) -> Array:
        matmul, small = self.tables.matmul, self.tables.small
        total = small.seconds("activation", rows, width // self.tensor_parallel)
        for _, n, k in self._dense_products(width):
            total = total + matmul.seconds(rows, n, k)
        return total

    def _products_s(self, rows: Array, names: tuple[str, ...]) -> Array:
        total = np.zeros_like(rows)
        for name, n, k in self.products():
            if name in names:
                table = self.tables.head if name in self._unquantised else None
                total = total + (table or self.tables.matmul).seconds(rows, n, k)
        return total

    @property
    def _unquantised(self) -> tuple[str, ...]:
        """Products of 16-bit weights in a quantised checkpoint.

        The gates of states are narrower than a block. Keys and values are absorbed in 16 bits; of
        latent attention in NVFP4 the output alone has 4 (NVIDIA's DeepSeek-V3.1 and V3.2).
        """
        narrow = "router", "state gates"
        if not self.architecture.latent_rank:
            return narrow
        queries = "query, key and value", "key and value", "query"
        return (*narrow, "key", "value", *(queries if self.tables.weights == "nvfp4" else ()))

    def _all_reduce_s(self, rows: Array, devices: int) -> Array:
        if devices == 1 or devices not in self.tables.all_reduce:
            return np.zeros_like(rows)
        size, seconds = self.tables.all_reduce[devices]
        moved = rows * self.architecture.hidden
        beyond = np.maximum(moved / size[-1], 1.0)
        return np.asarray(np.interp(moved, size, seconds) * beyond, dtype=np.float64)

    def roofline(self, count: Literal["paper", "physical"] = "paper") -> Roofline:
        return Roofline(
            architecture=self.group,
            peaks=self.tables.peaks,
            count=count,
            tensor_parallel=self.tensor_parallel,
            weight_bytes=layer_bytes(self.architecture, self.tables.weights),
            cache_bytes=CACHE_BYTES[self.tables.cache],
        )


def unread_parts(architecture: ModelArchitecture) -> list[str]:
    """The parts of a target of which no operator tables are read."""
    a = architecture
    parts = {
        "latent attention": a.latent_rank,
        "attention of another shape": a.full_cached_width != a.cached_width,
        "layers that share keys": a.shared_kv_layers,
        "recurrent layers": a.recurrent not in ("", "gated_delta"),
        "other matrices": a.other_weights,
    }
    return [name for name, size in parts.items() if size]

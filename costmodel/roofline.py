"""FLOPs and bytes of one forward of a target, and the roofline over them.

There are two counts. `paper` is equations (8) and (9) of the BASTION paper, with the modules
of its tables 3 and 4. `physical` is the least work of any implementation, so it gives a lower
bound on time. A forward has `rows` new tokens a sequence after `context` cached ones, for
`batch` sequences. Weights are read once, everything else once a sequence. Counts are float64,
exact up to 2**53.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import Peaks
from costmodel.statistics import Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Count:
    """Work by module."""

    @property
    def total(self) -> Array:
        total = sum(getattr(self, field.name) for field in dataclasses.fields(self))
        return np.asarray(total, dtype=np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount(_Count):
    """FLOPs by module, as the rows of the paper's table 3, and three that it does not have.

    Fields are arrays in the broadcast shape of rows, context and batch. `recurrent`: layers that
    keep a state, with their projections; `other`: further matrices.
    """

    q_projection: Array
    kv_projection: Array
    scores: Array
    values: Array
    output_projection: Array
    gate_up: Array
    down: Array
    lm_head: Array
    router: Array
    recurrent: Array
    other: Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ByteCount(_Count):
    """Bytes moved by module, as the rows of the paper's table 4, in the shape of FlopCount's.

    `small_weights` (norms, biases, router) is 0 in the paper's count. `attention_weights` holds
    recurrent layers' too; `state` is what these read and write.
    """

    embedding_and_lm_head_weights: Array
    attention_weights: Array
    ffn_weights: Array
    small_weights: Array
    kv_read: Array
    kv_write: Array
    attention_io: Array
    ffn_io: Array
    lm_head_io: Array
    state: Array


def paper_flops(
    architecture: ModelArchitecture, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> FlopCount:
    """Equation (8) and table 3, times `batch`.

    A mixture of experts counts the experts that are active for a row, without the router. The paper
    has gated FFNs only; one without a gate counts two matrices instead of three.
    """
    s, c, b = _shapes(rows, context, batch)
    return _flops(architecture, s * b, keys=c + s, router=False)


def physical_flops(
    architecture: ModelArchitecture, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> FlopCount:
    """The matrix products of equation (8), attention over visible keys only, and the router.

    A row sees the context and, as in a chain, half of the new rows on average; under a
    sliding window never more than the window. Latent attention multiplies with the cached vector,
    or makes the keys and values of all tokens from it, whichever takes less.
    """
    a = architecture
    s, c, b = _shapes(rows, context, batch)
    keys = c + (s + 1) / 2
    if (window := a.sliding_window) is not None:
        growing = np.clip(window - c, 0, s)  # new rows that still see everything before them
        seen = growing * c + growing * (growing + 1) / 2 + (s - growing) * window
        if a.chunked:
            seen = _chunk_pairs(c + s, window) - _chunk_pairs(c, window)
        keys = _over_layers(a, keys * a.full_score_ratio, seen / s)
    count = _flops(a, s * b, keys=keys, router=True)
    if not a.latent_rank:
        return count
    made = a.heads * (a.head_dim - a.rope_dim + a.value_dim)
    expanding = a.attention_layers * 2 * (b * c) * a.latent_rank * made
    pairs = 2 * a.attention_layers * (s * b * _chosen(a, keys)) * a.heads
    scores, values = (pairs * width for width in (a.head_dim, a.value_dim))
    cheaper = expanding + scores + values < count.scores + count.values
    return dataclasses.replace(
        count,
        kv_projection=count.kv_projection + np.where(cheaper, expanding, 0.0),
        scores=np.where(cheaper, scores, count.scores),
        values=np.where(cheaper, values, count.values),
    )


def _chunk_pairs(tokens: Array, chunk: int) -> Array:
    """Pairs of row and key in a text of `tokens`, whose rows see their own chunk only."""
    whole, rest = np.divmod(tokens, chunk)
    return np.asarray(whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2)


def _over_layers(a: ModelArchitecture, full: Array, windowed: Array) -> Array:
    """The mean over attention of a quantity in layers without and with a window."""
    share = a.full_layers / a.attention_layers
    return share * full + (1 - share) * windowed if share else windowed


def _chosen(a: ModelArchitecture, keys: Array) -> Array:
    """Of the keys that a row sees, those that its indexer chooses, if it has one."""
    return np.minimum(keys, a.index_topk) if a.index_topk else keys


def cached_tokens(
    architecture: ModelArchitecture, context: ArrayLike, *, scored: bool = False
) -> Array:
    """Cached tokens that attention reads for one row, the mean over layers with attention.

    Layers count by the width of their cache, or of their scores, in units of a usual layer.
    """
    a, c = architecture, np.asarray(context, dtype=np.float64)
    full = a.full_score_ratio if scored else a.full_cached_width / a.cached_width
    if a.sliding_window is None:
        return _chosen(a, c)
    seen = np.mod(c, a.sliding_window) if a.chunked else np.minimum(c, a.sliding_window - 1)
    return _over_layers(a, full * c, seen)


def _flops(architecture: ModelArchitecture, rows: Array, *, keys: Array, router: bool) -> FlopCount:
    a = architecture
    layers = a.attention_layers * 2 * rows
    queries, keys_values, outputs = (
        layers * usual + 2 * rows * more
        for usual, more in zip(a.projections, a.reshaped, strict=True)
    )
    score_width, value_width = a.attention_widths
    indexed = a.index_parameters + a.index_values * a.index_heads * keys
    keys = _chosen(a, keys)
    ffn = 2 * rows * a.hidden * a.active_ffn
    return FlopCount(
        q_projection=queries,
        kv_projection=keys_values,
        scores=layers * keys * score_width,
        values=layers * keys * value_width,
        output_projection=outputs,
        gate_up=ffn * (a.ffn_matrices - 1),
        down=ffn,
        lm_head=2 * rows * a.hidden * a.vocab,
        router=2 * rows * a.hidden * a.sparse_layers * (a.experts if router else 0),
        recurrent=rows * a.recurrent_row_flops,
        other=2 * rows * (a.other_weights + indexed),
    )


def paper_bytes(
    architecture: ModelArchitecture,
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike = 1,
    element_bytes: float = 2,
    weight_bytes: tuple[float, float] | None = None,
) -> ByteCount:
    """Equation (9) and table 4: weights once, everything else times `batch`.

    As printed, the input embedding is read whole even where it is tied, and unfused
    attention writes and reads its scores. A mixture of experts reads the experts that are
    active for one row. An ungated FFN reads two matrices and moves one intermediate array
    instead of two. A verification moves each recurrent state three times: read for the outputs,
    read and written when the accepted rows are replayed. `weight_bytes` are read of one weight of
    the layers' matrices, and of embedding and LM head; None: `element_bytes`, like all else.
    """
    a = architecture
    s, c, b = _shapes(rows, context, batch)
    size = float(element_bytes)
    weight, head = weight_bytes or (size, size)
    one = np.ones_like(s) * size * a.attention_layers
    layer = one * b * s
    rows = size * b * s
    recurrent = a.recurrent_layers * (a.conv_channels + 2 * a.state_inner)
    apart = a.layers - a.attention_layers
    return ByteCount(
        embedding_and_lm_head_weights=np.ones_like(s) * head * 2 * a.vocab * a.hidden,
        attention_weights=_mixer_bytes(a, s, weight),
        ffn_weights=np.ones_like(s) * weight * a.ffn_matrices * a.hidden * a.active_ffn,
        small_weights=np.zeros_like(s),
        kv_read=one * b * c * a.cached_width + size * b * c * a.index_values,
        kv_write=layer * a.cached_width + rows * a.index_values,
        attention_io=layer
        * (2 * a.hidden + 4 * a.query_width + a.cached_width + 2 * a.heads * (c + s))
        + rows * (2 * a.hidden * apart + recurrent),
        ffn_io=layer * 2 * a.hidden
        + rows * 2 * (a.ffn_matrices - 1) * a.active_ffn
        + rows * 2 * a.hidden * apart,
        lm_head_io=size * b * s * (a.hidden + a.vocab),
        state=state_traffic(a, s, b, size, moves=3),
    )


def physical_bytes(
    architecture: ModelArchitecture,
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike = 1,
    element_bytes: float = 2,
    weight_bytes: tuple[float, float] | None = None,
) -> ByteCount:
    """The least traffic: every weight once, fused attention, layers fused as far as possible.

    A tied embedding is the LM head and is read once; of an untied one only the rows of the
    new tokens are gathered. The cache is read once a key-value head (a latent one once) and the
    new entries written once. Activations: each layer reads and writes the residual stream once
    (all of it under `ffn_io`), the LM head writes its logits. A mixture of experts reads the
    expected number of distinct experts, E (1 - (1 - k/E)^(rows x batch)), as if tokens chose
    independently. Each recurrent state is read and written once, which replays the rows accepted
    last; of several rows, what that needs is written and read once. `weight_bytes` as in
    `paper_bytes`.
    """
    a = architecture
    s, c, b = _shapes(rows, context, batch)
    size = float(element_bytes)
    weight, head = weight_bytes or (size, size)
    one = np.ones_like(s) * size * a.attention_layers
    full, windowed = a.kept_layers
    written = full * a.full_cached_width + windowed * a.cached_width + a.index_values
    gathered = np.zeros_like(s) if a.tied else np.minimum(s * b, a.vocab)
    return ByteCount(
        embedding_and_lm_head_weights=head * a.hidden * (a.vocab + gathered)
        + size * a.lookup_weights / a.vocab * np.minimum(s * b, a.vocab),
        attention_weights=_mixer_bytes(a, s, weight),
        ffn_weights=weight * (a.ffn_matrices * a.hidden * a.common_ffn)
        + weight * a.sparse_layers * a.expert_parameters * distinct_experts(a, s * b),
        small_weights=np.ones_like(s) * size * a.small_parameters,
        kv_read=one * b * cached_tokens(a, c) * a.cached_width + size * b * c * a.index_values,
        kv_write=size * b * s * written,
        attention_io=np.zeros_like(s),
        ffn_io=np.ones_like(s) * size * a.layers * b * s * 2 * a.hidden,
        lm_head_io=size * b * s * a.vocab,
        state=state_traffic(a, s, b, size),
    )


def _mixer_bytes(a: ModelArchitecture, s: Array, weight: float) -> Array:
    """Bytes of the matrices of attention, recurrent layers and others."""
    attention = np.ones_like(s) * weight * a.attention_layers * a.attention_parameters
    return np.asarray(attention + weight * a.mixer_parameters)


def state_traffic(
    a: ModelArchitecture, s: Array, b: Array, size: float = 2, *, moves: int = 2
) -> Array:
    """Bytes of recurrent states: `moves` of each in a verification, two in a plain step."""
    several = s > 1
    states = a.state_bytes(size) * np.where(several, moves, 2)
    return np.asarray(b * (states + 2 * s * a.stash_bytes(size) * several))


def distinct_experts(architecture: ModelArchitecture, tokens: ArrayLike) -> Array:
    """Expected distinct experts that `tokens` tokens use in one layer; 1 for a dense FFN."""
    count = np.asarray(tokens, dtype=np.float64)
    if not architecture.experts:
        return np.ones_like(count)
    share = architecture.active_experts / architecture.experts
    return np.asarray(architecture.experts * (1.0 - (1.0 - share) ** count))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """max(FLOPs / peak FLOP rate, bytes / bandwidth) of one forward (paper, appendix F).

    `tensor_parallel` devices share both evenly, which leaves out communication and what every
    device repeats: for `physical` still a lower bound. `weight_bytes` and `head_bytes` are read
    of one weight of the layers and of the LM head, `cache_bytes`, which count in `physical`, of one
    cached value; None where it is stored like the rest.
    """

    architecture: ModelArchitecture
    peaks: Peaks
    element_bytes: float = 2
    count: Literal["paper", "physical"] = "paper"
    tensor_parallel: int = 1
    weight_bytes: float | None = None
    head_bytes: float | None = None
    cache_bytes: float | None = None

    @property
    def read_bytes(self) -> tuple[float, float]:
        """Bytes that a step reads of one weight of the layers, and of embedding and LM head."""
        size = self.element_bytes
        return self.weight_bytes or size, self.head_bytes or size

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds, in the broadcast shape of the arguments."""
        compute_s, memory_s = self.branches_s(rows, context, batch)
        return np.maximum(compute_s, memory_s)

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """`seconds`: the roofline serves as a calibration where there is none."""
        return self.seconds(rows, context, batch)

    def branches_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> tuple[Array, Array]:
        """The two sides of the maximum: (compute seconds, memory seconds)."""
        count_flops = paper_flops if self.count == "paper" else physical_flops
        count_bytes = paper_bytes if self.count == "paper" else physical_bytes
        flops = count_flops(self.architecture, rows, context, batch).total
        sizes = self.element_bytes, self.read_bytes
        count = count_bytes(self.architecture, rows, context, batch, *sizes)
        moved = count.total
        if self.count == "physical" and self.cache_bytes is not None:
            saved = 1 - self.cache_bytes / self.element_bytes
            moved = moved - saved * (count.kv_read + count.kv_write)
        return (
            flops / (self.peaks.flops_per_s * self.tensor_parallel),
            moved / (self.peaks.bytes_per_s * self.tensor_parallel),
        )

    def bounded(
        self, seconds: ArrayLike, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> Array:
        """`seconds`, raised to the physical bound where they lie below it."""
        return np.maximum(seconds, self.with_count("physical").seconds(rows, context, batch))

    def with_count(self, count: Literal["paper", "physical"]) -> Roofline:
        """The same device and target under the other count."""
        return dataclasses.replace(self, count=count)


def _shapes(rows: ArrayLike, context: ArrayLike, batch: ArrayLike) -> tuple[Array, Array, Array]:
    s, c, b = (np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
    s, c, b = np.broadcast_arrays(s, c, b)
    return s, c, b

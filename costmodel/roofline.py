"""FLOPs and bytes of one forward of a target, and the roofline over them.

Two counts. `paper` is equations (8) and (9) of the BASTION paper with the modules of its
tables 3 and 4. `physical` is the least that any implementation has to do, and so a lower
bound on time. A forward takes `rows` new tokens a sequence on top of `context` cached ones,
for `batch` sequences; weights are read once, everything else is counted once a sequence.
Counts are float64, exact up to 2**53.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.architecture import ModelArchitecture
from costmodel.device import Peaks
from costmodel.errors import InputError

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOPs by module, as the rows of the paper's table 3 (router: mixtures of experts only).

    Each field is an array in the broadcast shape of rows, context and batch.
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

    @property
    def total(self) -> Array:
        """FLOPs of the whole forward."""
        return _sum_fields(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ByteCount:
    """Bytes moved by module, as the rows of the paper's table 4.

    `small_weights` (norms, biases, router) is 0 in the paper's count. Each field is an array in
    the broadcast shape of rows, context and batch.
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

    @property
    def total(self) -> Array:
        """Bytes of the whole forward."""
        return _sum_fields(self)


def paper_flops(
    architecture: ModelArchitecture, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> FlopCount:
    """Equation (8) and table 3, times `batch`.

    A mixture of experts counts the experts that are active for a row. The paper has gated
    FFNs only; one without a gate counts two matrices instead of three. The router, which the
    paper does not have, counts 0. Raises InputError for impossible shapes.
    """
    s, c, b = _shapes(rows, context, batch)
    return _flops(architecture, s * b, keys=c + s, router=False)


def physical_flops(
    architecture: ModelArchitecture, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
) -> FlopCount:
    """The matrix products of equation (8), attention over visible keys only, and the router.

    A row sees the context and, as in a chain, half of the new rows on average; under a
    sliding window never more than the window. Raises InputError for impossible shapes.
    """
    s, c, b = _shapes(rows, context, batch)
    window = architecture.sliding_window
    if window is None:
        return _flops(architecture, s * b, keys=c + (s + 1) / 2, router=True)
    growing = np.clip(window - c, 0, s)  # new rows that still see everything before them
    keys = (growing * c + growing * (growing + 1) / 2 + (s - growing) * window) / s
    return _flops(architecture, s * b, keys=keys, router=True)


def _flops(architecture: ModelArchitecture, rows: Array, *, keys: Array, router: bool) -> FlopCount:
    a = architecture
    width = a.active_experts * a.expert_ffn if a.experts else a.ffn
    attention = a.layers * 2 * rows * keys * a.query_width
    projection = a.layers * 2 * rows * a.hidden
    return FlopCount(
        q_projection=projection * a.query_width,
        kv_projection=2 * projection * a.kv_width,
        scores=attention,
        values=attention.copy(),
        output_projection=projection * a.query_width,
        gate_up=projection * width * (a.ffn_matrices - 1),
        down=projection * width,
        lm_head=2 * rows * a.hidden * a.vocab,
        router=projection * (a.experts if router else 0),
    )


def paper_bytes(
    architecture: ModelArchitecture,
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike = 1,
    element_bytes: float = 2,
) -> ByteCount:
    """Equation (9) and table 4: weights once, everything else times `batch`.

    As printed, the input embedding is read whole even where it is tied, and unfused
    attention writes and reads its scores. A mixture of experts reads the experts that are
    active for one row. An ungated FFN reads two matrices and moves one intermediate array
    instead of two. Raises InputError for impossible shapes.
    """
    a = architecture
    s, c, b = _shapes(rows, context, batch)
    size = _element_bytes(element_bytes)
    one = np.ones_like(s) * size * a.layers
    width = a.active_experts * a.expert_ffn if a.experts else a.ffn
    layer = one * b * s
    return ByteCount(
        embedding_and_lm_head_weights=np.ones_like(s) * size * 2 * a.vocab * a.hidden,
        attention_weights=one * a.attention_parameters,
        ffn_weights=one * a.ffn_matrices * a.hidden * width,
        small_weights=np.zeros_like(s),
        kv_read=one * b * 2 * c * a.kv_width,
        kv_write=layer * 2 * a.kv_width,
        attention_io=layer
        * (2 * a.hidden + 4 * a.query_width + 2 * a.kv_width + 2 * a.heads * (c + s)),
        ffn_io=layer * (2 * a.hidden + 2 * (a.ffn_matrices - 1) * width),
        lm_head_io=size * b * s * (a.hidden + a.vocab),
    )


def physical_bytes(
    architecture: ModelArchitecture,
    rows: ArrayLike,
    context: ArrayLike,
    batch: ArrayLike = 1,
    element_bytes: float = 2,
) -> ByteCount:
    """The least traffic: every weight once, fused attention, layers fused as far as possible.

    A tied embedding is the LM head and is read once; of an untied one only the rows of the
    new tokens are gathered. The key-value cache is read once a key-value head and the new
    entries written once. Activations: each layer reads and writes the residual stream once
    (all of it under `ffn_io`), the LM head writes its logits. A mixture of experts reads the
    expected number of distinct experts, E (1 - (1 - k/E)^(rows x batch)), as if tokens chose
    independently. Raises InputError for impossible shapes.
    """
    a = architecture
    s, c, b = _shapes(rows, context, batch)
    size = _element_bytes(element_bytes)
    one = np.ones_like(s) * size * a.layers
    gathered = np.zeros_like(s) if a.tied else np.minimum(s * b, a.vocab)
    cached = c if a.sliding_window is None else np.minimum(c, a.sliding_window - 1)
    return ByteCount(
        embedding_and_lm_head_weights=size * a.hidden * (a.vocab + gathered),
        attention_weights=one * a.attention_parameters,
        ffn_weights=one * a.expert_parameters * distinct_experts(a, s * b),
        small_weights=one * a.small_parameters + size * a.final_norm_parameters,
        kv_read=one * b * 2 * cached * a.kv_width,
        kv_write=one * b * s * 2 * a.kv_width,
        attention_io=np.zeros_like(s),
        ffn_io=one * b * s * 2 * a.hidden,
        lm_head_io=size * b * s * a.vocab,
    )


def distinct_experts(architecture: ModelArchitecture, tokens: ArrayLike) -> Array:
    """Expected distinct experts that `tokens` tokens use in one layer; 1 for a dense FFN."""
    count = np.asarray(tokens, dtype=np.float64)
    if not architecture.experts:
        return np.ones_like(count)
    share = architecture.active_experts / architecture.experts
    used: Array = architecture.experts * (1.0 - (1.0 - share) ** count)
    return used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """max(FLOPs / peak FLOP rate, bytes / bandwidth) of one forward (paper, appendix F).

    `tensor_parallel` devices share both evenly, which leaves out communication and what every
    device repeats: for `physical` still a lower bound.
    """

    architecture: ModelArchitecture
    peaks: Peaks
    element_bytes: float = 2
    count: Literal["paper", "physical"] = "paper"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        _element_bytes(self.element_bytes)
        if self.count not in ("paper", "physical"):
            raise InputError(f"count must be paper or physical (is {self.count!r})")
        if self.tensor_parallel < 1:
            raise InputError(f"tensor_parallel must be at least 1 (is {self.tensor_parallel})")

    def seconds(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """Seconds, in the broadcast shape of the arguments. Raises InputError."""
        compute_s, memory_s = self.branches_s(rows, context, batch)
        return np.maximum(compute_s, memory_s)

    def predict_s(self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1) -> Array:
        """`seconds`: the bare roofline is the calibration of a device that nobody measured."""
        return self.seconds(rows, context, batch)

    def branches_s(
        self, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> tuple[Array, Array]:
        """The two sides of the maximum: (compute seconds, memory seconds)."""
        count_flops = paper_flops if self.count == "paper" else physical_flops
        count_bytes = paper_bytes if self.count == "paper" else physical_bytes
        flops = count_flops(self.architecture, rows, context, batch).total
        moved = count_bytes(self.architecture, rows, context, batch, self.element_bytes).total
        return (
            flops / (self.peaks.flops_per_s * self.tensor_parallel),
            moved / (self.peaks.bytes_per_s * self.tensor_parallel),
        )

    def bounded(
        self, seconds: ArrayLike, rows: ArrayLike, context: ArrayLike, batch: ArrayLike = 1
    ) -> Array:
        """`seconds`, raised to the physical bound where they are faster than these peaks allow."""
        return np.maximum(seconds, self.with_count("physical").seconds(rows, context, batch))

    def with_count(self, count: Literal["paper", "physical"]) -> Roofline:
        """The same device and target under the other count."""
        return dataclasses.replace(self, count=count)


def _shapes(rows: ArrayLike, context: ArrayLike, batch: ArrayLike) -> tuple[Array, Array, Array]:
    try:
        s, c, b = (np.asarray(value, dtype=np.float64) for value in (rows, context, batch))
        s, c, b = np.broadcast_arrays(s, c, b)
    except (TypeError, ValueError) as failure:
        raise InputError(
            f"rows, context and batch must be numbers that broadcast ({failure})"
        ) from None
    for name, value, least in (("rows", s, 1), ("context", c, 0), ("batch", b, 1)):
        if value.size and not (value.min() >= least and value.max() < np.inf):
            raise InputError(f"{name} must be finite and at least {least}")
    return s, c, b


def _element_bytes(value: float) -> float:
    if not 0 < value <= 8:
        raise InputError(f"element_bytes must be above 0 and at most 8 (is {value!r})")
    return float(value)


def _sum_fields(count: FlopCount | ByteCount) -> Array:
    total = sum(getattr(count, field.name) for field in dataclasses.fields(count))
    return np.asarray(total, dtype=np.float64)

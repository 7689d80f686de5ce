"""The decoder layers of a forward on a CPU as one compiled function, shared by its threads.

Numbers between products are float32; inputs of products are rounded to the weights' dtype where the
CPU multiplies in it, and keys and values to the cache's. Every row is computed alone and in one
order, so its result is the same among any other rows.
"""

# ruff: noqa: PLR0913 - arrays one by one compile in half the time of tuples of all
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.jit import jit, jit_inner, jit_sums, parts_of
from decoder.model.runtime.row_attention import (
    KEYS,
    add_mixed,
    add_scores,
    at,
    exponential,
    keep,
    softmax,
)
from decoder.model.runtime.tiles import multiply

PHASES = 9  # of a layer; the entry, the last norm and the head have three more

Numbers = NDArray[np.float32]
Bits = NDArray[np.uint16]  # bfloat16 numbers, which NumPy does not have


class Matrix(NamedTuple):
    """A joined weight of all layers.

    blocks  [layers, blocks, steps, OUTPUTS], see `tiles`
    scales  [layers, blocks * OUTPUTS] of int8 weights, else [layers, 0]
    bias    [layers, blocks * OUTPUTS]
    """

    blocks: NDArray[np.int32] | Numbers | NDArray[np.int8]
    scales: Numbers
    bias: Numbers


class LayerWeights(NamedTuple):
    """All layers of a model.

    entry       makes a context's rows of features, as of one layer; perhaps empty
    norms       [2 * layers + 1, hidden]: before attention and FFN of each layer, and the last;
                behind them that of a context's rows
    head_norms  [layers, heads + kv_heads, head_dim], or [layers, 0, 0]
    windows     [layers]: positions that a row sees, its own included; 0 for all
    heads       of the queries
    ffn         numbers of a row that is gated
    """

    entry: Matrix
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    norms: Numbers
    head_norms: Numbers
    windows: NDArray[np.int64]
    heads: int
    ffn: int
    eps: np.float32
    scale: np.float32


Rows = Numbers | NDArray[np.int32]  # [rows, width], of pairs of bfloat16 numbers [rows, width / 2]


class Forward(NamedTuple):
    """The rows of a forward and what is computed of them.

    Behind them may come rows of a context, of which every layer stores a key and a value, made of
    the same normed row. They are counted where it says [all].

    given      [context, width]: features of the context, the input of the entry
    rows       [all, hidden], hidden padded to whole units; embeddings at first
    normed, qkv, queries  [all, ...];  mixed, gate_up, gated  [rows, ...]
    given, normed, queries, mixed, gated  pairs where the CPU multiplies so
    factors    cosines and sines [2, all, head_dim / 2]
    cache, shape  [layers, 2, sequences, kv_heads, slots, head_dim], flat
    owners, slots, positions  [all]: a row's sequence, and the slot and position of its key
    leading    [rows]: slots that a row sees from the first on
    first, seen  [rows + 1], [...]: row r sees the slots seen[first[r]:first[r + 1]] too, in order
    captured   numbers of the states that are features, flat [rows, captured * hidden]
    head       the LM head as of one layer, perhaps empty
    headed     first and last of the rows that have logits, padded to whole units
    """

    given: Rows
    rows: Numbers
    normed: Rows
    qkv: Numbers
    queries: Rows
    mixed: Rows
    gate_up: Numbers
    gated: Rows
    factors: Numbers
    cache: Numbers | Bits
    shape: tuple[int, ...]
    owners: NDArray[np.int64]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    leading: NDArray[np.int64]
    first: NDArray[np.int64]
    seen: NDArray[np.int64]
    captured: NDArray[np.int64]
    features: Numbers
    head: Matrix
    headed: tuple[int, int]
    logits: Numbers


@jit_sums
def _factor(numbers, first, count, eps):
    """What an RMSNorm multiplies a row by."""
    total = np.float32(0)
    for i in range(count):
        total += at(numbers, first + i) * at(numbers, first + i)
    return np.float32(1) / np.sqrt(total / np.float32(count) + eps)


@jit_inner
def _norm_rows(
    own, state, out, weights, number, eps, captured, features, start, bias, after, phase, claims
):
    """Norm `number` of the own rows, features, and what the next products add to.

    start, bias  of the product of normed rows
    after        the bias of the product that is added to the rows next
    """
    (rows, size), width = state.shape, weights.shape[1]
    layer, stride = number // 2 % len(bias), width + width % 2
    work, parts = np.empty(width, np.float32), max(rows, len(start))
    for r in parts_of(claims, phase, parts, parts):
        if r < len(start):
            for i in range(bias.shape[1]):
                start[r, i] = bias[layer, i]
        if r >= (own if number else rows):
            continue
        factor = _factor(state, r * size, width, eps)
        norm = number if r < own else len(weights) - 1
        for i in range(width):
            work[i] = at(state, r * size + i) * factor * weights[norm, i]
        keep(work, 0, out, r * stride, width)
        if r >= own:
            continue
        for i in range(len(captured)):
            if 2 * captured[i] == number:
                place = (r * len(captured) + i) * width
                keep(state, r * size, features, place, width)
        for i in range(size):
            state[r, i] += after[layer, i]


@jit_inner
def _rotate_rows(
    layer, heads, qkv, queries, factors, cache, shape, owners, places, head_norms, scale, eps,
    phase, claims,
):  # fmt: skip
    """Rotate queries and keys, and store keys and values."""
    _, _, sequences, kv_heads, slots, width = shape
    (rows, size), half = qkv.shape, width // 2
    work, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    for r in parts_of(claims, phase, rows, rows):
        key = ((2 * layer * sequences + owners[r]) * kv_heads * slots + places[r]) * width
        value = key + sequences * kv_heads * slots * width
        for h in range(heads + kv_heads):
            first = r * size + h * width
            for i in range(width):
                work[i] = at(qkv, first + i)
            if head_norms.shape[1]:
                factor = _factor(qkv, first, width, eps)
                for i in range(width):
                    work[i] *= factor * head_norms[layer, h, i]
            factor = scale if h < heads else np.float32(1)
            for i in range(half):
                cosine, sine = factors[0, r, i] * factor, factors[1, r, i] * factor
                turned[i] = work[i] * cosine - work[half + i] * sine
                turned[half + i] = work[half + i] * cosine + work[i] * sine
            if h < heads:
                keep(turned, 0, queries, (r * heads + h) * width, width)
            else:
                keep(turned, 0, cache, key + (h - heads) * slots * width, width)
        for h in range(kv_heads):
            first = r * size + (heads + kv_heads + h) * width
            keep(qkv, first, cache, value + h * slots * width, width)


@jit_inner
def _attend_rows(
    layer, window, group, queries, cache, shape, out, owners, positions, leading, firsts, seen,
    scratch, phase, claims, count,
):  # fmt: skip
    """Attention of every row and KV head."""
    _, _, sequences, kv_heads, slots, width = shape
    one, none = np.int64(1), np.int64(0)
    scores, mixed, totals = scratch
    keys, rows = len(scores) // group, len(leading)
    parts = rows * kv_heads
    for part in parts_of(claims, phase, parts, 4 * count):
        kv, r = part // rows, part % rows
        hidden = max(positions[r] - window + 1, 0) if window else 0
        begin = min(hidden, leading[r])
        ahead, start = leading[r] - begin, firsts[r] + hidden - begin
        behind = firsts[r + 1] - start
        key = ((2 * layer * sequences + owners[r]) * kv_heads + kv) * slots * width
        value = key + sequences * kv_heads * slots * width
        query = (r * kv_heads + kv) * group * width
        add_scores(
            queries, query, group, cache, key + begin * width, ahead, width, scores, keys, none
        )
        for i in range(behind):
            slot = key + seen[start + i] * width
            add_scores(queries, query, group, cache, slot, one, width, scores, keys, ahead + i)
        for i in range(group * width):
            mixed[i] = np.float32(0)
        for h in range(group):
            totals[h] = softmax(scores, h * keys, ahead + behind)
        add_mixed(scores, keys, none, group, cache, value + begin * width, ahead, width, mixed)
        for i in range(behind):
            slot = value + seen[start + i] * width
            add_mixed(scores, keys, ahead + i, group, cache, slot, one, width, mixed)
        for h in range(group):
            for i in range(h * width, (h + 1) * width):
                mixed[i] /= totals[h]
        keep(mixed, 0, out, query, group * width)


@jit_inner
def _gate_rows(gate_up, width, out, phase, claims):
    """silu(gate) * up of every row."""
    (rows, size), stride, work = gate_up.shape, width + width % 2, np.empty(width, np.float32)
    for r in parts_of(claims, phase, rows, rows):
        for i in range(width):
            gate, up = at(gate_up, r * size + i), at(gate_up, r * size + width + i)
            work[i] = gate / (np.float32(1) + exponential(-gate)) * up
        keep(work, 0, out, r * stride, width)


@jit
def run_layers(w, f, claims, count):
    """Compute all layers, the last norm into f.normed, and logits, by PHASES a layer and three."""
    layers, kv_heads, slots, width = f.shape[0], f.shape[3], f.shape[4], f.shape[5]
    group, own = w.heads // kv_heads, len(f.leading)
    scores = np.empty(group * (slots + KEYS), np.float32)
    scratch = scores, np.empty(group * width, np.float32), np.empty(group, np.float32)
    q, o, g, d, norms, eps = w.qkv, w.output, w.gate_up, w.down, w.norms, w.eps
    rows, normed, cache, shape = f.rows, f.normed, f.cache, f.shape
    captured, features = f.captured, f.features
    multiply(w.entry.blocks[0], w.entry.scales[0], f.given, rows[own:], 0, claims, count)
    for layer in range(layers + 1):
        p, number = layer * PHASES + 1, 2 * layer
        start, bias = (f.qkv, q.bias) if layer < layers else (f.logits, f.head.bias)
        _norm_rows(
            own, rows, normed, norms, number, eps, captured, features, start, bias, o.bias, p,
            claims,
        )  # fmt: skip
        if layer == layers:
            break
        multiply(q.blocks[layer], q.scales[layer], normed, f.qkv, p + 1, claims, count)
        _rotate_rows(
            layer, w.heads, f.qkv, f.queries, f.factors, cache, shape, f.owners, f.slots,
            w.head_norms, w.scale, eps, p + 2, claims,
        )  # fmt: skip
        _attend_rows(
            layer, w.windows[layer], group, f.queries, cache, shape, f.mixed, f.owners, f.positions,
            f.leading, f.first, f.seen, scratch, p + 3, claims, count,
        )  # fmt: skip
        multiply(o.blocks[layer], o.scales[layer], f.mixed, rows, p + 4, claims, count)
        number, p, start, bias = number + 1, p + 5, f.gate_up, g.bias
        _norm_rows(
            own, rows, normed, norms, number, eps, captured, features, start, bias, d.bias, p,
            claims,
        )  # fmt: skip
        multiply(g.blocks[layer], g.scales[layer], normed[:own], start, p + 1, claims, count)
        _gate_rows(start, w.ffn, f.gated, p + 2, claims)
        multiply(d.blocks[layer], d.scales[layer], f.gated, rows, p + 3, claims, count)
    head, headed, p = f.head, normed[f.headed[0] : f.headed[1]], layers * PHASES + 2
    multiply(head.blocks[0], head.scales[0], headed, f.logits, p, claims, count)

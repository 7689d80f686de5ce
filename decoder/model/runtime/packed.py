"""The packed runtime: a CPU's forwards by weights packed once, all layers in one compiled call.

The layers of the common families run without transformers' modules (`layers`). Other families keep
their modules, which call packed products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.activations import SiLUActivation
from transformers.models.mistral.modeling_mistral import MistralAttention

from costmodel.statistics import Ints
from decoder.configs import base_of
from decoder.cpu import this_cpu
from decoder.jit import run_shared
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import KVCache
from decoder.model.runtime import tiles
from decoder.model.runtime.eager import EagerRuntime, ForwardOutputs, ModelStep, RuntimeKind
from decoder.model.runtime.fused import FUSIBLE, PROJECTIONS, is_plain, plain_linears, unfuse
from decoder.model.runtime.layers import PHASES, Forward, LayerWeights, Matrix, Rows, run_layers
from decoder.model.runtime.linear import TiledLinear
from decoder.model.runtime.row_attention import LANES, PAIRED
from decoder.model.structure import bypassed_linears

NONE = torch.empty(0, 2)
MOST_POSITIONS = 2048  # of the first table of rotary factors; it doubles


class RopeFactors:
    """Rotary factors of positions, by the arithmetic of transformers' rotary modules."""

    def __init__(self, rotary: Any) -> None:
        self._frequencies, self._scaling = rotary.inv_freq.float(), rotary.attention_scaling
        self._table = np.empty((2, 0, len(self._frequencies)), np.float32)

    def __call__(self, positions: Ints) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Cosines and sines [2, rows, head_dim / 2] of positions [rows]."""
        largest, size = int(positions.max()), max(self._table.shape[1], MOST_POSITIONS)
        while size <= largest:
            size *= 2
        if size > self._table.shape[1]:
            angles = torch.arange(size).float()[:, None] * self._frequencies
            self._table = (torch.stack((angles.cos(), angles.sin())) * self._scaling).numpy()
        return self._table.take(positions, axis=1)  # contiguous, so compiled code serves all


class PackedLayers:
    """All layers of a model like those of `FUSIBLE`, and its final norm."""

    def __init__(
        self, base: Any, *, int8: bool, entry: tuple[nn.Linear, nn.Module] | None = None
    ) -> None:
        """entry: the product and the norm that make a context's rows of features"""
        layers, last = list(base.layers), base.norm
        attentions, linears = [one.self_attn for one in layers], list(map(PROJECTIONS, layers))
        self._dtype = last.weight.dtype
        self._pairs = self._dtype == torch.bfloat16 and not int8 and this_cpu().pairs
        self._paired_heads = self._pairs and attentions[0].head_dim % PAIRED == 0
        self._stored = torch.int8 if int8 else None
        self._rope = RopeFactors(base.rotary_emb)
        self._queries = linears[0][0].out_features
        pairs = [(one.input_layernorm, one.post_attention_layernorm) for one in layers]
        all_norms = (*chain(*pairs), last, *(entry or ())[1:])
        norms = [norm.weight.detach().float() for norm in all_norms]
        heads = self._queries // attentions[0].head_dim
        outputs: Any = self._stacked([one[3:4] for one in linears])
        self._none = Matrix(*(part[:1, :0] for part in outputs))
        self._weights = LayerWeights(
            self._none if entry is None else self._stacked([[entry[0]]]),
            self._stacked([one[:3] for one in linears]),
            outputs,
            self._stacked([one[4:6] for one in linears]),
            self._stacked([one[6:] for one in linears]),
            torch.stack(norms).numpy(),
            torch.stack([_head_norms(one, heads) for one in attentions]).numpy(),
            np.array([_window(one) for one in attentions]),
            heads,
            linears[0][4].out_features,
            np.float32(last.eps if isinstance(last, nn.RMSNorm) else last.variance_epsilon),
            np.float32(attentions[0].scaling),
        )

    def _stacked(self, groups: Sequence[Sequence[nn.Linear]]) -> Matrix:
        """The joined weights of all layers side by side, of which each layer's are a view."""
        exact = all(tiles.is_bfloat16(one.weight) for group in groups for one in group)
        stored = self._stored or (torch.bfloat16 if exact else self._dtype)
        joined = [TiledLinear(groups[0], stored)]
        blocks = tiles.room(len(groups), *joined[0].blocks.shape, like=joined[0].blocks)
        for i in range(len(groups)):
            joined += [TiledLinear(groups[i], stored)] if i else []
            blocks[i] = joined[i].blocks
            joined[i].blocks = blocks[i]
        scales = torch.stack([one.scales for one in joined])
        bias = torch.stack([one.bias for one in joined])
        return Matrix(blocks.numpy(), scales.numpy(), bias.numpy())

    def run(
        self, embedded: Tensor, cache: KVCache, blocks: Sequence[RowBlock],
        captured: Sequence[int] = (), *, context: Tensor = NONE,
        head: tuple[TiledLinear, int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Hidden states behind the last norm, features, and logits, of rows [rows, hidden].

        context  features [tokens, width] for the entry, of which keys and values alone are
                 stored: in the cache's last slots before `end`
        head     the product of logits, float32, with the first and last of the rows that have some
        """
        w, (rows, hidden), given = self._weights, embedded.shape, len(context)
        *places, leading, few, seen = row_places(cache, blocks)
        if given:
            sequence = blocks[0].sequence
            stored = np.arange(given) + cache.end(sequence) - given
            more = np.full(given, sequence), stored, stored
            places = [np.append(*both) for both in zip(places, more, strict=True)]
        owners, slots, positions = places
        data = cache.data.view(torch.uint16) if self._dtype == torch.bfloat16 else cache.data
        state = np.zeros((rows + given, w.output.bias.shape[1]), np.float32)
        torch.from_numpy(state)[:rows, :hidden] = embedded
        matrix, first, last = self._none, 0, 0
        if head is not None:
            parts = head[0].blocks, head[0].scales, head[0].bias
            matrix, first, last = Matrix(*(part[None].numpy() for part in parts)), *head[1:]
        logits = np.empty((last - first, matrix.bias.shape[1]), np.float32)
        features = np.empty((rows, len(captured) * hidden), np.float32)
        inputs, taken = self._inputs(*context.shape)
        taken[:] = context
        normed, kept = self._inputs(rows + given, hidden)
        forward = Forward(
            inputs, state, normed, np.empty((rows + given, w.qkv.bias.shape[1]), np.float32),
            self._inputs(rows + given, self._queries, self._paired_heads)[0],
            self._inputs(rows, self._queries)[0],
            np.empty((rows, w.gate_up.bias.shape[1]), np.float32), self._inputs(rows, w.ffn)[0],
            self._rope(positions), data.view(-1).numpy(), tuple(data.shape),
            owners, slots, positions, leading, few, seen,
            np.array(captured, np.int64), features.reshape(-1), matrix, (first, last), logits,
        )  # fmt: skip
        phases = PHASES * len(w.windows) + 3
        run_shared(run_layers, w, forward, phases=phases, threads=torch.get_num_threads())
        found = torch.from_numpy(features).to(self._dtype) if captured else None
        return kept[:rows], found, torch.from_numpy(logits)[:, : head[0].outputs if head else 0]

    def _inputs(self, rows: int, width: int, pairs: bool | None = None) -> tuple[Rows, Tensor]:
        """Memory for inputs of products, which may take pairs, and its numbers."""
        paired = self._pairs if pairs is None else pairs
        kind = torch.bfloat16 if paired else torch.float32
        numbers = torch.zeros(rows, width + width % 2, dtype=kind)
        return (numbers.view(torch.int32) if paired else numbers).numpy(), numbers[:, :width]


def row_places(cache: KVCache, blocks: Sequence[RowBlock]) -> tuple[Ints, ...]:
    """Owners, slots, positions, leading slots and others that rows see; see `Forward`."""
    parts: list[tuple[Ints, ...]] = []
    for block in blocks:
        sequence, end = block.sequence, cache.end(block.sequence)
        prefix, rows = cache.lengths[sequence], np.arange(block.rows)
        if block.visible is None:
            leading, counts, seen = end + rows + 1, 0 * rows, rows[:0]
        else:
            run = np.minimum.accumulate(block.visible, axis=1)
            leading, visible = prefix + run.sum(1), block.visible & ~run
            counts, seen = visible.sum(1), prefix + visible.nonzero()[1]
        owners = np.full(block.rows, sequence)
        parts.append((owners, end + rows, block.offsets + prefix, leading, counts, seen))
    *places, counts, seen = (np.concatenate(kind) for kind in zip(*parts, strict=True))
    return *places, np.append(0, counts.cumsum()), seen


def compile_ahead(step: ModelStep, *, int8: bool) -> Thread | None:
    """Compile the layers' forward beside what comes before the first one; None for others' layers.

    LLVM, which takes most of the time, leaves Python to others.
    """
    layers = compiled_layers(step)
    if not layers:
        return None
    width = PAIRED if layers[0].self_attn.head_dim % PAIRED == 0 else LANES
    weight = 0.0 if tiles.is_bfloat16(layers[0].mlp.down_proj.weight) else 0.1
    return _compiling(step.dtype, width, weight, int8)


@cache
def _compiling(dtype: torch.dtype, width: int, weight: float, int8: bool) -> Thread:
    """A thread that runs a tiny model, once for each kind of compiled layers."""

    @torch.inference_mode()
    def run() -> None:
        sizes: Any = {"hidden_size": width, "head_dim": width, "intermediate_size": width}
        config = LlamaConfig(num_attention_heads=1, num_hidden_layers=1, vocab_size=8, **sizes)
        with torch.device("meta"):  # no random numbers are drawn
            model: Any = LlamaModel(config)
            model = model.to(dtype)
        tiny = model.to_empty(device="cpu")
        for tensor in (*tiny.parameters(), *tiny.buffers()):
            tensor.fill_(weight)
        data, place = torch.zeros(1, 2, 1, 1, 1, width, dtype=dtype), np.zeros(1, np.int64)
        store: Any = SimpleNamespace(data=data, lengths=[0], end=lambda _: 0)
        row = RowBlock(0, place, place, None)
        PackedLayers(tiny, int8=int8).run(data[0, 0, 0, 0], store, [row])

    thread = Thread(target=run)
    thread.start()
    return thread


def compiled_layers(step: ModelStep) -> list[Any]:
    """The layers of a model where all are such as `layers` computes, else none."""
    found = list(getattr(base_of(step.model), "layers", ()))
    known = step.rope is None and all(
        type(layer) in FUSIBLE
        and plain_linears(layer)
        and isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation))
        and layer.self_attn.head_dim % LANES == 0
        for layer in found
    )
    return found if known else []


class PackedModel:
    """The packed weights of a model, which has given up its own.

    head    the LM head; None where it is not packed
    layers  the forward of the layers; None for families whose modules call packed products
    """

    def __init__(self, step: ModelStep, *, int8: bool) -> None:
        model, stored = step.model, torch.int8 if int8 else None
        unfuse(model)
        head, embedding = step.head, step.embedding
        tied, self.head = head.weight is embedding.weight, None
        if type(head) is nn.Linear and (not tied or type(embedding) is nn.Embedding):
            self.head = TiledLinear([head], stored)
            if tied:  # the embedding takes its rows from the head
                embedding.forward, embedding.weight = self.head.rows, head.weight
        known = bool(compiled_layers(step))
        self.layers = PackedLayers(base_of(model), int8=int8) if known else None
        keep = {id(step.head)} if known else {id(step.head), *bypassed_linears(model)}
        for module in model.modules():
            if id(module) not in keep and is_plain(module):
                TiledLinear([module], stored)


class PackedStep(ModelStep):
    """The forward of an owned causal LM by packed weights."""

    def __init__(self, step: ModelStep, *, int8: bool = False) -> None:
        """int8: round the weights to int8"""
        super().__init__(step.model, owned=True)
        self.plain_head, self.masks = step.plain_head, step.masks
        if packed_of(self.model) is None:
            with torch.no_grad():
                self.model.packed_weights = PackedModel(step, int8=int8)
        self.packed: PackedModel = self.model.packed_weights

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.packed.head if self.plain_head else None
        return super().logits(hidden) if head is None else head.numbers(hidden)

    def head_rows(self, tokens: Tensor) -> Tensor:
        head = self.packed.head
        return super().head_rows(tokens) if head is None else head.rows(tokens)

    def head_weight(self) -> Tensor:
        head = self.packed.head
        return super().head_weight() if head is None else head.weight()


class PackedRuntime(EagerRuntime):
    """Runs a model by packed weights on a CPU."""

    kind: RuntimeKind = "packed"
    _step: PackedStep

    def forward(
        self, cache: KVCache, blocks: Sequence[RowBlock], *, last_only: bool = False
    ) -> ForwardOutputs:
        packed, rows = self._step.packed, sum(block.rows for block in blocks)
        if packed.layers is None or packed.head is None or not self._step.plain_head:
            return super().forward(cache, blocks, last_only=last_only)
        head = packed.head, rows - 1 if last_only else 0, rows
        _, features, logits = self._run(packed.layers, cache, blocks, head)
        return ForwardOutputs(logits, features)

    def hidden(self, cache: KVCache, blocks: Sequence[RowBlock]) -> tuple[Tensor, Tensor | None]:
        layers = self._step.packed.layers
        if layers is None:
            return super().hidden(cache, blocks)
        return self._run(layers, cache, blocks)[:2]

    def _run(
        self,
        layers: PackedLayers,
        cache: KVCache,
        blocks: Sequence[RowBlock],
        head: tuple[TiledLinear, int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `PackedLayers.run`."""
        tokens = torch.from_numpy(np.concatenate([block.tokens for block in blocks]))
        embedded = self._step.embedding(tokens)
        return layers.run(embedded, cache, blocks, self._step.captured, head=head)


def packed_of(model: nn.Module) -> PackedModel | None:
    """The packed weights of a model; None for a model with its own."""
    return getattr(model, "packed_weights", None)


def _head_norms(attention: Any, heads: int) -> Tensor:
    """LayerWeights of the queries' and keys' norms [heads + kv_heads, head_dim]; empty without."""
    if not hasattr(attention, "q_norm"):
        return torch.empty(0, 0)
    query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    kv_heads = attention.k_proj.out_features // attention.head_dim
    return torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1))).float()


def _window(attention: Any) -> int:
    """Positions that a row sees in a layer; 0 for all."""
    common = getattr(getattr(attention, "config", None), "sliding_window", None)
    of_model = common if isinstance(attention, MistralAttention) else None
    return getattr(attention, "sliding_window", of_model) or 0

"""The DFlash draft model: a block of masks filled in one forward beside the target's features.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT): keys and values come
from context rows and block rows, queries from the block only; context rows are the target's
features, projected once for all layers, without a layer's input norm or feed-forward.

A drafter is small: launching an operation costs it as much as reading weights. So the query,
key and value products of a layer are one and so are gate and up, the keys of all layers'
context are normed and rotated together, and residual additions go into the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from decoder.drafters.blocks import (
    DraftAttention,
    DraftCache,
    DraftShape,
    GatedFfn,
    Rope,
    RowCache,
    Span,
    rotate,
    span,
)
from decoder.drafters.checkpoint import Weights, load_weights, save_checkpoint
from decoder.drafters.dflash_config import DFlashConfig, Kind
from decoder.drafters.draft_head import read_tokens, write_tokens
from decoder.runtime.fused import add_product, add_product_, join_linears


class DFlashLayer(nn.Module):
    """One layer: attention to context and block, then the feed-forward, of block rows only."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, shape.hidden, normed=True)
        self.mlp = GatedFfn(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class DFlashModel(nn.Module):
    """The weights under their published names, and where they are loaded."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.head_tokens: NDArray[np.int64] | None = None  # None: the target's whole head
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(config.layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self._passes: DFlashPasses | None = None

    def passes(self) -> DFlashPasses:
        """The passes over these weights, the same ones each time; it is not trained any more.

        The weights become views of joined ones, so that the state dict stays what it was.
        """
        self._passes = self._passes or DFlashPasses(self)
        return self._passes


class _JoinedLayer:
    """What a layer's pass over block rows needs, with products joined."""

    def __init__(self, layer: DFlashLayer, shape: DraftShape) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._shape = layer, shape
        self._qkv = join_linears((attention.q_proj, attention.k_proj, attention.v_proj))
        self._gate_up, _ = join_linears((mlp.gate_proj, mlp.up_proj))
        norms = (attention.q_norm, shape.heads), (attention.k_norm, shape.kv_heads)
        weights = [norm.weight.detach().expand(heads, 1, -1) for norm, heads in norms]
        self._norms = torch.cat(weights)  # [heads + kv_heads, 1, head_dim]

    def keys_values(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * kv_heads * head_dim] of rows [rows, hidden]: keys, not normed, and values."""
        weight, bias = self._qkv
        first = self._shape.heads * self._shape.head_dim
        return functional.linear(rows, weight[first:], None if bias is None else bias[first:])

    def __call__(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, layer: int, seen: Span
    ) -> torch.Tensor:
        """[rows, hidden] of rows [rows, hidden]; `layer` is the number of this one."""
        own, shape = self._layer, self._shape
        heads = functional.linear(own.input_layernorm(block), *self._qkv)
        heads = heads.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        turned, value = heads.split((shape.heads + shape.kv_heads, shape.kv_heads))
        turned = rotate(_over_rms(turned, shape.norm_eps) * self._norms, rope)
        query, key = turned.split((shape.heads, shape.kv_heads))
        cache.write(layer, cache.length, key, value)
        drawn = cache.attend(layer, query, seen, shape.head_dim**-0.5)
        drawn = drawn.transpose(0, 1).reshape(len(block), -1)
        block = add_product(block, drawn, own.self_attn.o_proj)
        both = functional.linear(own.post_attention_layernorm(block), self._gate_up)
        gate, up = both.chunk(2, dim=-1)
        return add_product_(block, functional.silu(gate) * up, own.mlp.down_proj)


class DFlashPasses:
    """The two passes over a model's weights; see `DFlashModel.passes`."""

    def __init__(self, model: DFlashModel) -> None:
        self.model, self.config = model, model.config
        shape = model.config.shape
        with torch.no_grad():
            self._layers = [_JoinedLayer(layer, shape) for layer in model.layers]
            norms = [layer.self_attn.k_norm.weight for layer in model.layers]
            self._key_norms = torch.stack(norms)[:, None, None]  # [layers, 1, 1, head_dim]

    def add_context(self, features: torch.Tensor, rope: Rope, cache: DraftCache) -> None:
        """Append the target's features [tokens, ids * hidden] to every layer's context."""
        cache.make_room(len(features))
        self.store_context(features, rope, cache)
        cache.length += len(features)

    def store_context(self, features: torch.Tensor, rope: Rope, cache: RowCache) -> None:
        """Write what `add_context` appends behind every layer's context."""
        model, shape = self.model, self.config.shape
        context = model.hidden_norm(model.fc(features))
        projected = torch.stack([layer.keys_values(context) for layer in self._layers])
        heads = projected.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        keys, values = heads.chunk(2, dim=1)  # [layers, kv_heads, rows, head_dim]
        keys = rotate(_over_rms(keys, shape.norm_eps) * self._key_norms, rope)
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.write(number, cache.length, key, value)

    def block(self, block: torch.Tensor, rope: Rope, cache: DraftCache) -> torch.Tensor:
        """Hidden states [block, hidden], normed for the target's head, of embeddings likewise.

        Slot 0 is the bonus token, the others are masks; the cache's context stays as it is.
        """
        cache.make_room(len(block))
        spans = {kind: self._span(cache, block, *kind) for kind in self.config.kinds}
        return self.fill_in(block, rope, cache, spans)

    def fill_in(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, spans: Mapping[Kind, Span]
    ) -> torch.Tensor:
        """`block` where it is known what the rows see in layers of each kind."""
        for number, (layer, kind) in enumerate(zip(self._layers, self.config.kinds, strict=True)):
            block = layer(block, rope, cache, number, spans[kind])
        found: torch.Tensor = self.model.norm(block)
        return found

    def _span(
        self, cache: DraftCache, block: torch.Tensor, window: int | None, causal: bool
    ) -> Span:
        """What block rows see: all without a mask, but for a window or causality.

        A window of w tokens reaches from a row to the w - 1 before it, and without
        causality as many after it.
        """
        end = cache.length + len(block)
        windowed = window is not None and window < end
        if not windowed and not causal:
            return Span(0, end, None)
        first = max(0, cache.length + 1 - window) if windowed and window is not None else 0
        start = first if windowed else cache.length  # where columns of the mask begin
        row = torch.arange(cache.length, end, device=block.device)[:, None]
        slot = torch.arange(start, end, device=block.device)[None]
        visible = slot <= row if causal else torch.ones_like(slot == row)
        if windowed:
            visible &= (row - slot).abs() < window
        return span(self.config.shape, (first, end), visible, block.dtype)


def _over_rms(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row over its root mean square."""
    return functional.rms_norm(rows, rows.shape[-1:], eps=eps)


def load_dflash(folder: Path, published: Mapping[str, Any], like: torch.Tensor) -> DFlashModel:
    """The model in a checkpoint folder, on the device and in the dtype of `like`.

    published  its config.json
    Raises InputError listing all tensors that are missing, not known or of a wrong shape.
    """
    config = DFlashConfig.parse(published, f"{folder / 'config.json'}")
    with torch.device("meta"):
        model = DFlashModel(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = Weights(folder)
    weights.check(shapes)
    load_weights(model, weights.read(shapes, like.device), like.dtype)
    model.head_tokens = read_tokens(folder)
    return model


def save_dflash(folder: Path, model: DFlashModel) -> None:
    """Write a model in the published format, which other engines read, and its head's tokens."""
    save_checkpoint(folder, model.config.published, model.state_dict())
    if model.head_tokens is not None:
        write_tokens(folder, model.head_tokens)

"""The DFlash draft model: a block of masks filled in one forward.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT): keys and values come from
context rows and block rows, queries from the block only. Context rows are the target's features,
projected once for all layers, without a layer's input norm or feed-forward.

Launching an operation costs as much as reading weights of such a size. So the query, key and value
products of a layer are joined, as are gate and up; the context's keys of all layers are normed and
rotated together; and residual additions are part of the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from costmodel.statistics import Ints
from decoder.device import to_device
from decoder.drafters.blocks import DraftAttention, DraftShape, Rope, Rotary, RowCache, Span, rotate
from decoder.drafters.caches import DraftRows
from decoder.drafters.checkpoint import Weights, checked_ids, load_weights, save_checkpoint
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.vocabulary import read_tokens, write_tokens
from decoder.model.runtime.linear import join, packing_refused, plain_state
from decoder.model.runtime.packed import PackedLayers
from decoder.model.runtime.row_attention import LANES
from decoder.model.target import Target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # copies of the target's, mostly
COMPARED = 16  # rows of them that are compared with the target's
OFFSETS, MEMBERS = "d2t", "t2d"  # of a reduced vocabulary


class DFlashLayer(nn.Module):
    """One layer over block rows: attention to context and block, then the feed-forward."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.shape
        self.self_attn = DraftAttention(shape, shape.hidden, normed=True)
        self.mlp = shape.mlp()
        self.input_layernorm = shape.norm()
        self.post_attention_layernorm = shape.norm()


class JoinedLayer:
    """A layer's pass over block rows, with its products joined."""

    def __init__(self, layer: Any, shape: DraftShape) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self._shape = layer, shape
        self._qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = join([attention.o_proj])
        self._gate_up = join([mlp.gate_proj, mlp.up_proj])
        self.down = join([mlp.down_proj])
        norms = (attention.q_norm, shape.heads), (attention.k_norm, shape.kv_heads)
        weights = [norm.weight.detach().expand(heads, 1, -1) for norm, heads in norms]
        self._norms = torch.cat(weights)  # [heads + kv_heads, 1, head_dim]

    def keys_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Unnormed keys, and values, [rows, 2 * kv_heads * head_dim], of rows [rows, hidden]."""
        return self._qkv.outputs_from(self._shape.heads * self._shape.head_dim, rows)

    def __call__(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, number: int, seen: Span
    ) -> torch.Tensor:
        """Outputs [rows, hidden] of rows [rows, hidden]; `number` is this layer's."""
        mixed = self.attend(self.layer.input_layernorm(block), rope, cache, number, seen)
        block = self.output.added_to(block, mixed)
        gated = self.gated(self.layer.post_attention_layernorm(block))
        return self.down.added_to(block, gated, overwrite=True)

    def attend(
        self, rows: torch.Tensor, rope: Rope, cache: RowCache, number: int, seen: Span
    ) -> torch.Tensor:
        """Attention's [rows, heads * head_dim] before the output product, of normed rows."""
        shape = self._shape
        heads = self._qkv(rows).unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        rotated, value = heads.split((shape.heads + shape.kv_heads, shape.kv_heads))
        rotated = rotate(_over_rms(rotated, shape.norm_eps) * self._norms, rope)
        query, key = rotated.split((shape.heads, shape.kv_heads))
        cache.write(number, key, value)
        mixed = cache.attend(number, query, seen, shape.head_dim**-0.5)
        return mixed.transpose(0, 1).reshape(len(rows), -1)

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        """The feed-forward's [rows, ffn] before its last product, of normed rows."""
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return functional.silu(gate) * up


class DFlashModel(nn.Module):
    """The weights under their published names.

    A related drafter's model is a subclass with its own types of these, and more weights.

    own_embedding, own_head  the checkpoint's, where they differ from the target's (`settle`)
    """

    config_type: ClassVar[type[DFlashConfig]] = DFlashConfig
    layer_type: ClassVar[type[DFlashLayer]] = DFlashLayer
    joined_type: ClassVar[type[JoinedLayer]] = JoinedLayer
    own_embedding: torch.Tensor | None = None
    own_head: torch.Tensor | None = None
    _tables: Weights | None = None  # where its embedding and head are, until they are settled

    def __init__(self, config: DFlashConfig, head: int | None = None) -> None:
        """head: the number of tokens of a reduced head; None for the target's whole head"""
        super().__init__()
        shape = config.shape
        self.config = config
        self.head_tokens: Ints | None = None  # None: the target's whole head
        self.layers = nn.ModuleList(self.layer_type(config) for _ in range(config.layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = shape.norm()
        self.norm = shape.norm()
        self._passes: DFlashPasses | None = None

    def passes(self) -> DFlashPasses:
        """The passes, made once: weights are joined or packed, and can be trained no more."""
        self._passes = self._passes or DFlashPasses(self)
        return self._passes

    @classmethod
    def load(cls, folder: Path, published: Mapping[str, Any], like: torch.Tensor) -> Self:
        """The model in a folder with this config.json, on the device and in the dtype of `like`.

        Raises InputError with all tensors that are missing, unknown or of a wrong shape.
        """
        where = f"{folder / 'config.json'}"
        config = cls.config_type.parse(published, where)
        weights, tokens = Weights(folder), read_tokens(folder)
        with torch.device("meta"):
            model = cls(config, None if tokens is None else len(tokens))
        stored = cls.stored_names(model.state_dict(), weights.shapes.keys())
        shapes = {stored[name]: tuple(t.shape) for name, t in model.state_dict().items()}
        optional: dict[str, tuple[int, ...]] = {}  # embedding and head need not be stored
        if config.vocab is not None:
            vocab, hidden, drafted = config.vocab, config.shape.hidden, config.draft_vocab
            head = (drafted or vocab, hidden)
            optional = {EMBEDDING: (vocab, hidden), HEAD: head, MEMBERS: (vocab,)}
        offsets = {} if config.draft_vocab is None else {OFFSETS: (config.draft_vocab,)}
        weights.check(shapes | optional | offsets, frozenset(optional))
        tensors = weights.read(shapes, like.device)
        load_weights(model, {name: tensors[place] for name, place in stored.items()}, like.dtype)
        model._tables = weights
        model.head_tokens = tokens
        for ids in weights.read(offsets, torch.device("cpu")).values():
            model.head_tokens = checked_ids(ids, config.vocab or 0, where).numpy()
        return model

    @classmethod
    def stored_names(cls, names: Iterable[str], stored: Set[str]) -> dict[str, str]:
        """The name of each tensor in a checkpoint that stores these names."""
        return {name: name for name in names}

    def settle(self, target: Target) -> None:
        """Read the checkpoint's embedding and head, unless they are copies of the target's."""
        weights, self._tables = self._tables, None
        vocab = target.architecture.vocab  # with rows of padding that the drafter may lack
        every = np.arange(vocab)
        if self.head_tokens is None and self.config.vocab not in (None, vocab):
            self.head_tokens = every[: self.config.vocab]
        if weights is None:
            return
        tokens = every if self.head_tokens is None else self.head_tokens
        for name, ids, rows_of in (
            (EMBEDDING, every, lambda ids: target.embed(to_device(ids, target.device))),
            (HEAD, tokens, target.head_rows),
        ):
            stored = weights.shapes.get(name)
            if stored is None:
                continue
            rows = np.unique(np.linspace(0, stored[0] - 1, COMPARED).astype(np.int64))
            theirs = rows_of(ids[rows])
            if theirs is None:
                continue
            ours, theirs = (part.double().cpu() for part in (weights.rows(name, rows), theirs))
            if (ours - theirs).abs().max() <= theirs.abs().max() / 64:  # but for a narrow dtype
                continue
            table = weights.read([name], target.device)[name].to(target.dtype)
            if name == EMBEDDING:
                self.own_embedding = functional.pad(table, (0, 0, 0, vocab - len(table)))
            else:
                self.own_head = table

    def save(self, folder: Path) -> None:
        """Write it in the published format, and the tokens of a reduced head beside it."""
        save_checkpoint(folder, self.config.published, plain_state(self))
        if self.head_tokens is not None:
            write_tokens(folder, self.head_tokens)


class DFlashPasses:
    """The two passes over a model's weights; see `DFlashModel.passes`."""

    def __init__(self, model: DFlashModel) -> None:
        self.model, self.config = model, model.config
        shape = model.config.shape
        with torch.no_grad():
            self.compiled = _compiled_layers(model)  # first: their products are the joined ones
            layers: list[Any] = list(model.layers)
            self._layers = [model.joined_type(layer, shape) for layer in layers]
            self._project = join([model.fc])
            norms = [layer.self_attn.k_norm.weight for layer in layers]
            self._key_norms = torch.stack(norms)[:, None, None]  # [layers, 1, 1, head_dim]

    def store_context(self, features: torch.Tensor, rope: Rope, cache: RowCache) -> None:
        """Write the target's features [tokens, ids * hidden] after every layer's context."""
        shape, context = self.config.shape, self.model.hidden_norm(self._project(features))
        projected = torch.stack([layer.keys_values(context) for layer in self._layers])
        heads = projected.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        keys, values = heads.chunk(2, dim=1)  # [layers, kv_heads, rows, head_dim]
        keys = rotate(_over_rms(keys, shape.norm_eps) * self._key_norms, rope)
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.write(number, key, value)

    def block(self, block: torch.Tensor, rows: DraftRows, rotary: Rotary) -> torch.Tensor:
        """Hidden states [block, hidden] for the head, of the embedded bonus token and masks."""
        spans = {kind: rows.span(*kind) for kind in set(self.config.kinds)}
        rope = rows.rope(rotary, block.dtype)
        for number, (layer, kind) in enumerate(zip(self._layers, self.config.kinds, strict=True)):
            block = layer(block, rope, rows, number, spans[kind])
        return self.model.norm(block)


def _compiled_layers(model: DFlashModel) -> PackedLayers | None:
    """The layers as compiled ones; None where device, dtype or the kind of layer forbid it."""
    weight, shape = model.fc.weight, model.config.shape
    refused = packing_refused(weight.device, weight.dtype) or shape.head_dim % LANES
    masked = any(window is not None or causal for window, causal in model.config.kinds)
    if refused or masked or model.joined_type is not JoinedLayer:
        return None
    rotary = Rotary(shape, weight.device).module
    parts = SimpleNamespace(layers=model.layers, norm=model.norm, rotary_emb=rotary)
    return PackedLayers(parts, int8=False, entry=(model.fc, model.hidden_norm))


def _over_rms(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row divided by its root mean square."""
    return functional.rms_norm(rows, rows.shape[-1:], eps=eps)

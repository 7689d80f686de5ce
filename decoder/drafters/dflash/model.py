"""The DFlash draft model and its checkpoint format: a block of masks filled in one forward.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT): keys and values come from
context rows and block rows, queries from the block only. Context rows are the target's features,
projected once for all layers, without a layer's input norm or feed-forward.

The model is so small that launching an operation costs as much as reading its weights. So the
query, key and value products of a layer are joined, as are gate and up; the context's keys of
all layers are normed and rotated together; and residual additions are part of the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from decoder.drafters.blocks import (
    DraftAttention,
    DraftCache,
    DraftShape,
    GatedFfn,
    Rope,
    RowCache,
    Span,
    hash_of,
    rotate,
    span,
)
from decoder.drafters.checkpoint import (
    MOST_BLOCK,
    MOST_LAYERS,
    Fields,
    Weights,
    architectures,
    load_weights,
    read_shape,
    save_checkpoint,
)
from decoder.drafters.vocabulary import read_tokens, write_tokens
from decoder.model.runtime.linear import join, plain_state

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_HEAD_DIM = 128  # of transformers' Qwen3Config, which the published class reads
SLIDING, FULL = "sliding_attention", "full_attention"

Kind = tuple[int | None, bool]  # a layer's attention: its window, and whether it is causal

# Fields of related drafters that change the computation, with the value that leaves it as here.
PLAIN = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "use_swa": False,
    "attention_sink_bias": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """The fields of a DFlash checkpoint's config.json.

    windows            for each layer: tokens that it sees back; None for all
    causal             for each layer: whether a block row sees only rows before it
    target_layer_ids   layers of the target whose outputs are the features
    num_target_layers  of the target it was trained for; None if not given
    vocab              of that target; None if not given
    published          config.json unchanged
    """

    shape: DraftShape
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab: int | None
    published: Mapping[str, Any]

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> DFlashConfig:
        """Read a config.json; fields in its `dflash_config` take precedence over the top level.

        Raises InputError with the field that is missing, wrong or not supported.
        """
        if not is_dflash(published):
            raise InputError(
                f"{where} is not that of a DFlash drafter",
                hint=f"It has no dflash_config, and its architecture is not {ARCHITECTURE}.",
            )
        inner = published.get("dflash_config") or {}
        if not isinstance(inner, Mapping):
            raise InputError(f"{where}: 'dflash_config' must be a mapping")
        fields = Fields({**published, **inner}, where)
        fields.require(PLAIN)
        count = fields.whole("num_hidden_layers", most=MOST_LAYERS)
        has_layers = fields.values.get("num_target_layers") is not None
        target_layers = fields.whole("num_target_layers") if has_layers else None
        return cls(
            shape=read_shape(
                fields, head_dim=DEFAULT_HEAD_DIM, bias=fields.flag("attention_bias", False)
            ),
            windows=_windows(fields, count),
            causal=_causal(fields, count),
            block_size=fields.whole("block_size", DEFAULT_BLOCK_SIZE, least=2, most=MOST_BLOCK),
            mask_token_id=fields.whole("mask_token_id", least=0),
            target_layer_ids=_layer_ids(fields, count, target_layers),
            num_target_layers=target_layers,
            vocab=fields.whole("vocab_size") if fields.values.get("vocab_size") else None,
            published=dict(published),
        )

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The attention kind of each layer."""
        return tuple(zip(self.windows, self.causal, strict=True))

    def hash(self, vocab: int) -> str:
        """The key of its cost; `vocab` is the size of the head it drafts with."""
        features = len(self.target_layer_ids)
        fields = {"layers": self.layers, "features": features, "windows": self.windows}
        block = {"block": self.block_size, "vocab": vocab}
        return hash_of({"drafter": "dflash", **self.shape.costs(), **fields, **block})


def is_dflash(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash drafter, of this or a later form."""
    return "dflash_config" in published or ARCHITECTURE in architectures(published)


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Feature layers of a config that names none: evenly from 1 to L - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(draft_layers))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.values.get("use_sliding_window") is False:
        return (None,) * layers
    sliding = [kind == SLIDING for kind in _layer_types(fields, layers)]
    window = fields.whole("sliding_window") if any(sliding) else None
    return tuple(window if slides else None for slides in sliding)


def _causal(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Sliding layers are causal and full ones are not, unless `is_causal` says so for all.

    As in the published class; sgl-project/sglang #34524 measured 5.62 accepted tokens so,
    against 5.27 with bidirectional sliding layers.
    """
    if fields.values.get("is_causal") is not None:
        return (fields.flag("is_causal", False),) * layers
    return tuple(kind == SLIDING for kind in _layer_types(fields, layers))


def _layer_types(fields: Fields, layers: int) -> list[str]:
    types = fields.values.get("layer_types") or [FULL] * layers
    known = isinstance(types, list) and all(kind in (SLIDING, FULL) for kind in types)
    if not known or len(types) != layers:
        raise fields.wrong("layer_types", f"a list of {layers} names, '{FULL}' or '{SLIDING}',")
    return types


def _layer_ids(fields: Fields, layers: int, target_layers: int | None) -> tuple[int, ...]:
    ids = fields.values.get("target_layer_ids")
    if ids is None:
        if target_layers is None:
            raise fields.wrong("num_target_layers", "given where target_layer_ids is not,")
        ids = list(default_layer_ids(target_layers, layers))
    whole = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not whole or not ids:
        raise fields.wrong("target_layer_ids", "a list of layer numbers")
    return tuple(ids)


class DFlashLayer(nn.Module):
    """One layer over block rows: attention to context and block, then the feed-forward."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, shape.hidden, normed=True)
        self.mlp = GatedFfn(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class DFlashModel(nn.Module):
    """The weights under their published names."""

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
        """The passes over these weights, made once; the model cannot be trained any more.

        The weights become views of joined ones, or are packed (`plain_state`).
        """
        self._passes = self._passes or DFlashPasses(self)
        return self._passes


def trainable_copy(model: DFlashModel) -> DFlashModel:
    """A model in float32 with the weights of one whose passes may have been made."""
    state = plain_state(model)
    copy = DFlashModel(model.config).to(state["fc.weight"].device)
    copy.load_state_dict(state)
    copy.head_tokens = model.head_tokens
    return copy.float()


class _JoinedLayer:
    """A layer's pass over block rows, with its products joined."""

    def __init__(self, layer: DFlashLayer, shape: DraftShape) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._shape = layer, shape
        self._qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._output = join([attention.o_proj])
        self._gate_up = join([mlp.gate_proj, mlp.up_proj])
        self._down = join([mlp.down_proj])
        norms = (attention.q_norm, shape.heads), (attention.k_norm, shape.kv_heads)
        weights = [norm.weight.detach().expand(heads, 1, -1) for norm, heads in norms]
        self._norms = torch.cat(weights)  # [heads + kv_heads, 1, head_dim]

    def keys_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Unnormed keys, and values, [rows, 2 * kv_heads * head_dim], of rows [rows, hidden]."""
        return self._qkv.outputs_from(self._shape.heads * self._shape.head_dim, rows)

    def __call__(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, layer: int, seen: Span
    ) -> torch.Tensor:
        """Outputs [rows, hidden] of rows [rows, hidden]; `layer` is this layer's number."""
        module, shape = self._layer, self._shape
        heads = self._qkv(module.input_layernorm(block))
        heads = heads.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
        rotated, value = heads.split((shape.heads + shape.kv_heads, shape.kv_heads))
        rotated = rotate(_over_rms(rotated, shape.norm_eps) * self._norms, rope)
        query, key = rotated.split((shape.heads, shape.kv_heads))
        cache.write(layer, cache.length, key, value)
        mixed = cache.attend(layer, query, seen, shape.head_dim**-0.5)
        mixed = mixed.transpose(0, 1).reshape(len(block), -1)
        block = self._output.added_to(block, mixed)
        both = self._gate_up(module.post_attention_layernorm(block))
        gate, up = both.chunk(2, dim=-1)
        return self._down.added_to(block, functional.silu(gate) * up, overwrite=True)


class DFlashPasses:
    """The two passes over a model's weights; see `DFlashModel.passes`."""

    def __init__(self, model: DFlashModel) -> None:
        self.model, self.config = model, model.config
        shape = model.config.shape
        with torch.no_grad():
            self._layers = [_JoinedLayer(layer, shape) for layer in model.layers]
            self._project = join([model.fc])
            norms = [layer.self_attn.k_norm.weight for layer in model.layers]
            self._key_norms = torch.stack(norms)[:, None, None]  # [layers, 1, 1, head_dim]

    def add_context(self, features: torch.Tensor, rope: Rope, cache: DraftCache) -> None:
        """Append the target's features [tokens, ids * hidden] to every layer's context."""
        cache.make_room(len(features))
        self.store_context(features, rope, cache)
        cache.length += len(features)

    def store_context(self, features: torch.Tensor, rope: Rope, cache: RowCache) -> None:
        """Write the rows of `add_context` after every layer's context, without counting them."""
        model, shape = self.model, self.config.shape
        context = model.hidden_norm(self._project(features))
        projected = torch.stack([layer.keys_values(context) for layer in self._layers])
        heads = projected.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        keys, values = heads.chunk(2, dim=1)  # [layers, kv_heads, rows, head_dim]
        keys = rotate(_over_rms(keys, shape.norm_eps) * self._key_norms, rope)
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.write(number, cache.length, key, value)

    def block(self, block: torch.Tensor, rope: Rope, cache: DraftCache) -> torch.Tensor:
        """Hidden states [block, hidden] for the target's head, of embeddings [block, hidden].

        Row 0 is the bonus token, the others are masks; the cache's context stays the same.
        """
        cache.make_room(len(block))
        spans = {kind: self._span(cache, block, *kind) for kind in self.config.kinds}
        return self.fill_in(block, rope, cache, spans)

    def fill_in(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, spans: Mapping[Kind, Span]
    ) -> torch.Tensor:
        """The same as `block`, with the span that rows see in layers of each kind given."""
        for number, (layer, kind) in enumerate(zip(self._layers, self.config.kinds, strict=True)):
            block = layer(block, rope, cache, number, spans[kind])
        normed: torch.Tensor = self.model.norm(block)
        return normed

    def _span(
        self, cache: DraftCache, block: torch.Tensor, window: int | None, causal: bool
    ) -> Span:
        """The span that block rows see: all without a mask, unless windowed or causal.

        A window of w tokens reaches from a row to the w - 1 before it and, if not causal, to as
        many after it.
        """
        end = cache.length + len(block)
        windowed = window is not None and window < end
        if not windowed and not causal:
            return Span(0, end, None)
        first = max(0, cache.length + 1 - window) if windowed and window is not None else 0
        start = first if windowed else cache.length  # the slot of the mask's first column
        row = torch.arange(cache.length, end, device=block.device)[:, None]
        slot = torch.arange(start, end, device=block.device)[None]
        visible = slot <= row if causal else torch.ones_like(slot == row)
        if windowed:
            visible &= (row - slot).abs() < window
        return span(self.config.shape, (first, end), visible, block.dtype)


def _over_rms(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row divided by its root mean square."""
    return functional.rms_norm(rows, rows.shape[-1:], eps=eps)


def load_dflash(folder: Path, published: Mapping[str, Any], like: torch.Tensor) -> DFlashModel:
    """The model in a checkpoint folder, on the device and in the dtype of `like`.

    published  its config.json
    Raises InputError with all tensors that are missing, unknown or of a wrong shape.
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
    """Write a model in the published format, and the tokens of a reduced head beside it."""
    save_checkpoint(folder, model.config.published, plain_state(model))
    if model.head_tokens is not None:
        write_tokens(folder, model.head_tokens)

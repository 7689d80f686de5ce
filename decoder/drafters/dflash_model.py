"""The DFlash draft model: a block of masks filled in one forward beside the target's features.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT): keys and values come
from context rows and block rows, queries from the block only; context rows are the target's
features, projected once for all layers, without a layer's input norm or feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    span,
)
from decoder.drafters.checkpoint import Fields, Weights, load_weights, read_shape, save_checkpoint

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_HEAD_DIM = 128  # of transformers' Qwen3Config, which the published class reads
SLIDING, FULL = "sliding_attention", "full_attention"

Kind = tuple[int | None, bool]  # of a layer's attention: its window, and whether it is causal

# Fields of related drafters that change what is computed, with the value that does not.
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
    """What config.json of a DFlash checkpoint says.

    windows  of each layer: how many tokens it sees back, None for all
    causal   of each layer: whether a block row sees only rows before it
    target_layer_ids   layers of the target whose outputs are the features
    num_target_layers  of the target it was trained for; None where it does not say
    vocab    of that target; None where it does not say
    published  config.json as it is
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
        """Read the fields of a config.json; `dflash_config` in it comes before its top level.

        Raises InputError naming the field that is missing, wrong or not supported.
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
        count = fields.whole("num_hidden_layers")
        known = fields.values.get("num_target_layers") is not None
        target_layers = fields.whole("num_target_layers") if known else None
        return cls(
            shape=read_shape(
                fields, head_dim=DEFAULT_HEAD_DIM, bias=fields.flag("attention_bias", False)
            ),
            windows=_windows(fields, count),
            causal=_causal(fields, count),
            block_size=fields.whole("block_size", DEFAULT_BLOCK_SIZE, least=2),
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
        """The attention of each layer."""
        return tuple(zip(self.windows, self.causal, strict=True))

    def hash(self, vocab: int) -> str:
        """The key of its cost; `vocab` is that of the head it borrows."""
        features = len(self.target_layer_ids)
        fields = {"layers": self.layers, "features": features, "windows": self.windows}
        block = {"block": self.block_size, "vocab": vocab}
        return hash_of({"drafter": "dflash", **self.shape.costs(), **fields, **block})


def is_dflash(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash drafter, of this or a later form."""
    return "dflash_config" in published or ARCHITECTURE in (published.get("architectures") or ())


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Target layers for features where a config names none: evenly from 1 to L - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(draft_layers))


class DFlashLayer(nn.Module):
    """One layer: attention to context and block, then the feed-forward, of block rows only."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, shape.hidden, normed=True)
        self.mlp = GatedFfn(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, layer: int, seen: Span
    ) -> torch.Tensor:
        rows = self.input_layernorm(block)
        self.self_attn.store(rows, rope, cache, layer, cache.length)
        block = block + self.self_attn(rows, rope, cache, layer, seen)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashModel(nn.Module):
    """The weights under their published names, and the two passes over them."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(shape) for _ in range(config.layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def add_context(self, features: torch.Tensor, rope: Rope, cache: DraftCache) -> None:
        """Append the target's features [tokens, ids * hidden] to every layer's context."""
        cache.make_room(len(features))
        self.store_context(features, rope, cache)
        cache.length += len(features)

    def store_context(self, features: torch.Tensor, rope: Rope, cache: RowCache) -> None:
        """Write what `add_context` appends behind every layer's context."""
        context = self.hidden_norm(self.fc(features))
        for number, layer in enumerate(self.layers):
            layer.self_attn.store(context, rope, cache, number, cache.length)

    def forward(self, block: torch.Tensor, rope: Rope, cache: DraftCache) -> torch.Tensor:
        """Hidden states [block, hidden], normed for the target's head, of embeddings likewise.

        Slot 0 is the bonus token, the others are masks; the cache's context stays as it is.
        """
        cache.make_room(len(block))
        spans = {kind: self._span(cache, block, *kind) for kind in self.config.kinds}
        return self.fill_in(block, rope, cache, spans)

    def fill_in(
        self, block: torch.Tensor, rope: Rope, cache: RowCache, spans: Mapping[Kind, Span]
    ) -> torch.Tensor:
        """`forward` where it is known what the rows see in layers of each kind."""
        for number, (layer, kind) in enumerate(zip(self.layers, self.config.kinds, strict=True)):
            block = layer(block, rope, cache, number, spans[kind])
        return self.norm(block)

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
    return model


def save_dflash(folder: Path, model: DFlashModel) -> None:
    """Write a model in the published format, which `load_dflash` and other engines read."""
    save_checkpoint(folder, model.config.published, model.state_dict())


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
    if not isinstance(types, list) or len(types) != layers or set(types) - {SLIDING, FULL}:
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

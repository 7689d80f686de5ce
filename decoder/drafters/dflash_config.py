"""config.json of a DFlash checkpoint.

Facts from the published code (z-lab/dflash, dflash/model.py, MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from costmodel.errors import InputError
from decoder.drafters.blocks import DraftShape, hash_of
from decoder.drafters.checkpoint import Fields, read_shape

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

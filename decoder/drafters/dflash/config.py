"""The fields of a block drafter's config.json, in the spellings that are published.

Every field is read, or known not to change what is computed, or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers import Qwen3Config

from costmodel.errors import InputError
from decoder.drafters.blocks import DraftShape, hash_of
from decoder.drafters.checkpoint import MOST_BLOCK, MOST_LAYERS, Fields, architectures, read_shape

USUAL = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "vocab_size", "rms_norm_eps",
)  # fmt: skip
DEFAULT_BLOCK_SIZE = 16
DEFAULT_HEAD_DIM = 128  # of transformers' Qwen3Config, which the published class reads
SLIDING, FULL = "sliding_attention", "full_attention"
EMBEDDING = -1  # the layer id that stands for the embedding's output
INNER, LAYER = "dflash_config", "transformer_layer_config"  # fields in mappings of their own

Kind = tuple[int | None, bool]  # a layer's attention: its window, and whether it is causal

# Fields that change the computation in drafters that are not built here, with the value that
# leaves it as here.
NEUTRAL: Mapping[str, Any] = {
    "projector_type": "dflash",
    "attention_mode": "gqa",
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "use_confidence_head": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "num_loops": 1,
    "topk_context": 0,
}

# Fields of training, of loading, and of a target's config that a drafter's was copied from.
_HARMLESS = """
    _name_or_path add_cross_attention architectures attention_dropout auf auto_map bos_token_id
    chunk_size_feed_forward confidence_detach_features confidence_head_with_markov draft_arch
    dtype emb_dim eos_token_id gru_hidden_dim id2label indexer_head_dim indexer_heads
    initializer_range is_decoder is_encoder_decoder label2id lambda_base_decay_ratio
    lambda_base_start loss_decay_factor max_anchors max_window_layers model_type num_anchors
    output_attentions output_hidden_states pad_token_id pretraining_tp problem_type
    pure_draft_prefix_len return_dict speculators_config speculators_version tie_word_embeddings
    topk_layers topk_local_window torch_dtype transformers_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """The fields of a DFlash checkpoint's config.json, and those that its relatives share.

    kinds              for each layer: tokens that it sees back (None for all), and whether a
                       block row sees only rows before it
    shifted            whether a row predicts the token after its own position, the bonus token's
                       row the first one
    target_layer_ids   layers of the target whose outputs are the features, or `EMBEDDING`
    softcap            of the head's scaled logits, by a tanh; None: as they are
    num_target_layers  of the target it was trained for; None if not given
    vocab              of that target; None if not given
    draft_vocab        tokens that it can draft; None for all
    """

    LABEL: ClassVar[str] = "a DFlash drafter"
    ARCHITECTURES: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)

    name: str
    shape: DraftShape
    kinds: tuple[Kind, ...]
    shifted: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    embedding_scale: float
    logit_scale: float
    softcap: float | None
    num_target_layers: int | None
    vocab: int | None
    draft_vocab: int | None
    published: Mapping[str, Any]

    @classmethod
    def recognises(cls, published: Mapping[str, Any]) -> bool:
        return cls.named_in(published) or INNER in published

    @classmethod
    def named_in(cls, published: Mapping[str, Any]) -> bool:
        """Whether a config.json names one of the architectures."""
        return any(name in architectures(published) for name in cls.ARCHITECTURES)

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> Self:
        """Read a config.json. Raises InputError with the field that is wrong or not supported."""
        if not cls.recognises(published):
            raise InputError(
                f"{where} is not that of {cls.LABEL}",
                hint=f"It has no {INNER}, and its architecture is not {cls.ARCHITECTURES[0]}.",
            )
        unknown = [name for name in architectures(published) if name not in cls.ARCHITECTURES]
        if unknown:
            raise InputError(
                f"{where} has architecture {unknown[0]}, which is not supported",
                hint=f"Those of {cls.LABEL} are {', '.join(cls.ARCHITECTURES)}.",
            )
        fields = Fields(_flat(published, where), where)
        config = cls(**cls.read(fields), published=dict(published))
        fields.refuse_unread(HARMLESS, NEUTRAL)
        return config

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        """The values of the dataclass's fields but `published`."""
        name = "jetspec" if fields.get("causal_head") else "dflash"
        return {"name": name, **backbone(fields, shifted=False)}

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def first_row(self) -> int:
        """The block's row that predicts the first drafted token."""
        return 0 if self.shifted else 1

    def costs(self) -> dict[str, object]:
        """The fields that the time of a draft depends on, but those of its layers' shape."""
        sizes = {"layers": self.layers, "features": len(self.target_layer_ids)}
        windows = [window for window, _ in self.kinds]
        return {**sizes, "windows": windows, **({"shifted": True} if self.shifted else {})}

    def hash(self, vocab: int) -> str:
        """The key of its cost; `vocab` is the size of the head it drafts with."""
        block = {"block": self.block_size, "vocab": vocab}
        return hash_of({"drafter": self.name, **self.shape.costs(), **self.costs(), **block})


def backbone(fields: Fields, *, shifted: bool) -> dict[str, Any]:
    """The values of `DFlashConfig` but its name; `shifted` holds where the config does not say."""
    count = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    shape = read_shape(fields, head_dim=DEFAULT_HEAD_DIM, bias=fields.flag("attention_bias", False))
    fields.require({"target_hidden_size": shape.hidden})
    has_layers = fields.get("num_target_layers") is not None
    vocab = fields.whole("vocab_size") if fields.get("vocab_size") else None
    drafted = fields.whole("draft_vocab_size", vocab or 1, most=vocab or 1)
    caps = fields.get("final_logit_softcapping")  # 0 and none: without
    return {
        "shape": shape,
        "kinds": _attention(fields, count),
        "shifted": fields.one_flag(("shift_label", "sample_from_anchor"), shifted),
        "block_size": fields.whole("block_size", DEFAULT_BLOCK_SIZE, least=2, most=MOST_BLOCK),
        "mask_token_id": fields.whole("mask_token_id", least=0),
        "target_layer_ids": _layer_ids(fields),
        "embedding_scale": fields.number("input_embedding_scale", 1.0),
        "logit_scale": fields.number("output_multiplier", 1.0),
        "softcap": fields.number("final_logit_softcapping", 1.0) if caps else None,
        "num_target_layers": fields.whole("num_target_layers") if has_layers else None,
        "vocab": vocab,
        "draft_vocab": None if drafted == (vocab or 1) else drafted,
    }


def of_speculators(fields: Fields) -> bool:
    """Whether a config is in the speculators library's form, which has defaults of its own."""
    return fields.get("speculators_model_type") is not None


def _flat(published: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All fields in one mapping. Raises InputError for a field with two values."""
    inner, layer = (published.get(name) or {} for name in (INNER, LAYER))
    for name, part in ((INNER, inner), (LAYER, layer)):
        if not isinstance(part, Mapping):
            raise InputError(f"{where}: '{name}' must be a mapping")
    outer = {name: value for name, value in published.items() if name not in (INNER, LAYER)}
    for name, value in inner.items():
        if outer.get(name) is not None and outer[name] != value:
            raise InputError(
                f"{where} has {name} = {outer[name]!r}, and {value!r} in its {INNER}",
                hint="Keep the one that the drafter was trained with.",
            )
    if layer:  # speculators leaves out what is Qwen3Config's own
        usual = Qwen3Config().to_dict()
        layer = {name: usual[name] for name in USUAL} | dict(layer)
    return {**layer, **outer, **inner}


def _attention(fields: Fields, layers: int) -> tuple[Kind, ...]:
    """The attention of each layer.

    Sliding layers are causal and full ones are not, unless a field says so for all, as in the
    published class (sgl-project/sglang #34524: 5.62 accepted tokens, 5.27 the other way).
    """
    types = fields.get("layer_types") or [FULL] * layers
    known = isinstance(types, list) and all(kind in (SLIDING, FULL) for kind in types)
    if not known or len(types) != layers:
        raise fields.wrong("layer_types", f"a list of {layers} names, '{FULL}' or '{SLIDING}',")
    sliding = [kind == SLIDING for kind in types]
    slid = fields.get("use_sliding_window") is not False and any(sliding)
    window = fields.whole("sliding_window") if slid else None
    fields.get("sliding_window")  # read, if unused
    both_ways = fields.flag("sliding_window_non_causal", of_speculators(fields))
    causal = fields.one_flag(("is_causal", "causal", "causal_head"), None)
    return tuple(
        (window if slides else None, slides and not both_ways if causal is None else causal)
        for slides in sliding
    )


def _layer_ids(fields: Fields) -> tuple[int, ...]:
    name, offset = "target_layer_ids", 0
    if of_speculators(fields) and fields.get(name) is None:
        name, offset = "aux_hidden_state_layer_ids", -1  # indices of the hidden states
    ids = fields.get(name)
    least = EMBEDDING - offset
    if not isinstance(ids, list) or not all(type(i) is int and i >= least for i in ids) or not ids:
        raise fields.wrong(name, "a list of layer numbers")
    return tuple(i + offset for i in ids)

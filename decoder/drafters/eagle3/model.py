"""The EAGLE-3 draft model: one causal layer over the target's features and token embeddings.

Facts from the published code (SafeAILab/EAGLE, eagle/model/cnets.py, Apache-2.0): the row of
position t joins the features of token t and the embedding of token t + 1, and predicts token
t + 2. Rows of drafted tokens take the layer's own output in place of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decoder.drafters.blocks import ALL_ROWS, DraftAttention, DraftShape, Rope, RowCache, hash_of
from decoder.drafters.checkpoint import (
    Fields,
    Weights,
    architectures,
    checked_ids,
    load_weights,
    read_shape,
)

FEATURES = 3  # hidden states of the target that are read
OWN_EMBEDDING = "embed_tokens.weight"

# Fields of related drafters that change the computation, with the value that leaves it as here.
PLAIN = dict.fromkeys(("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting"), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The fields of an EAGLE-3 checkpoint's config.json.

    vocab          of the target
    draft_vocab    of the drafter's own head; smaller where only frequent tokens are drafted
    target_hidden  the target's hidden size
    own_embedding  whether the checkpoint has an embedding; otherwise the target's is used
    normed         whether the attention's output is added to the hidden state after its norm
    in_list        whether the layer is stored as the first of a list, as by speculators
    features       indices of the target's hidden states that are read (0: the embedding); None
                   for those of the published code
    published      config.json unchanged
    """

    shape: DraftShape
    vocab: int
    draft_vocab: int
    target_hidden: int
    own_embedding: bool
    normed: bool
    in_list: bool
    features: tuple[int, ...] | None
    published: Mapping[str, Any]

    @classmethod
    def parse(
        cls,
        published: Mapping[str, Any],
        where: str = "config.json",
        *,
        own_embedding: bool = False,
    ) -> Eagle3Config:
        """Read a config.json, flat or in speculators' form. Raises InputError for a field."""
        layer = published.get("transformer_layer_config")
        own = {name: value for name, value in published.items() if value is not None}
        fields = Fields({**layer, **own} if isinstance(layer, Mapping) else own, where)
        fields.require(PLAIN)
        vocab = fields.whole("vocab_size")
        draft_vocab = fields.whole("draft_vocab_size", vocab)
        if draft_vocab > vocab:
            raise fields.wrong("draft_vocab_size", f"at most vocab_size ({vocab})")
        shape = read_shape(fields, head_dim=None, bias=False)
        return cls(
            shape=shape,
            vocab=vocab,
            draft_vocab=draft_vocab,
            target_hidden=fields.whole("target_hidden_size", shape.hidden),
            own_embedding=own_embedding,
            normed=fields.get("norm_before_residual") is True,
            in_list=isinstance(layer, Mapping),
            features=_features(published, where),
            published=dict(published),
        )

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from token ids."""
        return self.draft_vocab != self.vocab

    def hash(self) -> str:
        """The key of its cost."""
        fields = {"vocab": self.draft_vocab, "target_hidden": self.target_hidden}
        return hash_of({"drafter": "eagle3", **self.shape.costs(), **fields})


def is_eagle3(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 drafter, whatever number of layers it states."""
    named = any("eagle3" in str(name).lower() for name in architectures(published))
    return (named or "draft_vocab_size" in published) and "dflash_config" not in published


def is_eagle1(published: Mapping[str, Any]) -> bool:
    """Whether a config.json names a drafter of the first EAGLE, whose form is another."""
    names = (*architectures(published), published.get("model_type"))
    names += (published.get("speculators_model_type"),)
    return not is_eagle3(published) and any("eagle" in str(name).lower() for name in names)


def joined_features(folder: Path) -> int:
    """The widths that an EAGLE drafter joins: 3 hidden states, or 2 of EAGLE-1; 0 of others."""
    shape = Weights(folder, pickled=True).shapes.get("fc.weight", (1, 0))
    return shape[1] // shape[0] if len(shape) == 2 else 0


def _features(published: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """The hidden states that a config names, in one of two conventions.

    Ids from 1 on are layers whose outputs are read (SpecForge; 1 is the lowest that it takes).
    Others are indices of the hidden states, as in vLLM and speculators, whose lowest is 2 or
    more. The first id tells them apart (sgl-project/sglang, pull request 25454).
    """
    name = "eagle_aux_hidden_state_layer_ids"
    inner = published.get("eagle_config")
    fields = published if name in published or not isinstance(inner, Mapping) else inner
    ids = fields.get(name)
    if ids is None or ids == []:
        return None
    whole = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
    if not whole or len(ids) != FEATURES:
        raise Fields(fields, where).wrong(name, f"{FEATURES} layers")
    return tuple(one + 1 for one in ids) if ids[0] == 1 else tuple(ids)


class Eagle3Layer(nn.Module):
    """The decoder layer; its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, 2 * shape.hidden, normed=False)
        self.mlp = shape.mlp()
        self.hidden_norm = shape.norm()
        self.input_layernorm = shape.norm()
        self.post_attention_layernorm = shape.norm()


class Eagle3Model(nn.Module):
    """The weights under their published names, and the passes over them."""

    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.fc = nn.Linear(FEATURES * config.target_hidden, shape.hidden, bias=False)
        layer = Eagle3Layer(shape)
        if config.in_list:
            self.layers = nn.ModuleList([layer])
        else:
            self.midlayer = layer
        self.norm = shape.norm()
        self.lm_head = nn.Linear(shape.hidden, config.draft_vocab, bias=False)
        if config.mapped:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, shape.hidden)

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, rope: Rope, cache: RowCache
    ) -> torch.Tensor:
        """The layer's output [rows, hidden] for embeddings and hidden states [rows, hidden]."""
        layer: Any = self.layers[0] if self.config.in_list else self.midlayer
        normed = layer.hidden_norm(hidden)
        rows = torch.cat((layer.input_layernorm(embedding), normed), dim=-1)
        layer.self_attn.store(rows, rope, cache, 0)
        residual = normed if self.config.normed else hidden
        hidden = residual + layer.self_attn(rows, rope, cache, 0, ALL_ROWS)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, draft_vocab] of the layer's output [rows, hidden]."""
        return self.lm_head(self.norm(hidden))


def load_eagle3(folder: Path, published: Mapping[str, Any], like: torch.Tensor) -> Eagle3Model:
    """The model in a checkpoint folder, on the device and in the dtype of `like`.

    published  its config.json
    Raises InputError with all tensors that are missing, unknown or of a wrong shape.
    """
    weights = Weights(folder, pickled=True)
    where = f"{folder / 'config.json'}"
    own_embedding = OWN_EMBEDDING in weights.shapes
    config = Eagle3Config.parse(published, where, own_embedding=own_embedding)
    with torch.device("meta"):
        model = Eagle3Model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # t2d follows from d2t; with equal vocabularies neither is used.
    unused = {"t2d": (config.vocab,)} | ({} if config.mapped else {"d2t": (config.draft_vocab,)})
    weights.check(shapes | unused, optional=frozenset(unused))
    load_weights(model, weights.read(shapes, like.device), like.dtype)
    if config.mapped:
        checked_ids(model.d2t, config.vocab, where)
    return model

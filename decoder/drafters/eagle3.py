"""The EAGLE-3 drafter: a tree grown level by level from the target's features (Li et al., 2025).

Facts from the published code (SafeAILab/EAGLE, eagle/model/cnets.py, Apache-2.0): the row of
position t joins the features of token t and the embedding of token t + 1, and predicts token
t + 2. Rows of drafted tokens take the layer's own output in place of features. The passes over a
text and its trees are captured where the target's forwards are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from costmodel.statistics import Ints
from decoder.acceptance.drawn import LevelDistributions, draw_levels
from decoder.device import to_device
from decoder.drafters.base import Drafter, DraftRequest, Draws
from decoder.drafters.blocks import (
    ALL_ROWS,
    DraftAttention,
    DraftShape,
    Rope,
    Rotary,
    RowCache,
    hash_of,
)
from decoder.drafters.caches import (
    CAPTURED_ROWS,
    DraftRows,
    FeatureSession,
    PlacedText,
    RowForwards,
    SharedCaches,
    check_observed,
)
from decoder.drafters.checkpoint import (
    Fields,
    Weights,
    architectures,
    checked_ids,
    is_padded,
    load_weights,
    read_shape,
    refuse_misfit,
    stored_model,
    token_ids,
)
from decoder.drafters.vocabulary import over_vocabulary, softmax, top_children
from decoder.model.attention import RowBlock
from decoder.model.kv_cache import CacheShape
from decoder.model.runtime.capture import CudaCapture, Tensors
from decoder.model.runtime.linear import pack_layers
from decoder.model.target import Target
from decoder.tree.draft_tree import CandidateTree, DraftTree
from decoder.tree.growth import Frontier, grow

FEATURES = 3  # hidden states of the target that are read
OWN_EMBEDDING = "embed_tokens.weight"

# Fields of related drafters that change the computation, with the value that leaves it as here.
PLAIN = dict.fromkeys(("norm_before_fc", "norm_output", "fc_norm", "parallel_drafting"), False)
# The published default: the root's children, then as many expansions, one forward each.
EXPANSIONS = 7
CHUNK_ROWS = 512  # of a prompt in one forward


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
        """Read a config.json, flat or in speculators' form. Raises InputError with the field."""
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
    """The model in a folder with this config.json, on the device and in the dtype of `like`.

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


class Eagle3Drafter(Drafter):
    """Drafts trees with one small layer of its own; the embedding is the target's.

    source  a checkpoint's folder or hub id, or a loaded model
    Raises InputError if the checkpoint is damaged or belongs to another target.
    """

    name = "eagle3"
    draws: Draws = "levels"
    max_depth = EXPANSIONS + 1
    deepens = True

    def __init__(self, target: Target, source: str | Path | Eagle3Model) -> None:
        self.model = stored_model(source, target, load_eagle3)
        if self.model is not source:
            pack_layers(self.model)
        config = self.model.config
        check_fit(config, target)
        self.target = target
        self.rotary = Rotary(config.shape, target.device)
        # The hidden states that enter these layers.
        layers = target.architecture.layers
        self.feature_layers = config.features or (2, layers // 2, layers - 3)
        self.architecture_hash = config.hash()
        self.tokens = token_ids(self.model.d2t).cpu().numpy() if config.mapped else None
        vocab = target.architecture.vocab  # with rows of padding that the drafter may lack
        if config.vocab < vocab and not config.mapped:
            self.tokens = np.arange(config.vocab)
        if config.own_embedding:
            table = self.model.embed_tokens
            rows = nn.functional.pad(table.weight, (0, 0, 0, vocab - len(table.weight)))
            table.weight = nn.Parameter(rows, requires_grad=False)

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None = None
    ) -> Eagle3Session:
        return Eagle3Session(self, prompt, features)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self.model.config.own_embedding
        return self.model.embed_tokens(ids) if own else self.target.embed(ids)

    @cached_property
    def forwards(self) -> LevelForwards:
        """The passes over its texts; captured if the target's forwards are."""
        return LevelForwards(self, self.target.runtime.capture)


class Eagle3Session(FeatureSession):
    """The drafting of one text: its draft cache, and features that are not yet in it."""

    rewinds = True

    def __init__(self, drafter: Eagle3Drafter, prompt: Ints, features: torch.Tensor | None) -> None:
        """features: of the prompt, [tokens, 3 * hidden]

        The row of the prompt's last token waits for the bonus token, which it embeds.
        """
        super().__init__("an EAGLE-3 drafter")
        self._drafter = drafter
        self._text = Eagle3Text(drafter.forwards)
        self._narrow: list[torch.Tensor] = []  # of the drafter's width, before the others
        self.observe(prompt.tolist(), features)
        self._extend(prompt)

    def draft(self, context: Ints, request: DraftRequest) -> CandidateTree:
        """The tree grown by `request.growth`, with probabilities given the parent."""
        drafter = self._drafter
        q = self._distributions(context, request.temperature)
        deepest = min(request.depth, drafter.deepest(request.growth))
        return grow(top_children(q, drafter.tokens), request.growth, deepest)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        drafter, q = self._drafter, self._distributions(context, temperature)
        vocab = drafter.target.architecture.vocab

        def whole(frontier: Frontier) -> torch.Tensor:
            return over_vocabulary(q(frontier), drafter.tokens, vocab)

        return draw_levels(shape, whole, generator, int(shape.depths.max(initial=0)))

    def rewind(self, tokens: int) -> None:
        self._text.cut(tokens)
        self._waiting.clear()
        self._narrow.clear()

    def take_in(self, features: torch.Tensor) -> None:
        self._narrow.append(self._drafter.model.fc(features))

    def _distributions(self, context: Ints, temperature: float) -> LevelDistributions:
        """q of the drafter's tokens below the nodes of a tree behind the context."""
        self._extend(context)
        check_observed(self._text.length, len(context))
        return lambda frontier: softmax(self._text.below(frontier), temperature)

    @torch.inference_mode()
    def _extend(self, context: Ints) -> None:
        """Bring every row whose next token is known into the draft cache."""
        self.take_in_waiting()
        if not self._narrow:
            return
        waiting = torch.cat(self._narrow)
        length = self._text.length
        rows = max(min(len(waiting), len(context) - 1 - length), 0)
        for first in range(0, rows, CHUNK_ROWS):
            chunk = waiting[first : min(first + CHUNK_ROWS, rows)]
            at = length + first + 1
            self._text.extend(chunk, context[at : at + len(chunk)])
        self._narrow = [waiting[rows:]] if rows < len(waiting) else []


def check_fit(config: Eagle3Config, target: Target) -> None:
    """Raise InputError unless the drafter was made for such a target."""
    hidden, layers = target.architecture.hidden, target.architecture.layers
    vocab, width = target.architecture.vocab, config.shape.hidden
    fields = {
        "target hidden size": (config.target_hidden, hidden),
        "vocabulary": (None if is_padded(config.vocab, vocab) else config.vocab, vocab),
    }
    problems = []
    if width != hidden and not config.own_embedding:
        problems.append(
            f"it is {width} wide and brings no embedding, and the target's is {hidden} wide"
        )
    if layers < 3:
        problems.append(f"it reads the inputs of three layers, and the target has {layers}")
    refuse_misfit(target, fields, problems)


class LevelForwards:
    """The passes of a drafter over all its texts: rows of a round, and levels of a tree.

    Narrowing the features (one product) and choosing the best children, whose number and
    temperature change by round, are outside of what may be captured.
    """

    def __init__(self, drafter: Eagle3Drafter, capture: CudaCapture | None) -> None:
        self._model, self._rotary, self._embed = drafter.model, drafter.rotary, drafter.embed
        shape, target = drafter.model.config.shape, drafter.target
        self._dtype, self.device = target.dtype, target.device
        sizes = CacheShape(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.caches = SharedCaches(sizes, target.dtype, target.device, target)
        # The layer's output at the last frontier, which the next level reads. One for all texts,
        # since a draft is finished before another begins.
        rows = torch.zeros(CAPTURED_ROWS, shape.hidden, dtype=target.dtype, device=target.device)
        self._hidden = rows
        self.extend = RowForwards("taking in a round's rows", self._extend, shape.group, capture)
        self.expand = RowForwards("the draft of a level", self._level, shape.group, capture)

    def keep(self, hidden: torch.Tensor) -> None:
        """Keep the output [rows, hidden] of the root, or of the last level, for the next one."""
        if len(hidden) > len(self._hidden):  # captured levels read the old tensor and are dropped
            self._hidden = hidden.new_zeros(2 * len(hidden), hidden.shape[1])
            self.expand.forget()
        self._hidden[: len(hidden)].copy_(hidden)

    def _extend(self, rows: DraftRows, hidden: torch.Tensor) -> Tensors:
        """Output [1, hidden] and logits [1, draft_vocab] of the last row before the padding."""
        last = self._run(rows, hidden)[rows.last]
        return last, self._model.logits(last)

    def _level(self, rows: DraftRows, above: torch.Tensor) -> Tensors:
        output = self._run(rows, self._hidden.index_select(0, above))
        return output, self._model.logits(output)

    def _run(self, rows: DraftRows, hidden: torch.Tensor) -> torch.Tensor:
        rope, embedded = rows.rope(self._rotary, self._dtype), self._embed(rows.tokens)
        return self._model(embedded, hidden, rope, rows)


class Eagle3Text(PlacedText):
    """The passes over one text: its context, and the rows of its tree, which are pending."""

    def __init__(self, forwards: LevelForwards) -> None:
        super().__init__(forwards.caches)
        self._forwards = forwards
        self._root = (torch.empty(0), torch.empty(0))  # output and logits at the newest row
        self._ancestors = np.zeros((1, 0), np.bool_)  # of the last frontier's nodes

    @torch.inference_mode()
    def extend(self, hidden: torch.Tensor, next_tokens: Ints) -> None:
        """Append rows of narrowed features [rows, hidden] and the tokens after them."""
        rows = len(hidden)
        self.cut(self.length)  # the rows of the last tree
        self.make_room(rows)
        block = RowBlock(self.sequence, next_tokens, np.arange(rows), None)
        output, logits = self._forwards.extend(self.cache, block, hidden)
        self.cache.lengths[self.sequence] += rows
        self._root = output.clone(), logits.clone()  # the next rows overwrite them

    @torch.inference_mode()
    def below(self, frontier: Frontier) -> torch.Tensor:
        """Logits [F, draft_vocab] below the frontier's nodes; `ROOT` begins a new tree."""
        if not frontier.depth:
            output, logits = self._root
            self.cut(self.length)
            self._ancestors = np.zeros((1, 0), np.bool_)
            self._forwards.keep(output)
            return logits
        rows = len(frontier.rows)
        self.make_room(rows)
        themselves = np.eye(rows, dtype=np.bool_)
        visible = np.concatenate((self._ancestors[frontier.above], themselves), axis=1)
        offsets = np.full(rows, frontier.depth - 1)  # children of the root follow the context
        block = RowBlock(self.sequence, frontier.tokens, offsets, visible)
        above = to_device(frontier.above, self._forwards.device)
        hidden, logits = self._forwards.expand(self.cache, block, above)
        self._forwards.keep(hidden[:rows])
        self.cache.pending[self.sequence] += rows
        self._ancestors = visible
        return logits[:rows]

"""The SpecBlock draft model: K dependent positions in one forward (Shi et al., section 3.1).

Its form is that of the checkpoints which the authors released (shiweijiezero/SpecBlock).
README.md has what their code adds to the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from decoder.drafters.blocks import DraftAttention, DraftShape, Rope, Rotary, Span, hash_of
from decoder.drafters.checkpoint import (
    MOST_BLOCK,
    MOST_LAYERS,
    Fields,
    Weights,
    architectures,
    load_weights,
    read_shape,
    save_checkpoint,
    token_ids,
)
from decoder.model.runtime.linear import pack_layers, plain_state
from lab.papers.specblock.cache import DraftCache, span

# The released configs have either name; the models are the same.
ARCHITECTURES = ("LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")
FEATURES = 3  # hidden states of the target: low, mid, top
EXAMPLES = "examples"  # the one tensor that released checkpoints lack
Projection = Callable[[torch.Tensor], torch.Tensor]  # states [rows, hidden] to logits
MOST_BRANCHING = 64
LIKELIEST = 20  # tokens over which the summary is normalised
TOP = 10  # log-probabilities in the summary
GAPS = (2, 3, 5)  # ranks whose logits are compared with the first
SUMMARY = TOP + len(GAPS) + 2
BOUNDS = (1, 4, 10)  # the last rank of each bucket but the last
BUCKETS = len(BOUNDS) + 1
RANK_HIDDEN = 256
TREES = ("paper", "repository")  # names of growths (`lab.papers.specblock.tree`)
# Parts that the ablations of the paper's table 2 leave out, and the names of these.
PARTS = {
    "prefix_broadcast": "no-broadcast",
    "layer_shift": "no-shift",
    "valid_prefix_mask": "no-mask",
    "rank_head": "no-rank-head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBlockConfig:
    """The fields of a SpecBlock checkpoint's config.json.

    block_length    K: positions of a block
    feature_layers  indices into the target's `hidden_states`; None for EAGLE-3's low, mid, top
    tree            name of its trees' growth: the paper's or that of the authors' code
    branching       children at a position of each bucket; None for that growth's
    parts           those of `PARTS` that it has or was trained with; released ones have all
    published       config.json unchanged
    """

    shape: DraftShape
    layers: int
    block_length: int
    vocab: int
    draft_vocab: int
    feature_layers: tuple[int, ...] | None
    tree: str
    branching: tuple[int, ...] | None
    parts: frozenset[str]
    published: Mapping[str, Any]

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> SpecBlockConfig:
        """Read a config.json. Raises InputError with the field that is wrong or not supported."""
        names = architectures(published)
        if not set(names) & set(ARCHITECTURES):
            raise InputError(
                f"{where} is of {', '.join(map(str, names))}, not of {ARCHITECTURES[-1]}",
                hint="Drafters of other forms, also those trained before the released one was "
                "read, are to be trained again.",
            )
        # Whatever the config says, heads are as wide as the hidden size allows.
        fields = Fields({key: published[key] for key in published if key != "head_dim"}, where)
        vocab = fields.whole("vocab_size")
        draft_vocab = fields.whole("draft_vocab_size", vocab, least=LIKELIEST)
        if draft_vocab > vocab:
            raise fields.wrong("draft_vocab_size", f"at most vocab_size ({vocab})")
        shape = read_shape(fields, head_dim=None, bias=False)
        if shape.hidden % (2 * shape.heads):
            raise fields.wrong("hidden_size", f"an even multiple of {shape.heads} heads")
        fields.require(
            {"rank_classes": BUCKETS, "attention_bias": False, "target_hidden_size": shape.hidden}
        )
        tree = published.get("tree", TREES[0])
        if tree not in TREES:
            raise fields.wrong("tree", " or ".join(TREES))
        return cls(
            shape=shape,
            layers=fields.whole("num_hidden_layers", most=MOST_LAYERS),
            block_length=fields.whole("diffspec_draft_token_num", most=MOST_BLOCK),
            vocab=vocab,
            draft_vocab=draft_vocab,
            feature_layers=_numbers(fields, "feature_layers", FEATURES, 1 << 20),
            tree=tree,
            branching=_numbers(fields, "branching", BUCKETS, MOST_BRANCHING),
            parts=frozenset(part for part in PARTS if fields.flag(part, True)),
            published=dict(published),
        )

    def features_of(self, layers: int) -> tuple[int, ...]:
        """Indices of the hidden states that it reads of a target with so many layers."""
        usual = (2, layers // 2, layers - 3)  # low, mid and top, as EAGLE-3's
        return self.feature_layers or tuple(min(max(i, 1), max(layers - 1, 0)) for i in usual)

    def costs(self) -> dict[str, object]:
        """The fields that the time of a forward depends on."""
        sizes = {"layers": self.layers, "block": self.block_length, "vocab": self.draft_vocab}
        parts = {part: part in self.parts for part in ("layer_shift", "rank_head")}
        return {**self.shape.costs(), **sizes, **parts}

    def hash(self, growth: Mapping[str, object]) -> str:
        """The key of its cost; `growth` has the fields of the tree that cost depends on."""
        return hash_of({"drafter": "specblock", **self.costs(), **growth})


def is_specblock(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a SpecBlock drafter, of whatever form."""
    return any("SpecBlock" in str(name) for name in architectures(published))


def summary(logits: torch.Tensor) -> torch.Tensor:
    """psi, [rows, 15] in float32, of logits [rows, vocab] with vocab of 20 or more.

    Of the 20 most likely tokens alone: ten log-probabilities, descending; how far the first logit
    is above those of ranks 2, 3 and 5; the first probability; the entropy in nats.
    """
    best = logits.topk(LIKELIEST).values.float()
    logs = best.log_softmax(-1)
    gaps = torch.stack([best[:, 0] - best[:, rank - 1] for rank in GAPS], dim=1)
    entropy = -(logs.exp() * logs).nan_to_num(0.0).sum(-1, keepdim=True)
    return torch.cat((logs[:, :TOP], gaps, logs[:, :1].exp(), entropy), dim=1)


def ranks_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rank of each row's token in its logits [rows, vocab], 1 the most probable; int64.

    ids  int64 [rows]; -1 for a token that the drafter lacks, whose rank is vocab + 1
    """
    of_token = logits.gather(-1, ids.clamp_min(0)[:, None])
    ranks = 1 + (logits > of_token).sum(-1)
    return torch.where(ids < 0, logits.shape[-1] + 1, ranks)


def buckets_of(ranks: torch.Tensor) -> torch.Tensor:
    """Bucket labels of ranks: 1 is b_0, 2 to 4 b_1, 5 to 10 b_2, more b_3."""
    bounds = torch.tensor(BOUNDS, device=ranks.device)
    return (ranks[..., None] > bounds).sum(-1)


class RankHead(nn.Sequential):
    """g_phi (equation 4): bucket logits of a state and the summary of its distribution."""

    def __init__(self, hidden: int) -> None:
        inner = nn.Linear(hidden + SUMMARY, RANK_HIDDEN, bias=False)
        super().__init__(inner, nn.SiLU(), nn.Linear(RANK_HIDDEN, BUCKETS, bias=False))

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[rows, 4] of normed states [rows, hidden] and their logits; neither gets a gradient."""
        features = summary(logits.detach()).nan_to_num_(0.0, 0.0, -100.0).to(hidden.dtype)
        return super().forward(torch.cat((hidden.detach(), features), dim=-1))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of a forward whose h^(L) is wanted: their numbers [W], and the span they see."""

    rows: torch.Tensor
    seen: Span


class InputLayer(nn.Module):
    """The parts of equations (1) and (2)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        hidden, norm = config.shape.hidden, config.shape.norm
        self.condition_proj = nn.Linear(FEATURES * hidden, hidden, bias=False)  # W_cond
        self.condition_norm = norm()
        self.token_norm = norm()
        self.query_norm = norm()
        self.position_queries = nn.Embedding(config.block_length, hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)  # W_fuse


class SpecBlockLayer(nn.Module):
    """A decoder layer of Llama's form."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, shape.hidden, normed=False)
        self.mlp = shape.mlp()
        self.input_layernorm = shape.norm()
        self.post_attention_layernorm = shape.norm()


class SpecBlockModel(nn.Module):
    """The weights under their released names, and the passes of training and drafting alike."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        shape, hidden = config.shape, config.shape.hidden
        self.config = config
        self.input_layer = InputLayer(config)
        self.layers = nn.ModuleList(SpecBlockLayer(shape) for _ in range(config.layers))
        shifts = config.layers - 1 if "layer_shift" in config.parts else 0
        self.shift_proj = nn.ModuleList(  # W_shift of equation (3), before all layers but the first
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(shifts)
        )
        self.norm = shape.norm()
        self.lm_head = nn.Linear(hidden, config.draft_vocab, bias=False)
        self.rank_head = RankHead(hidden) if "rank_head" in config.parts else None
        # The drafted tokens: marked among all, and each one's id less its place among them.
        self.register_buffer("t2d", torch.zeros(config.vocab, dtype=torch.bool))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
        # Texts that trained the trunk, and those that trained the rank head too.
        self.register_buffer(EXAMPLES, torch.zeros(2, dtype=torch.int64))

    @property
    def tokens(self) -> torch.Tensor:
        """The target's token of each drafted one, int64 [draft_vocab]."""
        return token_ids(self.d2t)

    def set_tokens(self, tokens: torch.Tensor) -> None:
        """Draft these tokens, int64 [draft_vocab]."""
        self.t2d.zero_()[tokens] = True
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def ranked(self) -> bool:
        """Whether it has a trained rank head; without one, trees are uniform."""
        return self.rank_head is not None and int(self.examples[1]) > 0

    @property
    def without(self) -> tuple[str, ...]:
        """The paper's parts that it lacks, as names like `no-shift`."""
        has = self.config.parts - (set() if self.ranked else {"rank_head"})
        return tuple(name for part, name in PARTS.items() if part not in has)

    @property
    def name(self) -> str:
        """`specblock`, with the parts it lacks: `specblock:no-shift`."""
        return ":".join(("specblock", *self.without))

    def condition(self, features: torch.Tensor) -> torch.Tensor:
        """Equation (1): conditions [rows, hidden] of the target's features [rows, 3 * hidden]."""
        return self.input_layer.condition_proj(features)

    def inputs(self, conditions: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """h^(0), [blocks, K, hidden], from conditions and embeddings [blocks, hidden].

        Equation (2): the prefix is broadcast to all positions, only the query differs.
        """
        part, dtype = self.input_layer, self.dtype  # under autocast, products are narrower
        prefix = torch.cat(
            (part.condition_norm(conditions.to(dtype)), part.token_norm(embeddings.to(dtype))),
            dim=-1,
        )
        width = prefix.shape[-1]
        fused = functional.linear(prefix, part.fuse.weight[:, :width])[:, None]
        if "prefix_broadcast" not in self.config.parts:
            later = fused.new_zeros(len(fused), self.config.block_length - 1, fused.shape[-1])
            fused = torch.cat((fused, later), dim=1)
        queries = part.query_norm(part.position_queries.weight)
        return (fused + functional.linear(queries, part.fuse.weight[:, width:])).to(dtype)

    def forward(
        self,
        rows: torch.Tensor,
        rope: Rope,
        cache: DraftCache,
        seen: Span,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """h^(L), [rows, hidden], from the rows h^(0) of whole blocks: of all, or of wanted rows.

        The keys and values of all rows go into the last slots of the span `seen`.
        """
        cache.start = seen.end - len(rows)
        before = torch.arange(len(rows), device=rows.device)
        before = before - (before % self.config.block_length > 0).long()
        for number, layer in enumerate(self.layers):
            if number and len(self.shift_proj):
                shift = self.shift_proj[number - 1]
                rows = shift(torch.cat((rows, rows[before]), dim=-1)).to(rows.dtype)
            normed = layer.input_layernorm(rows)
            layer.self_attn.store(normed, rope, cache, number)
            if wanted is not None and number == self.config.layers - 1:
                rows, normed, seen = rows[wanted.rows], normed[wanted.rows], wanted.seen
                rope = (rope[0][wanted.rows], rope[1][wanted.rows])
            rows = rows + layer.self_attn(normed, rope, cache, number, seen)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        return rows

    def first_blocks(
        self,
        rotary: Rotary,
        cache: DraftCache,
        conditions: torch.Tensor,
        embeddings: torch.Tensor,
        last: int = 1,
    ) -> torch.Tensor:
        """The first blocks of the tokens behind the cache: h^(L) of the last, [last, K, hidden].

        conditions, embeddings  [tokens, hidden]
        Their rows are behind the cache's context, whose length does not change. A row sees all
        rows of earlier tokens and its own block's up to itself, so the mask is causal.
        """
        rows = self.inputs(conditions, embeddings).flatten(0, 1)
        count, length, device = len(rows), self.config.block_length, rows.device
        cache.make_room(count)
        ends = (0, cache.length + count)
        visible = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        tokens = cache.length // length + torch.arange(len(conditions), device=device)
        rope = rotary(self.positions(tokens).flatten(), rows.dtype)
        chosen = torch.arange(count, device=device)[-last * length :]
        shape, dtype = self.config.shape, rows.dtype
        wanted = Wanted(chosen, span(shape, ends, visible[chosen], dtype))
        seen = span(shape, ends, visible, dtype)
        return self(rows, rope, cache, seen, wanted).unflatten(0, (-1, length))

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotary positions [tokens, K] of all blocks that begin at these tokens."""
        offsets = torch.arange(self.config.block_length, device=tokens.device)
        return tokens[:, None] + 1 + offsets

    def read(
        self, hidden: torch.Tensor, project: Projection | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits over the draft vocabulary and over the buckets, from h^(L) [rows, hidden].

        project  replaces the LM head
        The second is None without a rank head.
        """
        normed = self.norm(hidden)
        logits = (project or self.lm_head)(normed)
        return logits, None if self.rank_head is None else self.rank_head(normed, logits)


def load_specblock(
    folder: Path, published: Mapping[str, Any], like: torch.Tensor
) -> SpecBlockModel:
    """The model in a checkpoint folder, on the device and in the dtype of `like`.

    published  its config.json
    Raises InputError with all tensors that are missing, unknown or of a wrong shape.
    """
    where = f"{folder / 'config.json'}"
    config = SpecBlockConfig.parse(published, where)
    with torch.device("meta"):
        model = SpecBlockModel(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = Weights(folder)
    weights.check(shapes, optional=frozenset({EXAMPLES}))
    tensors = weights.read(shapes, like.device)
    tensors.setdefault(EXAMPLES, torch.ones(2, dtype=torch.int64, device=like.device))
    _check_mapping(tensors, config, where)
    load_weights(model, tensors, like.dtype)
    return model


def pack_specblock(model: SpecBlockModel) -> None:
    """Pack the linear layers where device and dtype allow; not W_fuse, which is used in parts."""
    parts = (model.input_layer.condition_proj, model.layers, model.shift_proj)
    for part in (*parts, model.lm_head, model.rank_head):
        if part is not None:
            pack_layers(part)


def plain_copy(model: SpecBlockModel) -> SpecBlockModel:
    """A model with plain weights, which can be trained; those of the given one may be packed."""
    copy = SpecBlockModel(model.config).to(model.norm.weight.device, model.dtype)
    copy.load_state_dict(plain_state(model))
    return copy.eval().requires_grad_(False)


def save_specblock(folder: Path, model: SpecBlockModel) -> None:
    """Write a model in the format that `load_specblock` reads."""
    save_checkpoint(folder, model.config.published, plain_state(model))


def _check_mapping(
    tensors: Mapping[str, torch.Tensor], config: SpecBlockConfig, where: str
) -> None:
    """Check that d2t gives each drafted token once, and t2d marks the same ones."""
    for name, dtype in (("d2t", torch.int64), ("t2d", torch.bool), (EXAMPLES, torch.int64)):
        if tensors[name].dtype != dtype:
            raise InputError(
                f"'{name}' beside {where} must hold {dtype} and is {tensors[name].dtype}"
            )
    tokens, marked = token_ids(tensors["d2t"]).sort().values, tensors["t2d"].nonzero()[:, 0]
    if not torch.equal(tokens, marked):
        raise InputError(
            f"d2t and t2d beside {where} do not name the same {config.draft_vocab} tokens of the "
            f"vocabulary of {config.vocab}",
            hint="The checkpoint is damaged, or its vocab_size is wrong.",
        )


def _numbers(fields: Fields, name: str, count: int, most: int) -> tuple[int, ...] | None:
    value = fields.get(name)
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(i) is int and 0 <= i <= most for i in value)
    if not whole or len(value) != count:
        limit = f", at most {most}," if name == "branching" else ""
        raise fields.wrong(name, f"a list of {count} whole numbers{limit}")
    return tuple(value)

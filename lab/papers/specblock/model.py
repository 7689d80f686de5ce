"""The SpecBlock draft model: K dependent positions in one forward (Shi et al., section 3.1).

Choices made here where the paper leaves one open:

- As in EAGLE-3, a block's condition is the features of the token before the one it embeds: those
  of the row that chose it. Likewise, a later block's condition is the state that proposed the
  token it starts from.
- The verified prefix keeps one row a token, that of a block's first position there (the paper:
  "the K keys and values that every committed position produced"): K rows would be K caches.
- Position k of a block at row t has the rotary position t + k - 1, so that a block started from
  position j has the positions that its tokens' rows will have once they are verified.
- The shift is between decoder layers, L - 1 times: before the first layer, positions differ by
  their query alone.
- Embedding and LM head (its rows for the reduced vocabulary) are the target's own, unless the
  checkpoint brings a head.
- The rank head (section 3.2, appendix B) has one hidden layer, and reads the state after the final
  norm, as the LM head does, so that its size is bounded. Tokens outside the reduced vocabulary
  count as rank > 10.
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
from decoder.drafters.blocks import (
    DraftAttention,
    DraftCache,
    DraftShape,
    GatedFfn,
    Rope,
    Span,
    hash_of,
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
from decoder.model.runtime.linear import pack_layers, plain_state

ARCHITECTURE = "SpecBlockDraftModel"
FEATURES = 3  # hidden states of the target: low, mid, top
HEAD = "lm_head.weight"
Projection = Callable[[torch.Tensor], torch.Tensor]  # states [rows, hidden] to logits
MOST_BRANCHING = 64
TOP = 10  # log-probabilities in the summary
GAPS = (2, 3, 5)  # ranks whose logits are compared with the first
SUMMARY = TOP + len(GAPS) + 2
BOUNDS = (1, 4, 10)  # the last rank of each bucket but the last
BUCKETS = len(BOUNDS) + 1
RANK_HIDDEN = 128
CONCENTRATED = (2, 4, 10, 0)  # the paper's two recommendations: give up on ranks beyond ten,
FALLBACK = (2, 4, 6, 4)  # or keep four candidates there
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
    feature_layers  indices into the target's `hidden_states`: low, mid, top
    branching       children at a position of each bucket
    parts           those of `PARTS` that it has or was trained with
    own_head        whether the checkpoint has an LM head
    published       config.json unchanged
    """

    shape: DraftShape
    layers: int
    qk_norm: bool
    block_length: int
    vocab: int
    draft_vocab: int
    feature_layers: tuple[int, ...]
    branching: tuple[int, ...]
    parts: frozenset[str]
    own_head: bool
    published: Mapping[str, Any]

    @classmethod
    def parse(cls, published: Mapping[str, Any], where: str = "config.json") -> SpecBlockConfig:
        """Read a config.json.

        Raises InputError with the field that is missing, wrong or not supported.
        """
        if not is_specblock(published):
            raise InputError(
                f"{where} is not that of a SpecBlock drafter",
                hint=f"Its architecture is not {ARCHITECTURE}.",
            )
        fields = Fields(published, where)
        vocab = fields.whole("vocab_size")
        draft_vocab = fields.whole("draft_vocab_size", vocab, least=TOP)
        if draft_vocab > vocab:
            raise fields.wrong("draft_vocab_size", f"at most vocab_size ({vocab})")
        shape = read_shape(fields, head_dim=None, bias=fields.flag("attention_bias", False))
        return cls(
            shape=shape,
            layers=fields.whole("num_hidden_layers", most=MOST_LAYERS),
            qk_norm=fields.flag("qk_norm", False),
            block_length=fields.whole("block_length", 4, most=MOST_BLOCK),
            vocab=vocab,
            draft_vocab=draft_vocab,
            feature_layers=_numbers(fields, "feature_layers", FEATURES, 1 << 20),
            branching=_numbers(fields, "branching", BUCKETS, MOST_BRANCHING, CONCENTRATED),
            parts=frozenset(part for part in PARTS if fields.flag(part, True)),
            own_head=fields.flag("own_head", False),
            published=dict(published),
        )

    def costs(self) -> dict[str, object]:
        """The fields that the time of a forward depends on."""
        sizes = {"layers": self.layers, "qk_norm": self.qk_norm, "block": self.block_length}
        parts = {part: part in self.parts for part in ("layer_shift", "rank_head")}
        return {**self.shape.costs(), **sizes, **parts, "vocab": self.draft_vocab}

    def hash(self, growth: Mapping[str, object]) -> str:
        """The key of its cost; `growth` has the fields of the tree that cost depends on."""
        return hash_of({"drafter": "specblock", **self.costs(), **growth})


def is_specblock(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a SpecBlock drafter."""
    return ARCHITECTURE in architectures(published)


def is_released(published: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a checkpoint which SpecBlock's authors released."""
    names = published.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("SpecBlock") for name in names)


def summary(logits: torch.Tensor) -> torch.Tensor:
    """psi, [rows, 15] in float32, of logits [rows, vocab] with vocab of 10 or more.

    Ten log-probabilities of the most likely tokens, descending; how far the first logit is
    above those of ranks 2, 3 and 5; the first probability; the entropy in nats.
    """
    logs = logits.float().log_softmax(-1)
    best = logs.topk(TOP).values
    # Differences of logits are those of log-probabilities: the normaliser cancels.
    gaps = torch.stack([best[:, 0] - best[:, rank - 1] for rank in GAPS], dim=1)
    probabilities = logs.exp()
    entropy = -(probabilities * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    scalars = torch.stack((probabilities.amax(-1), entropy), dim=1)
    return torch.cat((best, gaps, scalars), dim=1)


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


class RankHead(nn.Module):
    """g_phi (equation 4): bucket logits of a state and the summary of its distribution."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden + SUMMARY, RANK_HIDDEN)
        self.outer = nn.Linear(RANK_HIDDEN, BUCKETS)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[rows, 4] of normed states [rows, hidden] and their logits; neither gets a gradient."""
        features = summary(logits.detach()).nan_to_num_(0.0, 0.0, -100.0).to(hidden.dtype)
        inner = self.inner(torch.cat((hidden.detach(), features), dim=-1))
        return self.outer(nn.functional.silu(inner))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of a forward whose h^(L) is wanted: their numbers [W], and the span they see."""

    rows: torch.Tensor
    seen: Span


class SpecBlockLayer(nn.Module):
    """A decoder layer of the target's form; `shift` is W_shift of equation (3), before it."""

    def __init__(self, config: SpecBlockConfig, *, shifted: bool) -> None:
        super().__init__()
        shape = config.shape
        self.shift = nn.Linear(2 * shape.hidden, shape.hidden, bias=False) if shifted else None
        self.self_attn = DraftAttention(shape, shape.hidden, normed=config.qk_norm)
        self.mlp = GatedFfn(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class SpecBlockModel(nn.Module):
    """The weights, and the passes over them for training and drafting alike."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        shape = config.shape
        hidden, eps = shape.hidden, shape.norm_eps
        self.config = config
        self.condition = nn.Linear(FEATURES * hidden, hidden, bias=False)  # W_cond
        self.condition_norm = nn.RMSNorm(hidden, eps=eps)
        self.embedding_norm = nn.RMSNorm(hidden, eps=eps)
        self.query_norm = nn.RMSNorm(hidden, eps=eps)
        self.queries = nn.Parameter(torch.zeros(config.block_length, hidden))
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)  # W_fuse
        shifted = "layer_shift" in config.parts
        self.layers = nn.ModuleList(
            SpecBlockLayer(config, shifted=shifted and number > 0)
            for number in range(config.layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab, bias=False)
        self.rank = RankHead(hidden) if "rank_head" in config.parts else None
        self.register_buffer("tokens", torch.zeros(config.draft_vocab, dtype=torch.int64))
        # Texts that trained the trunk, and those that trained the rank head too.
        self.register_buffer("examples", torch.zeros(2, dtype=torch.int64))

    @property
    def ranked(self) -> bool:
        """Whether it has a trained rank head; without one, trees are uniform."""
        return self.rank is not None and int(self.examples[1]) > 0

    @property
    def without(self) -> tuple[str, ...]:
        """The paper's parts that it lacks, as names like `no-shift`."""
        has = self.config.parts - (set() if self.ranked else {"rank_head"})
        return tuple(name for part, name in PARTS.items() if part not in has)

    @property
    def name(self) -> str:
        """`specblock`, with the parts it lacks: `specblock:no-shift`."""
        return ":".join(("specblock", *self.without))

    def inputs(self, conditions: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """h^(0), [blocks, K, hidden], from conditions and embeddings [blocks, hidden].

        Equation (2): the prefix is broadcast to all positions, only the query differs.
        """
        dtype = self.queries.dtype  # under autocast, results of products are narrower
        prefix = torch.cat(
            (self.condition_norm(conditions.to(dtype)), self.embedding_norm(embeddings.to(dtype))),
            dim=-1,
        )
        width = prefix.shape[-1]
        fused = functional.linear(prefix, self.fuse.weight[:, :width])[:, None]
        if "prefix_broadcast" not in self.config.parts:
            later = fused.new_zeros(len(fused), self.config.block_length - 1, fused.shape[-1])
            fused = torch.cat((fused, later), dim=1)
        query = functional.linear(self.query_norm(self.queries), self.fuse.weight[:, width:])
        return (fused + query).to(dtype)

    def forward(
        self,
        rows: torch.Tensor,
        before: torch.Tensor,
        rope: Rope,
        cache: DraftCache,
        seen: Span,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """h^(L), [rows, hidden], from rows h^(0): of all rows, or of the wanted ones.

        before  int64 [rows]: the row of the position before; for a block's first, itself
        The keys and values of all rows go into the last slots of the span `seen`.
        """
        at = seen.end - len(rows)
        for number, layer in enumerate(self.layers):
            if layer.shift is not None:
                rows = layer.shift(torch.cat((rows, rows[before]), dim=-1)).to(rows.dtype)
            normed = layer.input_layernorm(rows)
            layer.self_attn.store(normed, rope, cache, number, at)
            if wanted is not None and number == self.config.layers - 1:
                rows, normed, seen = rows[wanted.rows], normed[wanted.rows], wanted.seen
                rope = (rope[0][wanted.rows], rope[1][wanted.rows])
            rows = rows + layer.self_attn(normed, rope, cache, number, seen)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
        return rows

    def read(
        self, hidden: torch.Tensor, project: Projection | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits over the draft vocabulary and over the buckets, from h^(L) [rows, hidden].

        project  replaces the LM head
        The second is None without a rank head.
        """
        normed = self.norm(hidden)
        logits = (project or self.lm_head)(normed)
        return logits, None if self.rank is None else self.rank(normed, logits)


def load_specblock(
    folder: Path, published: Mapping[str, Any], like: torch.Tensor, head: torch.Tensor
) -> SpecBlockModel:
    """The model in a checkpoint folder, on the device and in the dtype of `like`.

    published  its config.json
    head       the target's LM head [vocab, hidden], whose rows a model without a head takes
    Raises InputError with all tensors that are missing, unknown or of a wrong shape.
    """
    where = f"{folder / 'config.json'}"
    config = SpecBlockConfig.parse(published, where)
    with torch.device("meta"):
        model = SpecBlockModel(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if not config.own_head:
        del shapes[HEAD]
    weights = Weights(folder)
    weights.check(shapes)
    tensors = weights.read(shapes, like.device)
    _check_numbers(tensors, config, where)
    if not config.own_head:
        tensors[HEAD] = head_rows(head, tensors["tokens"], config)
    load_weights(model, tensors, like.dtype)
    return model


def pack_specblock(model: SpecBlockModel) -> None:
    """Pack the linear layers where device and dtype allow; not W_fuse, which is used in parts."""
    for part in (model.condition, model.layers, model.lm_head, model.rank):
        if part is not None:
            pack_layers(part)


def plain_copy(model: SpecBlockModel) -> SpecBlockModel:
    """A model with plain weights, which can be trained; those of the given one may be packed."""
    copy = SpecBlockModel(model.config).to(model.queries.device, model.queries.dtype)
    copy.load_state_dict(plain_state(model))
    return copy.eval().requires_grad_(False)


def save_specblock(folder: Path, model: SpecBlockModel) -> None:
    """Write a model in the format that `load_specblock` reads."""
    tensors = plain_state(model)
    if not model.config.own_head:
        del tensors[HEAD]
    save_checkpoint(folder, model.config.published, tensors)


def head_rows(head: torch.Tensor, tokens: torch.Tensor, config: SpecBlockConfig) -> torch.Tensor:
    """The rows [draft_vocab, hidden] of the target's LM head [vocab, hidden] for these tokens."""
    if head.shape != (config.vocab, config.shape.hidden):
        raise InputError(
            f"the drafter takes rows of an LM head of {config.vocab} tokens and width "
            f"{config.shape.hidden}, and the target's is {head.shape[0]} by {head.shape[1]}",
            hint="Use the drafter that was trained for this target.",
        )
    return head.detach()[tokens.to(head.device)]


def _check_numbers(
    tensors: Mapping[str, torch.Tensor], config: SpecBlockConfig, where: str
) -> None:
    """Check that the drafted tokens are ascending ids of the vocabulary, counts whole numbers."""
    for name in ("tokens", "examples"):
        if tensors[name].dtype != torch.int64:
            raise InputError(
                f"'{name}' beside {where} must hold int64 numbers and is {tensors[name].dtype}"
            )
    tokens = tensors["tokens"]
    ascending = bool((tokens[1:] > tokens[:-1]).all())
    if not ascending or int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab:
        raise InputError(
            f"'tokens' beside {where} must hold ascending ids within the vocabulary of "
            f"{config.vocab}",
            hint="The checkpoint is damaged, or its vocab_size is wrong.",
        )


def _numbers(
    fields: Fields, name: str, count: int, most: int, default: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    value = fields.values.get(name)
    if value is None and default is not None:
        return default
    whole = isinstance(value, list) and all(type(i) is int and 0 <= i <= most for i in value)
    if not whole or len(value) != count:
        limit = f", at most {most}," if name == "branching" else ""
        raise fields.wrong(name, f"a list of {count} whole numbers{limit}")
    return tuple(value)

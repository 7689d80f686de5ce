"""The training objective of block drafters: blocks at random anchors of the target's texts.

As in the DFlash paper (Chen et al., 2026), a block's first slot is a real token and the others
are masks, each of which learns the token that it predicts with a weight that falls with depth. The
head is the target's, cut to the tokens most frequent in the texts, as the whole vocabulary would
cost more than the drafter. lab/training/kinds.py has what the kinds add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from decoder.configs import text_of
from decoder.drafters.blocks import Rope, Rotary
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.model import DFlashLayer, DFlashModel
from decoder.model.loading import LoadedModel
from decoder.model.runtime.linear import plain_state
from decoder.tree.draft_tree import Lattice, best_first
from lab.drafters.dflash2.model import AFTER, BEFORE, convolve
from lab.training.corpus import TrainingText
from lab.training.features import Example, FrozenHead
from lab.training.kinds import KINDS
from lab.training.loop import accepted_depth

VALIDATION_NODES = 16  # of the tree whose committed length is reported
VALIDATION_WIDTH = 8  # candidates at each of its positions
VALIDATION_STRIDE = 5  # tokens from one anchor to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashTraining:
    """The sizes of a new drafter, and the settings of its loss.

    layers         of the drafter
    target_layers  whose outputs are its features; None for five, evenly from 1 to L - 2
    anchors        blocks of one text in a training step
    vocabulary     tokens of the reduced head
    decay          depth over which a position's weight falls by a factor e
    likeness       weight of the distance to the target's last hidden state, which tells more
                   about a position than its one token (EAGLE, Li et al.)
    soft           share of the loss that compares with the target's whole distribution (a
                   forward KL divergence, as of JetSpec), not with its token alone
    rank           of the tables of pairs, or of Domino's correction
    state          size of Domino's recurrent state
    """

    layers: Annotated[int, Field(ge=1, le=16)] = 3
    block_size: Annotated[int, Field(ge=2, le=64)] = 8
    target_layers: tuple[NonNegativeInt, ...] | None = None
    anchors: PositiveInt = 48
    vocabulary: PositiveInt = 8192
    decay: PositiveFloat = 4.0
    likeness: NonNegativeFloat = 1.0
    soft: Annotated[float, Field(ge=0, le=1)] = 0.0
    rank: PositiveInt = 64
    state: PositiveInt = 256


def fresh_config(
    loaded: LoadedModel,
    wanted: DFlashTraining,
    mask_token: int,
    kind: str = "dflash",
    *,
    shifted: bool = True,
) -> dict[str, Any]:
    """config.json of a new drafter for this target, in a published form of its kind.

    `shifted`: whether the rows of kinds that may shift predict the token after their own position.
    """
    sizes, wanted_kind = loaded.architecture, KINDS[kind]
    source = loaded.model.config.get_text_config(decoder=True)
    rope = source.rope_parameters or {}
    rope = rope.get("full_attention", rope)  # of kinds whose windowed layers have their own
    # Five layers evenly from 1 to L - 2; of a target of few layers, what there are.
    deepest = max(sizes.layers - 2, 0)
    spread = np.linspace(min(1, deepest), deepest, 5).round().astype(int).tolist()
    ids = wanted.target_layers or sorted(set(spread))
    return {
        "architectures": [wanted_kind.drafter.model_type.config_type.ARCHITECTURES[0]],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": wanted.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": getattr(source, "rms_norm_eps", None) or source.norm_eps,
        "attention_bias": False,
        "max_position_embeddings": source.max_position_embeddings,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "vocab_size": sizes.vocab,
        "layer_types": ["full_attention"] * wanted.layers,
        "block_size": wanted.block_size,
        "num_target_layers": sizes.layers,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": list(ids)}
        | wanted_kind.fields(wanted.rank, wanted.state, shifted),
        "dtype": "bfloat16",
    }


def fresh_model(
    loaded: LoadedModel, config: DFlashConfig, seed: int, tokens: torch.Tensor
) -> DFlashModel:
    """A drafter in float32 that begins with the target's last layers where shapes allow.

    Its features begin as the last of the target layers it reads. `tokens` are those of its head.
    """
    torch.manual_seed(seed)
    kind = KINDS[config.name]
    model = kind.drafter.model_type(config, len(tokens)).float()
    model.head_tokens = tokens.numpy()
    text = text_of(loaded.model)
    donors = text.layers[-config.layers :]
    with torch.no_grad():
        # A drafter with more layers than the target begins its first ones by chance.
        for layer, donor in zip(reversed(model.layers), reversed(donors), strict=False):
            take_over(layer, donor)
        take_over(model.norm, getattr(text, "norm", None))
        hidden = config.shape.hidden
        model.fc.weight.normal_(0, 0.02 / len(config.target_layer_ids))
        model.fc.weight[:, -hidden:] += torch.eye(hidden, device=model.fc.weight.device)
        take_over(model.hidden_norm, getattr(donors[-1], "input_layernorm", None))
        kind.begin(model, loaded.model.get_input_embeddings().weight)
    return model.to(loaded.model.device)


@torch.no_grad()
def take_over(module: nn.Module, donor: nn.Module | None, without: Sequence[str] = ()) -> None:
    """Copy the weights that have the same name and shape."""
    source = donor.state_dict() if donor is not None else {}
    for name, weight in module.named_parameters():
        if name in source and name not in without and source[name].shape == weight.shape:
            weight.copy_(source[name].float())


def head_tokens(texts: Sequence[TrainingText], size: int, vocab: int) -> torch.Tensor:
    """The tokens of the reduced head, ascending: three quarters the most frequent in the texts.

    The others are spread over the rest of the vocabulary, to learn low scores for unseen tokens.
    """
    if size >= vocab:
        return torch.arange(vocab)
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[text.prompt_tokens :])
    chosen = {token for token, _ in counts.most_common(size - size // 4)}
    others = [token for token in range(vocab) if token not in chosen]
    spread = np.linspace(0, len(others) - 1, size - len(chosen)).astype(int)
    return torch.tensor(sorted(chosen | {others[place] for place in spread}))


def trainable_copy(model: DFlashModel) -> DFlashModel:
    """A model in float32 with the weights of one whose passes may have been made."""
    state = plain_state(model)
    tokens = model.head_tokens
    copy = type(model)(model.config, None if tokens is None else len(tokens))
    copy = copy.to(state["fc.weight"].device)
    copy.load_state_dict(state)
    copy.head_tokens = tokens
    return copy.float()


class DFlashObjective:
    """The cross-entropy of every predicted position of every block, over the reduced head."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: DFlashModel,
        wanted: DFlashTraining,
        head: torch.Tensor | None = None,
    ) -> None:
        """head: of the target [vocab, hidden], where the loaded model may not have it any more"""
        self.model = model
        # A layer's output is the input of the next one: one further on in hidden_states.
        self.layers = tuple(number + 1 for number in model.config.target_layer_ids)
        self._wanted, self._size = wanted, model.config.block_size
        self._first = model.config.first_row
        self._added = KINDS[model.config.name].added
        device, vocab = loaded.model.device, loaded.architecture.vocab
        self._rotary = Rotary(model.config.shape, device)
        self._embedding = loaded.model.get_input_embeddings()
        kept = np.arange(vocab) if model.head_tokens is None else model.head_tokens
        self._kept = torch.from_numpy(kept).to(device)
        whole = loaded.model.get_output_embeddings().weight if head is None else head
        self._head = FrozenHead(whole[self._kept])
        self._place = torch.full((vocab,), -1, device=device)
        self._place[self._kept] = torch.arange(len(kept), device=device)
        depth = torch.arange(self._size - self._first, device=device)
        self._weights = torch.exp(-depth / wanted.decay)

    def loss(
        self, example: Example, generator: torch.Generator, step: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        anchors = self._anchors(example, generator)
        states, logits = self.scores(example.tokens, example.features, anchors, self._size)
        labels, counted = self._labels(example, anchors)
        logs = logits.float().log_softmax(-1)
        losses = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        places = anchors[:, None] + torch.arange(len(self._weights), device=anchors.device)
        real = example.final.float()[places.clamp(max=len(example.final) - 1)]
        if self._wanted.soft:
            likely = self._head(real).float().softmax(-1)
            losses = losses.lerp(-(likely * logs).sum(-1), self._wanted.soft)
        # The distance to the target's last hidden states, relative to these.
        distances = (states - real).square().mean(-1) / real.square().mean(-1)
        losses = losses + self._wanted.likeness * distances
        weights = self._weights * counted
        hits = (logits.detach().argmax(-1) == labels) & counted
        figures = {"chain": 1 + float(hits.cumprod(-1).sum(-1).float().mean())}
        return (losses * weights).sum() / weights.sum().clamp(min=1e-6), figures

    @torch.no_grad()
    def validate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Acceptance of held-out texts.

        chain, tree  tokens a verification, bonus token included, with a chain of the whole
                     block and, if no score depends on a token before, with the best-first tree
                     of 16 nodes
        accepted_i   share of blocks whose first i positions are right
        """
        right, tree, blocks = np.zeros(len(self._weights)), 0.0, 0
        for example in examples:
            anchors = torch.arange(
                example.prompt_tokens, len(example.tokens) - self._size, VALIDATION_STRIDE
            )
            if not len(anchors):
                continue
            _, logits = self.scores(example.tokens, example.features, anchors, self._size)
            best, places = logits.float().softmax(-1).topk(VALIDATION_WIDTH)
            tokens = self._kept[places].cpu().numpy()
            truth = _windows(example.tokens, anchors, len(self._weights)).cpu().numpy()
            right += (tokens[:, :, 0] == truth).cumprod(-1).sum(0)
            pairs = zip(tokens, best.double().cpu().numpy(), truth, strict=True)
            tree += sum(
                accepted_depth(best_first(Lattice(t, p), VALIDATION_NODES), real)
                for t, p, real in pairs
                if self._added is None
            )
            blocks += len(anchors)
        if not blocks:
            return {}
        trees = {"tree": 1 + tree / blocks} if self._added is None else {}
        shares = {f"accepted_{i + 1}": float(n / blocks) for i, n in enumerate(right)}
        return {"chain": 1 + float(right.sum() / blocks)} | trees | shares

    def accepted(
        self, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, size: int
    ) -> torch.Tensor:
        """The length [anchors] of the part of each greedy block that agrees with the text.

        size  of the blocks
        """
        _, logits = self.scores(tokens, features, anchors, size)
        drafted = self._kept[logits.argmax(-1)]
        return (drafted == _windows(tokens, anchors, drafted.shape[1])).cumprod(-1).sum(-1)

    def scores(
        self, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the predicting rows: states [anchors, depth, hidden], logits [anchors, depth, kept].

        They are those behind the tokens of the text.
        """
        states = self.states(tokens, features, anchors, size)[:, self._first :]
        dtype = states.dtype if torch.is_grad_enabled() else self._head.dtype  # as in decoding
        logits = self._head(states.to(dtype))
        if self._added is None:
            return states, logits
        places = anchors[:, None] + torch.arange(states.shape[1], device=tokens.device)
        before = tokens[places.clamp(max=len(tokens) - 1)]
        with torch.no_grad():
            embedded = self._embedding(before).float()
        return states, logits + self._added(self.model, states, before, embedded)

    def _anchors(self, example: Example, generator: torch.Generator) -> torch.Tensor:
        """Positions of bonus tokens, drawn from the continuation without replacement."""
        first, last = example.prompt_tokens, len(example.tokens) - 2
        if last < first:
            raise InputError("a text has fewer than two tokens behind its prompt")
        order = torch.randperm(last - first + 1, generator=generator, device=generator.device)
        return (first + order[: self._wanted.anchors]).sort().values.to(example.tokens.device)

    def _labels(self, example: Example, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the reduced head [anchors, depth], and whether each counts."""
        windows = _windows(example.tokens, anchors, len(self._weights))
        places = torch.where(windows >= 0, self._place[windows.clamp(min=0)], -1)
        return places, places >= 0

    def states(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        anchors: torch.Tensor,
        size: int | None = None,
    ) -> torch.Tensor:
        """Hidden states [anchors, block, hidden] of all blocks in one forward.

        size  of a block; None for that of the drafter
        A block at anchor a sees the features of the tokens before a, and itself. The states are
        those of `DFlashPasses.block` after `store_context` of these features.
        """
        model, size = self.model, size or self._size
        device = tokens.device
        context = model.hidden_norm(model.fc(features.float()).float())
        block_tokens = tokens.new_full((len(anchors), size), model.config.mask_token_id)
        block_tokens[:, 0] = tokens[anchors]
        with torch.no_grad():
            block = self._embedding(block_tokens).float()  # [anchors, block, hidden]
        slots = anchors[:, None] + torch.arange(size, device=device)
        rope = self._rotary(slots.flatten(), torch.float32)
        context_rope = self._rotary(torch.arange(len(context), device=device), torch.float32)
        before = torch.arange(len(context), device=device) < anchors[:, None]
        far = torch.zeros(before.shape, device=device).masked_fill(~before, -torch.inf)[:, None]
        near = torch.full((size, size), -torch.inf, device=device).triu(1)
        for layer, (_, causal) in zip(model.layers, model.config.kinds, strict=True):
            masks = far, near if causal else torch.zeros_like(near)
            block = _layer(layer, block, context, (rope, context_rope), masks)
        return model.norm(block)


def _layer(
    layer: DFlashLayer,
    block: torch.Tensor,
    context: torch.Tensor,
    ropes: tuple[Rope, Rope],
    masks: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """One layer over blocks [anchors, block, hidden] that share a context [tokens, hidden]."""
    attention, (rope, context_rope), shape = layer.self_attn, ropes, block.shape[:2]
    rows, after = _convolved(layer, "attention_conv", layer.input_layernorm(block))
    rows = rows.flatten(0, 1)
    query = attention.queries(rows, rope).unflatten(1, shape)
    key, value = (part.unflatten(1, shape) for part in attention.keys_values(rows, rope))
    shared = attention.keys_values(context, context_rope)
    mixed = _attend(query, shared, (key, value), masks)  # [heads, anchors, block, head_dim]
    block = block + after(attention.o_proj(mixed.permute(1, 2, 0, 3).flatten(2)))
    rows, after = _convolved(layer, "mlp_conv", layer.post_attention_layernorm(block))
    return block + after(layer.mlp(rows))


def _convolved(
    layer: DFlashLayer, name: str, rows: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A sublayer's input, and what follows on its output, where convolutions stand around it."""
    convolution = getattr(layer, name, None)
    if convolution is None:
        return rows, lambda output: output
    kernels = convolution.kernels(convolution.kernel_projection(rows))
    return convolve(rows, kernels, BEFORE), lambda output: convolve(output, kernels, AFTER)


def _attend(
    query: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    blocks: tuple[torch.Tensor, torch.Tensor],
    masks: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attention of blocks to one context and each to itself: [heads, anchors, block, head_dim].

    query    [heads, anchors, block, head_dim]
    context  keys and values of the context, [kv_heads, tokens, head_dim]
    blocks   keys and values of the blocks, [kv_heads, anchors, block, head_dim]
    masks    additive, [anchors, 1, tokens] and [block, block]: what a block's rows see of both
    One product over the context serves all blocks.
    """
    width, size = query.shape[-1], query.shape[-2]
    kv_heads, tokens = context[0].shape[:2]
    query = query.unflatten(0, (kv_heads, -1)) * width**-0.5  # [kv_heads, group, ...]
    rows = query.flatten(1, 3)
    far = (rows @ context[0].transpose(1, 2)).view(*query.shape[:4], tokens) + masks[0]
    # [kv_heads, group, anchors, block, block]
    near = query @ blocks[0].transpose(-1, -2)[:, None] + masks[1]
    weights = torch.cat((far, near), dim=-1).softmax(-1).to(blocks[1].dtype)
    far, near = weights.split((tokens, size), dim=-1)
    mixed = (far.flatten(1, 3) @ context[1]).view(query.shape) + near @ blocks[1][:, None]
    return mixed.flatten(0, 1)


def _windows(tokens: torch.Tensor, anchors: torch.Tensor, depth: int) -> torch.Tensor:
    """The tokens after each anchor [anchors, depth]; -1 past the end of the text."""
    padded = functional.pad(tokens, (0, depth + 1), value=-1)
    places = anchors.to(tokens.device)[:, None] + torch.arange(1, depth + 1, device=tokens.device)
    return padded[places]

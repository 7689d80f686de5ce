"""Where a SpecBlock drafter's training starts: its config, its tokens, its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from costmodel.errors import InputError
from decoder.drafters.blocks import ROPE_TYPES
from decoder.drafters.specblock_model import (
    ARCHITECTURE,
    PARTS,
    SpecBlockConfig,
    SpecBlockModel,
    head_rows,
)
from decoder.drafters.specblock_rank import TOP
from decoder.drafters.specblock_tree import CONCENTRATED
from decoder.loading import LoadedModel
from decoder.target import Target
from decoder.training.corpus import Text

WEIGHT_SPREAD = 0.02  # standard deviation of weights that have nothing to start from
PROBE_TOKENS = 64  # for the size of the features
QUERY_SHARE = 0.5  # of a query in the fused input, beside condition and embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBlockSettings:
    """What a SpecBlock drafter is, and how it is trained.

    tokens          the reduced vocabulary, its frequent tokens; empty for all of the target's
    feature_layers  indices into `hidden_states`; None for EAGLE-3's low, mid and top
    without         names of table 2's ablations: no-broadcast, no-shift, no-mask, no-rank-head
    own_head        train an LM head of its own, as the paper does, which the checkpoint then
                    holds; otherwise the target's rows are used and stay as they are
    anchors         first blocks in an example;  blocks  M, chained at uniform cuts
    rank_from_step  the update from which on the rank head is trained too
    """

    layers: int = 2
    block_length: int = 4
    tokens: Sequence[int] = ()
    feature_layers: tuple[int, ...] | None = None
    branching: tuple[int, ...] = CONCENTRATED
    without: frozenset[str] = frozenset()
    own_head: bool = False
    anchors: int = 32
    blocks: int = 2
    rank_from_step: int = 2000


def frequent_tokens(texts: Iterable[Text], size: int, vocab: int) -> tuple[int, ...]:
    """The tokens that continuations hold most often, ascending; unseen ones by their ids.

    In most vocabularies low ids are single bytes and the first, commonest merges.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[text.prompt_tokens :])
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return tuple(sorted(order[:size]))


def eagle_layers(layers: int) -> tuple[int, ...]:
    """Low, mid and top hidden states of a target of so many layers, as EAGLE-3 takes them."""
    return tuple(min(max(i, 1), max(layers - 1, 0)) for i in (2, layers // 2, layers - 3))


def config_for(target: LoadedModel, settings: SpecBlockSettings) -> SpecBlockConfig:
    """The config of a drafter with the target's own layer sizes.

    Raises InputError for an ablation that there is none of, or too few tokens.
    """
    unknown = sorted(settings.without - set(PARTS.values()))
    if unknown:
        raise InputError(
            f"SpecBlock has no ablation '{unknown[0]}'", hint=f"Use {', '.join(PARTS.values())}."
        )
    own, theirs = target.architecture, target.model.config
    drafted = len(settings.tokens) or own.vocab
    if drafted < TOP:
        raise InputError(f"a SpecBlock drafter needs {TOP} tokens or more, got {drafted}")
    published: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "hidden_size": own.hidden,
        "intermediate_size": own.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.kv_heads,
        "head_dim": own.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(theirs, "max_position_embeddings", None),
        "rope_parameters": _rope(theirs),
        "qk_norm": own.qk_norm,
        "vocab_size": own.vocab,
        "draft_vocab_size": drafted,
        "block_length": settings.block_length,
        "feature_layers": list(settings.feature_layers or eagle_layers(own.layers)),
        "branching": list(settings.branching),
        "own_head": settings.own_head,
    }
    published |= {part: name not in settings.without for part, name in PARTS.items()}
    return SpecBlockConfig.parse(published, "the drafter's config")


def first_model(
    target: LoadedModel, settings: SpecBlockSettings, generator: torch.Generator
) -> SpecBlockModel:
    """A drafter to train, float32 on the target's device.

    Its layers begin as the target's last ones where shapes allow, its input as the top
    features in their own size plus the embedding and half a query, its shift as no shift.
    """
    config = config_for(target, settings)
    model = SpecBlockModel(config)
    head = target.model.get_output_embeddings().weight
    tokens = torch.tensor(sorted(settings.tokens) or range(config.vocab))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, WEIGHT_SPREAD, generator=generator)
        model.queries.normal_(0.0, 1.0, generator=generator)
        _begin_neutral(model)
        model.tokens.copy_(tokens)
        model.lm_head.weight.copy_(head_rows(head, tokens, config))
        scale = feature_scale(target, config.feature_layers[-1], tokens, generator)
        model.condition_norm.weight.fill_(scale)
    copy_from(target.model, model)
    model.lm_head.weight.requires_grad_(settings.own_head)
    return model.to(target.model.device)


def feature_scale(
    target: LoadedModel, layer: int, tokens: torch.Tensor, generator: torch.Generator
) -> float:
    """The usual size (root mean square, median of rows) of a hidden state of the target.

    The copied layers add to states of that size; of size 1, as normed ones are, what they add
    drowns them. Measured on drafted tokens in random order.
    """
    picks = torch.randint(len(tokens), (PROBE_TOKENS,), generator=generator)
    reader = Target(target, owned=False)
    reader.reserve(PROBE_TOKENS)
    reader.capture((layer,))
    reader.prefill(tokens[picks].to(reader.device))
    states = reader.features()
    if states is None:
        raise InputError(f"the hidden states of {target.name} cannot be read")
    return float(states.float().pow(2).mean(-1).sqrt().median())


def copy_from(target: nn.Module, model: SpecBlockModel) -> list[str]:
    """Give the drafter the target's last layers and final norm; which tensors were copied.

    Both name the tensors of a layer alike (Llama, Qwen and Mistral do); others are left alone.
    """
    base = target.base_model
    theirs = list(getattr(base, "layers", ()))[-len(model.layers) :]
    pairs: list[tuple[str, nn.Module, nn.Module]] = [
        (f"layers.{number}.", layer, source)
        for number, (layer, source) in enumerate(zip(model.layers, theirs, strict=False))
    ]
    if isinstance(getattr(base, "norm", None), nn.Module):
        pairs.append(("norm.", model.norm, base.norm))
    copied = []
    with torch.no_grad():
        for prefix, ours, source in pairs:
            given = source.state_dict()
            for name, tensor in ours.state_dict().items():
                if name in given and given[name].shape == tensor.shape:
                    tensor.copy_(given[name])
                    copied.append(prefix + name)
    return copied


def _begin_neutral(model: SpecBlockModel) -> None:
    hidden = model.config.shape.hidden
    one = torch.eye(hidden)
    model.condition.weight.zero_()
    model.condition.weight[:, -hidden:] = one
    model.fuse.weight.copy_(torch.cat((one, one, QUERY_SHARE * one), dim=1))
    for layer in model.layers:
        if layer.shift is not None:
            layer.shift.weight.copy_(torch.cat((one, torch.zeros_like(one)), dim=1))


def _rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters where the drafter's layers can have them."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}

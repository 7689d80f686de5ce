"""Training of a SpecBlock drafter into a folder: its config, first weights, and the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from costmodel.errors import InputError
from decoder.drafters.blocks import ROPE_TYPES
from decoder.model.loading import LoadedModel
from decoder.model.making import make_target
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.model import (
    ARCHITECTURES,
    BUCKETS,
    LIKELIEST,
    PARTS,
    SpecBlockConfig,
    SpecBlockModel,
    plain_copy,
    save_specblock,
)
from lab.papers.specblock.training.objective import SpecBlockObjective, SpecBlockSettings
from lab.training.corpus import TrainingText
from lab.training.dflash import take_over
from lab.training.loop import Say, TrainingSettings
from lab.training.recipe import Recipe, Trained, begun, gather, learn

WEIGHT_SPREAD = 0.02  # standard deviation of new weights
PROBE_TOKENS = 64  # for the scale of the features
NORMED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
QUERY_SHARE = 0.5  # weight of a query in the fused input, beside condition and embedding


# The paper's clip, with this project's other defaults.
RUN = TrainingSettings(learning_rate=1.5e-3, clip=0.5)


def train_specblock(
    loaded: LoadedModel,
    folder: Path,
    recipe: Recipe,
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Trained:
    """Collect texts, train and save a SpecBlock drafter; a run in `folder` is continued.

    prompts  to train on; none for generated ones
    Raises InputError for evaluation prompts, for a folder of another recipe, and for a start
    that does not fit the target.
    """
    first = None if recipe.start is None else _begun_model(loaded, recipe.start, recipe.drafter)
    texts = gather(loaded, folder, recipe.collecting, prompts, say)
    tokens = frequent_tokens(texts[0], recipe.drafter.vocabulary, loaded.architecture.vocab)
    wanted = replace(recipe.drafter, tokens=tokens)
    generator = torch.Generator().manual_seed(recipe.settings.seed)
    model = first or first_model(loaded, wanted, generator)
    objective = SpecBlockObjective(loaded, wanted, model)
    trained = learn(loaded, folder, texts, objective, recipe.settings, say)
    save_specblock(trained.folder, objective.model.bfloat16())
    return trained


def _begun_model(loaded: LoadedModel, start: str, wanted: SpecBlockSettings) -> SpecBlockModel:
    """A trained drafter in float32."""
    drafter = begun(loaded, start, SpecBlockDrafter, "SpecBlock")
    model = plain_copy(drafter.model).float().requires_grad_()
    model.lm_head.weight.requires_grad_(wanted.own_head or wanted.from_scratch)
    return model


def frequent_tokens(texts: Iterable[TrainingText], size: int, vocab: int) -> tuple[int, ...]:
    """The most frequent tokens of the continuations, ascending; unseen ones rank by their ids.

    In most vocabularies low ids are single bytes and the earliest, commonest merges.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.tokens[text.prompt_tokens :])
    order = sorted(range(vocab), key=lambda token: (-counts[token], token))
    return tuple(sorted(order[:size]))


def config_for(target: LoadedModel, settings: SpecBlockSettings) -> SpecBlockConfig:
    """The config of a drafter with the target's own layer sizes.

    Raises InputError for an unknown ablation or too few tokens.
    """
    unknown = sorted(settings.without - set(PARTS.values()))
    if unknown:
        raise InputError(
            f"SpecBlock has no ablation '{unknown[0]}'", hint=f"Use {', '.join(PARTS.values())}."
        )
    sizes, theirs = target.architecture, target.model.config
    drafted = len(settings.tokens) or sizes.vocab
    if drafted < LIKELIEST:
        raise InputError(f"a SpecBlock drafter needs {LIKELIEST} tokens or more, got {drafted}")
    published: dict[str, Any] = {
        "architectures": [ARCHITECTURES[-1]],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(theirs, "max_position_embeddings", None),
        "rope_parameters": _rope(theirs),
        "vocab_size": sizes.vocab,
        "draft_vocab_size": drafted,
        "diffspec_draft_token_num": settings.block_length,
        "rank_classes": BUCKETS,
        "num_ttt_blocks": settings.blocks,
        "tree": settings.tree,
    }
    for name in ("feature_layers", "branching"):
        if (numbers := getattr(settings, name)) is not None:
            published[name] = list(numbers)
    published |= {part: name not in settings.without for part, name in PARTS.items()}
    return SpecBlockConfig.parse(published, "the drafter's config")


def first_model(
    target: LoadedModel, settings: SpecBlockSettings, generator: torch.Generator
) -> SpecBlockModel:
    """A new drafter, float32 on the target's device.

    Unless it begins from scratch, its layers are copies of the target's last ones as far as shapes
    allow. Its input is the top features at their own scale plus the embedding and half a query;
    its shift does nothing yet.
    """
    config = config_for(target, settings)
    model = SpecBlockModel(config)
    head = target.model.get_output_embeddings().weight
    tokens = torch.tensor(sorted(settings.tokens) or range(config.vocab))
    model.set_tokens(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, WEIGHT_SPREAD, generator=generator)
        if settings.from_scratch:
            return model.to(target.model.device)
        model.input_layer.position_queries.weight.normal_(0.0, 1.0, generator=generator)
        _set_neutral(model)
        model.lm_head.weight.copy_(head[tokens.to(head.device)])
        top = config.features_of(target.architecture.layers)[-1]
        scale = feature_scale(target, top, tokens, generator)
        model.input_layer.condition_norm.weight.fill_(scale)
    copy_from(target.model, model)
    model.lm_head.weight.requires_grad_(settings.own_head)
    return model.to(target.model.device)


def feature_scale(
    target: LoadedModel, layer: int, tokens: torch.Tensor, generator: torch.Generator
) -> float:
    """The scale of a hidden state of the target: the median over rows of the root mean square.

    The copied layers add to states of that scale; normed states, of scale 1, would be lost in
    what they add. Measured on drafted tokens in random order.
    """
    picks = torch.randint(len(tokens), (PROBE_TOKENS,), generator=generator)
    reader = make_target(target, owned=False)
    reader.reserve(PROBE_TOKENS)
    reader.capture((layer,))
    reader.prefill(tokens[picks].to(reader.device))
    states = reader.features()
    if states is None:
        raise InputError(f"the hidden states of {target.name} cannot be read")
    return float(states.float().pow(2).mean(-1).sqrt().median())


def copy_from(target: nn.Module, model: SpecBlockModel) -> None:
    """Copy the target's last layers and final norm, where names and shapes agree.

    As in Llama, Qwen and Mistral models; not queries and keys that the target normalises, since
    the drafter does not.
    """
    base = target.base_model
    theirs = list(getattr(base, "layers", ()))[-len(model.layers) :]
    for layer, donor in zip(model.layers, theirs, strict=False):
        normed = "self_attn.q_norm.weight" in donor.state_dict()
        take_over(layer, donor, NORMED if normed else ())
    if isinstance(getattr(base, "norm", None), nn.Module):
        take_over(model.norm, base.norm)


def _set_neutral(model: SpecBlockModel) -> None:
    """Set condition, fusion and shift to pass the top features and the embedding through."""
    hidden = model.config.shape.hidden
    one = torch.eye(hidden)
    part = model.input_layer
    part.condition_proj.weight.zero_()
    part.condition_proj.weight[:, -hidden:] = one
    part.fuse.weight.copy_(torch.cat((one, one, QUERY_SHARE * one), dim=1))
    for shift in model.shift_proj:
        shift.weight.copy_(torch.cat((one, torch.zeros_like(one)), dim=1))


def _rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters, or default ones of a kind that drafters support."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}

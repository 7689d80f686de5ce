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
    ARCHITECTURE,
    PARTS,
    TOP,
    SpecBlockConfig,
    SpecBlockModel,
    head_rows,
    plain_copy,
    save_specblock,
)
from lab.papers.specblock.training.objective import SpecBlockObjective, SpecBlockSettings
from lab.training.corpus import TrainingText
from lab.training.loop import Say, TrainingSettings
from lab.training.recipe import Recipe, Trained, begun, gather, learn

WEIGHT_SPREAD = 0.02  # standard deviation of new weights
PROBE_TOKENS = 64  # for the scale of the features
QUERY_SHARE = 0.5  # weight of a query in the fused input, beside condition and embedding


# The paper's clip, with this project's other defaults.
RUN = TrainingSettings(learning_rate=1.5e-3, clip=0.5)


def train_specblock(
    loaded: LoadedModel,
    folder: Path,
    recipe: Recipe[SpecBlockSettings],
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> Trained:
    """Collect texts, train and save a SpecBlock drafter; a run in `folder` is continued.

    prompts  to train on; none for generated ones
    Raises InputError for evaluation prompts, for a folder of another recipe, and for a start
    that does not fit the target.
    """
    first = None if recipe.start is None else _begun_model(loaded, recipe.start)
    texts = gather(loaded, folder, recipe.collecting, prompts, say)
    tokens = frequent_tokens(texts[0], recipe.drafter.vocabulary, loaded.architecture.vocab)
    wanted = replace(recipe.drafter, tokens=tokens)
    generator = torch.Generator().manual_seed(recipe.settings.seed)
    model = first or first_model(loaded, wanted, generator)
    objective = SpecBlockObjective(loaded, wanted, model)
    trained = learn(loaded, folder, texts, objective, recipe.settings, say)
    save_specblock(trained.folder, objective.model.bfloat16())
    return trained


def _begun_model(loaded: LoadedModel, start: str) -> SpecBlockModel:
    """A trained drafter in float32; only a head of its own is trained."""
    drafter = begun(loaded, start, SpecBlockDrafter, "SpecBlock")
    model = plain_copy(drafter.model).float().requires_grad_()
    model.lm_head.weight.requires_grad_(model.config.own_head)
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


def eagle_layers(layers: int) -> tuple[int, ...]:
    """Indices of the low, mid and top hidden states of a target, as in EAGLE-3."""
    return tuple(min(max(i, 1), max(layers - 1, 0)) for i in (2, layers // 2, layers - 3))


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
    if drafted < TOP:
        raise InputError(f"a SpecBlock drafter needs {TOP} tokens or more, got {drafted}")
    published: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(theirs, "max_position_embeddings", None),
        "rope_parameters": _rope(theirs),
        "qk_norm": sizes.qk_norm,
        "vocab_size": sizes.vocab,
        "draft_vocab_size": drafted,
        "block_length": settings.block_length,
        "feature_layers": list(settings.feature_layers or eagle_layers(sizes.layers)),
        "branching": list(settings.branching),
        "own_head": settings.own_head,
    }
    published |= {part: name not in settings.without for part, name in PARTS.items()}
    return SpecBlockConfig.parse(published, "the drafter's config")


def first_model(
    target: LoadedModel, settings: SpecBlockSettings, generator: torch.Generator
) -> SpecBlockModel:
    """A new drafter, float32 on the target's device.

    Its layers are copies of the target's last ones as far as shapes allow. Its input is the top
    features at their own scale plus the embedding and half a query; its shift does nothing yet.
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
        _set_neutral(model)
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


def copy_from(target: nn.Module, model: SpecBlockModel) -> list[str]:
    """Copy the target's last layers and final norm; returns the names of the copied tensors.

    Tensors of the same name and shape are copied, as in Llama, Qwen and Mistral models.
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
            tensors = source.state_dict()
            for name, tensor in ours.state_dict().items():
                if name in tensors and tensors[name].shape == tensor.shape:
                    tensor.copy_(tensors[name])
                    copied.append(prefix + name)
    return copied


def _set_neutral(model: SpecBlockModel) -> None:
    """Set condition, fusion and shift to pass the top features and the embedding through."""
    hidden = model.config.shape.hidden
    one = torch.eye(hidden)
    model.condition.weight.zero_()
    model.condition.weight[:, -hidden:] = one
    model.fuse.weight.copy_(torch.cat((one, one, QUERY_SHARE * one), dim=1))
    for layer in model.layers:
        if layer.shift is not None:
            layer.shift.weight.copy_(torch.cat((one, torch.zeros_like(one)), dim=1))


def _rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters, or default ones of a kind that drafters support."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}

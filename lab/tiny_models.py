"""Tiny random causal LMs of every kind that the installed transformers has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from costmodel.io import read_yaml

TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))
SIZES: Mapping[str, Any] = TABLE["sizes"]
VOCAB = SIZES["vocab_size"]
LATENT = {"num_key_value_heads": 4}  # of kinds that compress keys and values
FLOAT32_ONLY = ("xglm", "xlnet")  # kinds whose masks transformers does not make in float64
MOST_PARAMETERS = 100_000_000  # the images' part of Gemma 3 has 93 million in any config


def tiny_model(kind: str, **changes: Any) -> Any:
    """A random model with clear choices of tokens, in the most exact dtype that its kind runs in.

    changes  sizes that take the place of `SIZES`
    Raises what transformers raises.
    """
    config_class = CONFIG_MAPPING[kind]
    sizes = _sizes(config_class, kind, {**SIZES, **changes})
    try:  # without an end token, so that texts are long
        config = config_class(**sizes)
    except StrictDataclassError:
        config = config_class(**(sizes | {"eos_token_id": VOCAB - 1}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if model_class.config_class is config_class.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    with torch.device("meta"):
        shapes = model_class(copy.deepcopy(config))
    parameters = sum(weight.numel() for weight in shapes.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"the tiny config still has {parameters / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    dtype = torch.float32 if kind in FLOAT32_ONLY else torch.float64
    model = model_class(config).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(0.2 / weight.std().clamp_min(1e-6))
    return model


def _sizes(config_class: Any, kind: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The known sizes that a config takes, its parts' within it."""
    taken = set(inspect.signature(config_class.__init__).parameters)
    taken |= set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        taken |= set(vars(base).get("__annotations__", {}))
    sizes = {name: size for name, size in known.items() if name in taken}
    for name, part in config_class.sub_configs.items():
        if part is AutoConfig:
            text = TABLE["text_parts"].get(kind)
            part = None if text is None else CONFIG_MAPPING[text]
        if part is not None:
            sizes[name] = _sizes(part, part.model_type, known) | {"model_type": part.model_type}
    latent = LATENT if "kv_lora_rank" in taken else {}
    return sizes | latent | TABLE["kinds"].get(kind, {})

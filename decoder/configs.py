"""A model's config by transformers' own class, with every default filled in, and its sizes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError, shown
from costmodel.hf_config import SAME, text_fields
from costmodel.hf_kinds import ATTENDING, block_types, kinds

# Errors of transformers for a folder with damaged, missing or contradictory files.
BROKEN_FILES = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    ImportError, RuntimeError, SafetensorError, StrictDataclassError,
)  # fmt: skip
MOST_UNREAD = 0.02  # of the parameters, in norms, biases and the like
# The names of projections to keys or latents, and to queries, keys and values at once.
KEYS = ("k_proj", "key", "key_proj", "k_lin", "wk", "kv_a_proj_with_mqa")
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "att_proj")


def read_model(
    fields: Mapping[str, Any], name: str, *, approximate: bool = False
) -> tuple[PreTrainedConfig, ModelArchitecture]:
    """The config of a config.json's fields, and the sizes of its text part.

    approximate  read a kind whose parts are not all counted by the usual names of its sizes
    Raises InputError.
    """
    config = config_of(fields)
    return config, sizes_of(config, name, approximate=approximate)


def sizes_of(
    config: PreTrainedConfig, name: str | None, *, approximate: bool = False
) -> ModelArchitecture:
    """The sizes that a config says; of a kind whose parts are not all counted, beside its model.

    That model is built without memory. Its other parameters are `other_weights`, and the kind is
    refused where they are many, or its keys are not those of the config. Raises InputError.
    """
    if str(config.model_type).endswith("_assistant") and not approximate:
        raise _unsupported(config, "it is a drafter")
    if text_fields(config).get("model_type") in kinds():
        return ModelArchitecture.from_hf_config(config, name)
    read = ModelArchitecture.from_hf_config(config, name, approximate=True)
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except BROKEN_FILES as error:
        if approximate:
            return read
        raise _unsupported(
            config, f"no causal LM is built of it ({first_reason(error)})"
        ) from error
    head, text = model.get_output_embeddings(), text_of(model)
    weights = {id(p): p.numel() for part in (text, head) if part for p in part.parameters()}
    built = sum(weights.values())
    if head is not None:
        read = replace(read, tied=head.weight is model.get_input_embeddings().weight)
    dense = replace(read, experts=0, active_experts=0, expert_ffn=0, shared_ffn=0, dense_layers=0)
    forms = [replace(form, gated_ffn=gated) for form in (read, dense) for gated in (True, False)]
    best = min(forms, key=lambda form: abs(built - form.parameters))
    rest = built - best.parameters
    made = replace(best, other_weights=max(rest, 0))
    widths = set()  # of what a layer keeps of a token
    for path, part in text.named_modules():
        outputs = getattr(part, "out_features", getattr(part, "nf", None))
        leaf = path.rpartition(".")[2]
        if isinstance(outputs, int) and leaf in (*KEYS, *FUSED):
            widths.add((outputs - made.query_width) // 2 if leaf in FUSED else outputs)
    reason, stateful = "", getattr(model, "_is_stateful", False)
    if stateful or set(block_types(text_fields(model.config))) - ATTENDING:
        reason = "some of its layers keep a state"
    elif widths != {made.cached_width if made.latent_rank else made.kv_width}:
        reason = "its layers keep other keys than its config says"
    if not -MOST_UNREAD / 20 <= rest / built <= MOST_UNREAD:
        reason = f"its fields explain {best.parameters:,} of {built:,} parameters"
    if reason and not approximate:
        raise _unsupported(config, reason)
    return made


def _unsupported(config: PreTrainedConfig, reason: str) -> InputError:
    kind = shown(text_fields(config).get("model_type"))
    hint = f"Kinds whose every part is counted: {', '.join(kinds())}"
    return InputError(f"the model kind {kind} is not supported: {reason}", hint=hint)


def _plain(value: Any) -> Any:
    """A copy with the numbers that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def config_of(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The config that transformers makes of a config.json's fields. Raises InputError."""
    kind = fields.get("model_type") if isinstance(fields, Mapping) else None
    if kind is None:
        raise InputError(
            "the target's config has no field 'model_type'",
            hint="Check that the folder's config.json is a Hugging Face model config",
        )
    known = str(kind) if str(kind) in CONFIG_MAPPING else SAME.get(str(kind), str(kind))
    if known == "mistral" and "layer_types" in fields:
        known = "ministral"  # as AutoConfig takes it
    if known not in CONFIG_MAPPING:
        raise InputError(
            f"the model kind {shown(kind)} is not known to transformers {transformers.__version__}",
            hint="Name a kind that transformers has, or install a newer transformers",
        )
    try:
        with quiet():
            config = CONFIG_MAPPING[known]
            return config.from_dict(_plain({**fields, "model_type": known}))
    except BROKEN_FILES as error:
        raise InputError(
            f"transformers cannot read the config of this {known}: {first_reason(error)}",
            hint="Correct its config.json; a field has a wrong type or contradicts another.",
        ) from error


def base_of(model: Any) -> Any:
    """The decoder of a causal LM, which gives hidden states; the model itself where it has none."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base


def text_of(model: Any) -> Any:
    """The module that gives hidden states of tokens: of a model of images too, its text part."""
    base = base_of(model)
    return getattr(base, "language_model", base)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, notices and warnings of transformers."""
    verbosity = transformers_logging.get_verbosity()
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()


def first_reason(error: BaseException) -> str:
    """An error's first line, or its first two where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")

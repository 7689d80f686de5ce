"""Types of weights and caches: those of operator tables, and the labels of quantised checkpoints.

A label stands in a profile's key (`runtime.quantization`). It is read from a checkpoint's config,
or is the name of a model file's kind.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.io import read_json

Weights = Literal["bfloat16", "fp8", "fp8_dynamic", "fp8_block", "nvfp4", "mxfp4"]
Cache = Literal["bfloat16", "fp8"]

# Bytes of a weight; nvfp4 has one 8-bit scale per 16 values, mxfp4 per 32. Of mxfp4 checkpoints
# (gpt-oss) the experts alone are quantised.
WEIGHT_BYTES: Mapping[Weights, float] = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_dynamic": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
CACHE_BYTES: Mapping[Cache, float] = {"bfloat16": 2.0, "fp8": 1.0}

# Of labels without a number of bits: one scale a row or tensor counts for nothing, bitsandbytes'
# 4-bit weights have a 32-bit scale per 64, mxfp8 an 8-bit one per 32.
_NAMED: Mapping[str, float] = {
    **{str(name): held for name, held in WEIGHT_BYTES.items()},
    "int8": 1.0,
    "fbgemm_fp8": 1.0,
    "fp8-tensor": 1.0,
    "fp8-tensor-static": 1.0,
    "bitsandbytes-8bit": 1.0,
    "bitsandbytes-4bit": 0.5625,
    "mxfp8": 1.03125,
    "bitnet": 0.25,
}
_SCALE_BYTES = 2.0  # of a group, in a 16-bit type
# Methods of checkpoints, and the names of GGUF's kinds: labels, also where no bits are read.
_LABEL = re.compile(
    r"(aqlm|auto-round|awq|bitnet|bitsandbytes|compressed-tensors|eetq|fp8|gptq|hqq|modelopt|quanto"
    r"|quark|torchao|vptq)[-_]"
    r"|i?q\d|tq\d|mxfp\d"
)
_BLOCKS = re.compile(r"fp8-(\d+)x(\d+)(?:-static)?")
_METHOD = re.compile(r"[a-z_]+-(\d+)bit(?:-g(\d+))?")
_SCHEME = re.compile(r"compressed-tensors-(?:fp)?w(\d+)a\d+(?:-g(\d+))?(?:-static)?")
_QUANTO = re.compile(r"quanto-q(?:int|float)(\d)")
_TORCHAO = re.compile(r"torchao-\w*?(?:int|float)(\d)weight")


def is_label(text: str) -> bool:
    """Whether a text is a type of weights in operator tables, or can be a checkpoint's label."""
    return text in _NAMED or _LABEL.match(text) is not None


def label_bytes(label: str) -> float | None:
    """Bytes of a weight in memory, with scales of stated groups; None where no label says."""
    if label in _NAMED:
        return _NAMED[label]
    if blocks := _BLOCKS.fullmatch(label):
        return 1 + 4 / (int(blocks[1]) * int(blocks[2]))
    if method := _METHOD.fullmatch(label):
        bits, group = int(method[1]), int(method[2] or 0)
        return bits / 8 + ((_SCALE_BYTES + bits / 8) / group if group else 0)
    if scheme := _SCHEME.fullmatch(label):
        return int(scheme[1]) / 8 + (_SCALE_BYTES / int(scheme[2]) if scheme[2] else 0)
    number = _QUANTO.match(label) or _TORCHAO.match(label)
    return int(number[1]) / 8 if number else None


def layer_bytes(architecture: ModelArchitecture, label: str) -> float | None:
    """The mean bytes of a weight of the layers, some of which a label leaves in 16 bits."""
    held, a = label_bytes(label), architecture
    if held is None or label != "mxfp4":
        return held
    experts = a.sparse_layers * a.experts * a.expert_parameters
    layers = a.parameters - a.vocab * a.hidden * (1 if a.tied else 2)
    return 2.0 - (2.0 - held) * experts / layers


# Endings of quantised checkpoints' names, and the labels of the commonest settings of each. Of fp8,
# companies that train with it store blocks.
_ENDINGS: Mapping[str, str] = {
    r"nvfp4|fp4": "nvfp4",
    r"mxfp4": "mxfp4",
    r"fp8[-_]dynamic": "fp8_dynamic",
    r"fp8[-_]block": "fp8_block",
    r"fp8(?:[-_]kv)?": "fp8",
    r"awq(?:[-_]int4|[-_]4bit)?": "awq-4bit-g128",
    r"gptq(?:[-_]int4|[-_]4bit)?": "gptq-4bit-g128",
    r"gptq[-_](?:int8|8bit)": "gptq-8bit-g128",
    r"(?:quantized\.)?w4a16": "compressed-tensors-w4a16-g128",
    r"(?:quantized\.)?w8a16": "compressed-tensors-w8a16",
    r"(?:quantized\.)?w8a8|int8": "compressed-tensors-w8a8",
    r"(?:unsloth[-_])?bnb[-_]4bit": "bitsandbytes-4bit",
    r"bnb[-_]8bit": "bitsandbytes-8bit",
}
_ENDING = re.compile("|".join(f"({ending})" for ending in _ENDINGS), re.IGNORECASE)
_BLOCKWISE = ("qwen", "deepseek-ai", "zai-org", "moonshotai", "minimaxai")


def checkpoint_name(name: str) -> tuple[str, str | None]:
    """The name without the ending of a quantised checkpoint, and its weights; None without one."""
    for start in (match.end() for match in re.finditer(r"[-_.]", name)):
        if ending := _ENDING.fullmatch(name, start):
            label = tuple(_ENDINGS.values())[(ending.lastindex or 1) - 1]
            if label == "fp8" and name.startswith("meta-llama/"):
                label = "fp8_dynamic"  # theirs have a scale per row of the inputs
            if label == "fp8" and name.lower().partition("/")[0] in _BLOCKWISE:
                label = "fp8_block"
            return name[: start - 1], label
    return name, None


def stored_weights(config: Any) -> str:
    """The weights that a Hugging Face config says: of operator tables, else a checkpoint's label.

    bfloat16 only where it says none. Raises InputError for settings that name no method.
    """
    settings = settings_of(config)
    if settings is None:
        return "bfloat16"
    try:
        return _named(settings) or quantization_of(config) or "bfloat16"
    except (AttributeError, LookupError, TypeError):
        raise InputError(
            "the field 'quantization_config' of the target's config cannot be read"
        ) from None


def _named(settings: Mapping[str, Any]) -> Weights | None:
    method = method_name(settings)
    if method == "mxfp4":
        return "mxfp4"
    if method in ("fp8", "fbgemm_fp8"):
        static = settings.get("activation_scheme") == "static"
        stored: Weights = "fp8" if static else "fp8_dynamic"
        return "fp8_block" if settings.get("weight_block_size") else stored
    if method == "modelopt":
        return _MODELOPT.get(str(settings.get("quant_algo")).lower())
    if method == "quark" and isinstance(settings.get("global_quant_config"), Mapping):
        parts = settings["global_quant_config"]
        weights, inputs = parts.get("weight") or {}, parts.get("input_tensors") or {}
        if (weights.get("dtype"), inputs.get("dtype")) == ("fp8_e4m3", "fp8_e4m3"):
            return "fp8_dynamic" if inputs.get("is_dynamic") else "fp8"
    if (scheme := _scheme_of(method, settings)) is not None:
        weights, inputs = scheme
        bits = weights.get("num_bits")
        if weights.get("type") == "float" and inputs.get("num_bits") == bits:
            if bits == 4:
                return "nvfp4" if weights.get("group_size") == 16 else None
            stored = "fp8_dynamic" if inputs.get("dynamic") else "fp8"
            return "fp8_block" if weights.get("strategy") == "block" else stored
    return None


_MODELOPT: Mapping[str, Weights] = {
    "fp8": "fp8", "nvfp4": "nvfp4", "fp8_per_channel_per_token": "fp8_dynamic",
    "fp8_pb_wo": "fp8_block",
}  # fmt: skip


def quantization(weights: str, cache: Cache) -> str | None:
    """The name that a profile gives to weights and cache of these types; None for bfloat16."""
    parts = [] if weights == "bfloat16" else [weights]
    parts += [] if cache == "bfloat16" else [f"{cache} cache"]
    return ", ".join(parts) or None


def weights_label(quantized: str | None) -> str | None:
    """The weights' part of a profile's `quantization`; None for plain weights."""
    text = quantized or ""
    return (text.rpartition(", ")[0] if text.endswith(" cache") else text) or None


MODELOPT_FILE = "hf_quant_config.json"  # written by ModelOpt beside the config
QUANTO_MAP = "quanto_qmap.json"  # written by optimum-quanto beside the weights that it saves
SELF_SAID = ("bitnet", "fbgemm_fp8", "fp8", "mxfp4", "mxfp8", "nvfp4")  # the method says the bits
BITS = ("bits", "w_bit", "weight_bits", "nbits", "num_bits")
GROUPS = ("group_size", "q_group_size", "w_group_size")


def quantization_of(config: Any) -> str | None:
    """The label of a config's quantisation, as `gptq-4bit-g128`; None for plain weights.

    It names method, bits and group size, of fp8 the block that has a scale (`fp8-128x128`). Where
    the bits are not said in one place, 6 hex digits of the settings tell two apart. Raises
    InputError.
    """
    settings = settings_of(config)
    if settings is None:
        return None
    method = method_name(settings)
    bits = next((settings[name] for name in BITS if isinstance(settings.get(name), int)), None)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        bits = 4 if settings.get("load_in_4bit") else 8
    if bits is None and method == "fp8":
        # The block of one scale, and whether the inputs' scales are stored: each has other kernels.
        block = settings.get("weight_block_size", (128, 128))  # transformers' default
        static = "-static" if settings.get("activation_scheme") == "static" else ""
        return f"fp8-{'x'.join(map(str, block)) if block else 'tensor'}{static}"
    if bits is None and method in SELF_SAID:
        return method
    if bits is None:
        return f"{method}-{_scheme(method, settings) or _digest(settings)}"
    group = next((settings[name] for name in GROUPS if isinstance(settings.get(name), int)), 0)
    return f"{method}-{bits}bit" + (f"-g{group}" if group > 0 else "")


def _digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _scheme(method: str, settings: Mapping[str, Any]) -> str | None:
    """What tells two settings of a method apart, in short; None where it takes all of them."""
    if method == "quanto" and isinstance(settings.get("weights"), list):
        rounded = [kind for kind in settings.get("activations", ()) if kind != "none"]
        return "-".join((*settings["weights"], *rounded))
    if method == "torchao" and isinstance(settings.get("quant_type"), Mapping):
        kind = settings["quant_type"].get("default", settings["quant_type"])
        return f"{str(kind.get('_type', '')).removesuffix('Config').lower()}-{_digest(kind)}"
    if method == "modelopt" and isinstance(settings.get("quant_algo"), str):
        return str(settings["quant_algo"]).lower()
    if (scheme := _scheme_of(method, settings)) is None:
        return None
    stored, inputs = scheme
    size = f"-g{stored['group_size']}" if stored.get("group_size") else ""
    kind = "fp" if stored.get("type") == "float" else ""
    dynamic = "" if not inputs or inputs.get("dynamic") else "-static"
    return f"{kind}w{stored.get('num_bits')}a{inputs.get('num_bits', 16)}{size}{dynamic}"


def _scheme_of(method: str, settings: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """How compressed-tensors stores weights and inputs, if all layers are alike."""
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    return group.get("weights") or {}, group.get("input_activations") or {}


def with_quantization(fields: Mapping[str, Any], folder: Path | None = None) -> Mapping[str, Any]:
    """A config's fields, with `quantization_config` where the weights' storage is said elsewhere.

    That is in the text part, in `compression_config` (older compressed-tensors), or beside the
    config.
    """
    if not isinstance(fields, Mapping) or fields.get("quantization_config") is not None:
        return fields
    text, settings = fields.get("text_config"), fields.get("compression_config")
    if settings is None and isinstance(text, Mapping):
        settings = text.get("quantization_config")
    elif isinstance(settings, Mapping):
        settings = {"quant_method": "compressed-tensors", **settings}
    if settings is None and folder is not None and (folder / MODELOPT_FILE).is_file():
        told = read_json(folder / MODELOPT_FILE)
        told = told.get("quantization") if isinstance(told, Mapping) else None
        if not isinstance(told, Mapping):
            raise InputError(f"{folder / MODELOPT_FILE} does not say how the weights are stored")
        settings = {"quant_method": "modelopt", **told}
    if settings is None and folder is not None and (folder / QUANTO_MAP).is_file():
        layers, parts = read_json(folder / QUANTO_MAP), ("weights", "activations")
        try:
            kinds = {
                part: sorted({str(layer[part]) for layer in layers.values()}) for part in parts
            }
        except (AttributeError, LookupError, TypeError):
            raise InputError(f"{folder / QUANTO_MAP} is no map of layers") from None
        settings = {"quant_method": "quanto", **kinds}
    return fields if settings is None else {**fields, "quantization_config": settings}


def settings_of(config: Any) -> dict[str, Any] | None:
    """The field `quantization_config`, which is a mapping before and an object after loading."""
    value = getattr(config, "quantization_config", None)
    if isinstance(config, Mapping):
        value = config.get("quantization_config")
    if value is None:
        return None
    settings = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(settings, Mapping) or not settings:
        raise InputError("the field 'quantization_config' of the target's config is no mapping")
    return {str(key): setting for key, setting in settings.items()}


def method_of(config: Any) -> str | None:
    settings = settings_of(config)
    return None if settings is None else method_name(settings)


def method_name(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    if method is None and settings.get("quant_algo"):
        method = "modelopt"
    text = getattr(method, "value", method)  # an enumeration after loading
    if not isinstance(text, str) or not text:
        raise InputError("the 'quantization_config' of the target's config has no 'quant_method'")
    return text

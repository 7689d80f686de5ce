"""Quantised checkpoints: their label in a profile's key, and the packages that load them.

A checkpoint says how its weights are stored in `quantization_config` of its config.json, and
transformers loads it with packages of others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from costmodel.errors import InputError
from costmodel.io import read_json

# What transformers needs for a method: (module, name on the package index); of others it says so.
_ACCELERATE = ("accelerate", "accelerate")
_GPTQMODEL = ("gptqmodel", "gptqmodel")
PACKAGES = {
    "awq": (_ACCELERATE, _GPTQMODEL), "bitnet": (_ACCELERATE,), "fp8": (_ACCELERATE,),
    "bitsandbytes": (_ACCELERATE, ("bitsandbytes", "bitsandbytes")), "mxfp8": (_ACCELERATE,),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "gptq": (("optimum", "optimum"), _GPTQMODEL), "torchao": (("torchao", "torchao"),),
    "quanto": (_ACCELERATE, ("optimum.quanto", "optimum-quanto")),
}  # fmt: skip
EXTRAS = ("bitsandbytes", "compressed-tensors", "fp8", "quanto", "torchao")  # of this package
REFUSED = {  # what is missing, whatever is installed
    "hqq": "transformers 5 has no loader for it",
    "mxfp4": "its kernels are code that transformers fetches from the hub",
}
QUANTO_MAP = "quanto_qmap.json"  # written by optimum-quanto beside the weights that it saves
OWN_DTYPE = ("quanto", "torchao")  # weights that cannot be cast while loading
UNPACKED = ("compressed-tensors", "fp8", "mxfp8")  # on a CPU: plain weights in memory
SELF_SAID = ("bitnet", "fbgemm_fp8", "fp8", "mxfp4", "mxfp8", "nvfp4")  # the method says the bits
BITS = ("bits", "w_bit", "weight_bits", "nbits", "num_bits")
GROUPS = ("group_size", "q_group_size", "w_group_size")


def quantization_of(config: Any) -> str | None:
    """The label of a config's quantisation, as `gptq-4bit-g128`; None for plain weights.

    It names method, bits and group size, of fp8 the block that has a scale (`fp8-128x128`). Where
    the bits are not said in one place, 6 hex digits of the settings tell two apart, since they
    cost differently. Raises InputError for settings that are none.
    """
    settings = _settings(config)
    if settings is None:
        return None
    method = _method(settings)
    bits = next((settings[name] for name in BITS if isinstance(settings.get(name), int)), None)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        bits = 4 if settings.get("load_in_4bit") else 8
    if bits is None and method in SELF_SAID:
        return f"fp8-{_fp8_scales(settings)}" if method == "fp8" else method
    if bits is None:
        return f"{method}-{_scheme(method, settings) or _digest(settings)}"
    group = next((settings[name] for name in GROUPS if isinstance(settings.get(name), int)), 0)
    return f"{method}-{bits}bit" + (f"-g{group}" if group > 0 else "")


def _fp8_scales(settings: Mapping[str, Any]) -> str:
    """The block of one scale, and whether the inputs' scales are stored: each has other kernels."""
    block = settings.get("weight_block_size", (128, 128))  # transformers' default
    scales = "x".join(map(str, block)) if block else "tensor"
    return scales + ("-static" if settings.get("activation_scheme") == "static" else "")


def _digest(settings: Any) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _scheme(method: str, settings: Mapping[str, Any]) -> str | None:
    """What tells two settings of a method apart, in short; None where it takes all of them."""
    if method == "quanto" and isinstance(settings.get("weights"), list):
        inputs = [kind for kind in settings.get("activations", ()) if kind != "none"]
        return "-".join((*settings["weights"], *inputs))
    if method == "torchao" and isinstance(settings.get("quant_type"), Mapping):
        kind = settings["quant_type"].get("default", settings["quant_type"])
        return f"{str(kind.get('_type', '')).removesuffix('Config').lower()}-{_digest(kind)}"
    groups = settings.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    size = f"-g{weights['group_size']}" if weights.get("group_size") else ""
    kind = "fp" if weights.get("type") == "float" else ""
    dynamic = "" if not inputs or inputs.get("dynamic") else "-static"
    return f"{kind}w{weights.get('num_bits')}a{inputs.get('num_bits', 16)}{size}{dynamic}"


def mark_quanto(config: Any, folder: Path) -> None:
    """Note in a config that optimum-quanto saved the folder's weights: it says so beside them."""
    if not (folder / QUANTO_MAP).is_file():
        return
    layers = read_json(folder / QUANTO_MAP)
    parts = ("weights", "activations")
    try:
        kinds = {part: sorted({str(layer[part]) for layer in layers.values()}) for part in parts}
    except (AttributeError, LookupError, TypeError):
        raise InputError(f"{folder / QUANTO_MAP} is no map of layers") from None
    config.quantization_config = {"quant_method": "quanto", **kinds}


def rounds_inputs(config: Any) -> bool:
    """Whether products round their inputs to few bits, so that a last bit can grow to a step."""
    settings = _settings(config)
    if settings is None:
        return False
    groups = settings.get("config_groups") or {}
    return bool(
        settings.get("load_in_8bit")
        or settings.get("activation_scheme")
        or "DynamicActivation" in str(settings.get("quant_type"))
        or any(group.get("input_activations") for group in groups.values())
        or set(settings.get("activations") or ()) - {"none"}
    )


def check_loadable(config: Any, source: str) -> None:
    """Raise InputError unless the packages that load the config's weights are installed."""
    settings = _settings(config)
    if settings is None:
        return
    method = _method(settings)
    key = method
    if method == "bitsandbytes":
        key += "_4bit" if settings.get("load_in_4bit") else "_8bit"
    refused = _refusal(method, settings)
    if refused is not None:
        raise InputError(
            f"{source} is quantised by {method}, which is not loaded: {refused}",
            hint="Use a checkpoint that is not quantised, or quantised another way.",
        )
    if key not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        # transformers would read the packed numbers as plain weights.
        raise InputError(
            f"{source} is quantised by '{method}', which this version of transformers does not "
            "know",
            hint="Use a checkpoint that is not quantised, or a newer transformers.",
        )
    missing = [name for module, name in PACKAGES.get(method, ()) if not _is_installed(module)]
    if missing:
        packages = f"'rooftree[{method}]'" if method in EXTRAS else " ".join(missing)
        raise InputError(
            f"{source} is quantised by {method}, and to load it "
            f"{' and '.join(missing)} must be installed",
            hint=f"Run: pip install {packages}; or take weights that are not quantised.",
        )


def _refusal(method: str, settings: Mapping[str, Any]) -> str | None:
    """What keeps a method, or settings of one, from being loaded and decoded exactly."""
    if method == "quanto" and not isinstance(settings.get("weights"), list):
        return f"there is no {QUANTO_MAP}; save it by optimum-quanto's QuantizedModelForCausalLM"
    if settings.get("kv_cache_scheme"):
        return "it quantises the KV cache too, which this decoder keeps itself"
    groups = (settings.get("config_groups") or {}).values()
    inputs = [group.get("input_activations") or {} for group in groups]
    kind = str(settings.get("quant_type"))
    if any(one.get("dynamic") and one.get("strategy") == "tensor" for one in inputs) or (
        "DynamicActivation" in kind and "PerTensor" in kind
    ):
        return "all rows of a forward share one scale, so that a tree would change its text"
    return REFUSED.get(method)


def stored_bytes(tensor: Any) -> int:
    """Bytes that a tensor holds, with scales and zero points that are kept beside its numbers."""
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's and quanto's
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    beside = [getattr(tensor, "SCB", None)]  # bitsandbytes': a scale a row, or a block
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        beside += state.as_dict(packed=False).values()
    scales = sum(part.nbytes for part in beside if isinstance(part, torch.Tensor))
    return int(tensor.nbytes) + scales


def _settings(config: Any) -> dict[str, Any] | None:
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
    """The method of a config's quantisation; None for plain weights."""
    settings = _settings(config)
    return None if settings is None else _method(settings)


def _method(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    text = getattr(method, "value", method)  # an enumeration after loading
    if not isinstance(text, str) or not text:
        raise InputError("the 'quantization_config' of the target's config has no 'quant_method'")
    return text


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the parent of a dotted name
        return False

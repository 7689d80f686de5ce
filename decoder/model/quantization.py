"""Quantised checkpoints: the packages that load them, and what cannot be decoded exactly.

`costmodel.weights` names them; transformers loads them with packages of others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from costmodel.errors import InputError
from costmodel.weights import QUANTO_MAP, method_name, settings_of

# The modules that transformers needs for a method; of other methods it says so.
MODULES = {
    "awq": ("accelerate", "gptqmodel"), "bitnet": ("accelerate",), "fp8": ("accelerate",),
    "bitsandbytes": ("accelerate", "bitsandbytes"), "mxfp8": ("accelerate",),
    "compressed-tensors": ("compressed_tensors",), "gptq": ("optimum", "gptqmodel"),
    "torchao": ("torchao",), "quanto": ("accelerate", "optimum.quanto"),
}  # fmt: skip
EXTRAS = ("bitsandbytes", "compressed-tensors", "fp8", "quanto", "torchao")  # of this package
REFUSED = {  # what is missing, whatever is installed
    "hqq": "transformers 5 has no loader for it",
    "mxfp4": "its kernels are code that transformers fetches from the hub",
}
OWN_DTYPE = ("quanto", "torchao")  # weights that cannot be cast while loading
UNPACKED = ("compressed-tensors", "fp8", "mxfp8")  # on a CPU: plain weights in memory


def rounds_inputs(config: Any) -> bool:
    """Whether products round their inputs to few bits, so that a last bit can grow to a step."""
    settings = settings_of(config)
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
    settings = settings_of(config)
    if settings is None:
        return
    key = method = method_name(settings)
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
    lacking = [module for module in MODULES.get(method, ()) if not _is_installed(module)]
    missing = [re.sub(r"[_.]", "-", module) for module in lacking]  # on the package index
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


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the parent of a dotted name
        return False

"""Quantised checkpoints: their label in a profile's key, and the packages that load them.

A checkpoint says how its weights are stored in `quantization_config` of its config.json, and
transformers loads it with packages of others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from costmodel.errors import InputError

# What transformers needs for each method: (module, name on the package index).
_ACCELERATE = ("accelerate", "accelerate")
_GPTQMODEL = ("gptqmodel", "gptqmodel")
PACKAGES = {
    "aqlm": (_ACCELERATE, ("aqlm", "aqlm[gpu,cpu]")),
    "auto-round": (("auto_round", "auto-round"),),
    "awq": (_ACCELERATE, _GPTQMODEL),
    "bitnet": (_ACCELERATE,),
    "bitsandbytes": (_ACCELERATE, ("bitsandbytes", "bitsandbytes")),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "eetq": (_ACCELERATE, ("kernels", "kernels")),
    "fbgemm_fp8": (_ACCELERATE, ("fbgemm_gpu", "fbgemm-gpu")),
    "fp8": (_ACCELERATE,),
    "gptq": (("optimum", "optimum"), _GPTQMODEL),
    "higgs": (_ACCELERATE, ("flute", "flute-kernel")),
    "hqq": (("hqq", "hqq"),),
    "mxfp8": (_ACCELERATE,),
    "quanto": (_ACCELERATE, ("optimum.quanto", "optimum-quanto")),
    "quark": (("quark", "amd-quark"),),
    "spqr": (_ACCELERATE, ("spqr_quant", "spqr_quant[gpu]")),
    "torchao": (("torchao", "torchao"),),
    "vptq": (_ACCELERATE, ("vptq", "vptq")),
}
SELF_SAID = ("bitnet", "fbgemm_fp8", "fp8", "mxfp4", "mxfp8", "nvfp4")  # the method says the bits
BITS = ("bits", "w_bit", "weight_bits", "nbits", "num_bits")
GROUPS = ("group_size", "q_group_size", "w_group_size")


def quantization_of(config: Any) -> str | None:
    """The label of a config's quantisation, as `gptq-4bit-g128`; None for plain weights.

    It names method, bits and group size. Where the bits are not said in one place, 6 hex digits
    of the settings tell two apart, since they cost differently. Raises InputError for settings
    that are none.
    """
    settings = _settings(config)
    if settings is None:
        return None
    method = _method(settings)
    bits = next((settings[name] for name in BITS if isinstance(settings.get(name), int)), None)
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        bits = 4 if settings.get("load_in_4bit") else 8
    if bits is None and method in SELF_SAID:
        return method
    if bits is None:
        text = json.dumps(settings, sort_keys=True, default=str)
        return f"{method}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    group = next((settings[name] for name in GROUPS if isinstance(settings.get(name), int)), 0)
    return f"{method}-{bits}bit" + (f"-g{group}" if group > 0 else "")


def check_loadable(config: Any, source: str) -> None:
    """Raise InputError unless the packages that load the config's weights are installed."""
    settings = _settings(config)
    if settings is None:
        return
    method = _method(settings)
    key = method
    if method == "bitsandbytes":
        key += "_4bit" if settings.get("load_in_4bit") else "_8bit"
    if key not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        # transformers would read the packed numbers as plain weights.
        raise InputError(
            f"{source} is quantised by '{method}', which this version of transformers does not "
            "know",
            hint="Use a checkpoint that is not quantised, or a newer transformers.",
        )
    missing = [name for module, name in PACKAGES.get(method, ()) if not _is_installed(module)]
    if missing:
        raise InputError(
            f"{source} is quantised by {method}, and to load it "
            f"{' and '.join(missing)} must be installed",
            hint=f"Run: pip install {' '.join(missing)}; or take weights that are not quantised.",
        )


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

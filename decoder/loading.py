"""From a name to a model: a local folder, a hub id, or a known target.

Real weights come from a folder, from the demo model, from the hub's local cache
or (where asked for) from the hub; random weights are built from the config on
the device itself, so that latency can be measured without a download.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from costmodel.targets import find_target
from decoder.demo_model import DEMO_NAME
from decoder.model_source import BROKEN_FILES, first_reason, label_of, read_config, weights_source
from decoder.parallel import ALONE, Ranks
from decoder.sharding import Checkpoint, RandomWeights, build_shard, local_architecture

Weights = Literal["auto", "random", "pretrained"]

CPU_TARGET = DEMO_NAME
GPU_TARGETS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM, what it is called and where its weights came from.

    `architecture` is that of the whole target, also where `ranks` share it.
    """

    model: PreTrainedModel
    name: str
    source: str  # the folder or hub id that the weights and tokenizer come from, or ""
    weights: Literal["pretrained", "random"]
    architecture: ModelArchitecture
    ranks: Ranks = ALONE

    @property
    def local(self) -> ModelArchitecture:
        """The sizes of what this process holds."""
        return local_architecture(self.architecture, self.ranks.size)

    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the weights; InputError when there is none."""
        if not self.source:
            raise InputError(
                f"{self.name} has random weights and no tokenizer",
                hint="Give token ids, or a target with weights (rooftree demo-model brings one).",
            )
        try:
            return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        except BROKEN_FILES as error:
            raise InputError(
                f"no usable tokenizer in {self.source}",
                hint="A folder needs a whole tokenizer.json beside the weights.",
            ) from error


def default_target(device: torch.device) -> str:
    """The target when nothing is named: SmolLM2-135M on a CPU, else the largest Qwen3 that fits."""
    if device.type == "cpu":
        return CPU_TARGET
    free_bytes, _ = torch.cuda.mem_get_info(device)
    for name in GPU_TARGETS:
        weights_bytes = find_target(name).architecture.parameters * 2
        if weights_bytes * 1.3 < free_bytes:  # room for the KV cache and activations
            return name
    return CPU_TARGET


def load_model(
    name: str,
    *,
    weights: Weights = "auto",
    dtype: torch.dtype,
    device: torch.device,
    download: bool = False,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Load `name` (folder, hub id or known target), or this rank's part of it, onto the device.

    weights  `pretrained` or raise InputError; `random` from the config alone;
             `auto` takes local weights where there are some, else random ones
    download whether the hub may be asked for `pretrained` weights not found locally
    """
    if weights not in ("auto", "random", "pretrained"):
        raise InputError(
            f"'{weights}' is not a kind of weights", hint="Use auto, pretrained or random."
        )
    if not name.strip():
        raise InputError(
            "the target's name is empty", hint="Give a folder, a hub id or a known target."
        )
    source = None
    if weights != "random":
        source = weights_source(name, download=download and weights == "pretrained")
    with _quiet():
        if source is not None:
            return _load_pretrained(name, source, dtype, device, ranks)
        if weights == "pretrained":
            raise InputError(
                f"no weights found for '{name}'",
                hint="Give a folder with config.json and *.safetensors, a hub id that can be "
                "reached, or run `rooftree demo-model` for a small real model.",
            )
        return _build_random(name, dtype, device, ranks)


def borrow_model(model: Any) -> LoadedModel:
    """A transformers model that belongs to the caller; nothing on it is changed for good."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"a target must be a name, a folder or a transformers model, not {type(model).__name__}"
        )
    source = str(getattr(model.config, "_name_or_path", "") or "")
    architecture = ModelArchitecture.from_hf_config(model.config, name=source or None)
    return LoadedModel(
        model=model.eval(),
        name=architecture.name,
        source=source,
        weights="pretrained",
        architecture=architecture,
    )


def _load_pretrained(
    name: str, source: str, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> LoadedModel:
    config = read_config(source)
    architecture = ModelArchitecture.from_hf_config(config, name=label_of(name))
    _check_memory(architecture, dtype, device, ranks)
    if ranks.alone:
        model = _whole_pretrained(source, config, dtype, device)
    else:
        model = _pretrained_shard(source, config, (dtype, device), ranks)
    return LoadedModel(
        model=model.eval(),
        name=label_of(name),
        source=source,
        weights="pretrained",
        architecture=architecture,
        ranks=ranks,
    )


def _whole_pretrained(
    source: str, config: Any, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        model = model.to(device)
    except BROKEN_FILES as error:
        raise _bad_weights(source, first_reason(error)) from error
    # transformers fills what a checkpoint lacks with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        raise _bad_weights(source, f"{len(wrong)} missing or of a wrong shape, as {wrong[0]}")
    return model


def _pretrained_shard(
    source: str, config: Any, placed: tuple[torch.dtype, torch.device], ranks: Ranks
) -> PreTrainedModel:
    """A rank's part, of which alone the files are read."""
    if getattr(config, "quantization_config", None) is not None:
        raise _bad_weights(source, "quantised weights cannot be shared by several processes")
    try:
        with ExitStack() as files:
            return build_shard(config, placed, ranks, Checkpoint(Path(source), files))
    except BROKEN_FILES as error:
        raise _bad_weights(source, first_reason(error)) from error


def _bad_weights(source: str, reason: str) -> InputError:
    return InputError(
        f"cannot load the weights in {source}: {reason}",
        hint="Only complete safetensors checkpoints are loaded; fetch or copy the folder again.",
    )


def _build_random(name: str, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> LoadedModel:
    folder = Path(name).expanduser()
    if folder.is_dir():
        config = read_config(str(folder))
    else:
        known = find_target(name).hf_config
        config = AutoConfig.for_model(**known)
    architecture = ModelArchitecture.from_hf_config(config, name=label_of(name))
    _check_memory(architecture, dtype, device, ranks)
    if ranks.alone:
        model = _initialised(config, dtype, device)
    else:
        source = RandomWeights(deviation=float(config.initializer_range))
        model = build_shard(config, (dtype, device), ranks, source)
    return LoadedModel(
        model=model.eval(),
        name=label_of(name),
        source="",
        weights="random",
        architecture=architecture,
        ranks=ranks,
    )


def _initialised(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with fresh weights, each written once, on the device itself."""
    with torch.device("meta"):  # shapes alone, without the initialisation of torch's own layers
        # Named here because a config's own dtype would win over torch's default.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()  # ties what is tied, and computes the rotary frequencies again
    return model


def _check_memory(
    architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> None:
    """Raise InputError before a model is loaded that cannot fit; a CPU would start to swap."""
    needed_bytes = local_architecture(architecture, ranks.size).parameters * dtype.itemsize
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        needed_bytes *= ranks.size  # all ranks have their part in the same memory
        free_bytes = int(ranks.least(psutil.virtual_memory().available))
    if needed_bytes > free_bytes:
        raise InputError(
            f"{architecture.name} needs {needed_bytes / 1e9:.1f} GB for its weights, but {device} "
            f"has {free_bytes / 1e9:.1f} GB free",
            hint="Choose a smaller target, or free some memory.",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or notices of transformers on a user's terminal."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()

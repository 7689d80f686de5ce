"""Loading a target by name: a local folder, a hub id or a known target.

Pretrained weights come from a folder, the demo model, the hub's local cache or, with
`download`, the hub. Random weights are built from the config on the device itself, so that
latency can be measured without a download.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import huggingface_hub
import psutil
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import TargetEntry, find_target, resolve_target
from costmodel.errors import InputError, RooftreeError, shown
from costmodel.io import folder_of, read_json
from costmodel.weights import method_of, quantization_of
from decoder.configs import BROKEN_FILES, first_reason, quiet, sizes_of
from decoder.model.demo_model import DEMO_NAME, demo_model_folder
from decoder.model.quantization import OWN_DTYPE, UNPACKED, check_loadable, stored_bytes
from decoder.model.runtime.linear import read_bytes
from decoder.names import check_path, check_target
from decoder.nvml import DEVICE_ERRORS, failed_device, free_gpu_bytes

Weights = Literal["auto", "random", "pretrained"]

CPU_TARGET = DEMO_NAME
GPU_TARGETS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B")  # largest first

# Kernels of transformers itself, by the config's field; other names are code on the hub.
KERNELS = {
    "_attn_implementation": (
        "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
        "flash_attention_4",
    ),
    "_experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}  # fmt: skip

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM with its name and the origin of its weights.

    source        the folder or hub id of weights and tokenizer; empty for random weights
    int8          whether a decoder is to round the weights to int8
    stored        the label of the quantisation in the checkpoint, whatever is in memory
    """

    model: PreTrainedModel
    name: str
    source: str
    weights: Literal["pretrained", "random"]
    architecture: ModelArchitecture
    int8: bool = False
    stored: str | None = None

    @property
    def quantization(self) -> str | None:
        """The label of the weights' quantisation; None for weights in the model's dtype."""
        return "int8" if self.int8 else quantization_of(self.model.config)

    @property
    def unpacked(self) -> bool:
        """Whether the layers of a quantised checkpoint are plain weights in memory."""
        plain = self.model.dtype.itemsize
        return self.stored is not None and (self.weight_bytes or plain) >= plain

    @property
    def weight_bytes(self) -> float | None:
        """Bytes that steps read of one weight of the layers, scales included; None: the dtype's."""
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        if self.quantization is None or self.int8:
            return read_bytes(self.model, ends)
        outside = {id(tensor) for end in ends for tensor in _tensors(end)}
        held = sum(stored_bytes(t) for t in _tensors(self.model) if id(t) not in outside)
        a = self.architecture
        return held / (a.parameters - a.vocab * a.hidden * (1 if a.tied else 2))

    @property
    def head_bytes(self) -> float | None:
        """Bytes that steps read of one weight of the LM head; None: the dtype's."""
        return read_bytes(self.model.get_output_embeddings())

    def tokenizer(self) -> Any:
        """The tokenizer beside the weights; InputError where there is none."""
        if not self.source:
            raise InputError(
                f"{self.name} has random weights and no tokenizer",
                hint="Give token ids, or a target with weights (rooftree demo-model brings one).",
            )
        try:
            return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare ones
            raise InputError(
                f"no usable tokenizer in {self.source}",
                hint="A folder needs a whole tokenizer.json beside the weights.",
            ) from error


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():  # bitsandbytes moves its scales there at the first product
        scales = getattr(getattr(part, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales


def default_target(device: torch.device) -> str:
    """The target where none is named: SmolLM2-135M on a CPU, else the largest Qwen3 that fits."""
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
) -> LoadedModel:
    """Load `name` (folder, hub id or known target) onto the device.

    weights   `pretrained`, `random` (from the config alone) or `auto`: local weights if
              there are any, else random ones
    download  allow fetching `pretrained` weights from the hub
    Raises InputError for an unknown name, absent or damaged weights, or too little memory.
    """
    if weights not in get_args(Weights):
        raise InputError(
            f"'{weights}' is not a kind of weights", hint="Use auto, pretrained or random."
        )
    check_target(name)
    pretrained, source = weights == "pretrained", None
    if weights != "random":
        source = weights_source(name, download=download and pretrained)
    with quiet():
        if source is not None:
            return _load_pretrained(name, source, dtype, device)
        if pretrained:
            raise InputError(
                f"no weights found for '{name}'",
                hint="Give a folder with config.json and *.safetensors, a hub id that can be "
                "reached, or run `rooftree demo-model` for a small real model.",
            )
        return _build_random(name, dtype, device)


def borrow_model(model: Any) -> LoadedModel:
    """A target from the caller's transformers model, which is put into eval mode."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"a target must be a name, a folder or a transformers model, not {type(model).__name__}"
        )
    source = str(getattr(model.config, "_name_or_path", "") or "")
    read = sizes_of(model.config, source or None, approximate=True)
    made: Any = {"model": model.eval(), "name": read.name, "source": source}
    return LoadedModel(**made, weights="pretrained", architecture=read)


def _load_pretrained(
    name: str, source: str, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    target, label = _resolved(source), label_of(name)
    config, architecture = target.hf_config, replace(target.architecture, name=label)
    check_loadable(config, source)
    # transformers reads it with the weights.
    generation = Path(source) / "generation_config.json"
    settings = read_json(generation, finite=False) if generation.is_file() else {}
    if not isinstance(settings, dict):
        raise InputError(
            f"{generation} must hold an object (is {shown(settings)})", hint="Correct it."
        )
    method, needed_bytes = method_of(config), architecture.parameters * dtype.itemsize
    if method is not None and (method not in UNPACKED or device.type != "cpu"):
        try:
            index = read_json(Path(source) / "model.safetensors.index.json")
            names = set(index["weight_map"].values())
        except (RooftreeError, LookupError, AttributeError, TypeError):
            names = {"model.safetensors"}
        files = [Path(source) / str(file) for file in names]
        needed_bytes = sum(file.stat().st_size for file in files if file.is_file())
    _check_memory(label, needed_bytes, device)
    stored = quantization_of(config)
    try:
        model, report = _read_weights(source, config, dtype, device)
    except DEVICE_ERRORS as error:
        raise failed_device(error, device) from error
    except BROKEN_FILES as error:
        if method is None:
            raise _bad_weights(source, first_reason(error)) from error
        raise InputError(
            f"cannot load the quantised weights in {source}: {first_reason(error)}",
            hint="Install what it names, or use a checkpoint that is not quantised.",
        ) from error
    # transformers fills what a checkpoint lacks with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        raise _bad_weights(source, f"{len(wrong)} missing or of a wrong shape, as {wrong[0]}")
    made: Any = {"model": model.eval(), "name": label, "source": source, "stored": stored}
    return LoadedModel(**made, weights="pretrained", architecture=architecture)


def _read_weights(source: str, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model on the device, and its report of what the files lack."""
    method = method_of(config)
    if method in OWN_DTYPE:
        dtype = config.dtype or dtype
    how: Any = {"config": config, "dtype": dtype, "output_loading_info": True}
    how |= {"use_safetensors": True, "trust_remote_code": False, "ignore_mismatched_sizes": True}
    read: Any = partial(AutoModelForCausalLM.from_pretrained, source, **how)
    if method is None:
        model, report = read()
        return model.to(device), report
    if method == "bitsandbytes":  # warns at every product
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    with redirect_stderr(StringIO()):  # progress bars of the methods' libraries
        if method == "quanto":  # transformers cannot read back what it quantises this way
            from optimum.quanto import QuantizedModelForCausalLM

            with torch.inference_mode():  # else its 4 bits cannot be multiplied in that mode
                model = QuantizedModelForCausalLM.from_pretrained(source)._wrapped.to(device)
            model.config.quantization_config = config.quantization_config
            return model, {"missing_keys": (), "mismatched_keys": ()}
        # Several methods pack their weights for the device, and cannot move them afterwards.
        model, report = read(device_map={"": device})
        if method == "compressed-tensors":  # unpacks them in the first forward of the whole model
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
        return model, report


def _bad_weights(source: str, reason: str) -> InputError:
    return InputError(
        f"cannot load the weights in {source}: {reason}",
        hint="Only complete safetensors checkpoints are loaded; fetch or copy the folder again.",
    )


def _build_random(name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    target = _resolved(name)
    config, architecture = target.hf_config, target.architecture
    quantization = quantization_of(config)
    if quantization is not None:
        raise InputError(
            f"{target.name} is quantised ({quantization}), and random weights are not: they would "
            "take the time of another model",
            hint="Give a folder with the quantised weights, or a config without "
            "'quantization_config'.",
        )
    _check_memory(architecture.name, architecture.parameters * dtype.itemsize, device)
    try:
        model = _initialised(config, dtype, device)
    except DEVICE_ERRORS as error:
        raise failed_device(error, device) from error
    except BROKEN_FILES as error:
        raise InputError(
            f"no model can be built from the config of {name}: {first_reason(error)}",
            hint="Correct its config.json; a field that transformers needs is missing or wrong.",
        ) from error
    made: Any = {"model": model.eval(), "name": target.name, "source": ""}
    return LoadedModel(**made, weights="random", architecture=architecture)


def _initialised(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with random weights, allocated and written once, on the device."""
    with torch.device("meta"):  # shapes alone, without initialising weights
        # Passed because a config's dtype takes precedence over torch's default.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()  # also ties weights and recomputes the rotary frequencies
        if dtype == torch.float32 and device.type == "cpu":
            for parameter in model.parameters():  # as published ones are, and as fast to read
                parameter.copy_(parameter.bfloat16())
    return model


def _check_memory(name: str, needed_bytes: int, device: torch.device) -> None:
    """Raise InputError for weights that do not fit the free memory; a CPU would swap."""
    on_gpu = device.type == "cuda"
    free_bytes = free_gpu_bytes(device) if on_gpu else psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        raise InputError(
            f"{name} needs {needed_bytes / 1e9:.1f} GB for its weights, but {device} "
            f"has {free_bytes / 1e9:.1f} GB free",
            hint="Choose a smaller target, or free some memory.",
        )


def weights_source(name: str, download: bool) -> str | None:
    """The folder that holds pretrained weights, or None.

    download  allow fetching them from the hub
    Raises InputError for a missing folder and an impossible name.
    """
    folder = folder_of(name)
    if folder is not None:
        return str(folder) if any(folder.glob("*.safetensors")) else None
    check_path(name)
    label, demo = _canonical_name(name), demo_model_folder()
    if label == DEMO_NAME and (demo / "config.json").is_file():
        return str(demo)
    copy = hub_copy(
        label, HUB_FILES, lambda copy: any(copy.glob("*.safetensors")), download=download
    )
    return None if copy is None else str(copy)


def hub_copy(
    name: str, files: Sequence[str], complete: Callable[[Path], bool], *, download: bool = True
) -> Path | None:
    """The local copy of a hub id where it is complete, else one that is downloaded now.

    download  False gives None in place of a download
    Raises InputError for an impossible name, and where the hub does not give it.
    """
    fetch = partial(huggingface_hub.snapshot_download, name, allow_patterns=list(files))
    try:
        copy = Path(fetch(local_files_only=True))
        if complete(copy):
            return copy
    except HFValidationError as error:
        raise InputError(
            f"'{name}' is neither a folder nor a hub id",
            hint="Check the name. Known targets are listed in calibrations/targets.yaml.",
        ) from error
    except LocalEntryNotFoundError:
        pass
    if not download:
        return None
    try:
        return Path(fetch())
    except (HfHubHTTPError, OSError) as error:
        raise InputError(
            f"'{name}' is no folder here, and the hub does not give it: {first_reason(error)}",
            hint="Check the name and the network, give a folder, or run `rooftree demo-model` for "
            "a small real model.",
        ) from error


def _resolved(source: str) -> TargetEntry:
    """The target in a folder, or of a name, with torch's own kernels whatever its config names.

    This decoder brings its own attention. Raises InputError for a name of no known kernel, such
    as a repository on the hub.
    """
    target = resolve_target(source, approximate=True)
    config = target.hf_config
    if isinstance(config, Mapping):  # a known target's
        return replace(target, hf_config=AutoConfig.for_model(**config))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for field, names in KERNELS.items():
            name = getattr(part, field, None)
            if name is None:
                continue
            if name not in names:
                raise InputError(
                    f"the config of {source} asks for the kernel {str(name)[:80]!r} as {field[1:]},"
                    " which is no part of transformers",
                    hint=f"Take {field[1:]} out of its config.json.",
                )
            setattr(part, field, None)
    return target


def label_of(name: str) -> str:
    """A model's name: its folder's name, or a known target's full name."""
    folder = folder_of(name)
    return _canonical_name(name) if folder is None else folder.resolve().name


def _canonical_name(name: str) -> str:
    """A known target's full name; other names unchanged."""
    try:
        return find_target(name).architecture.name
    except RooftreeError:
        return name

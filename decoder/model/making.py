"""Targets made of loaded models: how one runs is decided here, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch

from costmodel.errors import DeviceError, InputError
from decoder.model.loading import LoadedModel
from decoder.model.runtime.capture import CudaCapture
from decoder.model.runtime.eager import EagerRuntime, ModelStep, RuntimeChoice, RuntimeKind
from decoder.model.runtime.fused import fuse, kernels_refused
from decoder.model.runtime.graphs import GraphRuntime
from decoder.model.runtime.linear import packing_refused
from decoder.model.runtime.packed import PackedRuntime, PackedStep, compile_ahead, packed_of
from decoder.model.selfcheck import checked_structure
from decoder.model.target import Target
from decoder.nvml import check_current

Quantization = Literal["int8"]

GRAPHS_MEMORY_SHARE = 0.1  # of the device, for captured forwards
GROUPED_CAPABILITIES = ((9, 0), (10, 0))  # on which PyTorch has a kernel for grouped products


def quantised(loaded: LoadedModel, quantization: Quantization | None) -> LoadedModel:
    """The model whose weights a decoder rounds when it packs them; None leaves them.

    Raises InputError for an unknown quantisation, and for weights that have one.
    """
    if quantization is None:
        return loaded
    if quantization != "int8":
        raise InputError(f"'{quantization}' is not a quantisation", hint="Use int8.")
    if loaded.quantization is not None:
        raise InputError(
            f"{loaded.name} is quantised already ({loaded.quantization})",
            hint="Leave out --dtype int8.",
        )
    return replace(loaded, int8=True)


def make_target(
    loaded: LoadedModel, *, owned: bool = True, runtime: RuntimeChoice = "auto", fused: bool = True
) -> Target:
    """Choose how a loaded model runs, prepare its weights for that, and make the target.

    owned    whether the model may be changed for good. A borrowed model keeps its weights and its
             attention, which is swapped only while a forward runs
    runtime  `graphs` captures forwards, `packed` gives the weights up for packed ones, `eager`
             does neither, `auto` chooses (`runtime_kind`)
    fused    fuse the layers of an owned model that is not packed
    Raises InputError for an unknown runtime, DeviceError for one that the device has not.
    """
    step = ModelStep(loaded.model, owned=owned)
    check_current(step.device)
    if not owned:  # the reason why the weights cannot be packed; None where they can
        refused: str | None = "the weights of a borrowed model stay as they are"
    elif loaded.quantization is not None and not loaded.int8:
        refused = "quantised weights are not packed"
    else:
        refused = packing_refused(step.device, step.dtype)
    dense = not loaded.architecture.experts
    capturable = owned and step.rope is None and (dense or experts_capturable(step))
    kind = runtime_kind(runtime, step.device, capturable=capturable, packable=refused is None)
    already_packed = packed_of(loaded.model) is not None
    if kind == "packed":
        if not already_packed:
            compile_ahead(step, int8=loaded.int8)
    elif loaded.int8:
        raise InputError(
            f"int8 weights need the packed runtime: {refused or f'this is {kind}'}",
            hint="Leave out --dtype int8, or take a CPU and --runtime packed.",
        )
    elif already_packed:
        raise InputError(
            f"the weights of {loaded.name} were packed, and no {kind} runtime can use them",
            hint="Load the model again.",
        )
    elif owned and fused and loaded.quantization is None:
        fuse(loaded.model)
        if step.device.type == "cuda":
            torch.cuda.empty_cache()  # the weights before they were joined
    structure = checked_structure(step, loaded.name)
    step.plain_head = structure.plain_head
    notes: tuple[str, ...] = ()
    plain_cpu = owned and step.device.type == "cpu" and loaded.quantization is None
    if refused is not None and (runtime == "packed" or (runtime == "auto" and plain_cpu)):
        notes = (f"runs eagerly: {refused}",)
    if step.device.type == "cuda" and kernels_refused(step.device):
        notes = (f"runs on PyTorch's own kernels: {kernels_refused(step.device)}",)
    kept, said = structure.token_values, loaded.architecture.token_values
    if kept != said and structure.latent == bool(loaded.architecture.latent_rank):
        notes += (f"its layers keep {kept} values of a token, and its config says {said}",)
    if loaded.unpacked:
        notes += (f"{loaded.stored} weights are held and read as plain {str(step.dtype)[6:]}",)
    if kind == "graphs" and structure.uneven:
        kind, notes = "eager", (*notes, f"runs eagerly: {structure.uneven}")
    if kind == "packed":
        if loaded.weights == "pretrained" and not already_packed:
            # Loaded tensors are views of the mapped file, and a single view keeps the whole file
            # in memory. Packing gives up the weights of linear layers; all others are copied.
            modules = [one for one in loaded.model.modules() if type(one) is torch.nn.Linear]
            given_up = {id(one.weight) for one in modules}
            for tensor in (*loaded.model.parameters(), *loaded.model.buffers()):
                if id(tensor) not in given_up:
                    tensor.data = tensor.data.clone()
        step = PackedStep(step, int8=loaded.int8)
        return Target(loaded, step, structure, PackedRuntime(step, structure, notes))
    eager = EagerRuntime(step, structure, notes)
    if kind == "eager":
        return Target(loaded, step, structure, eager)
    _, total_bytes = torch.cuda.mem_get_info(step.device)
    capture = CudaCapture(step.device, int(GRAPHS_MEMORY_SHARE * total_bytes))
    return Target(loaded, step, structure, GraphRuntime(step, eager, capture))


def runtime_kind(
    choice: RuntimeChoice, device: torch.device, *, capturable: bool = True, packable: bool = True
) -> RuntimeKind:
    """The runtime of a choice: `auto` is graphs on CUDA and packed on a CPU, where they can be.

    capturable  False for a borrowed model, whose weights may move while a graph reads them, and
                for experts that need the host (`experts_capturable`)
    packable    whether the weights may be given up for packed ones; without it a choice of packed
                is eager
    Raises InputError for an unknown choice, DeviceError for a runtime that the device has not.
    """
    if choice not in get_args(RuntimeChoice):
        raise InputError(
            f"'{choice}' is not a runtime", hint=f"Use one of {', '.join(get_args(RuntimeChoice))}."
        )
    needs = {"graphs": "cuda", "packed": "cpu"}.get(choice, device.type)
    if needs != device.type:
        raise DeviceError(
            f"the {choice} runtime needs a {needs.upper()} device, and this is {device}",
            hint="Use --runtime eager, or leave it out.",
        )
    if choice == "graphs" or (choice == "auto" and device.type == "cuda" and capturable):
        return "graphs"
    return "packed" if choice != "eager" and device.type == "cpu" and packable else "eager"


def experts_capturable(step: ModelStep) -> bool:
    """Whether a mixture of experts is computed without asking the host for anything.

    transformers' grouped product does not, where PyTorch has one kernel for it; on other devices
    and in other dtypes PyTorch copies the sizes of the groups to the host.
    """
    if step.device.type != "cuda" or step.dtype != torch.bfloat16:
        return False
    grouped = step.model.config.get_text_config()._experts_implementation == "grouped_mm"
    return grouped and torch.cuda.get_device_capability(step.device) in GROUPED_CAPABILITIES

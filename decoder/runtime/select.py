"""Which runtime a target uses."""

from __future__ import annotations

from typing import get_args

import torch

from costmodel.errors import DeviceError, InputError
from decoder.parallel import ALONE, Ranks
from decoder.runtime.base import Runtime, RuntimeChoice, RuntimeKind
from decoder.runtime.capture import CudaCapture
from decoder.runtime.eager import EagerRuntime
from decoder.runtime.graphs import GraphRuntime
from decoder.runtime.step import ModelStep

MEMORY_SHARE = 0.1  # of the device, for captured forwards


def runtime_kind(
    choice: RuntimeChoice, device: torch.device, *, capturable: bool = True
) -> RuntimeKind:
    """The runtime that a choice means: `auto` takes graphs on CUDA where that is sure to work.

    capturable  not a borrowed model, since a graph keeps reading its weights where they lie,
                and no mixture of experts, since transformers' routing asks the host
    Raises InputError for an unknown choice, DeviceError for graphs on a device that has none.
    """
    if choice not in get_args(RuntimeChoice):
        raise InputError(
            f"'{choice}' is not a runtime", hint=f"Use one of {', '.join(get_args(RuntimeChoice))}."
        )
    if choice == "graphs" and device.type != "cuda":
        raise DeviceError(
            f"the graphs runtime needs a CUDA device, and this is {device}",
            hint="Use --runtime eager, or leave it out.",
        )
    if choice == "auto":
        return "graphs" if device.type == "cuda" and capturable else "eager"
    return choice


def make_runtime(
    choice: RuntimeChoice,
    step: ModelStep,
    eager: EagerRuntime,
    *,
    capturable: bool = True,
    ranks: Ranks = ALONE,
) -> Runtime:
    """The runtime of one model; errors as in `runtime_kind`."""
    if runtime_kind(choice, step.device, capturable=capturable) == "eager":
        return eager
    _, total_bytes = torch.cuda.mem_get_info(step.device)
    budget_bytes = int(MEMORY_SHARE * total_bytes)
    return GraphRuntime(step, eager, CudaCapture(step.device, ranks), budget_bytes, ranks)

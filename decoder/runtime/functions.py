"""A drafter's own forward, captured once for each set of input shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from decoder.runtime.capture import Capture, CudaCapture

Tensors = tuple[torch.Tensor, ...]
_Key = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


class GraphedFunction:
    """A function of tensors whose device work is captured, and then replayed.

    The function takes and returns tensors, and knows from Python nothing that differs between
    calls of the same shapes: a cache's length comes in as a tensor. It may write tensors in
    place, as long as doing so again changes nothing, since a capture runs it several times.
    What it returns are static tensors that the next call of the same shapes overwrites. Where
    it cannot be captured it is called as it is, and `refused` says why.
    """

    def __init__(self, function: Callable[..., Tensors], capture: Capture | None) -> None:
        """capture: None calls the function as it is."""
        self._function = function
        self._capture = capture
        self._captured: dict[_Key, _Captured] = {}
        self.refused: str | None = None

    @classmethod
    def on(cls, device: torch.device, function: Callable[..., Tensors]) -> GraphedFunction:
        """Captured on CUDA, called as it is elsewhere."""
        return cls(function, CudaCapture(device) if device.type == "cuda" else None)

    @torch.inference_mode()
    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        if self._capture is None or self.refused is not None:
            return self._function(*inputs)
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self._captured:
            try:
                self._captured[key] = self._record(self._capture, inputs)
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
                self.refused = str(error).partition("\n")[0] or type(error).__name__
                logging.getLogger(__name__).warning("running eagerly: %s", self.refused)
                return self._function(*inputs)
        captured = self._captured[key]
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.copy_(given)
        captured.replay()
        return captured.outputs

    def _record(self, capture: Capture, inputs: Tensors) -> _Captured:
        fixed = tuple(tensor.clone() for tensor in inputs)
        outputs = tuple(torch.empty_like(tensor) for tensor in self._function(*fixed))

        def run() -> None:
            for kept, found in zip(outputs, self._function(*fixed), strict=True):
                kept.copy_(found)

        return _Captured(fixed, outputs, capture.record(run))

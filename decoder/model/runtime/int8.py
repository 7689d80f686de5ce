"""Linear layers with int8 weights and one scale for each output, for a CPU.

Weights alone are rounded, symmetrically and to the nearest; products are those of torch's own
kernel, whose results do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from decoder.model.runtime.linear import JoinedLinear, release

LARGEST = 127
WIDTH_MULTIPLE = 16  # of inputs: the kernel reads beyond the end of others


class Int8Linear(JoinedLinear):
    """Layers whose weights are rounded to int8; the modules compute by it from now on."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases).detach() if biases else None
        largest = weight.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny)
        self._scales = (largest / LARGEST).to(weight.dtype)
        steps = (weight.float() / self._scales.float()[:, None]).round()
        self._numbers = steps.clamp(-LARGEST, LARGEST).to(torch.int8)  # [out, in]
        release(linears, self)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        outputs = torch._weight_int8pack_mm(rows, self._numbers, self._scales)
        if self._bias is not None:
            outputs += self._bias
        return outputs.view(*inputs.shape[:-1], -1)

    def outputs_from(self, first: int, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)[..., first:]

    def added_to(
        self, rows: torch.Tensor, inputs: torch.Tensor, *, overwrite: bool = False
    ) -> torch.Tensor:
        return self(inputs).add_(rows)

    def weight(self) -> torch.Tensor:
        return self._numbers * self._scales[:, None]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._numbers[numbers] * self._scales[numbers][..., None]


def fits_int8(linear: nn.Linear) -> bool:
    """Whether the kernel takes a layer of this width."""
    return linear.in_features % WIDTH_MULTIPLE == 0

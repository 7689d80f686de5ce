"""Linear layers with int8 weights and one scale for each output, for a CPU.

Weights alone are rounded, symmetrically and to the nearest. In bfloat16 products are those of
torch's own kernel, in float32 those of `tiles`; neither's results depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from decoder.model.runtime import tiles
from decoder.model.runtime.linear import JoinedLinear, joined_weights, release

LARGEST = 127
WIDTH_MULTIPLE = 16  # of inputs: torch's kernel reads beyond the end of others


class Int8Linear(JoinedLinear):
    """Layers whose weights are rounded to int8; the modules compute by it from now on."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, self._bias = joined_weights(linears)
        largest = weight.abs().amax(1).float().clamp_min(torch.finfo(torch.float32).tiny)
        self._scales = (largest / LARGEST).to(weight.dtype)
        self.weight_bytes = 1.0 + self._scales.itemsize / weight.shape[1]
        steps = (weight.float() / self._scales.float()[:, None]).round()
        numbers = steps.clamp(-LARGEST, LARGEST).to(torch.int8)
        self._tiled = weight.dtype == torch.float32
        self._numbers = tiles.pack(numbers) if self._tiled else numbers
        release(linears, self)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self._tiled:
            outputs = tiles.product(rows, self._numbers)[:, : len(self._scales)] * self._scales
        else:
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
        size = len(self._scales)
        numbers = tiles.unpacked(self._numbers, size) if self._tiled else self._numbers
        return numbers * self._scales[:, None]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        whole = tiles.rows_of(self._numbers, numbers) if self._tiled else self._numbers[numbers]
        return whole * self._scales[numbers][..., None]


def fits_int8(linear: nn.Linear) -> bool:
    """Whether the kernel takes a layer of this width."""
    return linear.in_features % WIDTH_MULTIPLE == 0

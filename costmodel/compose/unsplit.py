"""Verifications in engines whose attention does not split the keys of several rows.

vLLM attends with FlashAttention 2 on Ampere, Ada and RTX Blackwell GPUs. It splits the keys of a
single row over idle processors. Of several rows, each tile of 64 rows of a head walks over all keys
on one processor, as in a prompt (`costmodel/compose/attention.py`).
"""

from __future__ import annotations

import numpy as np

from costmodel.architecture import ModelArchitecture
from costmodel.catalog import DeviceSpec
from costmodel.compose.serving_tables import Cache
from costmodel.compose.transfer_errors import transfer_errors

_CHIPS = ("GA100", "GA102", "AD102", "AD104", "GB202")
_TILE_ROWS = 64
# Share of a processor's peak rate at which a tile is computed: 0.47 and 0.48 on A100 and RTX A6000,
# 0.61 to 0.83 on RTX PRO 6000, L40S and RTX 4090.
_SHARE, _SHARE_AMPERE = 0.66, 0.48


def leaves_keys_unsplit(engine: str, device: DeviceSpec | None, cache: Cache = "bfloat16") -> bool:
    """Whether the engine's attention on this device walks over all keys with several rows."""
    if engine != "vllm" or cache != "bfloat16" or device is None:
        return False
    return _generation_and_chip(device)[1] in _CHIPS


def unsplit_attention_s(
    device: DeviceSpec,
    architecture: ModelArchitecture,
    shape: tuple[float, float, int],
    tensor_parallel: int = 1,
) -> float:
    """Seconds of all layers' walks over cached tokens; `shape` is (batch, context, rows)."""
    a, (batch, context, rows) = architecture, shape
    ampere = "Ampere" in _generation_and_chip(device)[0]
    processor_flops_per_s = device.peak_flops_per_s / device.sm_count
    tile_key_flops = 4 * _TILE_ROWS * a.head_dim  # scores and values, a multiplication and a sum
    key_s = tile_key_flops / processor_flops_per_s / (_SHARE_AMPERE if ampere else _SHARE)
    tiles = batch * a.heads / tensor_parallel * np.ceil(rows / _TILE_ROWS)
    waves = float(np.ceil(tiles / device.sm_count))
    seen = min(context, a.sliding_window or context)
    full = a.layers if a.sliding_window is None else a.full_layers
    return key_s * waves * (full * context + (a.layers - full) * seen)


def _generation_and_chip(device: DeviceSpec) -> tuple[str, str]:
    return transfer_errors().chips.get(device.slug, ("", ""))

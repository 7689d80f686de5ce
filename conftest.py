"""Leaves tests marked `gpu` out where PyTorch finds no GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]

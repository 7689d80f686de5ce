"""For all tests: `gpu` tests are left out where there is no GPU, and the real demo model."""

from __future__ import annotations

import os
from pathlib import Path

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


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted once a machine.

    Skips where it cannot be fetched, and fails in CI.
    """
    from costmodel.errors import InputError
    from decoder.demo_model import ensure_demo_model

    try:
        return ensure_demo_model()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")

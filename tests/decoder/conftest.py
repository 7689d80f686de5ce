"""The real demo model, fetched and converted once a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from costmodel.errors import InputError
from decoder.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where it cannot be fetched, fails in CI."""
    try:
        return ensure_demo_model()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")

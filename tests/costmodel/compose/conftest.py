"""Fixtures of the composed profiles' tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Measured data that lies beside the checkout."""
    folder = Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder ../shared is not here")
    return folder

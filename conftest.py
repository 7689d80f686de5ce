"""For all tests: which run where and when, and the real demo model."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples at every run; `--hypothesis-profile=searching` looks for others. Neither
# depends on how fast the machine is.
settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("searching"), derandomize=True)
settings.load_profile("repeatable")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more wait for each other on a busy machine

MANY_CASES = 12  # of one test; more are a cross product
QUICK_SHARE = 3  # one case in so many runs with the quick tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most cases of large cross products slow; leave out `gpu` tests without a GPU."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for same_test in cases.values():
        if len(same_test) > MANY_CASES:
            for index, item in enumerate(same_test):
                if index % QUICK_SHARE:
                    item.add_marker(pytest.mark.slow)
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collections, which the code under test asks for.

    A full collection over PyTorch's modules and some thousand tests takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free it at its end, or C++ libraries report it as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted once a machine.

    Skips where it cannot be fetched, and fails in CI.
    """
    from costmodel.errors import InputError
    from decoder.model.demo_model import ensure_demo_model

    try:
        return ensure_demo_model()
    except InputError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")

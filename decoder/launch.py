"""What torchrun tells a process that it starts. Imports nothing heavy, unlike what uses it."""

from __future__ import annotations

import os

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched_size() -> int:
    """How many processes torchrun started together with this one; 1 without it."""
    if any(not os.environ.get(name, "").strip() for name in TORCHRUN):
        return 1
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """Which of them this process is, from 0; 0 without it."""
    return int(os.environ["RANK"]) if launched_size() > 1 else 0

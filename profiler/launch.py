"""The processes that torchrun started, by its environment variables.

Apart from `calibrate.ranks`, because the command line asks before it imports torch.
"""

from __future__ import annotations

import os

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched_size() -> int:
    """Processes that torchrun started together, this one included; 1 without torchrun."""
    if any(not os.environ.get(name, "").strip() for name in TORCHRUN):
        return 1
    return int(os.environ["WORLD_SIZE"])


def launched_rank() -> int:
    """The number of this process among them, from 0; 0 without torchrun."""
    return int(os.environ["RANK"]) if launched_size() > 1 else 0

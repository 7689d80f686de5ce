"""vLLM: a scheduler that chooses each step's draft length, and stepping for calibration.

vLLM is imported only when a class of it is needed. Other modules are named by their full path:
`--scheduler-cls integrations.vllm.CostScheduler`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CostScheduler", "JunkDrafter", "SteeredScheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from integrations.vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

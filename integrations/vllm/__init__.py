"""vLLM: a scheduler that chooses each step's draft length, and stepping for calibration.

vLLM is imported only when a class of it is needed. Other modules are named by their full path:
`--scheduler-cls integrations.vllm.CostScheduler`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CostScheduler", "JunkDrafter", "SteeredScheduler"]


def __getattr__(name: str) -> Any:
    if name == "CostScheduler":
        from integrations.vllm.scheduler import CostScheduler

        return CostScheduler
    if name in ("JunkDrafter", "SteeredScheduler"):
        from integrations.vllm import steering

        return getattr(steering, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

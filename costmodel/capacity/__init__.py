"""Capacity planning: memory, throughput and latency of a server, and how many GPUs a rate takes.

    from costmodel.capacity import PlanRequest, Traffic, plan

What is named here is imported when it is first used: the planner needs more than a decoder does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.capacity.arrivals import Sampling
    from costmodel.capacity.goals import Goals
    from costmodel.capacity.operating import Policy, Traffic
    from costmodel.capacity.planner import Plan, plan
    from costmodel.capacity.request import PlanRequest

__all__ = ["Goals", "Plan", "PlanRequest", "Policy", "Sampling", "Traffic", "plan"]

_HOMES = {
    "Goals": "goals",
    "Plan": "planner",
    "PlanRequest": "request",
    "Policy": "operating",
    "Sampling": "arrivals",
    "Traffic": "operating",
    "plan": "planner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

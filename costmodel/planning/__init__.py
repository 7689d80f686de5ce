"""Capacity planning: from traffic, goals and prices to GPUs, tree sizes and cost.

    from costmodel.planning import Goals, PlanRequest, Traffic, plan

Layers from the bottom: `traffic`, `engines` and `request` describe the question; `forwards` (found
by `sources`), `drafting` and `acceptance` give seconds of forwards and tokens per cycle; `batching`
adds up one cycle of an engine and `servers` picks its best tree; `sizing` counts GPUs; `simulation`
adds percentiles; `search` tries all options and returns a `result.Plan`. `options` reads requests
from text, `exports` writes engine settings. The folder may import all of costmodel but online/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.planning.request import (
        Goals,
        PlanRequest,
        ServingPolicy,
        SimulationSettings,
    )
    from costmodel.planning.result import Plan
    from costmodel.planning.search import plan
    from costmodel.planning.traffic import Traffic, read_trace

_MODULES = {
    "Goals": "request",
    "Plan": "result",
    "PlanRequest": "request",
    "ServingPolicy": "request",
    "SimulationSettings": "request",
    "Traffic": "traffic",
    "plan": "search",
    "read_trace": "traffic",
}

__all__ = [
    "Goals",
    "Plan",
    "PlanRequest",
    "ServingPolicy",
    "SimulationSettings",
    "Traffic",
    "plan",
    "read_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value

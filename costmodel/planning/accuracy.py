"""Expected errors of planned times, and the options that a plan cannot tell from its best."""

from __future__ import annotations

import math

from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.engines import VERSIONS, EngineRules, planned_version
from costmodel.planning.forwards import Origin, TargetForward

# Half the width of an 80 % interval over the mean absolute error, for normally distributed errors:
# 1.2816 x 1.2533.
INTERVAL = 1.606
_ERRORS: dict[str, float] = read_yaml(shipped_directory() / "plan_errors.yaml")
SERVER_ERROR, DRAFTING_ERROR = _ERRORS["server"], _ERRORS["drafting"]


def relative_error(
    origin: Origin,
    engine: str,
    acceptance: Acceptance | None,
    committed: float,
    *,
    version: str = "",
    running: int = 1,
) -> float:
    """Expected relative error of a time per token: independent parts added in squares.

    The parts are the forward's error, the server model's (none where this project's own runtime
    was measured as a whole), the acceptance's, and that of drafts for several requests at once.
    The server model was checked with composed profiles: of these the larger error counts.
    """
    measured = engine == "rooftree" and origin.whole_runtime
    server = 0.0 if measured else server_error(engine, version)
    together = max if origin.kind == "composed" else math.hypot
    spread = acceptance.relative_error(committed) if acceptance else 0.0
    drafting = DRAFTING_ERROR if committed > 1.0 and running > 1 else 0.0
    return math.hypot(together(origin.error, server), spread, drafting)


def server_error(engine: str, version: str = "") -> float:
    """Mean error of times per token of published servers of an engine and version."""
    chats = engine in VERSIONS and planned_version(engine, version) == VERSIONS[engine][0]
    return _ERRORS["served"] if chats else SERVER_ERROR


def slower_error(forward: TargetForward, rules: EngineRules, error: float) -> float:
    """The error of longer times: a GPU may wait for host, link or ranks, experts stall."""
    starves = rules.name == "vllm" and forward.plans_on_host and not rules.overlaps_host
    wide = bool(forward.architecture.experts) and forward.value_bytes.weight >= 1
    reasons = {
        "starved": starves,
        "pcie": forward.shares_pcie,
        "ranks": forward.ranks > 1,
        "experts": wide and rules.name == "vllm",
        "hybrid": starves and forward.architecture.recurrent,
    }
    return math.hypot(error, *(_ERRORS[reason] for reason, applies in reasons.items() if applies))

"""Expected errors of planned times, and the options that a plan cannot tell from its best."""

from __future__ import annotations

import math

from costmodel.planning.acceptance import Acceptance
from costmodel.planning.engines import VERSIONS, EngineRules, planned_version
from costmodel.planning.forwards import Origin, TargetForward

# Half the width of an 80 % interval over the mean absolute error, for normally distributed errors:
# 1.2816 x 1.2533.
INTERVAL = 1.606
# Mean error of times per token against 1,043 published servers, pairs of GPU and model left out
# (lab/studies/results/capacity_accuracy.json), and of the version whose servers decoded real chats
# (lab/studies/results/served_rows.json). Both were planned with composed profiles.
SERVER_ERROR, SERVED_ERROR = 0.098, 0.044
# A server whose GPU waits for its host is slower by this much more, which nothing in a plan can
# tell: a third of the published B200 servers, as their power shows. Of the models that it was
# chosen on 88 % of the rows are inside, of the others 77 % (served_rows.json). Hybrids start their
# states' kernels one by one: a Nemotron 9B there was planned 41 % too fast.
STARVED_ERROR, HYBRID_ERROR = 0.25, 0.35
# Two published servers on pairs of RTX PRO 6000 were this much slower than planned.
PCIE_ERROR = 0.2
# Of experts in 8 or 16 bits, 13 published servers of Mixtral were planned 25 % too fast in the mean
# and 77 % inside (lab/studies/plans_scored.py): they stall, which a hundredth of the requests shows
# that took 1.3 to 2.3 times as long as the mean of the same length, of dense models 1.03 to 1.29.
# Servers of vLLM 0.11 in fp8 blocks were 32 % slower. Those in 4 bits (gpt-oss) were not.
EXPERTS_ERROR = 0.2
# Eight ranks with few requests each were planned 70 % too fast, which is not explained: the host
# gathers the counts of all ranks in every step; NCCL's gather and scatter in place of an all-reduce
# are at most 1 ms more in 62 layers.
RANKS_ERROR = 0.7
# Cycles of drafts for many requests at once were not checked against servers. This is the largest
# mean error of plans of drafts for one request (lab/studies/results/plan_speedups.json).
DRAFTING_ERROR = 0.17


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
    if engine in VERSIONS and planned_version(engine, version) == VERSIONS[engine][0]:
        return SERVED_ERROR
    return SERVER_ERROR


def slower_error(forward: TargetForward, rules: EngineRules, error: float) -> float:
    """The error of longer times: a GPU may wait for host, link or ranks, experts stall."""
    starves = rules.name == "vllm" and forward.plans_on_host and not rules.overlaps_host
    link = PCIE_ERROR if forward.shares_pcie else 0.0
    together = RANKS_ERROR if forward.ranks > 1 else 0.0
    hybrid = HYBRID_ERROR if starves and forward.architecture.recurrent else 0.0
    wide = bool(forward.architecture.experts) and forward.value_bytes.weight >= 1
    experts = EXPERTS_ERROR if wide and rules.name == "vllm" else 0.0
    return math.hypot(error, STARVED_ERROR if starves else 0.0, link, together, experts, hybrid)

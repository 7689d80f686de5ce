"""Model-Optimizer's `speculation_profile.json` from a plan: its acceptance alone."""

from __future__ import annotations

from json import dumps
from typing import Any

import numpy as np

from costmodel.acceptance import conditional_rates
from costmodel.errors import InputError
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.exports import Export, SettingsWriter

# Kinds whose draft of K tokens begins like that of K + 1; blocks are drafted anew for each K.
CHAINED = ("eagle", "eagle3", "draft_model", "mtp", "ngram")
_UNKNOWN = ("block_size", "mean_accept_length_per_request", "acceptance_length_histogram",
            "per_category", "validation")  # fmt: skip


def speculation_profile(acceptance: Acceptance, target: str, drafter: str) -> dict[str, Any]:
    """The `speculation_profile.json` of chains; `measured` where acceptance was recorded.

    drafter  its kind, where the acceptance does not say it
    Raises InputError for acceptance of trees alone.
    """
    chain, source = acceptance.chain, acceptance.measured
    most = len(chain) - 1
    if not most:
        raise InputError(f"{acceptance.label} has no acceptance of chains")
    method = source.drafter_kind or drafter
    checkpoint = None if source.drafter == method else source.drafter
    marginal = [round(float(rate), 6) for rate in np.diff(chain)]
    return {
        "schema_version": "1.0",
        "measured": acceptance.kind == "recorded",
        "method": method,
        "draft_checkpoint": checkpoint,
        "target_model": source.target or target,
        "num_speculative_tokens": most,
        "max_supported_k": most,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in conditional_rates(np.diff(chain))],
        "marginal_accept_rates": marginal,
        "mean_accept_length": round(float(chain[-1]), 6),
        "accept_length_model": "chain_analytic" if method in CHAINED else "measured_per_k",
        "accept_length_by_k": {str(k): round(float(chain[k]), 6) for k in range(1, most + 1)},
        "measurement_conditions": {"source": acceptance.label},
        **dict.fromkeys(_UNKNOWN),
    }


def _write(export: Export) -> list[str]:
    acceptance = export.plan.acceptance
    if acceptance is None:
        raise InputError("a speculation profile is acceptance", hint="Give --acceptance")
    profile = speculation_profile(acceptance, export.request.target, export.drafter)
    return [dumps(profile, indent=2)]


PROFILE = SettingsWriter(engine=None, write=_write)

"""Acceptance in a `speculation_profile.json`, schema 1.0 (NVIDIA Model-Optimizer).

Its open pull requests 2247 and 2313 to 2316 have the chance of each draft position given those
before (conditional) and of all up to it (marginal), and tokens a step by K, the draft's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from costmodel.acceptance import conditional_rates
from costmodel.errors import InputError
from costmodel.io import NotJson, parse_json

_AGREE = 0.02  # by which the conditional and the marginal rates may differ, and the mean


def read_profile(text: str) -> dict[str, Any] | None:
    """Rates by depth of a `speculation_profile.json`. Raises InputError with what is wrong."""
    try:
        data = parse_json(text)
    except NotJson:
        return None
    if not isinstance(data, Mapping) or "conditional_accept_rates" not in data:
        return None
    conditional, marginal = data["conditional_accept_rates"], data.get("marginal_accept_rates")
    if not data.get("measured") or conditional is None:
        why = data.get("vectors_unavailable_reason") or data.get("note") or "nothing was measured"
        raise InputError(f"the speculation profile has no rates: {why}")
    product = np.cumprod([float(rate) for rate in conditional])
    survival = product if marginal is None else np.array([float(rate) for rate in marginal])
    if len(product) != len(survival) or np.max(np.abs(product - survival), initial=0.0) > _AGREE:
        raise InputError("the speculation profile's conditional and marginal rates disagree")
    lengths = {int(k): float(v) for k, v in (data.get("accept_length_by_k") or {}).items()}
    doubts = []
    if data.get("accept_length_model") == "measured_per_k" and len(lengths) < 2:
        doubts.append(f"acceptance was measured with drafts of {len(product)} tokens alone")
    histogram = data.get("acceptance_length_histogram") or {}
    # The survival by position whose chains have the tokens a step that were measured by K.
    bent, start, before = survival.copy(), 0, 1.0
    for k in sorted(k for k in lengths if 0 < k <= len(survival)):
        part = survival[start:k].sum()
        bent[start:k] *= (lengths[k] - before) / part if part else 1.0
        start, before = k, lengths[k]
    return {
        "by_depth": conditional_rates(np.minimum.accumulate(np.clip(bent, 0.0, 1.0))),
        "rounds": int(sum(histogram.values())) or None,
        "target": _name(data.get("target_model")),
        "drafter": _name(data.get("draft_checkpoint")),
        "drafter_kind": data.get("method"),
        "doubts": doubts,
    }


def _name(described: Any) -> str | None:
    """The name of a checkpoint: a text, or the first text that describes it."""
    values = described.values() if isinstance(described, Mapping) else [described]
    return next((value for value in values if isinstance(value, str) and value), None)

"""Acceptance in what a vLLM server's `/metrics` counts: drafts, accepted tokens by position."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

from costmodel.acceptance import conditional_rates
from costmodel.errors import InputError

_COUNTER = re.compile(r"^vllm:(\w+?)(?:_total)?\{(.*?)\} (\S+)", re.MULTILINE)
_FEW = 0.98  # of a draft's positions, in the mean: later ones are then counted too low


def read_metrics(text: str) -> dict[str, Any] | None:
    """Rates by depth of what vLLM's `/metrics` prints, over all its engines.

    A round gives one token beside the accepted ones, and a request's first token has none: so the
    rounds without a draft are known. Raises InputError where nothing was drafted.
    """
    counts: dict[str, float] = defaultdict(float)
    accepted: dict[int, float] = defaultdict(float)
    models = set()
    for name, labels, value in _COUNTER.findall(text):
        fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts[name] += float(value)
        if name == "spec_decode_num_accepted_tokens_per_pos":
            accepted[int(fields["position"])] += float(value)
            models.add(fields.get("model_name"))
    if not models:
        return None
    drafts = counts["spec_decode_num_drafts"]
    if not drafts:
        raise InputError("the vLLM server of these metrics drafted nothing yet")
    rounds = counts["generation_tokens"] - counts["spec_decode_num_accepted_tokens"]
    rounds -= counts["request_success"]
    drafted, positions = counts["spec_decode_num_draft_tokens"] / drafts, len(accepted)
    doubts = []
    if drafted < _FEW * positions:
        doubts.append(
            f"drafts had {drafted:.1f} of {positions} tokens in the mean: the acceptance of later"
            " positions is counted too low"
        )
    return {
        "by_depth": conditional_rates(np.array([accepted[i] / drafts for i in sorted(accepted)])),
        "rounds": int(drafts),
        "drafted_share": min(drafts / rounds, 1.0) if rounds > 0 else 1.0,
        "target": models.pop() if len(models) == 1 else None,
        "doubts": doubts,
    }

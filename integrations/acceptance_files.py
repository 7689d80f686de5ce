"""Acceptance in the files of other tools: Model-Optimizer's speculation profile, vLLM's counters.

A reader, an entry point in `rooftree.readers`, gets the text of a file and returns the fields of
`costmodel.planning.acceptance.from_file`, or None where the file is not of its kind.

- `speculation_profile.json`, schema 1.0 (NVIDIA Model-Optimizer's open #2247, #2313 to #2316): the
  chance of each draft position given those before (conditional) and of all up to it (marginal), and
  tokens a step by K, the length of the draft.
- What vLLM's `/metrics` prints: drafts, and accepted tokens by position, counted since its start.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from costmodel.errors import InputError
from costmodel.io import NotJson, parse_json
from costmodel.planning.acceptance import Acceptance

# Kinds whose draft of K tokens begins like that of K + 1; blocks are drafted anew for each K.
CHAINED = ("eagle", "eagle3", "draft_model", "mtp", "ngram")
_AGREE = 0.02  # by which the conditional and the marginal rates may differ, and the mean
_UNKNOWN = ("block_size", "mean_accept_length_per_request", "acceptance_length_histogram",
            "per_category", "validation")  # fmt: skip
_COUNTER = re.compile(r"^vllm:(\w+?)(?:_total)?\{(.*?)\} (\S+)", re.MULTILINE)


def read_speculation_profile(text: str) -> dict[str, Any] | None:
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
    return {
        "by_depth": _conditional(_through(survival, lengths)),
        "rounds": int(sum(histogram.values())) or None,
        "target": _name(data.get("target_model")),
        "drafter": _name(data.get("draft_checkpoint")),
        "drafter_kind": data.get("method"),
        "doubts": doubts,
    }


def read_vllm_metrics(text: str) -> dict[str, Any] | None:
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
    if drafted < (1 - _AGREE) * positions:
        doubts.append(
            f"drafts had {drafted:.1f} of {positions} tokens in the mean: the acceptance of later"
            " positions is counted too low"
        )
    return {
        "by_depth": _conditional(np.array([accepted[i] / drafts for i in sorted(accepted)])),
        "rounds": int(drafts),
        "drafted_share": min(drafts / rounds, 1.0) if rounds > 0 else 1.0,
        "target": models.pop() if len(models) == 1 else None,
        "doubts": doubts,
    }


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
        "conditional_accept_rates": [round(rate, 6) for rate in _conditional(np.diff(chain))],
        "marginal_accept_rates": marginal,
        "mean_accept_length": round(float(chain[-1]), 6),
        "accept_length_model": "chain_analytic" if method in CHAINED else "measured_per_k",
        "accept_length_by_k": {str(k): round(float(chain[k]), 6) for k in range(1, most + 1)},
        "measurement_conditions": {"source": acceptance.label},
        **dict.fromkeys(_UNKNOWN),
    }


def _through(survival: Any, lengths: Mapping[int, float]) -> Any:
    """The survival by position whose chains have the tokens a step that were measured by K."""
    bent, start, before = survival.copy(), 0, 1.0
    for k in sorted(k for k in lengths if 0 < k <= len(survival)):
        part = survival[start:k].sum()
        bent[start:k] *= (lengths[k] - before) / part if part else 1.0
        start, before = k, lengths[k]
    return np.minimum.accumulate(np.clip(bent, 0.0, 1.0))


def _conditional(survival: Sequence[float] | Any) -> list[float]:
    """The rate of each position, given those before it; 0 behind one that was never accepted."""
    return [float(now / before) if before else 0.0 for before, now in pairwise([1.0, *survival])]


def _name(described: Any) -> str | None:
    """The name of a checkpoint: a text, or the first text that describes it."""
    values = described.values() if isinstance(described, Mapping) else [described]
    return next((value for value in values if isinstance(value, str) and value), None)

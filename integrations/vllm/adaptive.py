"""A vLLM plug-in: its adaptive verification with the costs of the batch's context.

With `enable_adaptive_verification` vLLM measures what its steps cost once, at
VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN, and verifies by these costs at every context. With
this plug-in, the entry point `rooftree` of the group `vllm.general_plugins`, a profile moves them.
It does nothing unless ROOFTREE_PROFILE is set. vLLM's adaptive verification needs a GPU, where this
was not run yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from integrations.draft_lengths.costs import ContextCurves, StepCosts
from integrations.vllm.configuration import PROFILE_VARIABLE, drafter_key, find_profile

CREATE = "maybe_create_adaptive_verification_manager"


def register() -> None:
    """Let every adaptive verification that vLLM creates from now on have a profile's costs."""
    if PROFILE_VARIABLE not in os.environ:
        return
    from vllm.logger import init_logger

    logger = init_logger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers only
    try:
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification
    except Exception as fault:  # a vLLM for another kind of device, or of another version
        logger.debug("Verification costs are vLLM's own: %s", fault)
        return
    create = getattr(adaptive_verification, CREATE)
    if getattr(create, "costs_by_context", False):  # vLLM may load a plug-in more than once
        return

    def create_with_costs(*, vllm_config: Any, **options: Any) -> Any:
        manager = create(vllm_config=vllm_config, **options)
        if manager is not None:
            try:
                attach(manager, vllm_config, logger.warning)
            except Exception as fault:  # whatever it is, serving goes on
                logger.warning("Verification costs are vLLM's own: %s", fault)
        return manager

    create_with_costs.costs_by_context = True
    setattr(adaptive_verification, CREATE, create_with_costs)


def attach(manager: Any, config: Any, warn: Callable[..., None]) -> None:
    """Let a manager decide by the costs at each batch's context. Raises ProfileError."""
    import vllm.envs as envs

    profile, _ = find_profile(config)
    curves = ContextCurves(
        StepCosts(profile, drafter_key(config)),
        envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN,
        manager.num_speculative_steps,
    )
    decide = manager.get_num_tokens

    def decide_at_context(
        num_tokens_per_req: Mapping[str, int], draft_tokens: Mapping[str, Sequence[int]]
    ) -> int:
        own = manager.cost_tables
        try:
            manager.cost_tables = tables_of(manager, curves, num_tokens_per_req, draft_tokens)
        except Exception as fault:
            warn("Verification costs are vLLM's own from now on: %s", fault)
            manager.get_num_tokens = decide
        try:
            return int(decide(num_tokens_per_req, draft_tokens))
        finally:
            manager.cost_tables = own

    manager.get_num_tokens = decide_at_context


def tables_of(
    manager: Any,
    curves: ContextCurves,
    num_tokens_per_req: Mapping[str, int],
    draft_tokens: Mapping[str, Sequence[int]],
) -> tuple[Any, Any]:
    """The tables for this batch; vLLM's own where a prompt is in it."""
    drafted = {name: len(draft_tokens.get(name, ())) for name in num_tokens_per_req}
    decoding = all(tokens == drafted[name] + 1 for name, tokens in num_tokens_per_req.items())
    if not (decoding and num_tokens_per_req):
        return manager.cost_tables
    states = manager.req_states
    slots = [states.req_id_to_index[name] for name in num_tokens_per_req]
    context = float(np.mean(states.num_computed_tokens_np[slots]))
    draft_ms, verify_ms = manager.cost_tables
    batch = len(slots)
    return (curves.draft_ms(draft_ms, batch, context), curves.verify_ms(verify_ms, batch, context))

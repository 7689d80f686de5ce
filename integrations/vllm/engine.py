"""A vLLM engine in this process whose steps have any rows, context and batch."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS = 16
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step: all of it, and the drafter's part."""

    step_s: float
    draft_s: float


class SteppedEngine:
    """An engine with as many requests as it runs at once, stepped one shape at a time.

    The requests are admitted once. Between steps their lengths are set to the wanted context: the
    KV cache holds noise, so that no context has to be computed first.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: arguments of `vllm.LLM`"""
        os.environ.update(ENVIRONMENT)
        from vllm import LLM

        defaults = {"enable_prefix_caching": False, "async_scheduling": False}
        self._llm = LLM(
            **(defaults | dict(options)),
            scheduler_cls="integrations.vllm.SteeredScheduler",
            disable_log_stats=True,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self.config = self._llm.llm_engine.vllm_config
        self._draft_s = 0.0
        self._time_drafts()
        self._filler = self._random_tokens(self.config.model_config.max_model_len)
        self._requests = self._admit()
        self._fill_cache()

    def _time_drafts(self) -> None:
        draft = self._runner.propose_draft_token_ids

        def timed(*args: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return draft(*args, **options)
            finally:
                self._draft_s = time.perf_counter() - start_s

        self._runner.propose_draft_token_ids = timed

    def _random_tokens(self, count: int) -> list[int]:
        vocab = self.config.model_config.get_vocab_size()
        generator = random.Random(0)
        return [generator.randrange(vocab) for _ in range(count)]

    def _admit(self) -> list[Any]:
        """As many running requests as the engine takes, each with one output token."""
        from vllm import SamplingParams

        length = self.config.model_config.max_model_len - PROMPT_TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        count = self.config.scheduler_config.max_num_seqs
        for index in range(count):
            prompt = {"prompt_token_ids": self._filler[index : index + PROMPT_TOKENS]}
            self._llm.llm_engine.add_request(str(index), prompt, params)
        while any(not request.num_output_tokens for request in self._scheduler.requests.values()):
            self._core.step_fn()
        return list(self._scheduler.running)

    def _fill_cache(self) -> None:
        self.step(rows=1, context=self.longest, batch=len(self._requests))
        for cache in self._runner.kv_caches:
            cache.normal_()

    @property
    def longest(self) -> int:
        return self.config.model_config.max_model_len - 2 - self.config.num_speculative_tokens

    def step(self, *, rows: int, context: int, batch: int, draft_tokens: int = 0) -> StepTime:
        requests = self._requests[:batch]
        for request in requests:
            self._set_context(request, context)
        self._scheduler.steer(requests, rows, draft_tokens)
        self._draft_s = 0.0
        start_s = time.perf_counter()
        self._core.step_fn()
        step_s = time.perf_counter() - start_s
        self._core.post_step(True)
        return StepTime(step_s=step_s, draft_s=self._draft_s)

    def _set_context(self, request: Any, context: int) -> None:
        outputs = self._filler[: context + 1 - PROMPT_TOKENS]
        request._output_token_ids[:] = outputs
        del request._all_token_ids[PROMPT_TOKENS:]
        request._all_token_ids.extend(outputs)
        request.num_computed_tokens = context
        # One token more than the scheduler says: the runner then takes over the scheduler's count.
        state = self._runner.requests[request.request_id]
        state.output_token_ids[:] = self._filler[: context + 2 - PROMPT_TOKENS]

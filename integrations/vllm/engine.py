"""A vLLM engine, scheduled from this process, whose steps have any rows, context and batch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from costmodel.errors import InputError, reason_of
from integrations.vllm.configuration import installed_version

PROMPT_TOKENS = 16
SPARE_TOKENS = 2  # a step's own token, and one that the runner is told to drop
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
}
OPTIONS = {
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "disable_log_stats": True,
    "scheduler_cls": "integrations.vllm.SteeredScheduler",
    "worker_extension_cls": "integrations.vllm.worker.MeasuredWorker",
}

Result = TypeVar("Result")


def spare_tokens(most_drafted: int) -> int:
    """Tokens beyond the longest context that an engine needs room for."""
    return 2 * (most_drafted + 1) + SPARE_TOKENS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step: the target's part, the drafter's, and the host's where it is apart.

    On a CPU `verify_s` is the time from `schedule()` to `update_from_output()` without the
    drafter's, and `host_s` is 0.
    """

    verify_s: float
    draft_s: float
    host_s: float = 0.0


class SteppedEngine:
    """An engine with as many requests as it runs at once, stepped one shape at a time.

    The requests are admitted once. Before a step their lengths are set to the wanted context. The
    KV cache holds noise, so no context has to be computed. On a CPU the worker is a process of its
    own with the cores that vLLM's server gives it, unless `distributed_executor_backend` is `uni`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: arguments of `vllm.LLM`. Raises InputError where the engine does not start."""
        installed_version()
        os.environ.update(ENVIRONMENT)
        from vllm import LLM
        from vllm.platforms import current_platform

        # As a server does on a CPU: a process for the worker.
        server = {"distributed_executor_backend": "mp"} if current_platform.is_cpu() else {}
        try:
            with _without_module("llvmlite.binding.ffi"):
                self._llm = LLM(**(OPTIONS | server | dict(options)))
        except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"vLLM does not start with these options: {reason_of(error)}",
                hint="Its own messages above say more.",
            ) from error
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self.config = self._llm.llm_engine.vllm_config
        model, generator = self.config.model_config, random.Random(0)
        vocab = model.get_vocab_size()
        self._tokens = [generator.randrange(vocab) for _ in range(model.max_model_len)]
        self._call("start_measuring", self._tokens)
        self._requests = self._admit()
        # Let every request have all its blocks, and fill the cache with noise.
        self.step(rows=1, context=self.longest_context, batch=self.most_requests)
        self._call("fill_cache_with_noise")

    @property
    def device(self) -> Any:
        """The torch device that the engine runs on."""
        return self._call("device_in_use")

    @property
    def attention(self) -> str:
        """vLLM's name of its attention backend."""
        return str(self._call("attention_backend"))

    def in_worker(self, function: Callable[..., Result], *args: Any) -> Result:
        """The result of a module's function in the process, and with the threads, of the worker."""
        return self._call(_called, function, args)

    @property
    def most_requests(self) -> int:
        return len(self._requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens that one step of a prefill takes."""
        return min(int(self.config.scheduler_config.max_num_batched_tokens), self.longest_context)

    @property
    def longest_context(self) -> int:
        """Cached tokens at which a step over the longest draft and its next draft still fit."""
        spare = spare_tokens(int(self.config.num_speculative_tokens))
        return int(self.config.model_config.max_model_len) - spare

    def step(self, *, rows: int, context: int, batch: int, draft_tokens: int = 0) -> StepTime:
        """Verify `rows` rows of `batch` sequences behind `context` tokens, then draft.

        A plain step of the same sequences goes before it, untimed: a server's steps follow one
        another, and on a CPU one behind a pause or a far longer step takes 4 % more.
        """
        requests = self._requests[:batch]
        self._set_context(requests, context - 1)
        self._scheduler.steer(requests, 1, 0)
        self._core.step_fn()
        self._core.post_step(True)
        self._scheduler.steer(requests, rows, draft_tokens)
        return self._timed_step()

    def prefill(self, tokens: int) -> StepTime:
        """Run a prompt of `tokens` (at least PROMPT_TOKENS) as one step, alone."""
        request = self._requests[0]
        self._set_context([request], tokens - 1)
        request.num_computed_tokens = 0
        self._scheduler.steer([request], 1, 0)
        return self._timed_step()

    def _timed_step(self) -> StepTime:
        start_s = time.perf_counter()
        self._core.step_fn()
        step_s = time.perf_counter() - start_s
        self._core.post_step(True)
        forward_s, draft_s = self._call("part_seconds")
        if self.config.device_config.device_type == "cuda":
            verify_s = forward_s - draft_s
            return StepTime(verify_s=verify_s, draft_s=draft_s, host_s=max(step_s - forward_s, 0.0))
        return StepTime(verify_s=step_s - draft_s, draft_s=draft_s)

    def _call(self, method: str | Callable[..., Any], *args: Any) -> Any:
        """The first worker's result of a method of MeasuredWorker, or of a function of a worker."""
        return self._core.model_executor.collective_rpc(method, args=args)[0]

    def _admit(self) -> list[Any]:
        """As many running requests as the engine takes, each with one output token."""
        from vllm import SamplingParams

        length = self.config.model_config.max_model_len - PROMPT_TOKENS
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for index in range(self.config.scheduler_config.max_num_seqs):
            prompt = {"prompt_token_ids": self._tokens[index : index + PROMPT_TOKENS]}
            self._llm.llm_engine.add_request(str(index), prompt, params)
        while any(not request.num_output_tokens for request in self._scheduler.requests.values()):
            self._core.step_fn()
        return list(self._scheduler.running)

    def _set_context(self, requests: Sequence[Any], context: int) -> None:
        outputs = self._tokens[: context + 1 - PROMPT_TOKENS]
        for request in requests:
            request._output_token_ids[:] = outputs
            request._all_token_ids[PROMPT_TOKENS:] = outputs
            request.num_computed_tokens = context
        # One token more than the scheduler has: the runner then takes over the scheduler's count.
        names = [request.request_id for request in requests]
        self._call("set_outputs", names, context + SPARE_TOKENS - PROMPT_TOKENS)


def _called(worker: Any, function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    return function(*args)


@contextlib.contextmanager
def _without_module(name: str) -> Iterator[None]:
    """Hide a loaded module: on a CPU vLLM looks into all of them, and this one breaks the search.

    It belongs to Numba, which is loaded completely by then.
    """
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module

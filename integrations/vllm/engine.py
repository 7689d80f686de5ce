"""A vLLM engine in this process whose steps have any rows, context and batch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from costmodel.errors import InputError
from integrations.vllm.configuration import installed_version, worker_threads

PROMPT_TOKENS = 16
SPARE_TOKENS = 2  # a step's own token, and one that the runner is told to drop
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
OPTIONS = {"enable_prefix_caching": False, "async_scheduling": False, "disable_log_stats": True}


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
    KV cache holds noise, so no context has to be computed. On a CPU the engine has the threads that
    a server's worker would have on this machine.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: arguments of `vllm.LLM`. Raises InputError where the engine does not start."""
        installed_version()
        os.environ.update(ENVIRONMENT)
        import torch
        from vllm import LLM

        set_threads = torch.set_num_threads  # vLLM replaces it by one that does nothing

        try:
            with _without_module("llvmlite.binding.ffi"):
                self._llm = LLM(
                    **(OPTIONS | dict(options)), scheduler_cls="integrations.vllm.SteeredScheduler"
                )
        except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise InputError(
                f"vLLM does not start with these options: {reason}",
                hint="Its own messages above say more.",
            ) from error
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self.config = self._llm.llm_engine.vllm_config
        clock = _CudaClock if self.device.type == "cuda" else _WallClock
        self._forward, self._draft = clock(), clock()
        self._time_parts()
        self._tokens = self._random_tokens(self.config.model_config.max_model_len)
        self._requests = self._admit()
        self._fill_cache()
        threads = worker_threads(self.config)
        if threads is not None:  # last, since the first n-gram draft sets it too (Numba)
            set_threads(threads)

    @property
    def device(self) -> Any:
        """The torch device that the engine runs on."""
        return self._runner.device

    @property
    def attention(self) -> str:
        """vLLM's name of its attention backend."""
        return str(self._runner.attn_groups[0][0].backend.get_name())

    @property
    def most_rows(self) -> int:
        """Rows of the longest draft and its root."""
        return int(self.config.num_speculative_tokens) + 1

    @property
    def most_requests(self) -> int:
        return len(self._requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens that one step of a prefill takes."""
        return min(int(self.config.scheduler_config.max_num_batched_tokens), self.longest_context)

    @property
    def longest_context(self) -> int:
        """Cached tokens at which a step of `most_rows` rows and its next draft still fit."""
        return int(self.config.model_config.max_model_len) - spare_tokens(self.most_rows - 1)

    def step(self, *, rows: int, context: int, batch: int, draft_tokens: int = 0) -> StepTime:
        """Verify `rows` rows of `batch` sequences behind `context` tokens, then draft."""
        requests = self._requests[:batch]
        for request in requests:
            self._set_context(request, context)
        self._scheduler.steer(requests, rows, draft_tokens)
        return self._timed_step()

    def prefill(self, tokens: int) -> StepTime:
        """Run a prompt of `tokens` (at least PROMPT_TOKENS) as one step, alone."""
        request = self._requests[0]
        self._set_context(request, tokens - 1)
        request.num_computed_tokens = 0
        self._scheduler.steer([request], 1, 0)
        return self._timed_step()

    def _timed_step(self) -> StepTime:
        self._forward.reset()
        self._draft.reset()
        start_s = time.perf_counter()
        self._core.step_fn()
        step_s = time.perf_counter() - start_s
        self._core.post_step(True)
        draft_s, forward_s = self._draft.seconds(), self._forward.seconds()
        if self.device.type == "cuda":
            verify_s = forward_s - draft_s
            return StepTime(verify_s=verify_s, draft_s=draft_s, host_s=max(step_s - forward_s, 0.0))
        return StepTime(verify_s=step_s - draft_s, draft_s=draft_s)

    def _time_parts(self) -> None:
        """Let the clocks run from the start of the forward to the end of drafting."""
        runner = self._runner
        runner.execute_model = _before(runner.execute_model, self._forward.start)
        runner.sample_tokens = _after(runner.sample_tokens, self._forward.stop)
        runner.propose_draft_token_ids = _after(
            _before(runner.propose_draft_token_ids, self._draft.start), self._draft.stop
        )

    def _random_tokens(self, count: int) -> list[int]:
        generator = random.Random(0)
        vocab = self.config.model_config.get_vocab_size()
        return [generator.randrange(vocab) for _ in range(count)]

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

    def _fill_cache(self) -> None:
        """Let every request have all its blocks, and fill the cache with noise."""
        self.step(rows=1, context=self.longest_context, batch=self.most_requests)
        for cache in self._runner.kv_caches:
            cache.normal_()

    def _set_context(self, request: Any, context: int) -> None:
        outputs = self._tokens[: context + 1 - PROMPT_TOKENS]
        request._output_token_ids[:] = outputs
        request._all_token_ids[PROMPT_TOKENS:] = outputs
        request.num_computed_tokens = context
        # One token more than the scheduler has: the runner then takes over the scheduler's count.
        state = self._runner.requests[request.request_id]
        state.output_token_ids[:] = self._tokens[: context + SPARE_TOKENS - PROMPT_TOKENS]


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


class _WallClock:
    """Seconds between `start` and `stop`; 0 where they were not called."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start_s = self._stop_s = 0.0

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(self) -> None:
        self._stop_s = time.perf_counter()

    def seconds(self) -> float:
        return self._stop_s - self._start_s


class _CudaClock:
    """The same by events on the current stream; not tried on a GPU yet."""

    def __init__(self) -> None:
        import torch

        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.reset()

    def reset(self) -> None:
        self._stopped = False

    def start(self) -> None:
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()
        self._stopped = True

    def seconds(self) -> float:
        if not self._stopped:
            return 0.0
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def _before(function: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        first()
        return function(*args, **options)

    return wrapped


def _after(function: Callable[..., Any], last: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        last()
        return result

    return wrapped

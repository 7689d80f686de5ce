"""vLLM's workers as a calibration needs them: contexts set from outside, and parts timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any


class MeasuredWorker:
    """Methods that vLLM adds to its workers (`worker_extension_cls`), for `collective_rpc`.

    A worker may be a process of its own, so that arguments and results are plain values.
    """

    model_runner: Any
    _outputs: Sequence[int]
    _parts: _Parts

    def start_measuring(self, outputs: Sequence[int]) -> None:
        """Time the parts of each step from now on. outputs: token ids for `set_outputs`."""
        self._outputs = outputs
        self._parts = _Parts(self.model_runner)

    def set_outputs(self, requests: Sequence[str], count: int) -> None:
        """Give the named requests the first `count` outputs."""
        for request in requests:
            self.model_runner.requests[request].output_token_ids[:] = self._outputs[:count]

    def part_seconds(self) -> tuple[float, float]:
        """Seconds of the last step from its forward to the end of drafting, and of drafting."""
        return self._parts.seconds()

    def fill_cache_with_noise(self) -> None:
        for cache in self.model_runner.kv_caches:
            cache.normal_()

    def device_in_use(self) -> Any:
        return self.model_runner.device

    def attention_backend(self) -> str:
        return str(self.model_runner.attn_groups[0][0].backend.get_name())


class _Parts:
    """Clocks around a model runner's forward and its drafting."""

    def __init__(self, runner: Any) -> None:
        clock = _CudaClock if runner.device.type == "cuda" else _WallClock
        self._forward, self._draft = clock(), clock()
        runner.execute_model = _around(runner.execute_model, before=self._start)
        runner.sample_tokens = _around(runner.sample_tokens, after=self._forward.stop)
        runner.propose_draft_token_ids = _around(
            runner.propose_draft_token_ids, before=self._draft.start, after=self._draft.stop
        )

    def seconds(self) -> tuple[float, float]:
        return self._forward.seconds(), self._draft.seconds()

    def _start(self) -> None:
        self._draft.reset()
        self._forward.reset()
        self._forward.start()


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


def _around(
    function: Callable[..., Any],
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        before()
        result = function(*args, **options)
        after()
        return result

    return wrapped

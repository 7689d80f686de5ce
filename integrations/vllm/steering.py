"""Steps of chosen size for calibration: an own scheduler and an own drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

JUNK_TOKEN = 1  # every vocabulary has it; whether it is accepted does not matter


class JunkDrafter:
    """Drafts nothing itself: `SteeredScheduler` puts junk tokens where drafts would be."""

    def __init__(self, vllm_config: Any) -> None:
        """Called by vLLM, for the speculative method `custom_class`."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """There is no model to load."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **options: Any) -> list[Any]:
        return [[] for _ in sampled_token_ids]


class SteeredScheduler(Scheduler):
    """vLLM's scheduler, whose next step has the requests, rows and draft length it is told."""

    _steered: tuple[Sequence[Request], int, int] | None = None

    def steer(self, requests: Sequence[Request], rows: int, draft_tokens: int) -> None:
        """Let the next step verify `rows` rows of each request, and draft so many tokens."""
        self._steered = (requests, rows, draft_tokens)

    def schedule(self, *args: Any, **options: Any) -> Any:
        if self._steered is None:
            return super().schedule(*args, **options)
        requests, rows, draft_tokens = self._steered
        self._steered = None
        everyone, self.running = self.running, list(requests)
        self.dynamic_sd_lookup = [draft_tokens] * (self.max_num_running_reqs + 1)
        for request in requests:
            request.spec_token_ids = [JUNK_TOKEN] * (rows - 1)
        try:
            return super().schedule(*args, **options)
        finally:
            self.running = everyone

"""vLLM's schedulers: with draft lengths from a profile, and with steps told by a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from costmodel.errors import ProfileError
from integrations.draft_lengths.acceptance import ANY_KIND, MatchedText, SeenPairs
from integrations.draft_lengths.costs import StepCosts
from integrations.draft_lengths.pilot import DraftTable, StepLengths, StepPilot, TablePilot
from integrations.draft_lengths.policy import DraftPolicy, RunningSequence
from integrations.vllm.configuration import (
    SCHEDULE_OPTION,
    added_options,
    drafter_key,
    find_profile,
)

JUNK_TOKEN = 1  # every vocabulary has it; whether it is accepted does not matter

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers only


class CostScheduler:
    """The class for `--scheduler-cls`: the kind that fits vLLM's configuration.

    The profile is the one that `additional_config["rooftree_profile"]` or the environment variable
    ROOFTREE_PROFILE names, else a stored one with this engine's keys. In place of a profile,
    `additional_config["rooftree_schedule"]` holds draft lengths by batch and context, as `rooftree
    export --engine vllm-contexts` writes them. Without a usable one, and after any fault, it logs
    one line and schedules as vLLM does.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **options: Any) -> Any:
        ahead = vllm_config.scheduler_config.async_scheduling
        kind = AsyncCostScheduler if ahead else SyncCostScheduler
        return kind(vllm_config, *args, **options)


class _Piloted:
    """What both kinds add to vLLM's scheduler."""

    pilot: StepPilot | TablePilot | None = None
    ahead: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._vllm_lookup = self.dynamic_sd_lookup
        self._lookups: dict[int, list[int]] = {}
        self._choice: StepLengths | None = None
        self._texts: dict[str, MatchedText | SeenPairs] = {}
        self.pilot = self._or_none(self._start)

    def schedule(self, *args: Any, **options: Any) -> Any:
        if self.pilot is not None:
            self._choice = self._or_none(self._choose)
        output = super().schedule(*args, **options)
        if self.pilot is not None and self._choice is not None:
            self._or_none(lambda: self.pilot.scheduled(self._choice, output.num_scheduled_tokens))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self.pilot is not None:
            self._or_none(lambda: self._learn(scheduler_output, model_runner_output))
        return result

    def _start(self) -> StepPilot | TablePilot:
        config = self.vllm_config
        if config.speculative_config is None:
            raise ProfileError("vLLM has no --speculative-config, so there is nothing to choose")
        if config.parallel_config.data_parallel_size > 1:
            raise ProfileError("with data parallelism all ranks must draft the same number")
        lookup = self._vllm_lookup
        allowed = lookup[1:] if lookup else range(self.num_spec_tokens + 1)
        if schedule := added_options(config).get(SCHEDULE_OPTION):
            table = DraftTable(schedule, allowed)
            logger.info("Draft lengths are those of %s", SCHEDULE_OPTION)
            return TablePilot(table)
        profile, path = find_profile(config)
        costs = StepCosts(profile, drafter_key(config))
        logger.info("Draft lengths are chosen from the profile %s", path)
        policy = DraftPolicy(costs, allowed, shortens=not self.ahead)
        return StepPilot(policy, ahead=self.ahead)

    def _choose(self) -> StepLengths:
        """Ask for this step's choice, and set it where vLLM looks."""
        decoding = [
            RunningSequence(
                name=request.request_id,
                context=request.num_computed_tokens,
                draft=list(request.spec_token_ids),
                kind=self._kind(request),
            )
            for request in self.running
            if request.num_computed_tokens >= request.num_prompt_tokens
        ]
        choice = self.pilot.choose(decoding)
        if not self.ahead:
            for request in self.running:
                length = choice.verified.get(request.request_id)
                if length is not None and length < len(request.spec_token_ids):
                    request.spec_token_ids = request.spec_token_ids[:length]
        tokens = choice.draft_tokens
        if tokens not in self._lookups:
            self._lookups[tokens] = [tokens] * (self.max_num_running_reqs + 1)
        self.dynamic_sd_lookup = self._lookups[tokens]
        return choice

    def _kind(self, request: Any) -> int:
        """How well the draft at hand fits the text; drafts not known yet are of one kind."""
        if self.ahead or not request.spec_token_ids:
            return ANY_KIND
        text = self._texts.get(request.request_id)
        if text is None:
            speculative = self.vllm_config.speculative_config
            text = SeenPairs()
            if speculative.method == "ngram":
                text = MatchedText(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
            self._texts[request.request_id] = text
        text.extend(request.all_token_ids[len(text) :])
        return text.kind(request.spec_token_ids)

    def _learn(self, scheduler_output: Any, model_runner_output: Any) -> None:
        index, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        names = scheduler_output.num_scheduled_tokens
        if not names:  # the pilot keeps no record of an empty step
            return
        texts = {name: sampled[index[name]] for name in names if name in index} if sampled else {}
        self.pilot.ended(texts)
        self.pilot.forget(set(self.requests))
        for name in self._texts.keys() - self.requests.keys():
            del self._texts[name]

    def _or_none(self, function: Callable[[], Any]) -> Any:
        """The result; after a fault None, and from then on everything is as in vLLM."""
        try:
            return function()
        except Exception as fault:  # whatever it is, serving goes on
            logger.warning("Draft lengths are vLLM's own from now on: %s", fault)
            self.pilot = self._choice = None
            self.dynamic_sd_lookup = self._vllm_lookup
            return None


class SyncCostScheduler(_Piloted, Scheduler):
    """The draft is known before a step, so that it can also be cut."""

    ahead = False


class AsyncCostScheduler(_Piloted, AsyncScheduler):
    """A step is scheduled before the last one has ended; only draft lengths are chosen."""

    ahead = True


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

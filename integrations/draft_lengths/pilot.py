"""Between an engine's scheduling of a step and its result: a draft policy, or a fixed table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.errors import InputError
from integrations.draft_lengths.policy import DraftPolicy, RunningSequence, mean_context

MOST_CONTEXT = 10**9
UNKNOWN = -1  # an engine's placeholder for a draft token that it does not know yet


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """Draft tokens to verify, by sequence, and the length of the next draft."""

    verified: Mapping[str, int]
    draft_tokens: int


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """A step that was scheduled and whose result is not there yet."""

    sequences: Mapping[str, RunningSequence]
    start_s: float
    predicted_s: float = 0.0
    verified: Mapping[str, int] = field(default_factory=dict)
    timed: bool = False


class StepPilot:
    """Asks the policy before each step, and tells it what came of it.

    Steps end in the order in which they were scheduled; with `ahead` the next one is scheduled
    before the last one has ended, and a step lasts from the end of the one before it.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        *,
        ahead: bool = False,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy = policy
        self._ahead, self._clock_s = ahead, clock_s
        self._steps: deque[StepRecord] = deque()
        self._ended_s: float | None = None
        self._known: set[str] = set()

    def choose(self, sequences: Sequence[RunningSequence]) -> StepLengths:
        """The choice for the step that is scheduled next."""
        policy = self.policy
        drafted = [len(sequence.draft) for sequence in sequences]
        lengths = policy.verified(sequences) if policy.shortens else drafted
        named = {sequence.name: sequence for sequence in sequences}
        self._steps.append(StepRecord(sequences=named, start_s=self._clock_s()))
        verified = dict(zip(named, lengths, strict=True))
        return StepLengths(verified=verified, draft_tokens=policy.draft_length(sequences))

    def scheduled(self, choice: StepLengths, rows: Mapping[str, int]) -> None:
        """What the engine made of the choice: the rows of each sequence of the step."""
        if not rows:
            self._steps.pop()
            return
        step = self._steps[-1]
        names = step.sequences.keys()
        step.timed = bool(names) and names == rows.keys()
        step.verified = {name: rows[name] - 1 for name in names & rows.keys()}
        if step.timed:
            drafted = sum(step.verified.values())
            step.predicted_s = self.policy.predicted_s(
                list(step.sequences.values()), drafted, choice.draft_tokens
            )

    def ended(self, texts: Mapping[str, Sequence[int]]) -> None:
        """The tokens that the oldest open step gave, by sequence."""
        step, now_s = self._steps.popleft(), self._clock_s()
        costs, acceptance, start_s = self.policy.costs, self.policy.acceptance, step.start_s
        if self._ahead and self._ended_s is not None:
            start_s = max(start_s, self._ended_s)
        elif self._ended_s is not None:
            costs.observe_gap(start_s - self._ended_s, now_s - start_s)
        self._ended_s = now_s
        if step.timed:
            drafted = sum(step.verified.values()) > 0
            costs.observe(step.predicted_s, now_s - start_s, drafted=drafted)
            batch, context = len(step.sequences), mean_context(list(step.sequences.values()))
            tokens = sum(map(len, texts.values()))
            self.policy.observe_step(batch, context, tokens, step.predicted_s)
        for name, text in texts.items():
            one = step.sequences.get(name)
            if one is None:
                acceptance.observe_text(name, (), text)
            elif one.draft and one.draft[0] == UNKNOWN:
                accepted = max(len(text) - 1, 0)
                acceptance.observe_count(name, step.verified.get(name, 0), accepted)
            else:
                acceptance.observe_text(name, one.draft, text, one.kind)

    def forget(self, running: set[str]) -> None:
        """Drop what was kept of sequences that run no longer."""
        for name in self._known - running:
            self.policy.acceptance.forget(name)
        self._known = set(running)


class DraftTable:
    """Draft lengths by batch and context: the first row of `rows` whose ranges hold both.

    A row is [first batch, last batch, first context, last context, tokens], or without contexts
    [first batch, last batch, tokens], as in vLLM's open pull request 48944. Beyond the last range
    of either the nearest holds.
    """

    def __init__(self, rows: Sequence[Sequence[int]], allowed: Iterable[int]) -> None:
        """allowed: lengths that the engine can run; 0 always is one. Raises InputError."""
        self.rows, lengths = [], {0, *allowed}
        for row in rows:
            whole = [int(number) for number in row]
            if len(whole) == 3:
                whole[2:2] = [0, MOST_CONTEXT]
            first, last, shortest, longest, tokens = whole if len(whole) == 5 else (1, 0, 0, 0, 0)
            if not (1 <= first <= last and 0 <= shortest <= longest and tokens >= 0):
                raise InputError(
                    f"{list(row)} is no row of a table of draft lengths",
                    hint="Rows are [first batch, last batch, first context, last context, tokens]",
                )
            self.rows.append(whole)
        if not self.rows or any(row[4] not in lengths for row in self.rows):
            raise InputError(
                f"a table of draft lengths needs rows, with lengths among {sorted(lengths)}",
                hint="Write it with `rooftree export --engine vllm-contexts`",
            )

    def tokens(self, batch: int, context: float) -> int:
        """The length for so many sequences of a mean context."""

        def distance(row: Sequence[int]) -> tuple[float, float]:
            first, last, shortest, longest, _ = row
            return (
                max(first - batch, batch - last, 0),
                max(shortest - context, context - longest, 0),
            )

        return min(self.rows, key=distance)[4]


class TablePilot:
    """Chooses by a table alone: it verifies whole drafts and learns nothing."""

    def __init__(self, table: DraftTable) -> None:
        self._table = table

    def choose(self, sequences: Sequence[RunningSequence]) -> StepLengths:
        """The choice for the step that is scheduled next."""
        tokens = self._table.tokens(len(sequences), mean_context(sequences)) if sequences else 0
        return StepLengths(verified={}, draft_tokens=tokens)

    def scheduled(self, choice: StepLengths, rows: Mapping[str, int]) -> None:
        """Nothing is noted."""

    def ended(self, texts: Mapping[str, Sequence[int]]) -> None:
        """Nothing is learnt."""

    def forget(self, running: set[str]) -> None:
        """Nothing was kept."""

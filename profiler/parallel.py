"""A calibration by several processes: one speaks and writes, all measure in step.

Each rank runs the same sweep. What a decision hangs on is made equal on all of them: a sample
is the largest of the ranks' times, the clock is the latest, memory the least, and further
points are the first rank's choice. So all take the same steps by the same code as one process.

The largest time, taken after all have met, is when the step is done everywhere: work without
a collective (building, accepting, committing) ends with the slowest rank, and a forward, which
all leave together, has the same time on each but for the skew of their start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.errors import DeviceError, RooftreeError
from decoder.launch import launched_rank, launched_size

if TYPE_CHECKING:
    from decoder.parallel import Ranks
    from decoder.target import Target
    from profiler.journal import Journal
    from profiler.sweep import Instruments
    from profiler.timing import Guard, Timer

INTERRUPTED = 130  # exit codes of the command line
UNEXPECTED = 70
FIRST_SPEAKS_S = 5.0  # how long others wait at most, for torchrun ends all when one has ended

_joins = 0  # groups that this process has formed, so that each has keys of its own


class EndedElsewhere(RooftreeError):
    """This process ends because of an error that another one has told."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of this group has failed")
        self.exit_code = exit_code


def leave_word_to_first() -> bool:
    """Whether another process tells this error: one that came up before there was a group.

    All have it then, and the first tells it. The others wait, since torchrun stops the first
    as soon as one of them has ended.
    """
    if launched_rank() == 0 or _joins:
        return False
    time.sleep(FIRST_SPEAKS_S)
    return True


@contextlib.contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone.

    An error in one of them ends all: it is raised where it came up first, and the others end
    with EndedElsewhere, or are stopped by torchrun while they wait for it.
    """
    from decoder.parallel import ALONE, join, leave

    if launched_size() == 1:
        yield ALONE
        return
    store = _meeting_place()
    ranks = join(store)
    try:
        yield ranks
        leave(ranks)
    except BaseException as error:
        mine = f"{ranks.rank} {_exit_code(error)}"
        told = mine
        with contextlib.suppress(RuntimeError):  # the store has gone with the process that had it
            told = store.compare_set("failed", "", mine).decode()
        if told != mine:
            raise EndedElsewhere(int(told.split()[1])) from error
        raise


def _meeting_place() -> Any:
    """The store of torchrun, with keys of this group's own; it outlives a rank that fails."""
    global _joins
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://"))
    _joins += 1
    return dist.PrefixStore(f"rooftree-{_joins}", store)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, RooftreeError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNEXPECTED


def check_alike(device: str, ranks: Ranks) -> None:
    """Raise DeviceError unless all ranks have the same device, by its name."""
    names = ranks.collect(device)
    if len(set(names)) > 1:
        raise DeviceError(
            f"the processes have different devices: {', '.join(names)}",
            hint="Choose equal GPUs with CUDA_VISIBLE_DEVICES.",
        )


class CommonTimer:
    """Times what all ranks do at once: the largest of their seconds, the latest of their clocks."""

    def __init__(self, timer: Timer, ranks: Ranks) -> None:
        self._timer, self._ranks = timer, ranks
        self._start_s = timer.now_s()

    def time_s(self, function: Callable[[], object]) -> float:
        self._ranks.largest(0.0)  # so that nobody's time has the others' delay in it
        return self._ranks.largest(self._timer.time_s(function))

    def now_s(self) -> float:
        return self._ranks.largest(self._timer.now_s() - self._start_s)


class CommonGuard:
    """Rejects a sample that was disturbed on any rank."""

    def __init__(self, guard: Guard, ranks: Ranks) -> None:
        self._guard, self._ranks = guard, ranks

    def start(self) -> None:
        self._guard.start()

    def disturbance(self) -> str:
        return self._ranks.any_text(self._guard.disturbance())

    def summary(self) -> dict[str, Any]:
        """What the first rank's guard saw of its own device."""
        return self._guard.summary()


def common(tools: Instruments, ranks: Ranks) -> Instruments:
    """The instruments, so that they tell all ranks the same."""
    if ranks.alone:
        return tools
    return replace(
        tools, timer=CommonTimer(tools.timer, ranks), guard=CommonGuard(tools.guard, ranks)
    )


class FollowedJournal:
    """The first rank's journal as another sees it: its records, and nothing is written."""

    def __init__(self, path: Path, records: list[dict[str, Any]]) -> None:
        self.path, self.records = path, records

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> None:
        """The first rank writes it."""

    def __enter__(self) -> FollowedJournal:
        return self

    def __exit__(self, *error: object) -> None: ...


def shared_journal(open_journal: Callable[[], Journal], ranks: Ranks) -> Journal | FollowedJournal:
    """The journal, opened by the first rank alone, and the same records for the others."""
    journal = open_journal() if ranks.first else None
    seen = ranks.decide(lambda: None if journal is None else (journal.path, journal.records))
    if journal is not None:
        return journal
    path, records = seen or (Path(), [])
    return FollowedJournal(path, records)


class Rehearsed:
    """A call of the target that each rank tries by itself before all do it together.

    Where the memory of one does not suffice, all learn of it and none is left waiting in a
    collective. After that a shortage can only end the run.
    """

    def __init__(self, run: Callable[[], object], target: Target) -> None:
        """run: raises OutOfMemory where the memory does not suffice."""
        self._run, self._target = run, target
        self._tried = False

    def __call__(self) -> object:
        from profiler.memory import OutOfMemory

        if not self._tried:
            reason = ""
            try:
                with self._target.rehearsal():
                    self._run()
            except OutOfMemory as error:
                reason = error.problem
            reason = self._target.ranks.any_text(reason)
            if reason:
                raise OutOfMemory(reason)
            self._tried = True
        try:
            return self._run()
        except OutOfMemory as error:
            raise DeviceError(
                f"{error.problem}, in a forward that others had begun",
                hint="Choose smaller --contexts, --max-nodes or --batch.",
            ) from error

"""A calibration by several processes: their group, their errors, and what they share.

Every rank runs the same sweep. Whatever a decision depends on is made equal on all of them:
times, free memory, and the choice of further points. So all ranks take the same steps by the
same code as a single process. The first rank alone prints and writes files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from costmodel.errors import DeviceError, RooftreeError
from decoder.model.ranks import ALONE, Ranks, join, leave
from profiler.launch import launched_rank, launched_size
from profiler.measure.journal import FollowedJournal, Journal

INTERRUPTED = 130  # exit codes of the command line
UNEXPECTED = 70
FIRST_REPORTS_S = 5.0  # time that other ranks leave the first one to report an error

_groups = 0  # formed by this process so far; each has its own keys in the store


class EndedElsewhere(RooftreeError):
    """This process ends because of an error that another one reports."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of this group has failed")
        self.exit_code = exit_code


def first_rank_reports() -> bool:
    """Whether the first rank reports this error, which then came up before there was a group.

    Every rank has such an error. The others wait a moment, since torchrun stops the first rank
    as soon as one of them has ended.
    """
    if launched_rank() == 0 or _groups:
        return False
    time.sleep(FIRST_REPORTS_S)
    return True


@contextlib.contextmanager
def together() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone.

    An error on one rank ends all. The rank where it came up first raises it; the others raise
    EndedElsewhere, or torchrun stops them while they wait.
    """
    if launched_size() == 1:
        yield ALONE
        return
    store = _new_store()
    ranks = join(store, launched_rank(), launched_size())
    try:
        yield ranks
        leave(ranks)
    except BaseException as error:
        own_failure = f"{ranks.rank} {_exit_code(error)}"
        first_failure = own_failure
        with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
            first_failure = store.compare_set("failed", "", own_failure).decode()
        if first_failure != own_failure:
            raise EndedElsewhere(int(first_failure.split()[1])) from error
        raise


def _new_store() -> Any:
    """The store of torchrun, with keys of this group alone; it outlives a rank that fails."""
    global _groups
    store, _, _ = next(dist.rendezvous("env://"))
    _groups += 1
    return dist.PrefixStore(f"rooftree-{_groups}", store)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, RooftreeError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else UNEXPECTED


def check_same_device(name: str, ranks: Ranks) -> None:
    """Raise DeviceError unless all ranks have a device of the same name."""
    names = ranks.collect(name)
    if len(set(names)) > 1:
        raise DeviceError(
            f"the processes have different devices: {', '.join(names)}",
            hint="Choose equal GPUs with CUDA_VISIBLE_DEVICES.",
        )


def shared_journal(open_journal: Callable[[], Journal], ranks: Ranks) -> Journal | FollowedJournal:
    """The journal, which the first rank opens, and its records on the other ranks."""
    journal = open_journal() if ranks.first else None
    shared = ranks.decide(lambda: None if journal is None else (journal.path, journal.records))
    if journal is not None:
        return journal
    path, records = shared or (Path(), [])
    return FollowedJournal(path, records)

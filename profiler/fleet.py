"""One calibration on each distinct kind of device of a cluster, whatever the cluster is.

The cluster is behind a protocol, so that everything here is plain bookkeeping: which devices are
of one kind, which node takes which kind next, what happens when a node is lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from costmodel.device import DeviceFingerprint
from costmodel.errors import DeviceError, RooftreeError
from costmodel.profile import Profile
from costmodel.registry_key import MEMORY_TOLERANCE

Job = Hashable


class NodeLostError(Exception):
    """A node, or the process on it, went away: the measurement may succeed elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDevice:
    """One device of one node; `host` is the machine, which several nodes of a test may share."""

    node: str
    host: str
    device: str
    fingerprint: DeviceFingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """How far a measurement is: a share of 0 to 1, and words."""

    share: float = 0.0
    text: str = "starting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a node sends back."""

    profile: Profile
    warnings: tuple[str, ...] = ()


class Cluster(Protocol):
    """Where the measurements run."""

    def devices(self) -> Sequence[FleetDevice]:
        """The devices of all nodes that are alive now."""
        ...

    def start(self, device: FleetDevice) -> Job:
        """Begin a calibration there. Raises NodeLostError."""
        ...

    def finished(self, jobs: Sequence[Job], timeout_s: float) -> Sequence[Job]:
        """Those that have ended, after at most so long; sleeps as long where there are none."""
        ...

    def result(self, job: Job) -> Gathered:
        """What a finished job made. Raises NodeLostError or RooftreeError."""
        ...

    def state(self, job: Job) -> JobState:
        """How far a running job is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """Tries for each kind, how long to wait for a node to take a lost one's place, polling.

    `rest_s`: how long a node that was lost is not tried again. A cluster may list a dead node for
    some seconds more, and tries on it would be thrown away.
    """

    attempts: int = 3
    patience_s: float = 120.0
    rest_s: float = 30.0
    poll_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """One kind: what was gathered and where, or the problem."""

    fingerprint: DeviceFingerprint
    attempts: int
    device: FleetDevice | None = None
    gathered: Gathered | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetListener:
    """Told what happens; both do nothing by default. `progress` gets the kind's number."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[int, FleetDevice, JobState], None] = lambda kind, device, state: None


def same_kind(one: DeviceFingerprint, other: DeviceFingerprint) -> bool:
    """Whether a profile of one serves the other: equal hard keys, memory within 8 %."""
    names = ("kind", "name", "mig", "threads", "instruction_set")
    near = abs(one.memory_bytes - other.memory_bytes) <= MEMORY_TOLERANCE * max(
        one.memory_bytes, other.memory_bytes
    )
    return near and all(getattr(one, name) == getattr(other, name) for name in names)


def label(fingerprint: DeviceFingerprint) -> str:
    """The kind in words."""
    details = f", {fingerprint.threads} threads" if fingerprint.threads is not None else ""
    return f"{fingerprint.name} ({fingerprint.memory_bytes / 2**30:.0f} GiB{details})"


def calibrate_fleet(
    cluster: Cluster,
    listener: FleetListener = FleetListener(),
    rules: FleetRules = FleetRules(),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[FleetOutcome, ...]:
    """One outcome for each kind of device, in the order in which the cluster names them.

    Kinds are measured at the same time, but never two on one host, as they would disturb each
    other. A lost node's kind is tried again on the node of its kind that was lost least often;
    another failure ends that kind only. Raises DeviceError where no node says what it has.
    """
    fleet = _Fleet(cluster, listener, rules, clock)
    if not fleet.kinds:
        raise DeviceError("no node of the cluster said which devices it has")
    while fleet.unfinished:
        fleet.start_what_can()
        fleet.collect()
    return tuple(kind.outcome for kind in fleet.kinds if kind.outcome is not None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Kind:
    """One kind's way through its attempts."""

    number: int
    fingerprint: DeviceFingerprint
    devices: list[FleetDevice]
    attempts: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    lost_at_s: dict[str, float] = field(default_factory=dict)
    missing_since: float | None = None
    outcome: FleetOutcome | None = None


class _Fleet:
    """All kinds, and what is running."""

    def __init__(
        self,
        cluster: Cluster,
        listener: FleetListener,
        rules: FleetRules,
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._listener, self._rules, self._clock = cluster, listener, rules, clock
        self._running: dict[Job, tuple[_Kind, FleetDevice]] = {}
        self.kinds: list[_Kind] = []
        for device in cluster.devices():
            for kind in self.kinds:
                if same_kind(kind.fingerprint, device.fingerprint):
                    kind.devices.append(device)
                    break
            else:
                self.kinds.append(
                    _Kind(
                        number=len(self.kinds),
                        fingerprint=device.fingerprint,
                        devices=[device],
                    )
                )

    @property
    def unfinished(self) -> bool:
        return any(kind.outcome is None for kind in self.kinds)

    def start_what_can(self) -> None:
        """Start every kind that waits and has a device on a host that is not measuring."""
        started = {kind.number for kind, _ in self._running.values()}
        for kind in self.kinds:
            if kind.outcome is not None or kind.number in started:
                continue
            if not self._rested(kind) and not self._look_again(kind):
                continue
            busy = {device.host for _, device in self._running.values()}
            free = [device for device in self._rested(kind) if device.host not in busy]
            if free:
                self._start(kind, min(free, key=lambda device: kind.losses[device.node]))

    def _rested(self, kind: _Kind) -> list[FleetDevice]:
        """The kind's devices without those of nodes that were lost just now."""
        now, lost, rest_s = self._clock(), kind.lost_at_s, self._rules.rest_s
        return [d for d in kind.devices if d.node not in lost or now - lost[d.node] >= rest_s]

    def _start(self, kind: _Kind, device: FleetDevice) -> None:
        kind.attempts += 1
        self._listener.say(f"{label(kind.fingerprint)}: measuring {device.device} of {device.host}")
        try:
            self._running[self._cluster.start(device)] = (kind, device)
        except NodeLostError as lost:
            self._lost(kind, device, lost)

    def collect(self) -> None:
        """Wait for a moment, report how far all are, and take in what has finished."""
        done = self._cluster.finished(list(self._running), self._rules.poll_s)
        for job, (kind, device) in self._running.items():
            if job not in done:
                self._listener.progress(kind.number, device, self._cluster.state(job))
        for job in done:
            kind, device = self._running.pop(job)
            try:
                gathered = self._cluster.result(job)
            except NodeLostError as lost:
                self._lost(kind, device, lost)
            except RooftreeError as error:
                self._end(
                    kind,
                    FleetOutcome(
                        fingerprint=kind.fingerprint,
                        attempts=kind.attempts,
                        device=device,
                        problem=str(error),
                    ),
                )
            else:
                self._end(
                    kind,
                    FleetOutcome(
                        fingerprint=kind.fingerprint,
                        attempts=kind.attempts,
                        device=device,
                        gathered=gathered,
                    ),
                )
                self._listener.progress(kind.number, device, JobState(share=1.0, text="done"))

    def _lost(self, kind: _Kind, device: FleetDevice, lost: NodeLostError) -> None:
        kind.losses[device.node] += 1
        kind.lost_at_s[device.node] = self._clock()
        kind.devices = []  # the cluster is asked again who is there
        if kind.attempts >= self._rules.attempts:
            self._fail(kind, f"lost its node {kind.attempts} times, last {device.host}: {lost}")
        else:
            self._listener.say(
                f"{label(kind.fingerprint)}: lost {device.host} ({lost}); trying again"
            )

    def _look_again(self, kind: _Kind) -> bool:
        """Whether a device of this kind is there now; gives up when patience is over."""
        kind.devices = [
            device
            for device in self._cluster.devices()
            if same_kind(kind.fingerprint, device.fingerprint)
        ]
        if kind.devices:
            kind.missing_since = None
            return True
        now = self._clock()
        if kind.missing_since is None:
            kind.missing_since = now
        if now - kind.missing_since >= self._rules.patience_s:
            self._fail(
                kind,
                f"lost its node, and no other of its kind came within"
                f" {self._rules.patience_s:.0f} s",
            )
        return False

    def _fail(self, kind: _Kind, problem: str) -> None:
        self._end(
            kind,
            FleetOutcome(fingerprint=kind.fingerprint, attempts=kind.attempts, problem=problem),
        )

    def _end(self, kind: _Kind, outcome: FleetOutcome) -> None:
        kind.outcome = outcome
        if outcome.problem:
            self._listener.say(f"{label(kind.fingerprint)}: {outcome.problem}")

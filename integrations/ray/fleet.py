"""Scheduling of one calibration for each distinct kind of device of a cluster.

The cluster is a protocol, so that this module is bookkeeping alone: it groups devices by kind,
assigns kinds to nodes, and tries again where a node is lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from costmodel.catalog import DeviceFingerprint
from costmodel.errors import DeviceError, RooftreeError
from costmodel.profile.profile import MEMORY_TOLERANCE, Profile

Job = Hashable


class NodeLostError(Exception):
    """A node or the process on it has ended; the measurement may succeed on another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDevice:
    """One device of one node; `host` is the machine, which several test nodes may share."""

    node: str
    host: str
    device: str
    fingerprint: DeviceFingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Progress of a measurement: a share from 0 to 1, and a text."""

    share: float = 0.0
    text: str = "starting"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The result that a node returns."""

    profile: Profile
    warnings: tuple[str, ...] = ()


class Cluster(Protocol):
    """Where the measurements run."""

    def devices(self) -> Sequence[FleetDevice]:
        """The devices of all nodes that are alive."""

    def start(self, device: FleetDevice) -> Job:
        """Start a calibration on the device. Raises NodeLostError."""

    def finished(self, jobs: Sequence[Job], timeout_s: float) -> Sequence[Job]:
        """The jobs that have ended, within `timeout_s`; sleeps as long when there are no jobs."""

    def result(self, job: Job) -> NodeResult:
        """The result of a finished job. Raises NodeLostError or RooftreeError."""

    def state(self, job: Job) -> JobState:
        """The progress of a running job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """Limits of a fleet's calibration.

    attempts    for each kind
    patience_s  time to wait for another node of a kind whose node was lost
    rest_s      time before a lost node is tried again; a cluster may list a dead node for some
                seconds, and attempts on it would be wasted
    poll_s      time between two looks at the running jobs
    """

    attempts: int = 3
    patience_s: float = 120.0
    rest_s: float = 30.0
    poll_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """The result of one kind and the device that gave it, or the problem."""

    fingerprint: DeviceFingerprint
    attempts: int
    device: FleetDevice | None = None
    gathered: NodeResult | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetListener:
    """Callbacks for messages and progress; `progress` gets the kind's number."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[int, FleetDevice, JobState], None] = lambda kind, device, state: None


def same_kind(one: DeviceFingerprint, other: DeviceFingerprint) -> bool:
    """Whether a profile of one serves the other: equal hard keys, and memory within 8 %."""
    names = ("kind", "name", "mig", "threads", "instruction_set")
    near = abs(one.memory_bytes - other.memory_bytes) <= MEMORY_TOLERANCE * max(
        one.memory_bytes, other.memory_bytes
    )
    return near and all(getattr(one, name) == getattr(other, name) for name in names)


def label(fingerprint: DeviceFingerprint) -> str:
    """A device kind as text."""
    details = f", {fingerprint.threads} threads" if fingerprint.threads is not None else ""
    return f"{fingerprint.name} ({fingerprint.memory_bytes / 2**30:.0f} GiB{details})"


def calibrate_fleet(
    cluster: Cluster,
    listener: FleetListener = FleetListener(),
    rules: FleetRules = FleetRules(),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[FleetOutcome, ...]:
    """One outcome for each kind of device, in the order in which the cluster names them.

    Kinds are measured at the same time, but never two on one host, since they would disturb
    each other. When a node is lost, its kind is tried again on the node of that kind that was
    lost least often. Any other failure ends that kind alone. Raises DeviceError when no node
    lists its devices.
    """
    fleet = _Fleet(cluster, listener, rules, clock)
    if not fleet.kinds:
        raise DeviceError("no node of the cluster listed its devices")
    while any(kind.outcome is None for kind in fleet.kinds):
        fleet.start_waiting()
        fleet.collect()
    return tuple(kind.outcome for kind in fleet.kinds if kind.outcome is not None)


@dataclass(slots=True, kw_only=True, eq=False)
class _Kind:
    """The state of one kind over its attempts."""

    number: int
    fingerprint: DeviceFingerprint
    devices: list[FleetDevice]
    attempts: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    lost_at_s: dict[str, float] = field(default_factory=dict)
    missing_since: float | None = None
    outcome: FleetOutcome | None = None


class _Fleet:
    """All kinds, and the running jobs."""

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
                    _Kind(number=len(self.kinds), fingerprint=device.fingerprint, devices=[device])
                )

    def start_waiting(self) -> None:
        """Start every waiting kind that has a device on an idle host."""
        started = {kind.number for kind, _ in self._running.values()}
        for kind in self.kinds:
            if kind.outcome is not None or kind.number in started:
                continue
            if not self._rested(kind) and not self._refresh(kind):
                continue
            busy = {device.host for _, device in self._running.values()}
            free = [device for device in self._rested(kind) if device.host not in busy]
            if not free:
                continue
            device = min(free, key=lambda one: kind.losses[one.node])
            kind.attempts += 1
            named = f"{device.device} of {device.host}"
            self._listener.say(f"{label(kind.fingerprint)}: measuring {named}")
            try:
                self._running[self._cluster.start(device)] = (kind, device)
            except NodeLostError as lost:
                self._lost(kind, device, lost)

    def _rested(self, kind: _Kind) -> list[FleetDevice]:
        """The kind's devices, without those of recently lost nodes."""
        now, lost, rest_s = self._clock(), kind.lost_at_s, self._rules.rest_s
        return [d for d in kind.devices if d.node not in lost or now - lost[d.node] >= rest_s]

    def collect(self) -> None:
        """Wait for a moment, report the progress, and take in the finished jobs."""
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
                self._end(kind, device=device, problem=str(error))
            else:
                self._end(kind, device=device, gathered=gathered)
                self._listener.progress(kind.number, device, JobState(share=1.0, text="done"))

    def _lost(self, kind: _Kind, device: FleetDevice, lost: NodeLostError) -> None:
        kind.losses[device.node] += 1
        kind.lost_at_s[device.node] = self._clock()
        kind.devices = []  # listed again before the next attempt
        if kind.attempts >= self._rules.attempts:
            problem = f"lost its node {kind.attempts} times, last {device.host}: {lost}"
            self._end(kind, problem=problem)
        else:
            self._listener.say(
                f"{label(kind.fingerprint)}: lost {device.host} ({lost}); trying again"
            )

    def _refresh(self, kind: _Kind) -> bool:
        """List the kind's devices again; False when there are none, which fails it in the end."""
        kind.devices = [
            device
            for device in self._cluster.devices()
            if same_kind(kind.fingerprint, device.fingerprint)
        ]
        if kind.devices:
            kind.missing_since = None
            return True
        now, patience_s = self._clock(), self._rules.patience_s
        if kind.missing_since is None:
            kind.missing_since = now
        if now - kind.missing_since >= patience_s:
            problem = f"lost its node, and no other of its kind came within {patience_s:.0f} s"
            self._end(kind, problem=problem)
        return False

    def _end(self, kind: _Kind, *, problem: str = "", **found: Any) -> None:
        """found: the device and what was gathered on it"""
        kind.outcome = FleetOutcome(
            fingerprint=kind.fingerprint, attempts=kind.attempts, problem=problem, **found
        )
        if problem:
            self._listener.say(f"{label(kind.fingerprint)}: {problem}")

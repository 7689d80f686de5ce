"""Calibrations on the nodes of a Ray cluster (extra `fleet`).

Every node needs the same version of rooftree, with the extra. A calibration requests all GPUs of
its node, or all CPUs where the cluster has no GPU, so that no other Ray task disturbs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from costmodel.catalog import DeviceFingerprint
from costmodel.errors import DeviceError, InputError, MeasurementError, RooftreeError, reason_of
from costmodel.profile.profile import Profile
from decoder.device import fingerprint
from integrations.ray.fleet import FleetDevice, Job, JobState, NodeLostError, NodeResult
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.source import CalibrationSettings

# How long to wait at first for every node to list its devices, and how long at each later look.
# A node that answers late is still taken in.
FIRST_SURVEY_S, LATER_SURVEY_S = 120.0, 1.0
CONNECT_S = 10.0
REPORT_INTERVAL_S = 1.0  # between two progress reports of a node, which disturb its measurement


@contextlib.contextmanager
def ray_cluster(
    settings: CalibrationSettings, address: str, say: Callable[[str], None]
) -> Iterator[RayCluster]:
    """Connect to a cluster for the body.

    Raises InputError without the extra, DeviceError without a cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError(
            "calibrating a fleet needs ray", hint="Install it with `pip install 'rooftree[fleet]'`"
        ) from None
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal():  # Ray itself would try for minutes where nothing listens
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        raise DeviceError(
            f"no Ray cluster answers at '{address}': {reason_of(error)}",
            hint="Start one with `ray start --head`, or give its HOST:PORT",
        ) from None
    try:
        yield RayCluster(settings, say)
    finally:
        ray.shutdown()


class RayCluster:
    """The scheduler's `Cluster` protocol, by Ray tasks that are bound to their node."""

    def __init__(self, settings: CalibrationSettings, say: Callable[[str], None]) -> None:
        import ray

        self._ray, self._settings, self._say = ray, settings, say
        self._devices_of: dict[str, list[FleetDevice]] = {}  # by node
        self._device_of: dict[Job, FleetDevice] = {}
        self._surveyed: dict[Any, Mapping[str, Any]] = {}  # nodes that have not answered yet
        # The actor may be on a node that is lost; only the progress reports are lost with it.
        self._board: Any = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._states: Mapping[str, JobState] = {}
        self._survey_s = FIRST_SURVEY_S

    def devices(self) -> Sequence[FleetDevice]:
        """The devices of all nodes that are alive: GPUs where there are any, else CPUs."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        gpus = {key: node for key, node in nodes.items() if node["Resources"].get("GPU")}
        if self._settings.device == "cuda" and not gpus:
            raise DeviceError("no node of the Ray cluster has a GPU")
        usable = nodes if self._settings.device == "cpu" else gpus or nodes
        asked = self._devices_of.keys() | {node["NodeID"] for node in self._surveyed.values()}
        new = [node for key, node in usable.items() if key not in asked]
        self._surveyed |= {
            self._task(_devices_here, node).remote(self._kind(node)): node for node in new
        }
        self._gather(new)
        return [device for key in usable for device in self._devices_of.get(key, ())]

    def _gather(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Take in the answers of nodes, and report new nodes without one."""
        if not self._surveyed:
            return
        waiting = list(self._surveyed)
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=self._survey_s)
        self._survey_s = LATER_SURVEY_S
        for reference in done:
            node = self._surveyed.pop(reference)
            try:
                devices = self._get(reference)
            except NodeLostError as error:  # surveyed again where the node is still there
                self._say(f"{node['NodeManagerHostname']} is left out for now: {error}")
                continue
            except RooftreeError as error:
                self._say(f"{node['NodeManagerHostname']} is left out: {error}")
                self._devices_of[node["NodeID"]] = []
                continue
            self._devices_of[node["NodeID"]] = [
                FleetDevice(
                    node=node["NodeID"],
                    host=node["NodeManagerHostname"],
                    device=name,
                    fingerprint=device,
                )
                for name, device in devices
            ]
        silent = {node["NodeID"] for node in self._surveyed.values()}
        for node in new:
            if node["NodeID"] in silent:
                self._say(f"{node['NodeManagerHostname']} has not listed its devices yet")

    def start(self, device: FleetDevice) -> Job:
        nodes = [n for n in self._ray.nodes() if n["NodeID"] == device.node and n["Alive"]]
        if not nodes:
            raise NodeLostError("it is no longer in the cluster")
        settings = dataclasses.replace(self._settings, device=device.device, output=None)
        job: Job = self._task(_calibrate_here, nodes[0]).remote(settings, self._board, device.node)
        self._device_of[job] = device
        return job

    def finished(self, jobs: Sequence[Job], timeout_s: float) -> Sequence[Job]:
        if not jobs:
            time.sleep(timeout_s)
            return []
        done, _ = self._ray.wait(list(jobs), num_returns=len(jobs), timeout=timeout_s)
        with contextlib.suppress(self._ray.exceptions.RayError):  # only progress is lost
            self._states = self._ray.get(self._board.all.remote(), timeout=timeout_s)
        return list(done)

    def state(self, job: Job) -> JobState:
        return self._states.get(self._device_of[job].node, JobState())

    def result(self, job: Job) -> NodeResult:
        made = self._get(job)
        if "problem" in made:
            raise MeasurementError(made["problem"])
        host = self._device_of[job].host
        return NodeResult(
            profile=Profile.from_bytes(made["profile"].encode(), f"the profile from {host}"),
            warnings=tuple(made["warnings"]),
        )

    def _kind(self, node: Mapping[str, Any]) -> str:
        gpu = bool(node["Resources"].get("GPU")) and self._settings.device != "cpu"
        return "cuda" if gpu else "cpu"

    def _task(self, function: Callable[..., Any], node: Mapping[str, Any]) -> Any:
        """The function as a Ray task on this node, alone there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        gpu = self._kind(node) == "cuda"
        resources = node["Resources"]
        return self._ray.remote(max_retries=0)(function).options(
            num_gpus=resources["GPU"] if gpu else 0,
            num_cpus=min(1, resources.get("CPU", 0)) if gpu else resources.get("CPU", 0),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )

    def _get(self, reference: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            first = (str(cause).splitlines() or [""])[0]
            raise MeasurementError(
                f"unexpected {type(cause).__name__} on the node: {first}",
                hint="Install the same rooftree with its extra `fleet` on every node",
            ) from None
        except exceptions.RayError as error:
            raise NodeLostError((str(error).splitlines() or [""])[0][:200]) from None


class _Board:
    """An actor with the last reported state of every node's measurement."""

    def __init__(self) -> None:
        self._states: dict[str, JobState] = {}

    def put(self, node: str, state: JobState) -> None:
        self._states[node] = state

    def all(self) -> dict[str, JobState]:
        return self._states


def _devices_here(kind: str) -> list[tuple[str, DeviceFingerprint]]:
    """Runs on a node: its devices as torch sees them there, with their fingerprints."""
    if kind == "cpu":
        return [("cpu", fingerprint(torch.device("cpu")))]
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [(name, fingerprint(torch.device(name))) for name in names]


def _calibrate_here(settings: CalibrationSettings, board: Any, node: str) -> dict[str, Any]:
    """Runs on a node: calibrates, stores the profile there, and returns it as text."""
    reported_s = 0.0
    if settings.device.startswith("cuda"):
        torch.cuda.set_device(settings.device)

    def report(share: float, text: str) -> None:
        nonlocal reported_s
        now = time.monotonic()
        if now - reported_s >= REPORT_INTERVAL_S:
            reported_s = now
            board.put.remote(node, JobState(share=share, text=text))

    try:
        result = calibrate(settings, CalibrationListener(progress=report))
    except RooftreeError as error:
        return {"problem": str(error)}
    return {"profile": result.profile.to_yaml(), "warnings": list(result.warnings)}

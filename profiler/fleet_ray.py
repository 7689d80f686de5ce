"""A Ray cluster as the place where calibrations run (extra `fleet`).

Every node needs the same rooftree, with the extra. A calibration asks for all GPUs of its node, or
for all its CPUs where the cluster has no GPU: nothing else that Ray runs may disturb it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from costmodel.errors import DeviceError, InputError, MeasurementError, RooftreeError
from costmodel.profile import Profile
from profiler.fleet import FleetDevice, Gathered, Job, JobState, NodeLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from costmodel.device import DeviceFingerprint
    from profiler.calibrate import CalibrationSettings

# A node that has not said within this time what it has is busy with something else. Its answer is
# still taken when it comes; later, while others are measuring, nobody waits for it.
SURVEY_S, AGAIN_S = 120.0, 1.0
CONNECT_S = 10.0
# Seconds between two reports of a measurement, so that reporting does not disturb it.
REPORT_EVERY_S = 1.0


@contextlib.contextmanager
def ray_cluster(
    settings: CalibrationSettings, address: str, say: Callable[[str], None]
) -> Iterator[RayCluster]:
    """Connect for the body. Raises InputError without the extra, DeviceError without a cluster."""
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError(
            "calibrating a fleet needs ray", hint="Install it with `pip install 'rooftree[fleet]'`"
        ) from None
    try:
        _check_listens(address)
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceError(
            f"no Ray cluster answers at '{address}': {reason}",
            hint="Start one with `ray start --head`, or give its --fleet-address",
        ) from None
    try:
        yield RayCluster(settings, say)
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise OSError where nobody listens at host:port, which Ray would try again for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


class RayCluster:
    """`profiler.fleet.Cluster` over Ray tasks that are bound to their node."""

    def __init__(self, settings: CalibrationSettings, say: Callable[[str], None]) -> None:
        import ray

        self._ray, self._settings, self._say = ray, settings, say
        self._known: dict[str, list[FleetDevice]] = {}
        self._asked: dict[Job, FleetDevice] = {}
        self._surveyed: dict[Any, Mapping[str, Any]] = {}  # questions without an answer yet
        # It may live on a node that is lost; then only what it has noted is.
        self._board: Any = ray.remote(num_cpus=0, max_restarts=-1)(_Board).remote()
        self._states: Mapping[str, JobState] = {}
        self._patience_s = SURVEY_S

    def devices(self) -> Sequence[FleetDevice]:
        """The devices of all nodes that are alive: GPUs where there are any, else CPUs."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        gpus = {key: node for key, node in nodes.items() if node["Resources"].get("GPU")}
        if self._settings.device == "cuda" and not gpus:
            raise DeviceError("no node of the Ray cluster has a GPU")
        wanted = nodes if self._settings.device == "cpu" else gpus or nodes
        asked = {node["NodeID"] for node in self._surveyed.values()}
        new = [node for key, node in wanted.items() if key not in self._known and key not in asked]
        self._surveyed |= {
            self._task(_devices_here, node).remote(self._kind(node)): node for node in new
        }
        self._gather(new)
        return [device for key in wanted for device in self._known.get(key, ())]

    def _gather(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Take in the answers that have come, and name new nodes that give none for now."""
        if not self._surveyed:
            return
        waiting = list(self._surveyed)
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=self._patience_s)
        self._patience_s = AGAIN_S
        for reference in done:
            node = self._surveyed.pop(reference)
            try:
                found = self._get(reference)
            except NodeLostError as error:  # if it is still there, it is asked again
                self._say(f"{node['NodeManagerHostname']} is left out for now: {error}")
                continue
            except RooftreeError as error:
                self._say(f"{node['NodeManagerHostname']} is left out: {error}")
                self._known[node["NodeID"]] = []
                continue
            self._known[node["NodeID"]] = [
                FleetDevice(
                    node=node["NodeID"],
                    host=node["NodeManagerHostname"],
                    device=name,
                    fingerprint=fingerprint,
                )
                for name, fingerprint in found
            ]
        silent = {node["NodeID"] for node in self._surveyed.values()}
        for node in new:
            if node["NodeID"] in silent:
                self._say(f"{node['NodeManagerHostname']} has not said yet what it has")

    def start(self, device: FleetDevice) -> Job:
        nodes = [n for n in self._ray.nodes() if n["NodeID"] == device.node and n["Alive"]]
        if not nodes:
            raise NodeLostError("it is no longer in the cluster")
        settings = dataclasses.replace(self._settings, device=device.device, output=None)
        job: Job = self._task(_calibrate_here, nodes[0]).remote(settings, self._board, device.node)
        self._asked[job] = device
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
        return self._states.get(self._asked[job].node, JobState())

    def result(self, job: Job) -> Gathered:
        made = self._get(job)
        if "problem" in made:
            raise MeasurementError(made["problem"])
        host = self._asked[job].host
        return Gathered(
            profile=Profile.from_bytes(made["profile"].encode(), f"the profile from {host}"),
            warnings=tuple(made["warnings"]),
        )

    def _kind(self, node: Mapping[str, Any]) -> str:
        gpu = bool(node["Resources"].get("GPU")) and self._settings.device != "cpu"
        return "cuda" if gpu else "cpu"

    def _task(self, function: Callable[..., Any], node: Mapping[str, Any]) -> Any:
        """The function as a task on exactly this node, which has the node to itself."""
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
    """An actor that keeps the last state of every node's measurement."""

    def __init__(self) -> None:
        self._states: dict[str, JobState] = {}

    def put(self, node: str, state: JobState) -> None:
        self._states[node] = state

    def all(self) -> dict[str, JobState]:
        return self._states


def _devices_here(kind: str) -> list[tuple[str, DeviceFingerprint]]:
    """On a node: its devices and their fingerprints, as torch sees them there."""
    import torch

    from decoder.device import fingerprint

    if kind == "cpu":
        return [("cpu", fingerprint(torch.device("cpu")))]
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return [(name, fingerprint(torch.device(name))) for name in names]


def _calibrate_here(settings: CalibrationSettings, board: Any, node: str) -> dict[str, Any]:
    """On a node: calibrate, store the profile there, and send it back as text."""
    from profiler.calibrate import Listener, calibrate
    from profiler.commands.calibrate import done_share, state
    from profiler.sweep import Progress

    reported_s = 0.0

    def report(progress: Progress) -> None:
        nonlocal reported_s
        now = time.monotonic()
        if now - reported_s >= REPORT_EVERY_S:
            reported_s = now
            share = min(done_share(progress), 1.0)
            board.put.remote(node, JobState(share=share, text=state(progress)))

    try:
        result = calibrate(settings, Listener(progress=report))
    except RooftreeError as error:
        return {"problem": str(error)}
    return {"profile": result.profile.to_yaml(), "warnings": list(result.warnings)}

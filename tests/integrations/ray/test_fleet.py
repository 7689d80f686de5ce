"""Calibrating a fleet on a made-up cluster: kinds, hosts, lost nodes, failures."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from costmodel.catalog import DeviceFingerprint
from costmodel.errors import DeviceError, MeasurementError
from integrations.ray import fleet
from integrations.ray.fleet import FleetDevice, FleetRules, JobState, calibrate_fleet

H100 = DeviceFingerprint(kind="cuda", name="NVIDIA H100", memory_bytes=80 * 2**30)
L40S = DeviceFingerprint(kind="cuda", name="NVIDIA L40S", memory_bytes=45 * 2**30)
CPU = DeviceFingerprint(kind="cpu", name="Some CPU", memory_bytes=2**36, threads=8)


def device(node: str, fingerprint: DeviceFingerprint, host: str = "", index: int = 0):
    return FleetDevice(
        node=node, host=host or f"host-{node}", device=f"cuda:{index}", fingerprint=fingerprint
    )


@dataclass
class FakeCluster:
    """Jobs end in the order of their start, one a poll, with what `ends` says for their node.

    `ends`: a list for each node, one entry a start: "lost", "gone" (lost for good), "bad" or "ok".
    """

    present: list[FleetDevice]
    ends: dict[str, list[str]] = field(default_factory=dict)
    arrive: dict[int, FleetDevice] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    running: list[FleetDevice] = field(default_factory=list)
    most_on_a_host: int = 0
    most_running: int = 0
    polls: int = 0

    def devices(self) -> Sequence[FleetDevice]:
        return list(self.present)

    def start(self, device: FleetDevice) -> object:
        if device not in self.present:
            raise fleet.NodeLostError("not there")
        self.started.append(device.node)
        self.running.append(device)
        hosts = [other.host for other in self.running]
        self.most_on_a_host = max(self.most_on_a_host, hosts.count(device.host))
        self.most_running = max(self.most_running, len(self.running))
        return (len(self.started), device)

    def finished(self, jobs: Sequence[object], timeout_s: float) -> Sequence[object]:
        self.polls += 1
        if self.polls in self.arrive:
            self.present.append(self.arrive[self.polls])
        return sorted(jobs, key=lambda job: job[0])[:1]

    def result(self, job: tuple[int, FleetDevice]) -> fleet.NodeResult:
        device = job[1]
        self.running.remove(device)
        end = self.ends.get(device.node, ["ok"]).pop(0) if self.ends.get(device.node) else "ok"
        if end == "gone":
            self.present = [other for other in self.present if other.node != device.node]
        if end in ("lost", "gone"):
            raise fleet.NodeLostError("power cut")
        if end == "bad":
            raise MeasurementError("too noisy")
        return fleet.NodeResult(profile=f"profile of {device.node}")

    def state(self, job: object) -> JobState:
        return JobState(share=0.5, text="half")


OF_B = ("NVIDIA L40S", "profile of b", 1)


def summary(outcomes):
    ends = [o.gathered.profile if o.gathered else o.problem for o in outcomes]
    return [(o.fingerprint.name, end, o.attempts) for o, end in zip(outcomes, ends, strict=True)]


def test_each_kind_is_measured_once_also_where_one_fails():
    twin = device("a", H100, index=1)
    cluster = FakeCluster([device("a", H100), twin, device("b", L40S), device("c", H100)])
    assert summary(calibrate_fleet(cluster)) == [("NVIDIA H100", "profile of a", 1), OF_B]
    assert cluster.started == ["a", "b"]
    assert cluster.most_running == 2
    devices = [device("a", H100), device("c", H100), device("b", L40S)]
    cluster = FakeCluster(devices, ends={"a": ["bad"]})
    assert summary(calibrate_fleet(cluster)) == [("NVIDIA H100", "too noisy", 1), OF_B]
    assert cluster.started == ["a", "b"]
    with pytest.raises(DeviceError, match="no node of the cluster listed its devices"):
        calibrate_fleet(FakeCluster([]))


def test_a_lost_nodes_kind_goes_to_another_node_also_where_it_is_still_listed():
    cluster = FakeCluster([device("a", H100), device("b", H100)], ends={"a": ["gone"]})
    said: list[str] = []
    outcomes = calibrate_fleet(cluster, fleet.FleetListener(say=said.append))
    assert summary(outcomes) == [("NVIDIA H100", "profile of b", 2)]
    assert outcomes[0].device.node == "b"
    assert any("lost host-a (power cut); trying again" in line for line in said)
    # The cluster notices the loss late: node a stays in the list, its measurements are lost
    arrive = {5: device("new", H100)}
    cluster = FakeCluster([device("a", H100)], ends={"a": ["lost"] * 9}, arrive=arrive)
    outcomes = calibrate_fleet(cluster, clock=lambda: float(cluster.polls))
    assert summary(outcomes) == [("NVIDIA H100", "profile of new", 2)]
    assert cluster.started == ["a", "new"]


def test_attempts_and_waiting_for_a_replacement_end_and_lose_no_other_kind():
    never = "lost its node, and no other of its kind came within 30 s"
    for end, rules, problem, attempts in (
        ("lost", FleetRules(attempts=2), "lost its node 2 times, last host-a: power cut", 2),
        ("gone", FleetRules(patience_s=30.0), never, 1),
    ):
        cluster = FakeCluster([device("a", H100), device("b", L40S)], ends={"a": [end] * 9})
        outcomes = calibrate_fleet(cluster, rules=rules, clock=lambda: 10.0 * cluster.polls)  # noqa: B023
        assert summary(outcomes) == [("NVIDIA H100", problem, attempts), OF_B]
        assert cluster.polls < 10


@pytest.mark.parametrize(("changed", "same"), [
    ({"driver": "other"}, True), ({"memory_bytes": int(80 * 2**30 * 0.95)}, True),
    ({"memory_bytes": 40 * 2**30}, False), ({"name": "NVIDIA H200"}, False),
    ({"mig": "1g.10gb"}, False), ({"threads": 4}, False),
])  # fmt: skip
def test_kinds_are_told_apart_as_profiles_are(changed, same):
    assert fleet.same_kind(H100, H100.model_copy(update=changed)) is same

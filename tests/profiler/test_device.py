"""Metadata collectors, what counts as a disturbance, and the GPU that CUDA means."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from costmodel.errors import DeviceError
from profiler import device, nvml
from profiler.device import Activity, BusyProcess, CpuGuard, Metadata, collect, observe, warnings
from profiler.nvml import Gpu, GpuGuard, clock_reasons, visible_entry


def metadata(**fields: Any) -> Metadata:
    return Metadata(fields=fields, absent={})


def test_collect_tells_the_versions_and_this_machine() -> None:
    import numpy
    import torch

    found = collect()
    assert found.fields["numpy_version"] == numpy.__version__
    assert found.fields["torch_threads"] == torch.get_num_threads()
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert found.fields["memory_bytes"] == 1024 * total_kib
    assert 0 < found.fields["memory_free_bytes"] <= found.fields["memory_bytes"]


def test_a_failing_collector_leaves_a_reason_in_place_of_its_fields() -> None:
    def broken() -> dict[str, Any]:
        raise PermissionError("not allowed")

    found = device.run_collectors({"good": lambda: {"a": 1}, "bad": broken})
    assert found.fields == {"a": 1}
    assert found.absent == {"bad": "PermissionError: not allowed"}


def test_busy_processes_are_found_by_name_without_ourselves() -> None:
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True)
    try:
        # A child of ours is not "another process"; a process with another parent is.
        assert all(process.pid != other.pid for process in observe(0.3).processes)
        found = _observed_by_another(other.pid)
    finally:
        other.kill()
        other.wait()
    assert found.startswith("sh ")
    assert float(found.split()[1]) > 0.2


def _observed_by_another(pid: int) -> str:
    """Name and core share of `pid` as seen from a process that is not its parent."""
    program = (
        "from profiler.device import observe\n"
        f"found = [p for p in observe(0.5).processes if p.pid == {pid}]\n"
        "print(found[0].name, found[0].core_share)"
    )
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    ).stdout


def test_warnings_name_the_process_and_say_what_to_do() -> None:
    activity = Activity(
        processes=(BusyProcess(pid=42, name="cc1plus", core_share=0.97),), steal_share=0.31
    )
    found = warnings(metadata(), activity)
    assert found[0].startswith("cc1plus (process 42) is using 97% of a core: stop it")
    assert "31% of the processor time" in found[1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cpu_governor": "powersave"}, "cpupower frequency-set -g performance"),
        ({"cpu_quota_cores": 1.5, "torch_threads": 8}, "OMP_NUM_THREADS=1"),
        ({"memory_free_bytes": 300 << 20}, "only 300 MiB"),
        ({"gpu_other_processes": [7, 9]}, "process 7, 9"),
        ({"gpu_temperature_c": 91}, "at 91 C"),
        ({"gpu_clock_reasons": ["hardware thermal slowdown"]}, "hardware thermal slowdown"),
    ],
)
def test_each_trouble_has_its_warning(fields: dict[str, Any], expected: str) -> None:
    (found,) = warnings(metadata(**fields))
    assert expected in found


def test_a_quiet_machine_has_no_warning() -> None:
    quiet = metadata(
        cpu_governor="performance",
        cpu_quota_cores=8.0,
        torch_threads=8,
        memory_free_bytes=1 << 34,
        gpu_other_processes=[],
        gpu_temperature_c=50,
        gpu_clock_reasons=["power cap"],
    )
    assert warnings(quiet, Activity(processes=(), steal_share=0.0)) == ()


@pytest.mark.parametrize(
    ("stolen_s", "throttled_s", "expected"),
    [(0.0, 0.0, ""), (0.5, 0.0, "stolen"), (0.0, 0.5, "quota"), (0.001, 0.001, "")],
)
def test_cpu_guard(
    monkeypatch: pytest.MonkeyPatch, stolen_s: float, throttled_s: float, expected: str
) -> None:
    counters = SimpleNamespace(stolen_s=10.0, throttled_s=20.0)
    monkeypatch.setattr(device, "_stolen_s", lambda: counters.stolen_s)
    monkeypatch.setattr(device, "_throttled_s", lambda: counters.throttled_s)
    guard = CpuGuard()
    guard.start()
    time.sleep(0.05)
    counters.stolen_s += stolen_s
    counters.throttled_s += throttled_s
    found = guard.disturbance()
    assert expected in found
    assert bool(expected) == bool(found)


def test_container_throttling_is_read_from_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    assert device._throttled_s() == 0.0
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 2500000\n")
    assert device._throttled_s() == 2.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert device._quota() == {"cpu_quota_cores": 1.5}
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert device._quota() == {}


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [
        (1, None, "1"),
        (0, "3,1", "3"),
        (1, " 3 , 1 ", "1"),
        (1, "GPU-aa,MIG-bb", "MIG-bb"),
        (0, "2,-1,4", "2"),
    ],
)
def test_visible_devices(index: int, visible: str | None, expected: str) -> None:
    assert visible_entry(index, visible) == expected


@pytest.mark.parametrize(("index", "visible"), [(0, ""), (1, "2,-1,4"), (0, "none")])
def test_hidden_devices_are_an_error(index: int, visible: str) -> None:
    with pytest.raises(DeviceError, match="there is no cuda:"):
        visible_entry(index, visible)


def test_clock_reasons_by_bit() -> None:
    assert clock_reasons(0x04 | 0x40) == ("power cap", "hardware thermal slowdown")
    assert clock_reasons(0) == ()


class FakeNvml:
    """Two GPUs as NVML shows them; calls that are not defined are not supported."""

    class NVMLError(Exception):
        pass

    uuids = ("GPU-1111-aaaa", "GPU-2222-bbbb")

    def __init__(self, reasons: int = 0) -> None:
        self.reasons = reasons

    def __getattr__(self, name: str) -> Any:
        def unsupported(*arguments: object) -> None:
            raise self.NVMLError(f"{name}: not supported")

        return unsupported

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise self.NVMLError("not found")
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.uuids[handle]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.reasons


@pytest.mark.parametrize(
    ("visible", "handle"),
    [("1,0", 1), ("GPU-2222-bbbb", 1), ("GPU-2222", 1), ("GPU-1111,GPU-2222", 0), (None, 0)],
)
def test_nvml_opens_the_gpu_that_cuda_sees_first(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, handle: int
) -> None:
    monkeypatch.setattr(nvml, "_torch_uuids", lambda index: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml._handle(FakeNvml(), 0) == handle


def test_the_uuid_that_torch_knows_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_torch_uuids", lambda index: ["MIG-2222-bbbb", "GPU-2222-bbbb"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert nvml._handle(FakeNvml(), 0) == 1


def test_an_unknown_uuid_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_torch_uuids", lambda index: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3333")
    with pytest.raises(DeviceError, match="GPU-3333"):
        nvml._handle(FakeNvml(), 0)


def test_reading_leaves_out_what_the_gpu_cannot_tell() -> None:
    found = Gpu(FakeNvml(reasons=0x04), 0).read()
    assert found == {
        "gpu_name": "NVIDIA H200",
        "gpu_uuid": "GPU-1111-aaaa",
        "gpu_sm_clock_hz": 1.98e9,
        "gpu_memory_clock_hz": 3.201e9,
        "gpu_clock_reasons": ["power cap"],
    }


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [(0x00, ""), (0x04, ""), (0x20, "software thermal slowdown"), (0x48, "hardware")],
)
def test_gpu_guard_rejects_heat_but_not_the_power_cap(reasons: int, expected: str) -> None:
    guard = GpuGuard(Gpu(FakeNvml(reasons), 0))
    guard.start()
    assert expected in guard.disturbance()
    assert bool(guard.disturbance()) == bool(expected)


@pytest.mark.gpu
def test_nvml_and_torch_mean_the_same_gpu() -> None:
    import torch

    found = Gpu.open(0).read()
    assert found["gpu_name"] == torch.cuda.get_device_name(0)
    assert str(torch.cuda.get_device_properties(0).uuid) in found["gpu_uuid"]

"""NVML through a fake of it: the GPU that CUDA means, its state, and rejected samples."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from costmodel.errors import DeviceError
from decoder import nvml
from decoder.device import default_dtype, fingerprint, parse_dtype
from decoder.nvml import Gpu, driver_facts
from profiler.measure.instruments import CudaTimer, GpuGuard, Guard, gpu_guard
from profiler.measure.machine import run_collectors, warnings

UUIDS = ("GPU-1111-aaaa", "GPU-2222-bbbb", "MIG-3333-cccc")


class FakeNvml:
    """Two GPUs as NVML shows them, the second of which may have a slice, handle 2.

    Calls that are not defined are not supported; of a slice NVML tells only what is its own.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: int = 0, sliced: bool = False, board_given: bool = True) -> None:
        self.reasons, self.sliced, self.board_given = reasons, sliced, board_given
        self.clock_mhz = 1980
        self.processes: list[SimpleNamespace] | None = None

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            handle = arguments[0] if arguments else None
            own: dict[str, Any] = {
                "nvmlDeviceGetCount": 2,
                "nvmlDeviceGetName": "NVIDIA H200",
                "nvmlSystemGetDriverVersion": "570.86",
                "nvmlDeviceGetEccMode": [1, 1],
            }
            if name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
                known = (0, 1) if name.endswith("Index") else UUIDS[: 2 + self.sliced]
                own |= {name: known.index(handle)} if handle in known else {}
            elif handle is not None:
                own["nvmlDeviceGetUUID"] = UUIDS[handle]
                own |= {"nvmlDeviceIsMigDeviceHandle": int(handle == 2)} if self.sliced else {}
                if self.processes is not None:
                    own["nvmlDeviceGetComputeRunningProcesses"] = self.processes
                if handle == 2 and self.board_given:
                    own["nvmlDeviceGetDeviceHandleFromMigDeviceHandle"] = 1
            if handle in (0, 1):
                own |= {
                    "nvmlDeviceGetClockInfo": {1: self.clock_mhz, 2: 3201}.get(arguments[-1]),
                    "nvmlDeviceGetTemperature": 60 + self.clock_mhz // 100,
                    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
                    "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
                }
                own |= {"nvmlDeviceGetMigMode": [handle, handle]} if self.sliced else {}
            if name not in own:
                raise self.NVMLError(f"{name}: not supported")
            return own[name]

        return answer


class TestMig:
    @pytest.mark.parametrize(("library", "uuid", "handle"), [
        (FakeNvml(), "2222-bbbb", 1), (FakeNvml(sliced=True), "3333-cccc", 2),
    ])  # fmt: skip
    def test_the_uuid_that_torch_knows_opens_gpu_or_slice(self, monkeypatch, library, uuid, handle):
        monkeypatch.setattr(nvml, "_torch_uuids", lambda index: [f"MIG-{uuid}", f"GPU-{uuid}"])
        assert nvml.find_handle(library, 0) == handle

    def test_a_slice_has_its_own_profiles_and_the_heat_of_its_gpu(self, monkeypatch):
        gpu = Gpu(FakeNvml(0x40, sliced=True), 2)
        fields = gpu.read()
        assert fields["gpu_uuid"] == "MIG-3333-cccc"
        assert fields["gpu_mig"] is True
        assert (fields["gpu_sm_clock_hz"], fields["gpu_power_limit_w"]) == (1.98e9, 700.0)
        assert GpuGuard(gpu).disturbance() == "hardware thermal slowdown"
        assert any("MIG slices" in line for line in warnings(fields))
        hidden = Gpu(FakeNvml(0, True, board_given=False), 2)  # in a container
        assert hidden.read()["gpu_mig"] is True and "gpu_sm_clock_hz" not in hidden.read()
        assert GpuGuard(hidden).disturbance() == ""
        fake_cuda(monkeypatch, (9, 0), name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        monkeypatch.setattr("decoder.device.driver_facts", lambda index: {})
        assert fingerprint(torch.device("cuda")).mig == "1g.10gb"
        fake_cuda(monkeypatch, (9, 0))
        assert fingerprint(torch.device("cuda")).mig is None

    @pytest.mark.parametrize(("board_given", "limit_w"), [(True, 700.0), (False, None)])
    def test_the_power_limit_of_the_soft_key(self, monkeypatch, board_given, limit_w):
        driver_facts.cache_clear()
        monkeypatch.setattr(
            "decoder.nvml.open_handle", lambda index: (FakeNvml(0, True, board_given), 2)
        )
        assert driver_facts(0) == {"driver": "570.86", "power_limit_w": limit_w}
        driver_facts.cache_clear()


@pytest.mark.parametrize("failing", ["missing package", "missing driver"])
def test_without_nvml_the_reason_is_one_error(monkeypatch, failing):
    class Failing(FakeNvml):
        def nvmlInit(self):
            if failing == "missing driver":
                raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "_torch_uuids", lambda index: [])
    module = None if failing == "missing package" else Failing()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(DeviceError, match=r"^NVML: ") as raised:
        nvml.open_handle(0)
    expected = "nvidia-ml-py" if failing == "missing package" else "NVIDIA driver"
    assert expected in raised.value.hint


def test_reading_leaves_out_what_the_gpu_cannot_tell_and_names_other_processes():
    fields = Gpu(FakeNvml(reasons=0x04), 0).read()
    assert fields == {
        "gpu_name": "NVIDIA H200", "gpu_uuid": "GPU-1111-aaaa", "gpu_sm_clock_hz": 1.98e9,
        "gpu_memory_clock_hz": 3.201e9, "gpu_temperature_c": 79, "gpu_power_limit_w": 700.0,
        "driver": "570.86", "gpu_ecc": True, "gpu_clock_reasons": ["power cap"],
    }  # fmt: skip
    fake = FakeNvml()
    fake.processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
        SimpleNamespace(pid=os.getppid(), usedGpuMemory=7 << 30),
        SimpleNamespace(pid=1 << 30, usedGpuMemory=None),
    ]
    fields = Gpu(fake, 0).read()
    others = fields["gpu_other_processes"]
    assert [process["pid"] for process in others] == [os.getppid(), 1 << 30]
    assert others[0]["name"] and others[1]["name"] is None
    (warning,) = warnings(fields)
    assert f"{others[0]['name']}, process {os.getppid()}" in warning
    assert f"process {1 << 30} outside this container" in warning


@pytest.mark.gpu
def test_nvml_and_torch_mean_the_same_gpu():
    fields = Gpu.open(0).read()
    assert fields["gpu_name"] == torch.cuda.get_device_name(0)
    assert str(torch.cuda.get_device_properties(0).uuid) in fields["gpu_uuid"]


def test_heat_and_clocks_below_the_floor_are_rejected_and_summed_up():
    fake = FakeNvml()
    guard = GpuGuard(Gpu(fake, 0))
    assert guard.summary() == {}
    for clock_mhz, reasons, rejection in (
        (1900, 0, ""), (1980, 0x04, ""), (1600, 0, ""), (1400, 0x04, ""),
        (1500, 0, "SM clock 1500 MHz, below 80% of 1980 MHz"),
        (1900, 0x20, "software thermal slowdown"), (1900, 0x48, "hardware"),
    ):  # fmt: skip
        fake.clock_mhz, fake.reasons = clock_mhz, reasons
        guard.start()
        found = guard.disturbance()
        assert rejection in found and bool(rejection) == bool(found)
    summary = guard.summary()
    assert (summary["gpu_sm_clock_hz"], summary["gpu_temperature_c"]) == (1.9e9, 79.0)
    assert {"power cap", "software thermal slowdown"} <= set(summary["gpu_clock_reasons"])


def test_without_nvml_samples_pass_unwatched_and_that_is_told(monkeypatch):
    driver_facts.cache_clear()
    missing = DeviceError("NVML: Driver Not Loaded", hint="Is the NVIDIA driver installed?")
    monkeypatch.setattr("decoder.nvml.open_handle", Mock(side_effect=missing))
    guard = gpu_guard(0)
    assert type(guard) is Guard
    assert guard.disturbance() == "" and guard.summary() == {}
    metadata = run_collectors({"gpu": lambda: Gpu.open(0).read()})
    (warning,) = warnings(metadata)
    assert "cannot be watched" in warning and "Driver Not Loaded" in warning
    assert driver_facts(0) == {"driver": None, "power_limit_w": None}
    driver_facts.cache_clear()


def fake_cuda(
    patch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "NVIDIA H200"
) -> None:
    """In place of `torch.cuda` one old or new GPU."""
    properties = SimpleNamespace(name=name, total_memory=141 << 30)
    for call, answer in {
        "get_device_properties": properties, "get_device_capability": capability,
        "get_device_name": "Tesla V100", "current_device": 1,
    }.items():  # fmt: skip
        patch.setattr(torch.cuda, call, lambda *_, answer=answer: answer)


def test_the_fingerprint_has_driver_and_power_limit_and_an_old_gpu_no_bfloat16(monkeypatch):
    asked = []

    def facts(cuda_index):
        asked.append(cuda_index)
        return {"driver": "570.86", "power_limit_w": 700.0}

    fake_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr("decoder.device.driver_facts", facts)
    for name in ("cuda", "cuda:0"):
        device = fingerprint(torch.device(name))
        assert (device.driver, device.power_limit_w) == ("570.86", 700.0)
    assert asked == [1, 0]
    fake_cuda(monkeypatch, (7, 0))
    assert default_dtype(torch.device("cuda")) == torch.float16
    with pytest.raises(DeviceError, match="Tesla V100 is too old") as raised:
        parse_dtype("bfloat16", torch.device("cuda"))
    assert "--dtype float16" in raised.value.hint
    fake_cuda(monkeypatch, (8, 0))
    assert default_dtype(torch.device("cuda")) == torch.bfloat16
    assert parse_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16


def test_a_cuda_sample_starts_on_an_idle_device_with_a_cold_cache():
    done = []
    event = SimpleNamespace(
        record=lambda stream: done.append(f"record on {stream}"),
        synchronize=lambda: done.append("wait"),
        elapsed_time=lambda end: 2.5,
    )
    cuda = SimpleNamespace(
        Event=lambda enable_timing: event, device=nullcontext,
        synchronize=lambda device: done.append("idle"), current_stream=lambda device: "stream",
    )  # fmt: skip
    timer = CudaTimer("cuda:0", cuda, flush=lambda: done.append("flush"))
    assert timer.time_s(lambda: done.append("work")) == 2.5e-3
    assert done == ["flush", "idle", "record on stream", "work", "record on stream", "wait"]


@pytest.mark.gpu
def test_the_flush_is_larger_than_the_cache():
    from profiler.measure.instruments import l2_flush

    scratch = l2_flush(torch.device("cuda"))()
    assert scratch.nbytes >= 2 * torch.cuda.get_device_properties(0).L2_cache_size

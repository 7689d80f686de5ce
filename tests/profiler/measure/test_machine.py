"""Metadata collectors, what counts as a disturbance, and the GPU that CUDA means."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from profiler.measure import instruments
from profiler.measure import machine as device
from profiler.measure.machine import collect, observe, warnings


def test_another_rooftree_is_named_with_its_command(tmp_path):
    program = tmp_path / "rooftree"
    program.write_text("print('up', flush=True); input()")
    command = [sys.executable, str(program), "bench", "--seed", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()  # its arguments are not readable while it is being started
        busy = {"pid": other.pid, "name": "rooftree", "core_share": 0.9}
        try:
            line, stolen = warnings({"busy_processes": [busy], "steal_share": 0.31})
        finally:
            other.kill()
    assert line.startswith(f"rooftree bench (process {other.pid}) is using 90% of a core: stop it")
    assert "31% of the processor time" in stolen


def test_collect_tells_the_versions_and_this_machine_or_why_not():
    import numpy
    import torch

    found = collect()
    assert found["numpy_version"] == numpy.__version__
    assert found["torch_threads"] == torch.get_num_threads()
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert found["memory_bytes"] == 1024 * total_kib
    assert 0 < found["memory_free_bytes"] <= found["memory_bytes"]

    def broken():
        raise PermissionError("not allowed")

    found = device.run_collectors({"good": lambda: {"a": 1}, "bad": broken})
    assert found == {"a": 1, "absent": {"bad": "PermissionError: not allowed"}}


@pytest.mark.slow
def test_busy_processes_are_found_by_name_without_ourselves():
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True)
    program = (
        "from profiler.measure.machine import observe\n"
        f"found = [p for p in observe(0.5)['busy_processes'] if p['pid'] == {other.pid}]\n"
        "print(found[0]['name'], found[0]['core_share'])"
    )
    command = [sys.executable, "-c", program]
    try:
        # A child of ours is not "another process"; a process with another parent is.
        assert all(one["pid"] != other.pid for one in observe(0.3)["busy_processes"])
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
        ).stdout
    finally:
        other.kill()
        other.wait()
    assert found.startswith("sh ") and float(found.split()[1]) > 0.2


@pytest.mark.parametrize(("fields", "expected"), [
    ({"cpu_governor": "powersave"}, "cpupower frequency-set -g performance"),
    ({"cpu_quota_cores": 1.5, "torch_threads": 8}, "OMP_NUM_THREADS=1"),
    ({"memory_free_bytes": 300 << 20}, "only 300 MiB"),
    ({"gpu_other_processes": [{"pid": 7, "name": "miner"}]}, "GPU (miner, process 7)"),
    ({"gpu_temperature_c": 91}, "at 91 C"),
    ({"gpu_clock_reasons": ["hardware thermal slowdown"]}, "hardware thermal slowdown"),
])  # fmt: skip
def test_each_trouble_has_its_warning(fields, expected):
    (found,) = warnings(fields)
    assert expected in found


def test_a_quiet_machine_has_no_warning():
    quiet = {
        "cpu_governor": "performance", "cpu_quota_cores": 8.0, "torch_threads": 8,
        "memory_free_bytes": 1 << 34, "gpu_other_processes": [], "gpu_temperature_c": 50,
        "gpu_clock_reasons": ["power cap"], "busy_processes": [], "steal_share": 0.0,
    }  # fmt: skip
    assert warnings(quiet) == ()


@pytest.mark.parametrize(("stolen_s", "throttled_s", "expected"), [
    (0.0, 0.0, ""), (0.5, 0.0, "stolen"), (0.0, 0.5, "quota"), (0.001, 0.001, ""),
])  # fmt: skip
def test_cpu_guard(monkeypatch, stolen_s, throttled_s, expected):
    counters = SimpleNamespace(stolen_s=10.0, throttled_s=20.0, now_s=30.0)
    clock = SimpleNamespace(perf_counter=lambda: counters.now_s)
    monkeypatch.setattr(instruments, "time", clock)
    monkeypatch.setattr(instruments.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(instruments, "stolen_s", lambda: counters.stolen_s)
    monkeypatch.setattr(instruments, "throttled_s", lambda: counters.throttled_s)
    guard = instruments.CpuGuard()
    guard.start()
    counters.now_s += 1.0
    counters.stolen_s += stolen_s
    counters.throttled_s += throttled_s
    found = guard.disturbance()
    assert expected in found
    assert bool(expected) == bool(found)


def test_container_throttling_is_read_from_the_control_group(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    assert device.throttled_s() == 0.0
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 2500000\n")
    assert device.throttled_s() == 2.5
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert device._quota() == {"cpu_quota_cores": 1.5}
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert device._quota() == {}

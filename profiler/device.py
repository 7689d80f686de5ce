"""The state of the machine while it is measured, and what in it spoils a measurement.

Small collectors give named fields; one that cannot tell leaves its fields out and a reason in
their place. Nothing here changes a setting.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from profiler.nvml import Gpu

PACKAGES = ("rooftree", "torch", "transformers", "numba", "numpy", "tokenizers")
BUSY_SHARE = 0.2
STEAL_SHARE = 0.02
LOW_MEMORY_BYTES = 1 << 30
HOT_GPU_C = 85

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What was found, and why the rest is absent (by collector)."""

    fields: dict[str, Any]
    absent: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyProcess:
    """Another process and the share of one core that it used."""

    pid: int
    name: str
    core_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What else ran during a short interval, and the share of processor time stolen."""

    processes: tuple[BusyProcess, ...]
    steal_share: float


Collector = Callable[[], dict[str, Any]]


def collect(cuda_index: int | None = None) -> Metadata:
    """All metadata of this machine, with those of a GPU where `cuda_index` is given."""
    collectors: dict[str, Collector] = {
        "packages": _packages,
        "python": _python,
        "torch": _torch,
        "processor": _processor,
        "governor": _governor,
        "quota": _quota,
        "memory": _memory,
    }
    if cuda_index is not None:
        collectors["gpu"] = lambda: Gpu.open(cuda_index).read()
    return run_collectors(collectors)


def run_collectors(collectors: dict[str, Collector]) -> Metadata:
    """Run each collector; the reason of one that raises takes the place of its fields."""
    fields: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, collector in collectors.items():
        try:
            fields |= collector()
        except Exception as error:
            # Metadata must never stop a measurement, whatever a driver or a system file does.
            absent[name] = f"{type(error).__name__}: {error}"
    return Metadata(fields=fields, absent=absent)


def observe(interval_s: float = 0.5) -> Activity:
    """Watch for `interval_s` which other processes use more than a fifth of a core."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    before, stolen_before_s = _cpu_seconds(), _stolen_s()
    start_s = time.perf_counter()
    time.sleep(interval_s)
    elapsed_s = time.perf_counter() - start_s
    stolen_s = _stolen_s() - stolen_before_s
    busy = []
    for process, used_s in _cpu_seconds().items():
        share = (used_s - before.get(process, used_s)) / elapsed_s
        if share > BUSY_SHARE and process[0] not in ours:
            busy.append(BusyProcess(pid=process[0], name=process[1], core_share=share))
    busy.sort(key=lambda process: -process.core_share)
    cores = psutil.cpu_count() or 1
    return Activity(processes=tuple(busy), steal_share=stolen_s / (elapsed_s * cores))


def warnings(metadata: Metadata, activity: Activity | None = None) -> tuple[str, ...]:
    """What would spoil a measurement, each with what to do about it."""
    fields = metadata.fields
    found = [] if activity is None else _activity_warnings(activity)
    if fields.get("cpu_governor") in ("powersave", "ondemand", "conservative", "schedutil"):
        found.append(
            f"the CPU governor is {fields['cpu_governor']}, so clocks vary: "
            "`sudo cpupower frequency-set -g performance`"
        )
    quota, threads = fields.get("cpu_quota_cores"), fields.get("torch_threads")
    if quota is not None and threads is not None and quota < threads:
        found.append(
            f"this container may use {quota:g} cores but torch runs {threads} threads: "
            f"set OMP_NUM_THREADS={max(1, int(quota))}"
        )
    if fields.get("memory_free_bytes", LOW_MEMORY_BYTES) < LOW_MEMORY_BYTES:
        free_mib = fields["memory_free_bytes"] >> 20
        found.append(f"only {free_mib} MiB of memory are free, the machine may swap: free some")
    if "gpu" in metadata.absent:
        found.append(
            "the GPU's clocks, heat and other processes cannot be watched: "
            f"{metadata.absent['gpu']}"
        )
    return tuple(found + _gpu_warnings(fields))


class CpuGuard:
    """Rejects samples during which the host or a container quota took processor time away."""

    # The kernel counts stolen time in ticks of 10 ms: one tick in a short sample says little.
    MAX_SHARE = 0.1

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self.start()

    def start(self) -> None:
        self._stolen_s = _stolen_s()
        self._throttled_s = _throttled_s()
        self._start_s = time.perf_counter()

    def disturbance(self) -> str:
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        if (_stolen_s() - self._stolen_s) / (elapsed_s * self._cores) > self.MAX_SHARE:
            return "processor time stolen by the host"
        if (_throttled_s() - self._throttled_s) / elapsed_s > self.MAX_SHARE:
            return "container quota used up"
        return ""

    def summary(self) -> dict[str, Any]:
        """Nothing beside what was rejected."""
        return {}


def _packages() -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        try:
            found[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _python() -> dict[str, Any]:
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
    }


def _torch() -> dict[str, Any]:
    import torch

    return {
        "torch_threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count(),
    }


def _processor() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu_cores_usable": len(os.sched_getaffinity(0)),
        "load_average": psutil.getloadavg()[0],
    }
    frequency = psutil.cpu_freq()
    if frequency is not None and frequency.current:
        found["cpu_frequency_hz"] = 1e6 * frequency.current
    return found


def _governor() -> dict[str, Any]:
    return {"cpu_governor": GOVERNOR.read_text().strip()}


def _quota() -> dict[str, Any]:
    allowed, period = (CGROUP / "cpu.max").read_text().split()
    return {} if allowed == "max" else {"cpu_quota_cores": int(allowed) / int(period)}


def _memory() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {"memory_bytes": memory.total, "memory_free_bytes": memory.available}


def _activity_warnings(activity: Activity) -> list[str]:
    found = [
        f"{process.name} (process {process.pid}) is using {process.core_share:.0%} of a core: "
        "stop it, or expect noisier numbers"
        for process in activity.processes
    ]
    if activity.steal_share > STEAL_SHARE:
        found.append(
            f"the host takes {activity.steal_share:.0%} of the processor time away: "
            "measure when it is quieter, or on a machine of your own"
        )
    return found


def _gpu_warnings(fields: dict[str, Any]) -> list[str]:
    found = []
    if others := fields.get("gpu_other_processes"):
        names = ", ".join(_gpu_process(process) for process in others)
        found.append(f"other processes are on this GPU ({names}): stop them")
    if fields.get("gpu_temperature_c", 0) >= HOT_GPU_C:
        found.append(f"the GPU is at {fields['gpu_temperature_c']} C: let it cool down first")
    if fields.get("gpu_mig"):
        found.append("this GPU is cut into MIG slices: others may share its memory bandwidth")
    slow = [name for name in fields.get("gpu_clock_reasons", ()) if "slowdown" in name]
    if slow:
        found.append(f"the GPU holds its clocks down ({', '.join(slow)}): check its cooling")
    return found


def _gpu_process(process: dict[str, Any]) -> str:
    if process["name"] is None:  # NVML numbers processes as the host does
        return (
            f"process {process['pid']} outside this container, or this one as the host numbers it"
        )
    return f"{process['name']}, process {process['pid']}"


def _cpu_seconds() -> dict[tuple[int, str], float]:
    """Processor seconds used so far, by process id and name."""
    used: dict[tuple[int, str], float] = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            used[process.pid, process.info["name"]] = times.user + times.system
    return used


def _stolen_s() -> float:
    """Processor seconds that the host gave to others, over all cores; 0 where it does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def _throttled_s() -> float:
    """Seconds for which the container quota stopped this group; 0 where there is no quota."""
    try:
        lines = (CGROUP / "cpu.stat").read_text().splitlines()
    except OSError:
        return 0.0
    counts = dict(line.split() for line in lines)
    return int(counts.get("throttled_usec", 0)) / 1e6

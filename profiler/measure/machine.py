"""The machine during a measurement: its metadata and other work on it.

Metadata come from small collectors. A collector that fails leaves its fields out and its reason
in `absent`. Nothing here changes a setting of the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from decoder.nvml import Gpu

PACKAGES = ("rooftree", "torch", "transformers", "numba", "numpy", "tokenizers")
BUSY_SHARE = 0.2
STEAL_SHARE = 0.02
LOW_MEMORY_BYTES = 1 << 30
HOT_GPU_C = 85
VARYING_GOVERNORS = ("powersave", "ondemand", "conservative", "schedutil")

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CGROUP = Path("/sys/fs/cgroup")

Collector = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Named facts about the machine, and the reason of each collector that failed."""

    fields: dict[str, Any]
    absent: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyProcess:
    """Another process and the share of one core that it used; `name` may be unreadable."""

    pid: int
    name: str | None
    core_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Other processes that were busy during a short interval, and the stolen processor time.

    steal_share  share of all cores' time that the host gave to other virtual machines
    """

    processes: tuple[BusyProcess, ...]
    steal_share: float


def collect(cuda_index: int | None = None) -> Metadata:
    """The metadata of this machine, and of a GPU where `cuda_index` is given."""
    collectors = dict(COLLECTORS)
    if cuda_index is not None:
        collectors["gpu"] = lambda: Gpu.open(cuda_index).read()
    return run_collectors(collectors)


def run_collectors(collectors: dict[str, Collector]) -> Metadata:
    """Run each collector; one that raises gives a reason instead of fields."""
    fields: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name, collector in collectors.items():
        try:
            fields |= collector()
        except Exception as error:
            # A driver or a system file may fail in any way; that must not stop a measurement.
            absent[name] = f"{type(error).__name__}: {error}"
    return Metadata(fields=fields, absent=absent)


def _software() -> dict[str, Any]:
    versions: dict[str, Any] = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[f"{package}_version"] = version(package)
    return versions | {"python_version": platform.python_version(), "platform": platform.platform()}


def _torch() -> dict[str, Any]:
    import torch

    return {
        "torch_threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count(),
    }


def _processor() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    fields: dict[str, Any] = {
        "cpu_cores": os.cpu_count(),
        "cpu_cores_usable": len(os.sched_getaffinity(0)),
        "load_average": psutil.getloadavg()[0],
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
    }
    frequency = psutil.cpu_freq()
    if frequency is not None and frequency.current:
        fields["cpu_frequency_hz"] = 1e6 * frequency.current
    return fields


def _quota() -> dict[str, Any]:
    version_1 = [CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    if version_1[0].exists():
        allowed, period = (path.read_text().strip() for path in version_1)
    else:
        allowed, period = (CGROUP / "cpu.max").read_text().split()
    return {} if allowed in ("max", "-1") else {"cpu_quota_cores": int(allowed) / int(period)}


COLLECTORS: dict[str, Collector] = {
    "software": _software,
    "torch": _torch,
    "processor": _processor,
    "governor": lambda: {"cpu_governor": GOVERNOR.read_text().strip()},
    "quota": _quota,
}


def observe(interval_s: float = 0.5) -> Activity:
    """Watch for `interval_s` which other processes use more than a fifth of a core."""
    own_pids = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    before, stolen_before_s = _cpu_seconds(), stolen_s()
    start_s = time.perf_counter()
    time.sleep(interval_s)
    elapsed_s = time.perf_counter() - start_s
    lost_s = stolen_s() - stolen_before_s
    busy = []
    for process, used_s in _cpu_seconds().items():
        share = (used_s - before.get(process, used_s)) / elapsed_s
        if share > BUSY_SHARE and process[0] not in own_pids:
            busy.append(BusyProcess(pid=process[0], name=process[1], core_share=share))
    busy.sort(key=lambda process: -process.core_share)
    cores = psutil.cpu_count() or 1
    return Activity(processes=tuple(busy), steal_share=lost_s / (elapsed_s * cores))


def _cpu_seconds() -> dict[tuple[int, str], float]:
    """Processor seconds used so far, by process id and name."""
    used: dict[tuple[int, str], float] = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            used[process.pid, process.info["name"]] = times.user + times.system
    return used


def stolen_s() -> float:
    """Processor seconds that the host gave to others, over all cores; 0 where it is not told."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def throttled_s() -> float:
    """Seconds for which the container quota stopped this group; 0 where there is no quota."""
    try:
        lines = (CGROUP / "cpu.stat").read_text().splitlines()
    except OSError:
        return 0.0
    counts = dict(line.split() for line in lines)
    return int(counts.get("throttled_usec", 0)) / 1e6


def warnings(metadata: Metadata, activity: Activity | None = None) -> tuple[str, ...]:
    """Conditions that would spoil a measurement, each with what to do about it."""
    fields = metadata.fields
    messages = [] if activity is None else _activity_warnings(activity)
    if fields.get("cpu_governor") in VARYING_GOVERNORS:
        messages.append(
            f"the CPU governor is {fields['cpu_governor']}, so clocks vary: "
            "`sudo cpupower frequency-set -g performance`"
        )
    quota, threads = fields.get("cpu_quota_cores"), fields.get("torch_threads")
    if quota is not None and threads is not None and quota < threads:
        messages.append(
            f"this container may use {quota:g} cores but torch runs {threads} threads: "
            f"set OMP_NUM_THREADS={max(1, int(quota))}"
        )
    if fields.get("memory_free_bytes", LOW_MEMORY_BYTES) < LOW_MEMORY_BYTES:
        free_mib = fields["memory_free_bytes"] >> 20
        messages.append(f"only {free_mib} MiB of memory are free, the machine may swap: free some")
    if "gpu" in metadata.absent:
        messages.append(
            "the GPU's clocks, temperature and other processes cannot be watched: "
            f"{metadata.absent['gpu']}"
        )
    if others := fields.get("gpu_other_processes"):
        names = ", ".join(
            f"process {process['pid']} outside this container, or this one as the host numbers it"
            if process["name"] is None  # NVML uses the host's process ids
            else f"{process['name']}, process {process['pid']}"
            for process in others
        )
        messages.append(f"other processes are on this GPU ({names}): stop them")
    if fields.get("gpu_temperature_c", 0) >= HOT_GPU_C:
        messages.append(f"the GPU is at {fields['gpu_temperature_c']} C: let it cool down first")
    if fields.get("gpu_mig"):
        messages.append("this GPU is cut into MIG slices: others may share its memory bandwidth")
    slow = [name for name in fields.get("gpu_clock_reasons", ()) if "slowdown" in name]
    if slow:
        messages.append(f"the GPU holds its clocks down ({', '.join(slow)}): check its cooling")
    return tuple(messages)


def disturbances(interval_s: float = 0.25) -> list[str]:
    """What else uses the processor now, each with what to do about it."""
    return _activity_warnings(observe(interval_s))


def _activity_warnings(activity: Activity) -> list[str]:
    messages = []
    for process in activity.processes:
        name, words = process.name, []
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(process.pid).cmdline()
        for program, command in itertools.pairwise(words):  # another rooftree, as `rooftree bench`
            if Path(program).name == "rooftree" and command.isprintable():
                name = f"rooftree {command}"
        messages.append(
            f"{name} (process {process.pid}) is using {process.core_share:.0%} of a "
            "core: stop it, or expect noisier numbers"
        )
    if activity.steal_share > STEAL_SHARE:
        messages.append(
            f"the host takes {activity.steal_share:.0%} of the processor time away: "
            "measure when it is quieter, or on a machine of your own"
        )
    return messages

"""The machine during a measurement: its metadata and other work on it; no setting is changed."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping
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


def collect(cuda_index: int | None = None) -> dict[str, Any]:
    """Facts about this machine and other work on it, and on a GPU where `cuda_index` is given.

    Under `absent` stand the collectors that failed, with the reason.
    """
    collectors = dict(COLLECTORS)
    if cuda_index is not None:
        collectors["gpu"] = lambda: Gpu.open(cuda_index).read()
    return run_collectors(collectors)


def run_collectors(collectors: dict[str, Collector]) -> dict[str, Any]:
    """Run each collector; one that raises gives a reason instead of fields."""
    fields: dict[str, Any] = {"absent": {}}
    for name, collector in collectors.items():
        try:
            fields |= collector()
        except Exception as error:
            # A driver or a system file may fail in any way; that must not stop a measurement.
            fields["absent"][name] = f"{type(error).__name__}: {error}"
    return fields


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
    "other work": lambda: observe(),
}


def observe(interval_s: float = 0.5) -> dict[str, Any]:
    """Watch for `interval_s` which other processes use more than a fifth of a core.

    busy_processes  process id, name (which may be unreadable) and share of a core
    steal_share     share of all cores' time that the host gave to other virtual machines
    """
    own_pids = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    list(psutil.process_iter(["cpu_percent"]))  # the next reading is of the time since this one
    stolen_before_s, start_s = stolen_s(), time.perf_counter()
    time.sleep(interval_s)
    core_s = (time.perf_counter() - start_s) * (psutil.cpu_count() or 1)
    lost_s = stolen_s() - stolen_before_s
    busy = []
    for process in psutil.process_iter(["name", "cpu_percent"]):
        share = (process.info["cpu_percent"] or 0.0) / 100
        if share > BUSY_SHARE and process.pid not in own_pids:
            busy.append({"pid": process.pid, "name": process.info["name"], "core_share": share})
    busy.sort(key=lambda process: -process["core_share"])
    return {"busy_processes": busy, "steal_share": lost_s / core_s}


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


def warnings(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Conditions that would spoil a measurement, each with what to do about it."""
    messages = []
    for process in fields.get("busy_processes", ()):
        name, words = process["name"], []
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(process["pid"]).cmdline()
        for program, command in itertools.pairwise(words):  # another rooftree, as `rooftree bench`
            if Path(program).name == "rooftree" and command.isprintable():
                name = f"rooftree {command}"
        messages.append(
            f"{name} (process {process['pid']}) is using {process['core_share']:.0%} of a "
            "core: stop it, or expect noisier numbers"
        )
    if fields.get("steal_share", 0.0) > STEAL_SHARE:
        messages.append(
            f"the host takes {fields['steal_share']:.0%} of the processor time away: "
            "measure when it is quieter, or on a machine of your own"
        )
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
    if reason := fields.get("absent", {}).get("gpu"):
        messages.append(
            f"the GPU's clocks, temperature and other processes cannot be watched: {reason}"
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


def disturbances(interval_s: float = 0.25) -> tuple[str, ...]:
    return warnings(observe(interval_s))

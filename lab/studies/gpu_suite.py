"""The GPU suite: everything that is measured on a GPU, in parts that can be resumed.

    python -m lab.studies.gpu_suite --archive FILE.tar.gz [--resume FILE.tar.gz] [--minutes 9]
    python -m lab.studies.gpu_suite --archive FILE.tar.gz --tiny FOLDER
    python -m lab.studies.gpu_suite --list
    python -m lab.studies.gpu_suite --store FILE.tar.gz

Parts of one target run in one process, under its limit and never beyond `--minutes`. After each
process the archive is written anew with all that was measured so far: results (result.json),
reasons of failures (failed.json), what was printed, profiles, raw samples, the journals of
interrupted calibrations, and what Triton, numba and torch compiled. A part that has a result is
skipped, and one that failed is tried again behind those not yet tried, so the same command with
`--resume` goes on, also on another machine. At the end a table says which kernels a library beats.
`--tiny` runs the whole suite on a CPU with the model of a folder; its numbers mean nothing.
docs/gpu-runs.md has the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.io import now_utc, replacing, shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from lab.studies import gpu_checks, gpu_kernels, gpu_timing
from lab.studies.common import environment, store
from lab.studies.gpu_parts import TINY, Part, Scale, all_parts, planned_s, processes

KINDS: dict[str, Callable[[Part, Scale, Path], dict[str, Any]]] = {
    "smoke": gpu_checks.run_smoke, "kernels": gpu_kernels.run_kernels,
    "logits": gpu_checks.run_logits, "tests": gpu_checks.run_tests,
    "calibrate": gpu_timing.run_calibration, "forwards": gpu_timing.run_forwards,
    "replay": gpu_timing.run_replay, "held-out": gpu_timing.run_held_out,
    "texts": gpu_checks.run_texts,
    "launches": gpu_timing.run_launches, "drafters": gpu_timing.run_drafters,
}  # fmt: skip
LEAST_SHARE = 0.8  # of the planned time: a part is not started with less left
LIMIT = 2.0  # times the planned seconds
PACKING_S = 10.0  # kept for the last archive
LAST_CHARACTERS = 1500  # of a failed part's output that are printed


def main() -> None:
    options = parse()
    if options.store:
        print(*store_archive(options.store, shipped_directory()), sep="\n")
        return
    scale = replace(TINY, targets=(str(options.tiny),)) if options.tiny else Scale()
    if options.targets:
        scale = replace(scale, targets=tuple(options.targets))
    parts = all_parts(scale)
    if options.list:
        for group in processes(parts):
            print(f"{planned_s(group):.0f} s  {' '.join(part.name for part in group)}")
        return
    if scale.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "this suite measures a CUDA device and there is none; --tiny FOLDER tries it on a CPU"
        )
    if options.child:
        run_child([part for part in parts if part.name in options.child], scale, options.work)
        return
    if options.archive is None:
        raise SystemExit("name the file that the results go to: --archive FILE.tar.gz")
    beginnings = tuple(options.parts or [""])
    missing = run_all([part for part in parts if part.name.startswith(beginnings)], options)
    print(*losses(options.work), sep="\n")
    if missing:
        raise SystemExit(
            f"not measured: {', '.join(missing)}; the same command with --resume tries them again"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, help="where the results go")
    parser.add_argument("--resume", type=Path, help="an archive of an earlier run, if it exists")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "rooftree-gpu-suite",
        help="folder for the parts' files",
    )
    parser.add_argument("--parts", nargs="+", help="only parts whose names begin so")
    parser.add_argument("--targets", nargs="+", help="known targets or folders with a config")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--list", action="store_true", help="print the parts' names and limits")
    parser.add_argument("--tiny", type=Path, help="try it on a CPU with this folder's config")
    parser.add_argument("--store", type=Path, help="store the results of this archive here")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(parts: list[Part], options: argparse.Namespace) -> list[str]:
    """Run the parts without a result; returns the names of those that have none afterwards."""
    deadline_s = perf_counter() + 60 * options.minutes - PACKING_S
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    if options.resume is not None and options.resume.is_file():
        with tarfile.open(options.resume) as archive:
            archive.extractall(work, filter="data")
    left = [part for part in parts if not result_path(work, part.name).is_file()]
    pack(work, options.archive)
    left.sort(key=lambda part: failure_path(work, part.name).is_file())  # stable: untried first
    for group in processes(left):
        left_s = deadline_s - perf_counter()
        if left_s < LEAST_SHARE * planned_s(group[:1]):
            print(f"{group[0].name}: no time left", flush=True)
            continue
        start_s = perf_counter()
        limit_s = left_s if options.tiny else min(LIMIT * planned_s(group), left_s)
        reason = run_limited(group, options, limit_s)
        took_s = perf_counter() - start_s
        for part in group:
            measured = result_path(work, part.name).is_file()
            if reason and not measured and not failure_path(work, part.name).is_file():
                note(work, part, reason, work / group[0].name / "log.txt")
                reason = ""  # those behind it were not reached
        names = [part.name for part in group if result_path(work, part.name).is_file()]
        print(f"measured: {', '.join(names) or 'nothing'} ({took_s:.0f} s)", flush=True)
        pack(work, options.archive)
    return [part.name for part in parts if not result_path(work, part.name).is_file()]


def run_limited(group: list[Part], options: argparse.Namespace, limit_s: float) -> str:
    """Run parts in one process. Returns the reason of a failure, or an empty text."""
    # Journals lie beside the results, so that an interrupted calibration resumes.
    home = (options.work / "home").absolute()
    folders = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    variables = {name: str(home / name.lower()) for name in folders} | {"ROOFTREE_HOME": str(home)}
    if options.tiny:
        variables["TRITON_INTERPRET"] = "1"  # the kernels' part runs on the CPU too
    for part in group:
        (options.work / part.name).mkdir(exist_ok=True)
        failure_path(options.work, part.name).unlink(missing_ok=True)
    log = options.work / group[0].name / "log.txt"
    with log.open("w", encoding="utf-8") as printed:
        child = subprocess.Popen(
            child_command(group, options),
            env=os.environ | variables | {"PYTHONUNBUFFERED": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            process_group=0,  # with what it starts, so that nothing of it stays on the device
        )
        try:
            child.wait(None if limit_s == float("inf") else limit_s)
            reason = f"failed with exit code {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if reason:
        print(log.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:], flush=True)
    return reason


def child_command(group: list[Part], options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "lab.studies.gpu_suite", "--work", str(options.work)]
    command += ["--child", *(part.name for part in group)]
    command += ["--tiny", str(options.tiny)] if options.tiny else []
    return command + (["--targets", *options.targets] if options.targets else [])


def note(work: Path, part: Part, reason: str, log: Path) -> None:
    """Write down a failure with the end of what its process printed."""
    last = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    failure = {"part": asdict(part), "reason": reason, "output": last[-LAST_CHARACTERS:]}
    path = failure_path(work, part.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(failure, indent=1) + "\n", encoding="utf-8")


def run_child(parts: list[Part], scale: Scale, work: Path) -> None:
    """Measure the parts, each result beside its files; one that fails leaves the others be."""
    [group], failed = processes(parts), []
    for part in group:
        gc.collect()
        try:
            result = run_part(part, scale, work)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{part.name}: {error}")
            log = work / group[0].name / "log.txt"
            note(work, part, f"{type(error).__name__}: {error}", log)
            continue
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        result_path(work, part.name).write_text(text, encoding="utf-8")
    if failed:
        raise SystemExit("\n".join(failed))


def losses(work: Path) -> list[str]:
    """A table of the kernels that take longer than a library's: those are to go."""
    path = result_path(work, "kernels")
    if not path.is_file():
        return []
    lines = ["kernel | rows | context | own us | library us | library"]
    for row in json.loads(path.read_text(encoding="utf-8"))["result"]["kernels"]:
        times = {name: took for name, took in row["library_s"].items() if took is not None}
        best = min(times, key=times.__getitem__, default="")
        if best and times[best] < row["median_s"]:
            place = f"{row['kernel']} | {row['rows']} | {row['context']}"
            lines.append(
                f"{place} | {row['median_s'] * 1e6:.1f} | {times[best] * 1e6:.1f} | {best}"
            )
    return lines


def run_part(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Measure one part; its files go into `folder`/<name of the part>."""
    part_folder = folder / part.name
    part_folder.mkdir(parents=True, exist_ok=True)
    start_s = perf_counter()
    result = KINDS[part.kind](part, scale, part_folder)
    return {
        "part": asdict(part), "scale": asdict(scale), "environment": environment(scale.device),
        "wall_s": round(perf_counter() - start_s, 2), "result": result,
    }  # fmt: skip


def result_path(work: Path, name: str) -> Path:
    return work / name / "result.json"


def failure_path(work: Path, name: str) -> Path:
    return work / name / "failed.json"


def pack(work: Path, path: Path) -> None:
    """Archive the files of all parts; the archive appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, tarfile.open(unfinished, "w:gz") as archive:
        for folder in sorted(work.iterdir()):
            archive.add(folder, arcname=folder.name)


def store_archive(archive: Path, calibrations: Path) -> list[Path]:
    """Store an archive's profiles and results; returns the files written.

    Measured profiles go into calibrations/<device>/, the results of all parts and the reasons of
    failures into lab/studies/results/gpu_<device>.json. Raises InputError for an archive without a
    result, and for one that was made on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        work = Path(folder)
        results, failures = (read_parts(work, f"{name}.json") for name in ("result", "failed"))
        if not results:
            hint = "Run the suite again with --resume."
            raise InputError("the archive holds no result", hint=hint)
        on_cpu = [name for name, one in results.items() if one["scale"]["device"] != "cuda"]
        if on_cpu:
            raise InputError(
                f"{on_cpu[0]} ran on a CPU: its numbers mean nothing",
                hint="Store the archive of a run without --tiny.",
            )
        written = []
        for path in sorted(work.glob("calibrate.*/profile.yaml")):
            written.append(ProfileStore([calibrations]).save(Profile.from_yaml(path)))
    device = next(iter(results.values()))["environment"]["device"]
    slug = "_".join(str(device).lower().replace("-", " ").split())
    record = {"stored_utc": now_utc(), "parts": results, "failed": failures}
    written.append(store(f"gpu_{slug}", record))
    return written


def read_parts(work: Path, name: str) -> dict[str, Any]:
    """The file of this name of each part that has one, by the part's name."""
    return {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work.glob(f"*/{name}"))
    }


if __name__ == "__main__":
    main()

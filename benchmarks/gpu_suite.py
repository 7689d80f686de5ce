"""The GPU suite: everything that is measured on a GPU, in parts that can be resumed.

    python -m benchmarks.gpu_suite --archive FILE.tar.gz [--resume FILE.tar.gz] [--minutes 9]
    python -m benchmarks.gpu_suite --archive FILE.tar.gz --tiny FOLDER
    python -m benchmarks.gpu_suite --list

Each part runs in its own process, and never beyond `--minutes`. After each, the archive is
written anew with all that was measured so far: results (result.json), profiles, raw samples,
and the journals of interrupted calibrations. A part that has a result is skipped, so the same
command with `--resume` goes on, also on another machine. `--tiny` runs the whole suite on a
CPU with the model of a folder; its numbers mean nothing. docs/gpu-runs.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.gpu_parts import TINY, Part, Scale, all_parts, run_part
from costmodel.errors import RooftreeError
from costmodel.io import replacing

LEAST_S = 20.0  # a part is not started with less time left
PACKING_S = 10.0  # kept for the last archive


def main() -> None:
    options = parse()
    scale = replace(TINY, targets=(str(options.tiny),)) if options.tiny else Scale()
    if options.targets:
        scale = replace(scale, targets=tuple(options.targets))
    parts = all_parts(scale)
    if options.list:
        print("\n".join(part.name for part in parts))
        return
    if scale.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "this suite measures a CUDA device and there is none; --tiny FOLDER tries it on a CPU"
        )
    if options.child:
        run_child(next(part for part in parts if part.name == options.child), scale, options.work)
        return
    if options.archive is None:
        raise SystemExit("name the file that the results go to: --archive FILE.tar.gz")
    wanted = [part for part in parts if not options.parts or matches(part, options.parts)]
    failed = run_all(wanted, options)
    if failed:
        raise SystemExit(
            f"not measured: {', '.join(failed)}; the same command with --resume tries them again"
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
    parser.add_argument("--list", action="store_true", help="print the parts' names")
    parser.add_argument("--tiny", type=Path, help="try it on a CPU with this folder's config")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def matches(part: Part, beginnings: list[str]) -> bool:
    return any(part.name.startswith(beginning) for beginning in beginnings)


def run_all(parts: list[Part], options: argparse.Namespace) -> list[str]:
    """Run the parts without a result; returns the names of those that have none afterwards."""
    deadline_s = perf_counter() + 60 * options.minutes - PACKING_S
    options.work.mkdir(parents=True, exist_ok=True)
    if options.resume is not None and options.resume.is_file():
        with tarfile.open(options.resume) as archive:
            archive.extractall(options.work, filter="data")
    failed = []
    for part in parts:
        left_s = deadline_s - perf_counter()
        if result_path(options.work, part.name).is_file():
            print(f"{part.name}: done before")
            continue
        reason = "no time left" if left_s < LEAST_S else run_limited(part, options, left_s)
        print(f"{part.name}: {reason or 'measured'}", flush=True)
        if reason:
            failed.append(part.name)
        pack(options.work, options.archive)
    return failed


def run_limited(part: Part, options: argparse.Namespace, limit_s: float) -> str:
    """Run a part in its own process; returns the reason of a failure, or an empty text."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--work", str(options.work)]
    command += ["--child", part.name]
    command += ["--tiny", str(options.tiny)] if options.tiny else []
    command += ["--targets", *options.targets] if options.targets else []
    # Journals lie beside the results, so that an interrupted calibration resumes.
    home = os.environ | {"ROOFTREE_HOME": str((options.work / "home").absolute())}
    timeout = None if limit_s == float("inf") else limit_s
    try:
        done = subprocess.run(command, env=home, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    return "" if done.returncode == 0 else f"failed with exit code {done.returncode}"


def run_child(part: Part, scale: Scale, work: Path) -> None:
    """Measure one part and write its result beside its files."""
    try:
        result = run_part(part, scale, work)
    except RooftreeError as error:
        raise SystemExit(str(error)) from None
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    result_path(work, part.name).write_text(text, encoding="utf-8")


def result_path(work: Path, name: str) -> Path:
    return work / name / "result.json"


def pack(work: Path, path: Path) -> None:
    """Archive the files of all parts; the archive appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, tarfile.open(unfinished, "w:gz") as archive:
        for folder in sorted(work.iterdir()):
            archive.add(folder, arcname=folder.name)


if __name__ == "__main__":
    main()

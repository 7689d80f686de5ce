"""Everything that is measured on a GPU, in parts, for a GPU that is at hand for a short time.

    python -m benchmarks.gpu_suite --out DIR [--minutes 9] [--parts NAME ...] [--list]
    python -m benchmarks.gpu_suite --out DIR --tiny FOLDER

Each part runs in a process of its own, ends inside `--limit` seconds and leaves one archive,
DIR/<part>.tar.gz, with its result (result.json), profiles and raw samples. A part whose
archive is there is not run again, so the same command goes on where the last one stopped,
on another machine too when DIR is carried there. `--minutes` starts no part later than that.
`--tiny` tries the whole suite on a CPU with the model of a folder; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.gpu_parts import run_part
from benchmarks.gpu_scale import TINY, Part, Scale, all_parts
from costmodel.errors import RooftreeError

LIMIT_S = 530.0  # a part, so that it ends inside 9 minutes with its start


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
        run_child(next(part for part in parts if part.name == options.child), scale, options.out)
        return
    wanted = [part for part in parts if not options.parts or matches(part, options.parts)]
    failed = run_all(wanted, options)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}; the same command tries them again")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the archives go")
    parser.add_argument("--parts", nargs="+", help="only parts whose names begin so")
    parser.add_argument("--targets", nargs="+", help="known targets or folders with a config")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a part may take")
    parser.add_argument("--list", action="store_true", help="print the parts' names")
    parser.add_argument("--tiny", type=Path, help="try it on a CPU with this folder's config")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def matches(part: Part, beginnings: list[str]) -> bool:
    return any(part.name.startswith(beginning) for beginning in beginnings)


def run_all(parts: list[Part], options: argparse.Namespace) -> list[str]:
    """Run what has no archive yet; the names of the parts that gave none."""
    start_s, failed = perf_counter(), []
    unpack(options.out)
    for part in parts:
        archive = options.out / f"{part.name}.tar.gz"
        if archive.is_file():
            print(f"{part.name}: done before")
            continue
        if perf_counter() - start_s > 60 * options.minutes:
            print(f"{part.name}: no time left")
            failed.append(part.name)
            continue
        reason = run_limited(part, options)
        if reason:
            print(f"{part.name}: {reason}", flush=True)
            failed.append(part.name)
        else:
            pack(options.out, part.name)
            print(f"{part.name}: stored {archive}", flush=True)
    return failed


def run_limited(part: Part, options: argparse.Namespace) -> str:
    """Run a part in a process of its own; why it gave no result, or nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--out", str(options.out)]
    command += ["--child", part.name]
    command += ["--tiny", str(options.tiny)] if options.tiny else []
    command += ["--targets", *options.targets] if options.targets else []
    # Journals lie beside the archives, so that an interrupted calibration goes on.
    home = os.environ | {"ROOFTREE_HOME": str((options.out / "home").absolute())}
    try:
        done = subprocess.run(command, env=home, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {options.limit:.0f} s"
    return "" if done.returncode == 0 else f"failed with exit code {done.returncode}"


def run_child(part: Part, scale: Scale, out: Path) -> None:
    """Measure one part and write its result beside its files."""
    try:
        result = run_part(part, scale, out / "work")
    except RooftreeError as error:
        raise SystemExit(str(error)) from None
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    (out / "work" / part.name / "result.json").write_text(text, encoding="utf-8")


def pack(out: Path, name: str) -> None:
    """The part's folder as one archive; whole or not there."""
    unfinished = out / f"{name}.tar.gz.part"
    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(out / "work" / name, arcname=name)
    unfinished.replace(out / f"{name}.tar.gz")


def unpack(out: Path) -> None:
    """Folders of parts that were measured before, on this machine or another."""
    (out / "work").mkdir(parents=True, exist_ok=True)
    for path in sorted(out.glob("*.tar.gz")):
        if not (out / "work" / path.name.removesuffix(".tar.gz")).is_dir():
            with tarfile.open(path) as archive:
                archive.extractall(out / "work", filter="data")


if __name__ == "__main__":
    main()

"""The whole campaign; stores counts and failures by format as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.common import RESULTS, environment
from benchmarks.faults.commands import Place, made_up_clock
from benchmarks.faults.endurance import run_long, run_threads
from benchmarks.faults.inputs import all_formats, run_all
from benchmarks.faults.kills import COMMANDS, run_kills
from benchmarks.faults.model_formats import tiny, tiny_folder
from benchmarks.faults.places import run_places
from costmodel.io import write_atomic

# Shares of the mutations: formats that are read in a millisecond get most of them.
SHARES = {
    "trace": 18, "times": 18, "prompts": 18, "journal": 14, "config": 10, "sweeps": 8,
    "catalogue": 5, "operators": 1, "result": 2, "acceptance": 0.1, "training": 0.5,
    "tokenizer": 0.7, "target": 0.5, "drafter-dflash": 0.6, "drafter-eagle3": 0.6,
    "drafter-pickled": 0.6, "drafter-specblock": 0.5, "drafter-blockpilot": 0.4,
    "drafter-causal": 0.4,
}  # fmt: skip


def main() -> None:
    given = _arguments()
    started_s = perf_counter()
    stored: dict[str, Any] = {}
    if given.add and given.output.exists():
        stored = json.loads(given.output.read_text())
    stored |= {"environment": environment(), "seed": given.seed}
    parts = given.parts.split(",")
    with made_up_clock(), TemporaryDirectory(prefix="faults-warm-") as folder:
        if {"kills", "places"} & set(parts):
            Place(folder=Path(folder), target=tiny_folder()).make().warm_up()
        if "kills" in parts:
            wanted = (given.kills, given.seed, tiny_folder(), given.minutes * 60)
            commands = (given.command,) if given.command else COMMANDS
            stored["kills"] = {command: run_kills(command, *wanted, say) for command in commands}
            store(given.output, stored)
        if "places" in parts:
            stored["places"] = run_places(tiny_folder(), say)
    if "endurance" in parts:
        stored["threads"] = run_threads(tiny(), given.calls)
        stored["long"] = run_long(tiny(), given.generations, say)
    if "inputs" in parts:

        def keep(totals: dict[str, Any]) -> None:
            stored["inputs"] = totals
            store(given.output, stored)

        run_all(counts_of(given), given.seed, given.workers, say, keep)
    stored["seconds"] = round(perf_counter() - started_s, 1)
    store(given.output, stored)
    say(f"{given.output}: {failures_of(stored)} failures")


def store(path: Path, stored: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(stored, indent=1) + "\n")


def counts_of(given: argparse.Namespace) -> dict[str, int]:
    """Inputs of each format; all of the wanted ones for a format named by `--format`."""
    if given.format:
        return {given.format: given.mutations}
    whole = sum(SHARES.values())
    assert set(SHARES) == set(all_formats())
    return {name: round(given.mutations * share / whole) for name, share in SHARES.items()}


def failures_of(stored: dict[str, Any]) -> int:
    """Failures of all parts that are stored."""
    found = sum(one["failed"] for one in stored.get("inputs", {}).values())
    found += sum(len(one["failures"]) for one in stored.get("kills", {}).values())
    return found + sum(
        len(stored.get(part, {}).get("failures", ())) for part in ("places", "threads", "long")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000, help="of all formats together")
    parser.add_argument("--kills", type=int, default=40, help="of each long command")
    parser.add_argument("--minutes", type=float, default=60, help="of kills of each command")
    parser.add_argument("--command", choices=COMMANDS, help="kill this one alone")
    parser.add_argument("--calls", type=int, default=400, help="from four threads")
    parser.add_argument("--generations", type=int, default=500, help="in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--parts", default="kills,places,endurance,inputs")
    parser.add_argument("--format", choices=sorted(all_formats()), help="mutate this one alone")
    parser.add_argument("--output", type=Path, default=RESULTS / "faults.json")
    parser.add_argument("--add", action="store_true", help="keep other parts of the output")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The whole campaign; stores counts and failures by format as JSON.

With `--add`, mutations go on where the output's ones of the same seed ended, and those of another
seed are counted beside them. A failure is listed as seed/number; `--format F --show SEED/NUMBER`
uses that input again, with its traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from costmodel.io import write_atomic
from lab.studies.common import RESULTS, environment
from lab.studies.faults.commands import Place, made_up_clock
from lab.studies.faults.endurance import run_long, run_threads
from lab.studies.faults.inputs import all_formats, format_named, run_all, use_again
from lab.studies.faults.kills import COMMANDS, run_kills
from lab.studies.faults.model_formats import target_with_drafter, tiny
from lab.studies.faults.places import run_places

# Per cent of the mutations: a file with more to it gets more, one that takes longer fewer.
SHARES = {
    "profile": 15, "journal": 11, "trace": 10, "times": 10, "prompts": 10, "config": 10,
    "sweeps": 6, "catalogue": 6, "operators": 3, "result": 3, "acceptance": 3, "target": 3,
    "tokenizer": 2, "training": 2, "features": 0.5, "structure": 0.5, "owner": 0.5,
    "drafter-dflash": 1, "drafter-eagle3": 0.8, "drafter-pickled": 0.7,
    "drafter-specblock": 0.8, "drafter-blockpilot": 0.7, "drafter-causal": 0.5,
}  # fmt: skip


def main() -> None:
    given = _arguments()
    if given.show:
        with TemporaryDirectory(prefix="faults-") as work:
            use_again(format_named(given.format), given.show, Path(work))
        return
    stored: dict[str, Any] = {}
    if given.add and given.output.exists():
        stored = json.loads(given.output.read_text())
    stored["environment"] = environment()
    parts = given.parts.split(",")
    if {"kills", "places"} & set(parts):
        run_commands(given, parts, stored)
    if "endurance" in parts:
        stored["threads"] = run_threads(tiny(), given.calls)
        stored["long"] = run_long(tiny(), given.generations, say)
    if "inputs" in parts:
        totals = stored.setdefault("inputs", {})
        keep = partial(store, given.output, stored)
        run_all(counts_of(given), given.seed, given.workers, say, totals, keep)
    store(given.output, stored)
    say(f"{given.output}: {failures_of(stored)} failures")


def run_commands(given: argparse.Namespace, parts: Sequence[str], stored: dict[str, Any]) -> None:
    """Commands that are killed, and that run in odd places; adds their outcomes."""
    target = target_with_drafter()
    with made_up_clock(), TemporaryDirectory(prefix="faults-warm-") as folder:
        Place(folder=Path(folder), target=target).make().warm_up()
        if "kills" in parts:
            kills = stored.setdefault("kills", {})
            for command in (given.command,) if given.command else COMMANDS:
                kills[command] = run_kills(command, given.kills, given.seed, target, say)
                store(given.output, stored)
        if "places" in parts:
            stored["places"] = run_places(target, say)


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
    parser = argparse.ArgumentParser(prog="python -m lab.studies.faults", description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000, help="of all formats together")
    parser.add_argument("--kills", type=int, default=40, help="of each long command")
    parser.add_argument("--command", choices=COMMANDS, help="kill this one alone")
    parser.add_argument("--calls", type=int, default=400, help="from four threads")
    parser.add_argument("--generations", type=int, default=500, help="in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--parts", default="kills,places,endurance,inputs")
    parser.add_argument("--format", choices=sorted(all_formats()), help="mutate this one alone")
    parser.add_argument("--show", metavar="SEED/NUMBER", help="use this input of --format again")
    parser.add_argument("--output", type=Path, default=RESULTS / "faults.json")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the other parts of the output, and go on with its mutations",
    )
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Loading the demo model: seconds, and memory after it, beside those of an earlier commit.

    python -m benchmarks.load [--baseline 396860c] [--repeats 7] [--memory]

Each load is `TreeDecoder.from_pretrained` in a process of its own, bfloat16 on a CPU; the commits
take turns, the earlier one in a temporary worktree. Imports come before the clock starts, and their
memory is counted apart. Resident memory is split into anonymous memory and pages of files, as those
of mapped checkpoints. `--memory` loads each commit once and keeps no times, for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import environment, store
from decoder.target.demo_model import DEMO_NAME

BASELINE = "396860c"
ROOT = Path(__file__).parents[1]
# Run in a checkout that may be older than this file, so it names no function of it but one.
LOAD = """
import json, sys, time
import torch, transformers
from transformers.models.llama import modeling_llama
from decoder.engine import TreeDecoder

def memory():
    lines = open("/proc/self/status").read().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"resident": "VmRSS", "anonymous": "RssAnon", "file": "RssFile", "peak": "VmHWM"}
    return {f"{key}_bytes": 1024 * int(fields[name].split()[0]) for key, name in names.items()}

before = memory()
start_s = time.perf_counter()
decoder = TreeDecoder.from_pretrained(sys.argv[1], dtype="bfloat16", policy="plain")
seconds = time.perf_counter() - start_s
after = memory()
runtime, parameters = decoder.target.runtime.kind, decoder.target.architecture.parameters
decoder.generate([1, 2, 3], max_new_tokens=2)
print(json.dumps({"seconds": seconds, "imported": before, "loaded": after, "decoded": memory(),
                  "runtime": runtime, "weight_bytes": 2 * parameters}))
"""


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A temporary worktree of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baseline"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def load(checkout: Path) -> dict[str, Any]:
    """One load in a fresh process that imports this checkout."""
    command = [sys.executable, "-c", LOAD, DEMO_NAME]
    ran = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    loaded: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return loaded


def summary(loads: list[dict[str, Any]], *, timed: bool) -> dict[str, Any]:
    """Medians over the loads of one commit."""
    weight_bytes = loads[0]["weight_bytes"]

    def grown(when: str, what: str) -> float:
        return median(one[when][what] - one["imported"][what] for one in loads)

    result = {
        "runtime": loads[0]["runtime"],
        "weight_bytes": weight_bytes,
        "imported_bytes": median(one["imported"]["resident_bytes"] for one in loads),
        "grown_bytes": grown("loaded", "resident_bytes"),
        "grown_anonymous_bytes": grown("loaded", "anonymous_bytes"),
        "grown_file_bytes": grown("loaded", "file_bytes"),
        "grown_peak_bytes": median(
            one["loaded"]["peak_bytes"] - one["imported"]["resident_bytes"] for one in loads
        ),
        "grown_decoded_bytes": grown("decoded", "resident_bytes"),
    }
    result["grown_over_weights"] = result["grown_bytes"] / weight_bytes
    if timed:
        result["median_s"] = median(one["seconds"] for one in loads)
        result["min_s"] = min(one["seconds"] for one in loads)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", default=BASELINE)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="one load each, no times")
    options = parser.parse_args()
    timed = not options.memory
    repeats = options.repeats if timed else 1
    loads: dict[str, list[dict[str, Any]]] = {"now": [], "baseline": []}
    with worktree(options.baseline) as baseline:
        checkouts = {"now": ROOT, "baseline": baseline}
        for number in range(repeats + timed):  # the first reads the files
            for name, checkout in checkouts.items():
                loaded = load(checkout)
                print(name, number, loaded, flush=True)
                if number or not timed:
                    loads[name].append(loaded)
    result: dict[str, Any] = {
        "environment": environment("cpu"),
        "target": DEMO_NAME,
        "baseline_commit": options.baseline,
        **{name: summary(ones, timed=timed) for name, ones in loads.items()},
    }
    if timed:
        pairs = zip(loads["now"], loads["baseline"], strict=True)
        result["time_over_baseline"] = median(a["seconds"] / b["seconds"] for a, b in pairs)
    shown = {"now": result["now"], "baseline": result["baseline"]}
    print(json.dumps(shown, indent=1), f"time: {result.get('time_over_baseline')}")
    store("load", result)


if __name__ == "__main__":
    main()

"""Loading the demo model: seconds, and memory after it, beside those of an earlier commit.

    python -m lab.studies.load [--baseline 396860c] [--repeats 7] [--memory]

Each load is `TreeDecoder.from_pretrained` in a process of its own, bfloat16 on a CPU; the commits
take turns, the earlier one in a temporary worktree. Imports come before the clock starts. Memory is
that of one more load, behind a load of a tiny model, so that libraries are counted apart; it is
split into anonymous memory and pages of files, as those of mapped checkpoints. `--memory` keeps no
times, for a busy machine.
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

from decoder.model.demo_model import DEMO_NAME
from lab.studies.common import environment, store

BASELINE = "396860c"
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
ROOT = Path(__file__).parents[2]
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

if len(sys.argv) > 2:
    TreeDecoder.from_pretrained(sys.argv[2], weights="random", dtype="bfloat16", policy="plain")
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


def load(checkout: Path, *first: str) -> dict[str, Any]:
    """One load in a fresh process that imports this checkout; `first` is loaded before it."""
    command = [sys.executable, "-c", LOAD, DEMO_NAME, *first]
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


def memory(loaded: dict[str, Any]) -> dict[str, Any]:
    """What one load adds to the memory of a process that has all libraries."""
    before, after, weight_bytes = loaded["imported"], loaded["loaded"], loaded["weight_bytes"]
    grown = {name: after[name] - before[name] for name in before if name != "peak_bytes"}
    return {
        "runtime": loaded["runtime"],
        "weight_bytes": weight_bytes,
        "before": before,
        "grown": grown,
        "grown_peak_bytes": after["peak_bytes"] - before["resident_bytes"],
        "grown_over_weights": grown["resident_bytes"] / weight_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", default=BASELINE)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="one load each, no times")
    options = parser.parse_args()
    result: dict[str, Any] = {"target": DEMO_NAME, "baseline_commit": options.baseline}
    times: dict[str, list[float]] = {"now": [], "baseline": []}
    with worktree(options.baseline) as baseline, tempfile.TemporaryDirectory() as tiny:
        Path(tiny, "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        checkouts = {"now": ROOT, "baseline": baseline}
        for name, checkout in checkouts.items():  # also reads the files for the first time
            result[name] = memory(load(checkout, tiny))
            print(name, json.dumps(result[name], indent=1), flush=True)
        for _ in range(0 if options.memory else options.repeats):
            for name, checkout in checkouts.items():
                times[name].append(load(checkout)["seconds"])
                print(name, times[name][-1], flush=True)
    if not options.memory:
        for name, seconds in times.items():
            result[name] |= {"median_s": median(seconds), "min_s": min(seconds)}
        pairs = zip(times["now"], times["baseline"], strict=True)
        result["time_over_baseline"] = median(now / before for now, before in pairs)
        print(f"time over that of {options.baseline}: {result['time_over_baseline']:.2f}")
    store("load", {"environment": environment("cpu")} | result)


if __name__ == "__main__":
    main()

"""Tokens per second of this checkout against another one, paired and interleaved.

    python -m lab.studies.compare_checkouts OTHER --profiles HERE OTHER [--per-set N] [--tokens N]

A process a checkout holds the demo model and one decoder an arm, on a profile that it can read.
Each prompt is decoded by both in turn, in changing order; the processes never run
at once. Ratios are of one prompt's times, and the texts must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lab.studies.common import environment, read_prompts, store

SETS = ("gsm8k", "humaneval", "mt_bench")
DRAFTERS = ("ngram", "demo", "ngram+demo")
POLICIES = ("bastion", "chain", "fixed:7", "fixed:15")
ARMS = ("plain", *(f"{policy} {drafter}" for drafter in DRAFTERS for policy in POLICIES))
RESAMPLES = 2000

WORKER = """
import json, sys
from time import perf_counter
from rooftree import ProfileChoice, TreeDecoder
target, profile, arms = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
first, decoders = None, {}
for arm in arms:
    policy, _, drafter = arm.partition(" ")
    source = target if first is None else first.target
    make = TreeDecoder.from_pretrained if first is None else TreeDecoder
    choice = ProfileChoice(path=profile)
    decoder = make(source, policy=policy, drafter=drafter or "ngram", profile=choice)
    first = first or decoder
    decoders[arm] = decoder
print("ready", flush=True)
for line in sys.stdin:
    arm, prompt, tokens = json.loads(line)
    began = perf_counter()
    result = decoders[arm].generate(prompt, chat=True, max_new_tokens=tokens)
    seconds = perf_counter() - began
    print(json.dumps([seconds, list(result.token_ids)]), flush=True)
"""


class Checkout:
    """A process that decodes with the packages of one checkout."""

    def __init__(self, folder: Path, target: str, profile: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, target, str(profile), json.dumps(ARMS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
        )  # fmt: skip
        self._read("ready")

    def decode(self, arm: str, prompt: str, tokens: int) -> tuple[float, list[int]]:
        """Seconds and token ids of one text."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arm, prompt, tokens]) + "\n")
        self._process.stdin.flush()
        seconds, ids = json.loads(self._read("["))
        return seconds, ids

    def _read(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit("a checkout's process ended; its error stands above")


def interval(ratios: list[float]) -> list[float]:
    """The 95 % bootstrap interval of the geometric mean over prompts."""
    logs, draw = np.log(ratios), np.random.default_rng(0)
    means = draw.choice(logs, size=(RESAMPLES, len(logs))).mean(axis=1)
    return [round(float(edge), 4) for edge in np.exp(np.percentile(means, [2.5, 97.5]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--profiles", type=Path, nargs=2, required=True)
    parser.add_argument("--per-set", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    from decoder.model.demo_model import ensure_demo_model

    target, began = str(ensure_demo_model()), perf_counter()
    here = Checkout(Path.cwd(), target, options.profiles[0])
    other = Checkout(options.other.resolve(), target, options.profiles[1])
    prompts = [row["prompt"] for name in SETS for row in read_prompts(name, options.per_set)]
    arms: dict[str, Any] = {}
    for checkout in (here, other):  # compiled and warm
        for arm in ARMS:
            checkout.decode(arm, prompts[-1], 16)
    for arm in ARMS:
        ratios, equal = [], 0
        for index, prompt in enumerate(prompts):
            order = (here, other) if index % 2 else (other, here)
            results = {checkout: checkout.decode(arm, prompt, options.tokens) for checkout in order}
            ratios.append(results[other][0] / results[here][0])
            equal += results[other][1] == results[here][1]
        speed = round(float(np.exp(np.mean(np.log(ratios)))), 4)
        arms[arm] = {"speed_over_other": speed, "interval_95": interval(ratios)}
        arms[arm] |= {"same_texts": equal, "texts": len(prompts)}
        print(arm, arms[arm])
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.other, capture_output=True, text=True, check=True
    )
    settings = {"tokens": options.tokens, "sets": SETS, "per_set": options.per_set}
    settings |= {"other_commit": commit.stdout.strip(), "seconds": perf_counter() - began}
    store("compare_checkouts", {"environment": environment(), "settings": settings, "arms": arms})


if __name__ == "__main__":
    main()

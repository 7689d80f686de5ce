"""This checkout beside another one: tokens per second, texts, and what commands print and draw.

    python -m lab.studies.compare_checkouts OTHER --profiles HERE OTHER [--per-set N] [--tokens N]
    python -m lab.studies.compare_checkouts OTHER --outputs

A process a checkout holds the demo model and one decoder an arm, on a profile that it can read.
Each prompt is decoded by both in turn, in changing order; the processes never run
at once. Ratios are of one prompt's times, and the texts must be the same. `--outputs` runs the same
commands in both instead, each in an empty home, and compares output, exit code and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
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

TIME = re.compile(rb"\d{4}-\d\d-\d\dT[\d:]+Z")
PLAN = "plan --target Qwen/Qwen3-8B --prompt-tokens 1000 --output-tokens 400"
TEXT = "--prompt 'Count to twenty.' --max-new-tokens 48"
SLO = "--slo tpot=30ms,ttft=1s"
PROFILES = ("h100-sxm/qwen3-8b", "rtx-a6000/llama-3.1-8b-instruct", "b200/qwen3-30b-a3b")
COMMANDS = (
    "--help", "calibrate --help", "plan --help", "profiles list", "profiles list --json",
    "devices", "devices --json", "targets", "targets --json", "support", "support --json",
    *(f"profiles show {name}" for name in PROFILES),
    *(f"profiles show {name} --json" for name in PROFILES),
    *(f"profiles show {name} --markdown" for name in PROFILES),
    *(f"profiles plot {name} --output picture.png" for name in PROFILES),
    f"{PLAN} --gpus h100-sxm,l40s --rate 5/s {SLO}",
    f"{PLAN} --gpus h100-sxm,l40s --rate 5/s {SLO} --details --acceptance gsm8k --json",
    f"{PLAN} --gpus all --rate 5/s --acceptance mt_bench --plot picture.png",
    f"{PLAN} --gpus l40s --rate 5/s --engine rooftree --acceptance gsm8k --details",
    f"{PLAN} --gpus l40s --rate 5/s --slo tpot.p95=30ms --simulate --json",
    *(f"export {PROFILES[0]} --engine {engine} --acceptance mt_bench"
      for engine in ("vllm", "sglang", "tensorrt-llm", "model-optimizer", "transformers")),
    "compose --device h100-sxm --target Qwen/Qwen3-14B --output profile.yaml",
    f"transfer {PROFILES[0]} h100-nvl --output profile.yaml",
    "profiles show nowhere/nothing", "plan --target nothing", "export nothing --engine vllm",
    "profiles validate missing.yaml", "generate --drafter nothing --prompt one --max-new-tokens 4",
    *(f"generate {TEXT} --target TARGET --drafter {drafter} {more}"
      for drafter in DRAFTERS for more in ("", "--temperature 0.8 --seed 1", "--policy fixed:7")),
)  # fmt: skip


def outputs(folder: Path, command: str) -> dict[str, Any]:
    """Exit code, both streams and written files of a command run with a checkout's packages.

    Times of day and the paths of home and checkout are taken out, and what `generate` says of its
    speed.
    """
    with tempfile.TemporaryDirectory() as home:
        own = {"PYTHONPATH": str(folder), "ROOFTREE_HOME": f"{home}/home", "COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, "-m", "rooftree", *shlex.split(command)],
            cwd=home, env=os.environ | own, capture_output=True, timeout=600, check=False,
        )  # fmt: skip
        files = [path.read_bytes() for path in sorted(Path(home).glob("*.*"))]
    said = b"" if command.startswith("generate") and not done.returncode else done.stderr
    texts = [done.stdout, said, *files]
    for path in (home, str(folder)):
        texts = [text.replace(path.encode(), b"") for text in texts]
    texts = [TIME.sub(b"", text) for text in texts]
    kinds = ("stdout", "stderr", "file")[: len(texts)]
    return {"exit code": done.returncode} | dict(zip(kinds, texts, strict=True))


def compare_outputs(other: Path, target: str) -> dict[str, Any]:
    """The number of commands that do the same in both, and what differs in each of the others."""
    differing = {}
    for command in COMMANDS:
        line = command.replace("TARGET", target)
        here, there = outputs(Path.cwd(), line), outputs(other, line)
        if different := sorted(kind for kind in here | there if here.get(kind) != there.get(kind)):
            differing[command] = different
            print(command, different, flush=True)
    return {"commands": len(COMMANDS), "differing": differing}


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
        self._process.stdin.write(json.dumps([arm, prompt, tokens]) + "\n")
        self._process.stdin.flush()
        seconds, ids = json.loads(self._read("["))
        return seconds, ids

    def _read(self, start: str) -> str:
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
    parser.add_argument("--profiles", type=Path, nargs=2)
    parser.add_argument("--outputs", action="store_true")
    parser.add_argument("--per-set", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.other, capture_output=True, text=True, check=True
    ).stdout.strip()
    from decoder.model.demo_model import ensure_demo_model

    target, began = str(ensure_demo_model()), perf_counter()
    if options.outputs:
        compared = compare_outputs(options.other.resolve(), target)
        store("compare_outputs", {"environment": environment(), "other_commit": commit} | compared)
        return
    if options.profiles is None:
        parser.error("--profiles names a profile for each checkout; or --outputs")
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
    settings = {"tokens": options.tokens, "sets": SETS, "per_set": options.per_set}
    settings |= {"other_commit": commit, "seconds": perf_counter() - began}
    store("compare_checkouts", {"environment": environment(), "settings": settings, "arms": arms})


if __name__ == "__main__":
    main()

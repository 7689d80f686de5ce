"""Files and lines that one decode round and one calibration touch.

    python -m lab.studies.reading_path [--checkout FOLDER]

A tiny random Llama decodes with `bastion` and the n-gram drafter on the CPU, eager runtime. Of
every drafted round after a warm-up text, the files of costmodel, decoder and profiler whose
functions `run_round` calls are counted. `round` is the median one; `largest_round` is one that also
asks the cost model at a new context. Numba is off, so that compiled functions are seen too.
`rooftree calibrate` of the same model is run as a command, and the modules that it imports are
counted. `--checkout` counts another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoder.engine import TreeDecoder
from lab.studies.common import environment, store

ROOT = Path(__file__).parents[2]
PACKAGES = ("costmodel", "decoder", "profiler")
PROMPT = [5, 17, 3, 88, 5, 17, 3, 41] * 8
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
CALIBRATE = (
    *("calibrate", "--contexts", "32,64", "--max-nodes", "7", "--time-budget", "5s"),
    *("--device", "cpu", "--weights", "random"),
)


class CalledCode:
    """The code of every Python function of this repository that `run_round` calls."""

    def __init__(self, root: Path) -> None:
        self._folders = tuple(f"{root / package}/" for package in PACKAGES)
        self._round: FrameType | None = None
        self.codes: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame is self._round:
            self._round = None
        if event != "call" or not frame.f_code.co_filename.startswith(self._folders):
            return
        if frame.f_code.co_name == "run_round":
            self._round = frame
        if self._round is not None:
            self.codes.add(frame.f_code)

    def __enter__(self) -> CalledCode:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[Path]:
        return {Path(code.co_filename) for code in self.codes}


def write_model(folder: Path) -> None:
    """A tiny random Llama that repeats itself soon."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)
    model.save_pretrained(folder)


def count_rounds(root: Path, model: Path) -> dict[str, Any]:
    """The drafted rounds of one text: the median one, and the one of the most files."""
    decoder = TreeDecoder.from_pretrained(
        model, policy="bastion", drafter="ngram", device="cpu", runtime="eager"
    )
    decoder.generate(PROMPT, max_new_tokens=64)
    run = decoder.stream(PROMPT, max_new_tokens=64)
    rounds, drafted = run.rounds(), []
    next(rounds)  # the prefill
    while True:
        with CalledCode(root) as called:
            text = next(rounds, None)
        if text is None:
            break
        if run.stats.tree_nodes[-1]:
            drafted.append(called)
    drafted.sort(key=lambda called: len(called.files))
    chosen = {"round": drafted[len(drafted) // 2], "largest_round": drafted[-1]}
    return {
        name: counts(root, called.files) | {"functions": len(called.codes)}
        for name, called in chosen.items()
    }


def count_calibrate(root: Path, model: Path) -> dict[str, Any]:
    """The modules of this repository that the command imports."""
    command = [sys.executable, "-X", "importtime", "-c", "from profiler.cli import main; main()"]
    done = subprocess.run(
        [*command, *CALIBRATE, "--target", str(model), "--output", str(model / "profile.yaml")],
        check=False,
        capture_output=True,
        text=True,
        cwd=root,
    )
    if done.returncode:
        raise SystemExit(f"rooftree calibrate failed:\n{done.stderr[-2000:]}")
    names = re.findall(r"^import time:[^|]*\|[^|]*\| *([\w.]+)$", done.stderr, re.MULTILINE)
    places = [root.joinpath(*name.split(".")) for name in names if name.split(".")[0] in PACKAGES]
    return counts(
        root,
        [place / "__init__.py" if place.is_dir() else place.with_suffix(".py") for place in places],
    )


def counts(root: Path, files: Iterable[Path]) -> dict[str, Any]:
    names = sorted(str(path.relative_to(root)) for path in set(files))
    lines = sum(len((root / name).read_text(encoding="utf-8").splitlines()) for name in names)
    return {"files": len(names), "lines": lines, "names": names}


def count(root: Path) -> dict[str, Any]:
    """Both counts of a checkout, each in a process of its own that imports it."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        changed = {"PYTHONPATH": str(root), "NUMBA_DISABLE_JIT": "1", "ROOFTREE_HOME": folder}
        done = subprocess.run(
            [sys.executable, __file__, "--checkout", str(root), "--model", folder],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | changed,
        )
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)  # of the counting process
    options = parser.parse_args()
    root = options.checkout.resolve()
    if options.model is not None:
        model = options.model
        counted = count_rounds(root, model) | {"calibrate": count_calibrate(root, model)}
        print(json.dumps(counted))
        return
    counted = count(root)
    for name, part in counted.items():
        print(f"{name}: {part['files']} files, {part['lines']} lines")
    name = "reading_path" if root == ROOT else "reading_path_before"
    store(name, {"environment": environment()} | counted)


if __name__ == "__main__":
    main()

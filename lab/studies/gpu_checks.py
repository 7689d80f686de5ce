"""The parts of the GPU suite that check: texts, logits and the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from costmodel.errors import RooftreeError
from costmodel.statistics import Ints
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.loading import LoadedModel
from decoder.model.making import make_target
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree
from lab.studies.gpu_kernels import relative_error
from lab.studies.gpu_parts import SEED, Part, Scale, dtype_of, open_target, random_texts

# Root mean square difference of logits over their standard deviation; bfloat16 keeps 8 bits a
# number, and differences of the layers add up. The largest of millions says less.
LOGIT_TOLERANCES = {"bfloat16": 0.05, "float16": 0.01, "float32": 1e-4}


def run_smoke(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """A short text of a small model with each policy, greedy and sampled; all must be plain's.

    Raises RooftreeError where tokens differ in float32, which says that trees are not exact.
    """
    target = open_target(Part(part.kind, part.target, part.runtime, "float32"), scale)
    prompt = random_texts(target.architecture.vocab, scale)[0][: scale.prompt_tokens]
    prompt = prompt[: len(prompt) // 2] * 2  # so that n-grams are found
    texts: dict[str, list[list[int]]] = {}
    for policy in ("plain", "chain", "fixed:15", "bastion"):
        decoder = TreeDecoder(target, drafter=NgramDrafter(), policy=policy, max_nodes=63)
        for sampling in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": SEED}):
            text = decoder.generate(prompt, max_new_tokens=16, **sampling).token_ids
            texts.setdefault(policy, []).append(text)
    differing = [policy for policy, both in texts.items() if both != texts["plain"]]
    if differing:
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        raise RooftreeError(
            f"{', '.join(differing)} wrote another text than plain decoding",
            hint=f"{folder / 'texts.json'} has both.",
        )
    return {"policies": list(texts), "warnings": list(target.runtime.warnings)}


def run_texts(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Where greedy texts of trees leave those of plain decoding in this dtype, at near-ties.

    first_difference  the position in each text; None: the same text
    """
    target = open_target(part, scale)
    texts = random_texts(target.architecture.vocab, replace(scale, texts=scale.compared_texts))
    positions: list[int | None] = []
    for text in texts:
        prompt = text[: scale.prompt_tokens // 2] * 2
        plain, trees = (
            TreeDecoder(target, drafter=NgramDrafter(), policy=policy, max_nodes=63)
            .generate(prompt, max_new_tokens=scale.new_tokens // 4)
            .token_ids
            for policy in ("plain", "fixed:15")
        )
        pairs = enumerate(zip(plain, trees, strict=True))
        positions.append(next((at for at, (one, other) in pairs if one != other), None))
    return {"first_difference": positions, "same": positions.count(None), "texts": len(texts)}


def run_tests(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The tests that are marked `gpu`. Raises RooftreeError where one fails."""
    files = [
        str(path)
        for path in sorted(Path("tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *scale.tests, "-p", "no:cacheprovider", *files],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    (folder / "pytest.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode != 0:
        raise RooftreeError(f"tests fail: {last[0]}", hint=f"{folder / 'pytest.txt'} says why.")
    return {"summary": last[0]}


def run_logits(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Logits of the runtime against transformers' own and against eager ones.

    Of a prompt's last token, and of chains of each size, whose rows transformers computes as a
    continued prompt. Raises RooftreeError where they differ by more than rounding.
    """
    context, most = scale.verify_context, max(scale.verify_rows)
    drawn = np.random.default_rng(SEED).random(context + most)
    before: list[Any] = []

    def see(loaded: LoadedModel) -> None:
        tokens = (drawn * loaded.architecture.vocab).astype(np.int64)
        before.extend((tokens, transformers_logits(loaded.model, tokens, context - 1)))

    target = open_target(part, scale, see)
    tokens, truth = before
    captures = timed_captures(target)
    start_s = perf_counter()
    prompt = fill(target, tokens, context, most)
    prefill_s = perf_counter() - start_s
    target.prepare(most)
    prepare_s = perf_counter() - start_s - prefill_s
    eager = make_target(target.loaded, runtime="eager")
    fill(eager, tokens, context, most)
    compared = [{"rows": 0, **difference(prompt[None], truth[:1])}]  # of the prompt
    for rows in scale.verify_rows:
        ours, theirs = (chain(one, tokens, context, rows) for one in (target, eager))
        row = {"rows": rows, **difference(ours, truth[1 : 1 + rows])}
        compared.append(row | {"against_eager": relative_error(ours, theirs)})
    allowed = LOGIT_TOLERANCES[dtype_of(part, scale)]
    wrong = [row["rows"] for row in compared if row["rms_error"] > allowed]
    (folder / "logits.json").write_text(json.dumps(compared), encoding="utf-8")
    if wrong:
        raise RooftreeError(
            f"logits of {wrong} rows differ from transformers' by more than {allowed:.2%}",
            hint=f"{folder / 'logits.json'} has the differences.",
        )
    capture = target.runtime.capture
    return {
        "compared": compared, "allowed_rms_error": allowed, "first_prefill_s": prefill_s,
        "prepare_s": prepare_s, "capture_bytes": capture.memory_bytes if capture else 0,
        "captures": captures, "warnings": list(target.runtime.warnings),
    }  # fmt: skip


def timed_captures(target: Target) -> list[dict[str, float]]:
    """A list that gets the seconds and bytes of each capture from now on."""
    capture, seen = target.runtime.capture, []
    if capture is not None:
        record = capture.record

        def timed(function: Callable[[], None]) -> Callable[[], None]:
            start_s, before_bytes = perf_counter(), capture.memory_bytes
            replay = record(function)
            took_s, more_bytes = perf_counter() - start_s, capture.memory_bytes - before_bytes
            seen.append({"seconds": took_s, "bytes": more_bytes})
            return replay

        capture.record = timed
    return seen


def fill(target: Target, tokens: Ints, context: int, most: int) -> torch.Tensor:
    """Prefill the context with room for `most` rows; float32 logits [vocab] on the host."""
    target.reserve(context + 2 * most)
    return target.prefill(torch.from_numpy(tokens[:context])).float().cpu()


def chain(target: Target, tokens: Ints, context: int, rows: int) -> torch.Tensor:
    """Float32 logits [rows, vocab], on the host, of a chain behind the context, not kept."""
    drafted = tokens[context + 1 : context + rows]
    places = np.arange(len(drafted), dtype=np.int64)
    tree = DraftTree(drafted, places, places + 1, np.full(len(drafted), 0.5))
    [logits] = target.verify([Step(int(tokens[context]), tree)])
    target.commit([])
    return logits.float().cpu()


@torch.inference_mode()
def transformers_logits(model: Any, tokens: Ints, first: int) -> torch.Tensor:
    """Float32 logits [tokens - first, vocab] by transformers' own forward, on the host."""
    ids = torch.from_numpy(tokens)[None].to(model.device)
    logits: torch.Tensor = model(ids, use_cache=False).logits[0, first:]
    return logits.float().cpu()


def difference(logits: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Differences over the spread of the logits, and the share of equal first choices."""
    squares = (logits.double() - truth.double()).square().mean()
    return {
        "rms_error": float(squares.sqrt() / truth.double().std()),
        "relative_error": relative_error(logits, truth),
        "same_argmax": float((logits.argmax(-1) == truth.argmax(-1)).double().mean()),
    }

"""The packed runtime of a CPU, with bfloat16 and int8 weights: forwards, texts and speed.

    python -m lab.studies.cpu_runtime steps [--rows 1,8] [--contexts 256]
    python -m lab.studies.cpu_runtime texts [--prompts 10] [--new-tokens 64]
    rooftree calibrate; rooftree calibrate --quantization int8
    python -m lab.studies.cpu_runtime speed [--prompts 9] [--new-tokens 128]

`steps` (packed_steps.json) times the forwards of eager, packed and int8 targets in turn, each time
behind a read of a large tensor, so that what slows the machine slows all alike. `texts`
(packed_texts.json) times nothing: texts of every tree policy against plain texts of the same
weights, each difference with the gap of the top two logits; perplexities on wikitext2. `speed`
(int8_speed.json) decodes each prompt with every arm in a new order, by the profiles that the two
commands have made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn import functional

from decoder.device import default_dtype, parse_dtype
from decoder.engine import TreeDecoder
from decoder.model.attention import DenseVisible, RowBlock
from decoder.model.demo_model import DEMO_NAME
from decoder.model.loading import load_model
from decoder.model.making import Quantization, make_target, quantised
from decoder.model.runtime.base import RuntimeChoice
from decoder.model.target import Step, Target
from decoder.profiling.startup import ProfileChoice
from decoder.tree.draft_tree import EMPTY, DraftTree
from lab.studies.common import environment, first_difference, pooled_ratio, read_prompts, store

SETS = ("gsm8k", "humaneval", "mt_bench")
POLICIES = ("bastion", "fixed:16", "chain", "beam:3x5", "static-tree:4x2", "dynatree")
WEIGHTS: dict[str, Quantization | None] = {"bfloat16": None, "int8": "int8"}
DRAFTERS = ("ngram", "ngram+demo")
READ_BYTES = 1 << 28
WARM_UPS, WARM_TOKENS = 3, 16
MOST_TOKENS = 512  # of a passage
NEAR_TIE = 1e-3  # gap of the top two logits in float32 below which rounding may decide
CPU = torch.device("cpu")


def tree_of(rows: int) -> DraftTree:
    """A binary tree of so many rows."""
    if rows == 1:
        return EMPTY
    nodes = np.arange(1, rows)
    parents = (nodes - 1) // 2
    depths = np.floor(np.log2(nodes + 1)).astype(np.int64)
    return DraftTree(nodes % 97, parents, depths, np.full(rows - 1, 0.5))


def target_arm(kind: str, name: str, dtype: torch.dtype) -> tuple[Target, Any]:
    """A target, and its start-up: seconds and resident bytes.

    kind  eager, packed, or int8
    """
    process, start_s = psutil.Process(), perf_counter()
    before_bytes = process.memory_info().rss
    loaded = load_model(name, dtype=dtype, device=CPU)
    runtime: RuntimeChoice = "eager" if kind == "eager" else "packed"
    target = make_target(quantised(loaded, "int8" if kind == "int8" else None), runtime=runtime)
    target.reserve(8)
    target.prefill(torch.zeros(1, dtype=torch.long))
    start_up = {"start_up_s": perf_counter() - start_s}
    return target, start_up | {"grown_bytes": process.memory_info().rss - before_bytes}


def verification(target: Target, context: int, rows: int) -> Callable[[], object]:
    cache, steps = target.reserve(context + rows), [Step(5, tree_of(rows))]
    cache.lengths[0] = context

    def run() -> None:
        target.verify(steps)
        cache.pending[0] = 0

    return run


def timed_s(function: Callable[[], object]) -> float:
    start_s = perf_counter()
    function()
    return perf_counter() - start_s


def measure(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Seconds of each arm, and of reading a large tensor beside them."""
    large = torch.ones(READ_BYTES // 4)
    for _ in range(WARM_UPS):
        for arm in arms.values():
            arm()
    times: dict[str, list[float]] = {name: [] for name in ("read", *arms)}
    for _ in range(repeats):
        times["read"].append(timed_s(large.sum))
        for name, arm in arms.items():
            times[name].append(timed_s(arm))
    return {name: {"median_s": median(v), "min_s": min(v)} for name, v in times.items()}


def run_steps(options: argparse.Namespace) -> None:
    """Forwards by runtime; a step's floor is the time of its weights at the bandwidth of a read."""
    dtype = parse_dtype(options.dtype, CPU) if options.dtype else default_dtype(CPU)
    start_up: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    for kind in ("eager", "packed", "int8"):
        targets[kind], start_up[kind] = target_arm(kind, DEMO_NAME, dtype)
    read_bytes = targets["packed"].loaded.weight_bytes or dtype.itemsize
    weight_bytes = targets["eager"].architecture.parameters * read_bytes
    forwards = []
    for context in map(int, options.contexts.split(",")):
        for rows in map(int, options.rows.split(",")):
            arms = {name: verification(target, context, rows) for name, target in targets.items()}
            times = measure(arms, options.repeats)
            floor_s = weight_bytes / READ_BYTES * times["read"]["median_s"]
            shown = "  ".join(f"{name} {1e3 * one['median_s']:.2f}" for name, one in times.items())
            print(f"context {context} rows {rows} ms: {shown}  floor {1e3 * floor_s:.2f}")
            forwards.append({"context": context, "rows": rows, **times})
    result = {"environment": environment("cpu"), "target": DEMO_NAME, "dtype": str(dtype)}
    result |= {"weight_bytes": weight_bytes, "start_up": start_up, "forwards": forwards}
    store("packed_steps", result)


@torch.inference_mode()
def perplexity(target: Target, texts: list[np.ndarray]) -> float:
    """Over the tokens of all texts but their first."""
    losses = []
    for ids in texts:
        cache, rows = target.reserve(len(ids)), len(ids) - 1
        block = RowBlock(0, ids[:-1], np.arange(rows), DenseVisible(np.tri(rows, dtype=np.bool_)))
        logits = target.runtime.forward(cache, [block]).logits.float()
        losses.append(functional.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def texts_part(
    plain: TreeDecoder, policies: Sequence[str], prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """The differences of each tree policy's texts from the plain texts of the same target."""
    expected = [plain.generate(ids, max_new_tokens=new_tokens).token_ids for ids in prompts]
    logits, result = partial(last_logits, plain.target), {}
    for policy in policies:
        trees = TreeDecoder(plain.target, policy=policy)
        done = [trees.generate(ids, max_new_tokens=new_tokens) for ids in prompts]
        differences = [
            {"prompt": number} | first_difference(logits, ids, text, one.token_ids)
            for number, (ids, text, one) in enumerate(zip(prompts, expected, done, strict=True))
            if one.token_ids != text
        ]
        result[policy] = {
            "equal": len(prompts) - len(differences),
            "tokens": sum(one.stats.new_tokens for one in done),
            "accepted_tokens": sum(one.stats.accepted_tokens for one in done),
            "differences": differences,
        }
        print(f"{plain.target.dtype} {policy}: {result[policy]}", flush=True)
    return {"prompts": len(prompts), "new_tokens": new_tokens, "policies": result}


def last_logits(target: Target, text: list[int]) -> torch.Tensor:
    target.reserve(len(text))
    return target.prefill(torch.tensor(text)).float().flatten()


def run_texts(options: argparse.Namespace) -> None:
    int8, exact = (
        TreeDecoder.from_pretrained(DEMO_NAME, dtype=dtype, quantization="int8", policy="plain")
        for dtype in ("bfloat16", "float32")
    )
    prompts = [int8.encode(text, chat=True) for text in prompts_of(options.prompts)]
    passages = [
        np.array(int8.encode(text["prompt"])[:MOST_TOKENS])
        for text in read_prompts("wikitext2", options.passages)
    ]
    packed = make_target(load_model(DEMO_NAME, dtype=torch.bfloat16, device=CPU), runtime="packed")
    arms = {
        "int8, bfloat16": (int8, POLICIES),
        "int8, float32": (exact, POLICIES),
        "bfloat16": (TreeDecoder(packed, policy="plain"), POLICIES[:2]),
    }
    result = {
        "environment": environment("cpu"),
        "target": DEMO_NAME,
        "perplexity": {
            "passages": len(passages),
            "bfloat16": perplexity(packed, passages),
            "int8": perplexity(int8.target, passages),
        },
        "texts": {
            name: texts_part(plain, policies, prompts, options.new_tokens)
            for name, (plain, policies) in arms.items()
        },
    }
    store("packed_texts", result)
    wrong = [
        (policy, one)
        for policy, texts in result["texts"]["int8, float32"]["policies"].items()
        for one in texts["differences"]
        if one["gap"] >= NEAR_TIE
    ]
    if wrong:
        raise SystemExit(f"int8 texts differ from their plain ones: {wrong}")


def prompts_of(count: int) -> list[str]:
    """So many prompts of all sets together."""
    each = -(-count // len(SETS))
    return [prompt["prompt"] for name in SETS for prompt in read_prompts(name, each)][:count]


def decoders() -> dict[str, TreeDecoder]:
    """The arms: plain decoding and trees of each drafter, of both kinds of weights."""
    arms = {}
    for weights, quantization in WEIGHTS.items():
        plain = TreeDecoder.from_pretrained(
            DEMO_NAME, dtype="bfloat16", quantization=quantization, policy="plain"
        )
        arms[f"{weights} plain"] = plain
        for drafter in DRAFTERS:
            trees = TreeDecoder(plain.target, drafter=drafter, profile=ProfileChoice(require=True))
            print(f"{weights} {drafter}: {trees.profile_line}")
            arms[f"{weights} bastion+{drafter}"] = trees
    return arms


def run_speed(options: argparse.Namespace) -> None:
    arms, random = decoders(), np.random.default_rng(0)
    texts = prompts_of(options.prompts)
    rows: dict[str, list[tuple[int, float]]] = {name: [] for name in arms}
    rounds = dict.fromkeys(arms, 0)
    for text in texts:
        for name in random.permutation(list(arms)).tolist():
            ids = arms[name].encode(text, chat=True)
            arms[name].generate(ids, max_new_tokens=WARM_TOKENS)
            stats = arms[name].generate(ids, max_new_tokens=options.new_tokens).stats
            rows[name].append((stats.new_tokens - 1, stats.decode_s))
            rounds[name] += stats.rounds
        print({name: round(row[-1][0] / row[-1][1], 1) for name, row in rows.items()}, flush=True)
    modes = ("plain", *(f"bastion+{drafter}" for drafter in DRAFTERS))
    pairs = [(f"int8 {mode}", f"bfloat16 {mode}") for mode in modes]
    pairs += [(f"int8 {mode}", "int8 plain") for mode in modes[1:]]
    ratios = [{"arm": a, "over": b} | pooled_ratio(rows[a], rows[b]) for a, b in pairs]
    totals = {name: np.sum(row, axis=0) for name, row in rows.items()}
    result = {"environment": environment("cpu"), "target": DEMO_NAME, "prompts": len(texts)}
    result |= {"new_tokens": options.new_tokens}
    result |= {"tokens_per_s": {name: float(n / s) for name, (n, s) in totals.items()}}
    result |= {"tokens_a_round": {name: float(totals[name][0] / rounds[name]) for name in totals}}
    store("int8_speed", result | {"ratios": ratios})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("steps", "texts", "speed"))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="256,1024,4000")
    parser.add_argument("--dtype")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--passages", type=int, default=20)
    options = parser.parse_args()
    {"steps": run_steps, "texts": run_texts, "speed": run_speed}[options.part](options)


if __name__ == "__main__":
    main()

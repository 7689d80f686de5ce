"""Products and decoding on a CPU without bfloat16 and AVX-512: every way to keep the weights.

    ROOFTREE_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell \
      NUMBA_CPU_FEATURES= python -m lab.studies.cpu_ways [--prompts 3] [--new-tokens 48]

`products` times one product of SmolLM2-135M's shapes by every way, in turn, over copies of the
weight that no cache holds. `decoding` times transformers and this decoder, each prompt with every
arm in turn, and compares the texts with those of transformers in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, demo_model_folder
from decoder.model.runtime import tiles
from lab.studies.common import environment, read_prompts, store

SHAPES = ((576, 576), (576, 1536), (49152, 576))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 5
COLD_BYTES = 48 << 20  # of all copies of a weight in float32, more than the caches hold
SETS = ("gsm8k", "humaneval", "mt_bench")
WARM_TOKENS = 8
SLOW, MOST_SLOW_ROWS = "int8 torch", 4  # seconds a product without AVX-512

Product = Callable[[torch.Tensor], object]


def ways(weight: torch.Tensor) -> dict[str, tuple[float, Product]]:
    """Bytes of a weight's number and its product, by the way to keep it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    scales = weight.abs().amax(1) / 127
    whole = (weight / scales[:, None]).round().to(torch.int8)
    small, half = weight.bfloat16(), weight.half()
    blocks, wide_blocks, whole_blocks = map(tiles.pack, (small, weight, whole))
    return {
        "float32 torch": (4, lambda x: functional.linear(x, weight)),
        "float32 oneDNN packed": (4, lambda x: onednn(x, packed, None, "none", [], "")),
        "float32 tiles": (4, lambda x: tiles.product(x, wide_blocks)),
        "bfloat16 widened, tiles": (2, lambda x: tiles.product(x, blocks)),
        "int8 tiles": (1, lambda x: tiles.product(x, whole_blocks).mul_(scales)),
        "int8 torch": (1, lambda x: torch._weight_int8pack_mm(x, whole, scales)),
        "bfloat16 torch": (2, lambda x: functional.linear(x.bfloat16(), small)),
        "float16 torch": (2, lambda x: functional.linear(x.half(), half)),
    }


def timed_products(outputs: int, inputs: int) -> list[dict[str, Any]]:
    """Median milliseconds and gigabytes a second of each way, by rows."""
    copies = max(1, COLD_BYTES // (outputs * inputs * 4))
    kept = [ways(torch.randn(outputs, inputs).bfloat16().float()) for _ in range(copies)]
    table = []
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        seconds: dict[str, list[float]] = {
            name: [] for name in kept[0] if name != SLOW or rows <= MOST_SLOW_ROWS
        }
        for repeat in range(REPEATS + 1):
            for name, times in seconds.items():
                start_s = time.perf_counter()
                for one in kept:
                    one[name][1](x)
                if repeat:  # the first compiles
                    times.append((time.perf_counter() - start_s) / copies)
        for name, times in seconds.items():
            taken_s, size = median(times), kept[0][name][0]
            row = {"way": name, "shape": [outputs, inputs], "rows": rows}
            row |= {"ms": round(taken_s * 1e3, 4)}
            row |= {"gb_per_s": round(outputs * inputs * size / taken_s / 1e9, 2)}
            row |= {"gflop_per_s": round(2e-9 * rows * outputs * inputs / taken_s, 1)}
            table.append(row)
        print(outputs, inputs, rows, {n: f"{median(t) * 1e3:.3f}" for n, t in seconds.items()})
    return table


class Clock(BaseStreamer):  # type: ignore[misc]
    """The times at which transformers hands out the prompt and each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None: ...


def by_transformers(model: Any, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Tokens, and seconds behind the first of them."""
    clock, prompt = Clock(), torch.tensor([ids])
    options = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    text = model.generate(prompt, max_new_tokens=new_tokens, streamer=clock, **options)
    return text[0, len(ids) :].tolist(), clock.times_s[-1] - clock.times_s[1]


def by_rooftree(decoder: TreeDecoder, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    done = decoder.generate(ids, max_new_tokens=new_tokens)
    return list(done.token_ids), done.stats.decode_s


def decoding(prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """Tokens a second of every arm, and the prompts whose text is not transformers' in float32."""
    load = partial(AutoModelForCausalLM.from_pretrained, demo_model_folder())
    plain = TreeDecoder.from_pretrained(DEMO_NAME, policy="plain")
    trees = TreeDecoder(plain.target, drafter="ngram+demo")
    print(trees.profile_line)
    arms = {
        f"transformers {name}": partial(by_transformers, load(dtype=dtype).eval())
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    } | {"plain": partial(by_rooftree, plain), "trees": partial(by_rooftree, trees)}
    counts = {name: [0, 0.0] for name in arms}
    differing: dict[str, list[int]] = {name: [] for name in arms}
    for number, prompt in enumerate(prompts):
        ids = plain.encode(prompt, chat=True)
        texts = {}
        for name, arm in arms.items():
            if not number:
                arm(ids, WARM_TOKENS)
            texts[name], taken_s = arm(ids, new_tokens)
            counts[name][0] += len(texts[name]) - 1
            counts[name][1] += taken_s
            if texts[name] != texts["transformers float32"]:
                differing[name].append(number)
        print(number, {name: round(n / s, 1) for name, (n, s) in counts.items()}, flush=True)
    rates = {name: n / s for name, (n, s) in counts.items()}
    best = max(rates["transformers float32"], rates["transformers bfloat16"])
    ratios = {"plain over transformers": rates["plain"] / best}
    ratios["trees over plain"] = rates["trees"] / rates["plain"]
    print(ratios, differing)
    return {"profile": trees.profile_line, "tokens_per_s": rates, "ratios": ratios,
            "prompts": len(prompts), "new_tokens": new_tokens, "differing": differing}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=3, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    torch.manual_seed(0)
    texts = [p["prompt"] for name in SETS for p in read_prompts(name, options.prompts)]
    with torch.inference_mode():
        table = [row for shape in SHAPES for row in timed_products(*shape)]
    result = {"environment": environment("cpu"), "products": table}
    store("cpu_ways", result | {"decoding": decoding(texts, options.new_tokens)})


if __name__ == "__main__":
    main()

"""Products and decoding on a CPU: every way to keep the weights, by rows.

    python -m lab.studies.cpu_ways [--prompts 3] [--new-tokens 48] [--part products] [--threads 1]
    ROOFTREE_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell \
      NUMBA_CPU_FEATURES= python -m lab.studies.cpu_ways

`products` times one product of SmolLM2-135M's shapes by every way, in turn, over copies of the
weight that no cache holds, and keeps the shortest time: other work only adds to it. One thread is
timed by its own seconds, which tell more beside other work. `decoding` times transformers and this
decoder, each prompt with every arm in turn, and compares the texts with transformers' in float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from decoder.cpu import this_cpu
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME, demo_model_folder
from decoder.model.runtime import tiles
from decoder.model.runtime.linear import rounded_to_int8
from lab.studies.common import environment, read_prompts, store

SHAPES = ((576, 576), (3072, 576), (576, 1536), (49152, 576))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 32, 128)
REPEATS = 15
PEAK_SIZE = 2048
COLD_BYTES = 96 << 20  # of all copies of a weight in bfloat16, more than the caches hold
SETS = ("gsm8k", "humaneval", "mt_bench")
WARM_TOKENS = 8

Product = Callable[[torch.Tensor], object]


def ways(weight: torch.Tensor) -> dict[str, tuple[float, Product]]:
    """Bytes of a weight's number and its product, by the way to keep it."""
    small, whole, scales = weight.bfloat16(), *rounded_to_int8(weight)
    onednn, reorder = (
        torch.ops.mkldnn._linear_pointwise.default,
        torch.ops.mkldnn._reorder_linear_weight,
    )
    wide_packed, packed, plain = reorder(weight, 1), reorder(small, 1), weight.numpy()
    blocks, whole_blocks = tiles.pack(small), tiles.pack(whole)
    out = torch.zeros(max(ROWS), len(weight))

    def tiled(x: torch.Tensor, blocks: torch.Tensor) -> None:
        tiles.add_product(out[: len(x)], x, blocks, tiles.padded(scales))

    return {
        "float32 OpenBLAS": (4, lambda x: x.numpy() @ plain.T),
        "float32 oneDNN packed": (4, lambda x: onednn(x, wide_packed, None, "none", [], "")),
        "bfloat16 oneDNN packed": (2, lambda x: onednn(x.bfloat16(), packed, None, "none", [], "")),
        "bfloat16 tiles": (2, lambda x: tiled(x.bfloat16(), blocks)),
        "bfloat16 tiles, float32 inputs": (2, lambda x: tiled(x, blocks)),
        "int8 tiles, float32 inputs": (1, lambda x: tiled(x, whole_blocks)),
    }


def clock_s() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def shortest_s(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start_s = clock_s()
        function()
        times.append(clock_s() - start_s)
    return min(times)


def peak_rates(dtype: torch.dtype) -> dict[str, float]:
    """Bytes/s of a sum over memory, and FLOPs/s of torch's product of square matrices."""
    buffer, square = torch.ones(COLD_BYTES // 4), torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
    product_s = shortest_s(lambda: square @ square)
    read_s = shortest_s(buffer.sum)
    return {"bytes_per_s": buffer.nbytes / read_s, "flops_per_s": 2 * PEAK_SIZE**3 / product_s}


def timed_products(outputs: int, inputs: int, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """Shortest milliseconds of each way, and its shares of bandwidth and peak, by rows."""
    copies = min(max(1, COLD_BYTES // (outputs * inputs * 2)), 60)
    kept = [ways(torch.randn(outputs, inputs)) for _ in range(copies)]
    table = []
    for rows in ROWS:
        x, seconds = torch.randn(rows, inputs), dict.fromkeys(kept[0], float("inf"))
        for _ in range(REPEATS):
            for name in seconds:
                start_s = clock_s()
                for one in kept:
                    one[name][1](x)
                seconds[name] = min(seconds[name], (clock_s() - start_s) / copies)
        for name, taken_s in seconds.items():
            read_bytes, flops = outputs * inputs * kept[0][name][0], 2 * rows * outputs * inputs
            table.append({
                "way": name, "shape": [outputs, inputs], "rows": rows,
                "ms": round(taken_s * 1e3, 4),
                "bandwidth_share": round(read_bytes / taken_s / peaks["bytes_per_s"], 3),
                "peak_share": round(flops / taken_s / peaks["flops_per_s"], 3),
            })  # fmt: skip
        print(outputs, inputs, rows, {n: f"{t * 1e3:.3f}" for n, t in seconds.items()}, flush=True)
    return table


class Clock(BaseStreamer):
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
    parser.add_argument("--part", choices=("products", "all"), default="all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    peaks = peak_rates(torch.bfloat16 if this_cpu().bfloat16 else torch.float32)
    with torch.inference_mode():
        table = [row for shape in SHAPES for row in timed_products(*shape, peaks)]
    result = {"environment": environment("cpu"), "peaks": peaks, "products": table}
    if options.part == "products":
        return store("cpu_products", result)
    texts = [p["prompt"] for name in SETS for p in read_prompts(name, options.prompts)]
    store("cpu_ways", result | {"decoding": decoding(texts, options.new_tokens)})


if __name__ == "__main__":
    main()

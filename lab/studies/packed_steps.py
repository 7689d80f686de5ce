"""A CPU's forwards by runtime: eager, packed, int8 and torch.compile, beside the read bandwidth.

    python -m lab.studies.packed_steps [--rows 1,8] [--contexts 256] [--compiled] [--texts 20]

Each repeat times every arm once, in turn, and a read of a large tensor before them, so that what
slows the machine slows all alike. A step's floor is the time its weights take at the bandwidth of
these reads. `--compiled` adds the same layers on plain weights under torch.compile (Inductor with
freezing, which packs the weights too), whose start-up counts its compilation of one row and of
several. `--texts` adds the perplexity of bfloat16 and int8 weights on so many passages of
wikitext2, from ../shared/prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional

from decoder.device import default_dtype, parse_dtype
from decoder.model.attention import DenseVisible, RowBlock, partial_attention
from decoder.model.loading import CPU_TARGET, load_model
from decoder.model.runtime.base import RuntimeChoice
from decoder.model.target import Step, Target, make_target, quantised
from decoder.tree.draft_tree import EMPTY, DraftTree
from lab.studies.common import environment, read_prompts, store

READ_BYTES = 1 << 28
WARM_UPS = 3
MOST_TOKENS = 512  # of a passage
CPU = torch.device("cpu")


class CompiledLayer(nn.Module):
    """A layer of a Llama over a cache of its own, with joined products, for torch.compile."""

    def __init__(self, layer: Any, capacity: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = nn.ModuleList((layer.input_layernorm, layer.post_attention_layernorm))
        self.qkv = joined((attention.q_proj, attention.k_proj, attention.v_proj))
        self.gate_up = joined((mlp.gate_proj, mlp.up_proj))
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.width, self.scale = attention.head_dim, attention.scaling
        self.kv_heads = attention.k_proj.out_features // self.width
        self.heads = attention.q_proj.out_features // self.width
        # One buffer each: writes to a part of a larger one are compiled to copies of the whole.
        for name in ("keys", "values"):
            memory = self.qkv.weight.new_zeros(self.kv_heads, capacity, self.width)
            self.register_buffer(name, memory, persistent=False)

    def forward(self, rows: torch.Tensor, shared: Any) -> torch.Tensor:
        cosine, sine, slots, mask = shared
        heads = self.qkv(self.norms[0](rows)).unflatten(-1, (-1, self.width)).transpose(0, 1)
        turned, value = heads.split((self.heads + self.kv_heads, self.kv_heads))
        first, second = turned.chunk(2, -1)
        turned = turned * cosine + torch.cat((-second, first), -1) * sine
        query, key = turned.split((self.heads, self.kv_heads))
        self.keys.index_copy_(1, slots, key)
        self.values.index_copy_(1, slots, value)
        keys, values = (part[None, :, : mask.shape[1]] for part in (self.keys, self.values))
        packed = query.reshape(1, self.kv_heads, -1, self.width)
        repeated = mask.repeat(self.heads // self.kv_heads, 1)[None, None]
        mixed, _ = partial_attention(packed, keys, values, repeated, self.scale)
        mixed = mixed.view(self.heads, -1, self.width).transpose(0, 1).flatten(1)
        rows = rows + self.output(mixed)
        gate, up = self.gate_up(self.norms[1](rows)).chunk(2, -1)
        return rows + self.down(functional.silu(gate) * up)


class CompiledLayers(nn.Module):
    """The forward of a Llama, written for torch.compile."""

    def __init__(self, model: Any, capacity: int) -> None:
        super().__init__()
        base = model.model
        self.embedding, self.rotary, self.norm = base.embed_tokens, base.rotary_emb, base.norm
        self.layers = nn.ModuleList(CompiledLayer(layer, capacity) for layer in base.layers)
        self.head = model.lm_head

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor) -> Any:
        """Logits [rows, vocab]; mask [rows, keys] of the first slots."""
        rows = self.embedding(tokens)
        cosine, sine = self.rotary(rows, slots[None])
        for layer in self.layers:
            rows = layer(rows, (cosine, sine, slots, mask))
        return self.head(self.norm(rows))


def joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, none of which has a bias."""
    weight = torch.cat([linear.weight for linear in linears])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


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
    start_up_s = perf_counter() - start_s
    return target, {
        "start_up_s": start_up_s,
        "grown_bytes": process.memory_info().rss - before_bytes,
    }


def verification(target: Target, context: int, rows: int) -> Callable[[], object]:
    cache, steps = target.reserve(context + rows), [Step(5, tree_of(rows))]
    cache.lengths[0] = context

    def run() -> None:
        target.verify(steps)
        cache.pending[0] = 0

    return run


def compiled_forward(compiled: Any, context: int, rows: int) -> Callable[[], object]:
    tokens = torch.full((rows,), 5)
    slots = torch.arange(context, context + rows)
    mask = torch.zeros(rows, context + rows, dtype=compiled.dtype)
    return torch.inference_mode()(lambda: compiled.run(tokens, slots, mask))


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


class Compiled:
    """The compiled layers, and the seconds that their compilation took."""

    def __init__(self, name: str, dtype: torch.dtype, capacity: int) -> None:
        import torch._inductor.config as inductor

        inductor.freezing, inductor.cpp_wrapper = True, True
        start_s = perf_counter()
        loaded = load_model(name, dtype=dtype, device=CPU)
        self.dtype = dtype
        self.run = torch.compile(CompiledLayers(loaded.model, capacity).eval(), dynamic=True)
        for rows in (1, 2, 9):
            compiled_forward(self, 40, rows)()
        self.start_up_s = perf_counter() - start_s


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="256,1024,4000")
    parser.add_argument("--dtype")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--target", default=CPU_TARGET)
    options = parser.parse_args()
    dtype = parse_dtype(options.dtype, CPU) if options.dtype else default_dtype(CPU)
    contexts = [int(context) for context in options.contexts.split(",")]
    start_up: dict[str, Any] = {}
    targets: dict[str, Target] = {}
    for kind in ("eager", "packed", "int8"):
        targets[kind], start_up[kind] = target_arm(kind, options.target, dtype)
    compiled = Compiled(options.target, dtype, max(contexts) + 65) if options.compiled else None
    if compiled is not None:
        start_up["compiled"] = {"start_up_s": compiled.start_up_s}
    weight_bytes = targets["eager"].architecture.parameters * dtype.itemsize
    result: dict[str, Any] = {
        "environment": environment("cpu"),
        "target": options.target,
        "dtype": str(dtype),
        "weight_bytes": weight_bytes,
        "start_up": start_up,
        "forwards": [],
    }
    for context in contexts:
        for rows in map(int, options.rows.split(",")):
            arms = {name: verification(target, context, rows) for name, target in targets.items()}
            if compiled is not None:
                arms["compiled"] = compiled_forward(compiled, context, rows)
            times = measure(arms, options.repeats)
            floor_s = weight_bytes / READ_BYTES * times["read"]["median_s"]
            shown = "  ".join(f"{name} {1e3 * one['median_s']:.2f}" for name, one in times.items())
            print(
                f"context {context} rows {rows} ms: {shown}  floor {1e3 * floor_s:.2f}", flush=True
            )
            result["forwards"].append({"context": context, "rows": rows, **times})
    if options.texts:
        texts = [text["prompt"] for text in read_prompts("wikitext2", options.texts)]
        tokenizer = targets["packed"].loaded.tokenizer()
        ids = [np.array(tokenizer(text)["input_ids"][:MOST_TOKENS]) for text in texts]
        result["perplexity"] = {kind: perplexity(targets[kind], ids) for kind in ("packed", "int8")}
        print(result["perplexity"])
    store("packed_steps", result)


if __name__ == "__main__":
    main()

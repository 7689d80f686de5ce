"""Rows of random draft trees against transformers' decoding of each row's path, one by one.

Tiny models of each mechanism verify chains, stars, combs and random trees behind texts that pass
their windows and that are committed tree by tree. A long text of models with states shows their
drift. Then come times of a layer's rules, which `RuleRows` runs without a state a node, and what
states take of a round in a model of the shape of Qwen3.5 with 124 M random weights.
"""

from __future__ import annotations

import argparse
import timeit
from bisect import bisect_left
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from decoder.engine import TreeDecoder
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.mixers import RowStates
from decoder.model.recurrence import Ancestors, KeptRows, gated_delta, stepped
from decoder.model.target import Step, Target
from decoder.tree.draft_tree import DraftTree, visibility
from lab.studies.common import environment, greedy, store
from lab.studies.families import VOCAB, HidingDrafter, tiny_model

MECHANISMS = {
    "gated delta rule": "qwen3_5_text",
    "delta rule of channels and latents": "kimi_linear",
    "convolutions": "lfm2",
    "mamba2 beside attention": "falcon_h1",
    "windows and sinks": "gpt_oss",
    "chunks": "llama4_text",
    "soft caps": "gemma2",
    "latents": "deepseek_v3",
    "an indexer's keys": "deepseek_v32",
}
STATES = ("qwen3_5_text", "falcon_h1")  # of the long texts
SHAPES = ("chain", "star", "comb", "random")
GROUPS, TREES = 3, 8  # each prompt is followed by groups, one tree of each committed
HEADS, WIDTH = 32, 128  # of a layer of Qwen3.5-4B
SMALL = {
    "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 16, "vocab_size": 49152,
    "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64, "linear_key_head_dim": 64,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def tree_of(shape: str, nodes: int, random: np.random.Generator) -> DraftTree:
    """A draft tree; each node of the chain in a comb has a sibling."""
    rows = np.arange(nodes)
    parents = {
        "chain": rows,
        "star": 0 * rows,
        "comb": np.maximum(rows - rows % 2 - 1, 0),
        "random": np.array([random.integers(max(0, row - 3), row + 1) for row in rows], dtype=int),
    }[shape]
    depths = visibility(parents).sum(1)[1:] - 1
    return DraftTree(random.integers(1, VOCAB, nodes), parents, depths, np.full(nodes, 0.5))


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The rows from the root to each row."""
    return [np.flatnonzero(seen).tolist() for seen in visibility(tree.parents)]


@torch.inference_mode()
def read(model: Any, cache: DynamicCache, ids: Any) -> Any:
    """transformers' logits [batch, vocab] behind tokens [batch, rows] read into its cache."""
    ids = torch.as_tensor(ids)
    places = torch.arange(ids.shape[1]).expand(ids.shape) + cache.get_seq_length()
    return model(ids, position_ids=places, past_key_values=cache, use_cache=True).logits[:, -1]


def decoded(model: Any, prompt: Sequence[int], tails: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [tails, vocab] behind each tail, read token by token behind the prompt.

    A tail with which others begin is read as part of one of them.
    """
    ordered = sorted(map(list, tails))
    ends = [one for one, after in zip(ordered, [*ordered[1:], []], strict=True)
            if after[: len(one)] != one]  # fmt: skip
    cache, longest = DynamicCache(config=model.config), max(map(len, ends))
    read(model, cache, [prompt] * len(ends))
    padded = np.array([[*end, *[1] * (longest - len(end))] for end in ends])
    steps = [read(model, cache, padded[:, i : i + 1]) for i in range(longest)]
    return torch.stack([steps[len(tail) - 1][bisect_left(ends, list(tail))] for tail in tails])


def off(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The largest difference of each row, in spreads of its logits."""
    return (ours - theirs).abs().amax(-1) / theirs.std(-1)


def fuzz(kind: str, dtype: torch.dtype, prompts: int) -> dict[str, Any]:
    """The worst row of many trees, and the number of rows whose first token differs."""
    model, random = tiny_model(kind).to(dtype), np.random.default_rng(0)
    for name, weights in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weights)
    target, errors, differing = make_target(borrow_model(model), owned=False), [], 0
    for _ in range(prompts):
        prompt = random.integers(1, VOCAB, int(random.integers(20, 50))).tolist()
        target.reserve(128)
        target.prefill(torch.tensor(prompt))
        committed: list[int] = []
        for _ in range(GROUPS):
            ours, tails, path = _verified(target, random)
            theirs = decoded(model, prompt, [[*committed, *tail] for tail in tails])
            errors.append(off(ours, theirs))
            differing += int((ours.argmax(-1) != theirs.argmax(-1)).sum())
            target.commit(path)
            committed += tails[-1]
    every, trees = torch.cat(errors), prompts * GROUPS * TREES
    return {
        "kind": kind, "dtype": str(dtype)[6:], "trees": trees, "rows": len(every),
        "worst": float(every.max()), "median": float(every.median()), "other_argmaxes": differing,
    }  # fmt: skip


def _verified(
    target: Target, random: np.random.Generator
) -> tuple[torch.Tensor, list[list[int]], list[int]]:
    """The logits of a group's rows, the tokens of their paths, and the path to the last row."""
    logits, tails = [], []
    for number in range(TREES):
        target.commit([])  # drops the tree before
        shape = SHAPES[-1 if number == TREES - 1 else int(random.integers(len(SHAPES)))]
        tree, root = tree_of(shape, int(random.integers(1, 25)), random), number + 1
        logits.append(target.verify([Step(root, tree)])[0].clone())
        paths, tokens = paths_of(tree), tree.row_tokens(root)
        tails += [tokens[path].tolist() for path in paths]
    return torch.cat(logits), tails, paths[-1]


def long_text(kind: str, dtype: torch.dtype, count: int) -> dict[str, Any]:
    """Whether a greedy text by trees is transformers', and the error of the states at its end."""
    model = tiny_model(kind).to(dtype)
    model.config.get_text_config().max_position_embeddings = count + 64
    text = np.random.default_rng(1).integers(1, VOCAB, 20).tolist()
    target, start = make_target(borrow_model(model), owned=False), len(text)
    text += greedy(model, text, count, pad_token_id=0)
    decoder = TreeDecoder(target, drafter=HidingDrafter(text), policy="fixed:12")
    ours = decoder.generate(text[:start], max_new_tokens=count)
    cache = DynamicCache(config=model.config)
    read(model, cache, [text[:start]])
    for token in text[start : target.cache.lengths[0]]:
        read(model, cache, [[token]])
    held = target.cache.states
    rules = [number for number, (form, *_) in enumerate(held.shapes) if form != "conv"]
    wanted = [getattr(layer, "recurrent_states", {}).get(0) for layer in cache.layers]
    drift = [0.0]
    for number, theirs in zip(rules, (one for one in wanted if one is not None), strict=True):
        mine = held.state(number, 0)
        mine = mine.mT if held.shapes[number][0] == "ssm" else mine
        drift.append(float((mine - theirs[0]).abs().max() / theirs.abs().max()))
    return {
        "kind": kind, "dtype": str(dtype)[6:], "tokens": count, "rounds": ours.stats.rounds,
        "same_text": ours.token_ids == text[start:], "state_drift": max(drift),
    }  # fmt: skip


def layer_times(rows: int) -> dict[str, Any]:
    """Milliseconds of a gated delta rule: a tree, a chain as transformers runs it, and a scan."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, rows, HEADS, WIDTH, generator=generator).unbind()
    g, beta = -torch.rand(1, rows, HEADS), torch.rand(1, rows, HEADS)
    state = torch.randn(HEADS, WIDTH, WIDTH, generator=generator)
    tree = tree_of("random", rows - 1, np.random.default_rng(0))
    seen = Ancestors(visibility(tree.parents), state.device)

    def by_tree() -> KeptRows:
        whole = gated_delta(query, key, value, g, beta, normed=True)
        return whole.tree(slice(0, rows), state, seen, None)[1]

    def by_chain() -> None:
        torch_chunk_gated_delta_rule(query, key, value, g, beta, initial_state=state[None])

    def by_scan() -> None:
        behind = [stepped("delta", state, kept, 0)[0]]
        for row, parent in enumerate(tree.parents, 1):
            behind.append(stepped("delta", behind[parent], kept, row)[0])

    kept, ways = by_tree(), {"tree_ms": by_tree, "chain_ms": by_chain, "scan_ms": by_scan}
    best = {name: 1e3 * min(timeit.repeat(run, number=1, repeat=5)) for name, run in ways.items()}
    return {"rows": rows} | best


@torch.inference_mode()
def round_times(context: int) -> list[dict[str, float]]:
    """Seconds of a verification, of these in states, and of a commit of at most four rows."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SMALL))
    target, spent = make_target(borrow_model(model.to(torch.bfloat16)), owned=False), [0.0]
    run = RowStates.__call__

    def timed(states: RowStates, *arguments: Any, **options: Any) -> Any:
        start = perf_counter()
        result = run(states, *arguments, **options)
        spent[0] += perf_counter() - start
        return result

    target.reserve(context + 256)
    target.prefill(torch.randint(SMALL["vocab_size"], (context,)))
    times = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        tree, measured = tree_of("random", rows - 1, np.random.default_rng(0)), []
        for _ in range(5):
            target.commit([])
            spent[0], start = 0.0, perf_counter()
            with patch.object(RowStates, "__call__", timed):
                target.verify([Step(1, tree)])
            verified = perf_counter()
            target.commit(paths_of(tree)[-1][:4])
            measured.append((verified - start, spent[0], perf_counter() - verified))
        verify_s, states_s, commit_s = min(measured)
        times.append(
            {"rows": rows, "verify_s": verify_s, "states_s": states_s, "commit_s": commit_s}
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=42, help="of each kind and dtype")
    parser.add_argument("--tokens", type=int, default=2000, help="of the long texts")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with torch.inference_mode():
        layers = [layer_times(rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    rounds = round_times(256)
    trees, texts = [], []
    for dtype in (torch.float64, torch.float32):
        for mechanism, kind in MECHANISMS.items():
            trees.append({"mechanism": mechanism} | fuzz(kind, dtype, arguments.prompts))
            print(trees[-1], flush=True)
        texts += [long_text(kind, dtype, arguments.tokens) for kind in STATES]
    result = {"environment": environment(), "trees": trees, "texts": texts, "layers": layers}
    result["rounds"] = {"context": 256, "times": rounds}
    store("tree_rows", result)


if __name__ == "__main__":
    main()

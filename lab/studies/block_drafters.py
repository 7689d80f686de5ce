"""Block drafters, trained alike, on prompts that none of them was trained on.

    for KIND in dflash jetspec dspark dflash2 domino:
        mkdir -p WORK/KIND WORK/texts; ln -s ../texts WORK/KIND/texts
        rooftree train-drafter --kind KIND --from demo --output WORK/KIND --texts 576 --steps 500
            --target HuggingFaceTB/SmolLM2-135M-Instruct --set learning_rate=5e-4 --set soft=0
    python -m lab.studies.block_drafters WORK/dflash/drafter ... WORK/domino/drafter demo

The kinds share texts and features, steps, depth and the backbone that they begin with. Every
drafter drafts at each position of the target's greedy texts. At temperature 0 the rounds of its
chain and of its trees of every size follow from these drafts, as trees are nested. Also counted is
how often the most probable next token is right: first, behind a path of most probable tokens (the
spine), and behind one that left it. Intervals are over texts; ratios to others are to the drafter
that is named first.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decoder.drafters.base import Drafter, DraftRequest
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.model.demo_model import DEMO_NAME
from decoder.model.making import make_target
from decoder.model.target import Target
from decoder.tree.draft_tree import DraftTree, best_first, chain
from decoder.tree.growth import TopPaths
from lab.studies.common import environment, pooled_ratio, read_prompts, store
from lab.studies.controller_simulated import committed_by_size
from lab.training.recipe import load_target

SETS = ("gsm8k", "humaneval", "mt_bench", "math500", "alpaca")
SIZES = (1, 3, 7, 15, 31, 63, 127, 255)
WIDTH = 32  # candidates of a position, where a drafter asks


class Counts:
    """Of one drafter: tokens and verifications of each text by policy, hits by place, seconds."""

    def __init__(self) -> None:
        self.texts: Mapping[str, list[tuple[int, int]]] = defaultdict(list)
        self.right: Mapping[str, list[bool]] = defaultdict(list)
        self.seconds: list[float] = []

    def follow(self, tree: DraftTree, truth: Sequence[int]) -> None:
        """Note at each accepted row whether its most probable child is right."""
        row, place = 0, "first"
        for token in truth:
            below = np.flatnonzero(tree.parents == row)
            if not len(below):  # as behind a token that is not in the tree, row -1
                return
            best = 1 + int(below[np.argmax(tree.scores[below])])
            self.right[place].append(bool(tree.tokens[best - 1] == token))
            row = tree.child(row, int(token))
            place = "spine" if row == best and place != "sibling" else "sibling"

    def finish(self, committed: Mapping[str, list[int]]) -> None:
        """A text, of the tokens that a verification at each of its positions commits."""
        for policy, by_position in committed.items():
            at = rounds = 0
            while at < len(by_position):
                at, rounds = at + int(by_position[at]), rounds + 1
            self.texts[policy].append((len(by_position), rounds))

    def figures(self, first: Counts) -> dict[str, Any]:
        means = {policy: np.sum(table, axis=0) for policy, table in self.texts.items()}
        return {
            "draft_ms": 1e3 * median(self.seconds),
            "next_token_right": {name: float(np.mean(hits)) for name, hits in self.right.items()},
            "next_tokens": {name: len(hits) for name, hits in self.right.items()},
            "tokens_a_verification": {name: float(a / b) for name, (a, b) in means.items()},
            "over_own_chain": {
                name: pooled_ratio(table, self.texts["chain"]) for name, table in self.texts.items()
            },
            "over_first": {
                name: pooled_ratio(table, first.texts[name]) for name, table in self.texts.items()
            },
        }


@torch.inference_mode()
def draft_along(
    target: Target, drafter: Drafter, ids: Sequence[int], text: Sequence[int], counts: Counts
) -> None:
    """Draft at every position of a text behind its first token."""
    tokens, start, depth = np.array([*ids, *text]), len(ids), drafter.max_depth
    target.capture(drafter.feature_layers)
    target.reserve(len(tokens))
    target.prefill(torch.from_numpy(tokens[:-1]))
    features = target.features()
    rows = [None] * len(tokens) if features is None else list(features.clone()[:, None])
    session = drafter.start(tokens[:start], None if features is None else features[:start].clone())
    request = DraftRequest(depth=depth, width=WIDTH, growth=TopPaths())
    committed: Mapping[str, list[int]] = defaultdict(list)
    for at in range(start, len(tokens) - 1):
        began_s = perf_counter()
        drafted = session.draft(tokens[: at + 1], request)
        counts.seconds.append(perf_counter() - began_s)
        truth = tokens[at + 1 : at + 1 + depth].tolist()
        tree, path = best_first(drafted, SIZES[-1]), chain(drafted, depth)
        by_size = committed_by_size(tree, truth, SIZES[-1])
        committed["chain"].append(committed_by_size(path, truth, depth)[-1])
        for size in SIZES:
            committed[f"fixed:{size}"].append(by_size[size])
        counts.follow(tree, truth)
        session.observe([int(tokens[at + 1])], rows[at])
    counts.finish(committed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--per-set", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    target = make_target(load_target(DEMO_NAME))
    plain = TreeDecoder(target, policy="plain")
    prompts = [one["prompt"] for name in SETS for one in read_prompts(name, options.per_set)]
    asked = [plain.encode(prompt, chat=True) for prompt in prompts]
    written = [plain.generate(ids, max_new_tokens=options.new_tokens).token_ids for ids in asked]
    result: dict[str, Any] = {"environment": environment("cpu"), "sets": SETS, "drafters": {}}
    first = None
    for name in options.drafters:
        drafter, counts = load_drafter(name, target), Counts()
        for ids, text in zip(asked, written, strict=True):
            draft_along(target, drafter, ids, text, counts)
        first = first or counts
        label = Path(name).parent.name or name
        result["drafters"][label] = counts.figures(first)
        print(label, {k: v for k, v in result["drafters"][label].items() if "over" not in k})
    store("block_drafters", result)


if __name__ == "__main__":
    main()

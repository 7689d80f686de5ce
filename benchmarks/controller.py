"""The controller against every fixed tree size, live on a CPU with a real model.

    python -m benchmarks.controller [--prompts-per-set 5] [--drafters ngram replay]

SmolLM2-135M in bfloat16 decodes prompts of three sets. Each prompt is run by every arm in
turn, the order turned by one each prompt: plain, and with each drafter `bastion`,
`bastion:paper`, `chain` and the best-first tree of each fixed size. All arms decode the text
that plain decoding wrote (profiler/bench/forced.py). With the n-gram drafter acceptance is real;
with the replay drafter it is simulated, at published rates, and labelled so.

For each set and drafter: tokens/s of each arm, the best fixed size in hindsight, paired
bootstrap intervals over the prompts, and the same figures from the rounds that `bastion`
recorded, where the costs are the profile's and every size is asked of the same rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, read_prompts, store
from benchmarks.recorded_rounds import Text, hindsight_of, read_trace, summary
from costmodel.published_acceptance import published
from decoder import TreeDecoder
from decoder.demo_model import DEMO_NAME, ensure_demo_model
from decoder.drafters.base import Drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.replay import ReplayDrafter, Truth
from profiler.bench.forced import ForcedTarget
from profiler.rounds import paired_ratio

SETS = ("gsm8k", "humaneval", "mt_bench")
TABLES = ("bastion", "ddtree")
FIXED = tuple(f"fixed:{nodes}" for nodes in (1, 3, 7, 15, 31, 63, 127))
POLICIES = ("bastion", "bastion:paper", "chain", *FIXED)
MOST = 127
WARM_UP_TOKENS = 96


@dataclass(slots=True)
class Arm:
    """A decoder, and what it did with each prompt."""

    decoder: TreeDecoder
    new_tokens: int
    trace: Path | None = None
    rows: list[dict[str, float]] = field(default_factory=list)

    def run(self, prompt: list[int]) -> None:
        stats = self.decoder.generate(prompt, max_new_tokens=self.new_tokens).stats
        self.rows.append(
            {
                "tokens": stats.new_tokens - 1,
                "seconds": stats.decode_s,
                "rounds": stats.rounds,
                "nodes": stats.drafted_tokens,
            }
        )

    def pairs(self) -> list[tuple[float, float]]:
        return [(row["tokens"], row["seconds"]) for row in self.rows]

    def figures(self) -> dict[str, float]:
        total = {key: sum(row[key] for row in self.rows) for key in self.rows[0]}
        return {
            "tokens_per_s": total["tokens"] / total["seconds"],
            "tokens_per_verification": total["tokens"] / total["rounds"],
            "nodes_per_verification": total["nodes"] / total["rounds"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One drafter on one prompt set: an arm for each policy.

    make  a fresh drafter; each arm has one of its own, since drafters learn
    """

    name: str
    label: str
    make: Any
    arms: dict[str, Arm]

    @classmethod
    def open(
        cls, name: str, label: str, make: Any, target: ForcedTarget, work: tuple[int, Path]
    ) -> Series:
        """work: new tokens a prompt, and a folder for traces."""
        new_tokens, folder = work
        arms = {}
        for policy in POLICIES:
            trace = folder / f"{name}.{label}.{policy}.jsonl".replace(" ", "_").replace(":", "-")
            decoder = TreeDecoder(
                target, drafter=make(), policy=policy, max_nodes=MOST, trace=trace
            )
            arms[policy] = Arm(decoder, new_tokens, trace)
        return cls(name=name, label=label, make=make, arms=arms)

    def result(self, plain: Arm, texts: list[list[int]], prompts: list[int]) -> dict[str, Any]:
        """texts: all that were decoded, warm-up first; prompts: their prompt lengths."""
        figures = {name: arm.figures() for name, arm in self.arms.items()}
        best = max(FIXED, key=lambda name: figures[name]["tokens_per_s"])
        ours = self.arms["bastion"].pairs()
        against = {"best_fixed": self.arms[best], "plain": plain} | {
            name: self.arms[name] for name in ("chain", "bastion:paper")
        }
        return {
            "drafter": self.arms["bastion"].decoder.drafter.name,
            "best_fixed": best,
            "bastion_over": {
                name: paired_ratio(ours, arm.pairs()) for name, arm in against.items()
            },
            "arms": {"plain": plain.figures()} | figures,
            "recorded_rounds": self._recorded(texts, prompts),
            "rows": {name: arm.rows for name, arm in self.arms.items()},
        }

    def _recorded(self, texts: list[list[int]], prompts: list[int]) -> dict[str, Any]:
        arm = self.arms["bastion"]
        cost = arm.decoder.cost_source.cost.cost
        lines = read_trace(arm.trace)
        run = [
            Text(
                tokens=text[: prompt + (arm.new_tokens if number else WARM_UP_TOKENS)],
                prompt=prompt,
                rounds=[line for line in lines if line["text"] == number],
            )
            for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
        ]
        found = hindsight_of(run, self.make(), cost)
        return summary(run[1:], found[1:], cost)


def warm_up(arms: dict[str, Arm], target: ForcedTarget, text: list[int], prompt: int) -> None:
    """Every arm once on a short text, so that compilation and first shapes are not timed."""
    target.follow(text[: prompt + WARM_UP_TOKENS])
    for arm in arms.values():
        arm.decoder.generate(text[:prompt], max_new_tokens=WARM_UP_TOKENS)


def run_set(
    target: ForcedTarget, prompts: list[list[int]], series: list[Series], plain: Arm
) -> dict[str, Any]:
    """All arms of a set, prompt by prompt; the first prompt warms up as well."""
    writer = TreeDecoder(target._target, policy="plain")
    truths = [
        prompt + writer.generate(prompt, max_new_tokens=plain.new_tokens).token_ids
        for prompt in prompts
    ]
    arms = {"plain": plain} | {
        f"{one.label} {name}": arm for one in series for name, arm in one.arms.items()
    }
    for one in series:
        for arm in one.arms.values():
            if isinstance(arm.decoder.drafter, ReplayDrafter):
                for text in truths:
                    arm.decoder.drafter.truth.add(text)
    warm_up(arms, target, truths[0], len(prompts[0]))
    names = list(arms)
    for index, (prompt, text) in enumerate(zip(prompts, truths, strict=True)):
        target.follow(text)
        turn = index * 7 % len(names)
        for name in names[turn:] + names[:turn]:
            arms[name].run(prompt)
        print(f"  {index + 1}/{len(prompts)}", flush=True)
    texts = [truths[0], *truths]
    lengths = [len(prompts[0]), *map(len, prompts)]
    return {one.label: one.result(plain, texts, lengths) for one in series}


def open_series(
    target: ForcedTarget, name: str, options: argparse.Namespace, folder: Path
) -> list[Series]:
    """The n-gram drafter, and a replay of each table's curve for this set."""
    series = []
    if "ngram" in options.drafters:
        work = (options.ngram_tokens, folder)
        series.append(Series.open(name, "ngram", NgramDrafter, target, work))
    if "replay" in options.drafters:
        vocab = target.architecture.vocab
        for table in TABLES:
            process, truth = published(table, name), Truth()

            def make(process: Any = process, truth: Truth = truth) -> Drafter:
                return ReplayDrafter(truth, process, vocab=vocab)

            work = (options.replay_tokens, folder)
            series.append(Series.open(name, f"replay {table}", make, target, work))
    return series


def report(results: dict[str, dict[str, Any]]) -> None:
    for name, by_label in results.items():
        for label, result in by_label.items():
            over = {key: f"{value['ratio']:.3f}" for key, value in result["bastion_over"].items()}
            recorded = result["recorded_rounds"]["over_best_fixed"]
            print(f"{name}, {label}: best {result['best_fixed']}, bastion over {over}")
            print(f"  recorded rounds: {recorded['ratio']:.3f} {recorded['interval_95']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=5)
    parser.add_argument("--ngram-tokens", type=int, default=64)
    parser.add_argument("--replay-tokens", type=int, default=96)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--drafters", nargs="+", default=["ngram", "replay"])
    options = parser.parse_args()
    ensure_demo_model(say=print)
    loaded = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="plain")
    target = ForcedTarget(loaded.target)
    header = {"environment": environment(), "dtype": str(torch.bfloat16), "target": DEMO_NAME}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sets:
            prompts = [
                loaded.encode(line["prompt"], chat=True)
                for line in read_prompts(name, options.prompts_per_set)
            ]
            plain = Arm(
                TreeDecoder(target, policy="plain"),
                max(options.ngram_tokens, options.replay_tokens),
            )
            series = open_series(target, name, options, Path(folder))
            print(name)
            results[name] = run_set(target, prompts, series, plain)
    report(results)
    for drafter, acceptance in (("ngram", "real"), ("replay", "simulated")):
        if drafter not in options.drafters:
            continue
        picked = {
            name: {label: found for label, found in by_label.items() if label.startswith(drafter)}
            for name, by_label in results.items()
        }
        tokens = vars(options)[f"{drafter}_tokens"]
        store(
            f"controller_{drafter}",
            header | {"acceptance": acceptance, "new_tokens": tokens, "sets": picked},
        )


if __name__ == "__main__":
    main()

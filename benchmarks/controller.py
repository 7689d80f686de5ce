"""The controller against every fixed tree size, live on a CPU with a real model.

    python -m benchmarks.controller [--prompts-per-set 5] [--drafters ngram demo ngram+demo replay]

SmolLM2-135M in bfloat16 decodes prompts of three sets: plain, and with each drafter by `bastion`,
`bastion:paper`, `chain` and the best-first tree of each fixed size. All arms decode the text
that plain decoding wrote (profiler/bench/forced.py), and they do so together: every arm has a
target of its own around the same weights and runs one round in its turn, the order turned by
one each time, so that a machine that becomes slower for a second or a minute becomes so for all.
With the n-gram drafter and the trained one acceptance is real; with the replay drafter it is
simulated, at published rates, and labelled so.

For each set and drafter: tokens/s of each arm, the best fixed size in hindsight, paired
bootstrap intervals over the prompts; and, for drafters that read no hidden states, the same
figures from the rounds that `bastion` recorded, where the costs are the profile's and every size
is asked of the same rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
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
from decoder.drafters.factory import load_drafter
from decoder.drafters.replay import ReplayDrafter, Truth
from decoder.loading import LoadedModel
from decoder.run import DecodeRun
from decoder.target import Target
from profiler.bench.forced import ForcedTarget
from profiler.rounds import paired_ratio

SETS = ("gsm8k", "humaneval", "mt_bench")
TABLES = ("bastion", "ddtree")
FIXED = tuple(f"fixed:{nodes}" for nodes in (1, 3, 7, 15, 31, 63))
POLICIES = ("bastion", "bastion:paper", "chain", *FIXED)
MOST = 127
WARM_UP_TOKENS = 96
ACCEPTANCE = {"ngram": "real", "demo": "real", "ngram+demo": "real", "replay": "simulated"}

Make = Callable[[Target], Drafter]


@dataclass(slots=True)
class Arm:
    """A decoder, and what it did with each prompt."""

    decoder: TreeDecoder
    new_tokens: int
    trace: Path | None = None
    rows: list[dict[str, float]] = field(default_factory=list)

    def begin(self, text: list[int], prompt: int, new_tokens: int) -> DecodeRun:
        """The text's prompt, to be decoded round by round."""
        self.decoder.target.follow(text)
        return self.decoder.stream(text[:prompt], max_new_tokens=new_tokens)

    def note(self, run: DecodeRun) -> None:
        """Keep what a run did that has ended; its seconds are those of its own rounds."""
        stats = run.stats
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

    make  a fresh drafter for a target; each arm has one of its own, since drafters learn
    """

    name: str
    label: str
    make: Make
    arms: dict[str, Arm]

    @classmethod
    def open(
        cls, name: str, label: str, make: Make, loaded: LoadedModel, work: tuple[int, Path]
    ) -> Series:
        """work: new tokens a prompt, and a folder for traces."""
        new_tokens, folder = work
        arms = {}
        for policy in POLICIES:
            trace = folder / f"{name}.{label}.{policy}.jsonl".replace(" ", "_").replace(":", "-")
            target = Target(loaded)
            decoder = TreeDecoder(
                ForcedTarget(target),
                drafter=make(target),
                policy=policy,
                max_nodes=MOST,
                trace=trace,
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

    def _recorded(self, texts: list[list[int]], prompts: list[int]) -> dict[str, Any] | None:
        arm = self.arms["bastion"]
        if arm.decoder.drafter.feature_layers:
            return None  # nothing is drafted again without the target's hidden states
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
        found = hindsight_of(run, self.make(arm.decoder.target), cost)
        return summary(run[1:], found[1:], cost)


def run_together(arms: dict[str, Arm], text: list[int], prompt: int, new_tokens: int) -> None:
    """One text by every arm, round by round in turns."""
    runs = {name: arm.begin(text, prompt, new_tokens) for name, arm in arms.items()}
    going = {name: run.rounds() for name, run in runs.items()}
    turn = 0
    while going:
        names = list(going)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if next(going[name], None) is None:
                del going[name]
        turn += 1
    for name, run in runs.items():
        arms[name].note(run)


def run_set(
    writer: TreeDecoder, prompts: list[list[int]], series: list[Series], plain: Arm
) -> dict[str, Any]:
    """All arms of a set, prompt by prompt; the first prompt warms up as well.

    writer  plain decoding with a target that nothing forces
    """
    truths = [
        prompt + writer.generate(prompt, max_new_tokens=plain.new_tokens).token_ids
        for prompt in prompts
    ]
    arms = {"plain": plain} | {
        f"{one.label} {name}": arm for one in series for name, arm in one.arms.items()
    }
    for arm in arms.values():
        if isinstance(arm.decoder.drafter, ReplayDrafter):
            for text in truths:
                arm.decoder.drafter.truth.add(text)
    # Compilation and first shapes are not timed.
    length = len(prompts[0])
    run_together(arms, truths[0][: length + WARM_UP_TOKENS], length, WARM_UP_TOKENS)
    for arm in arms.values():
        arm.rows.clear()
    for index, (prompt, text) in enumerate(zip(prompts, truths, strict=True)):
        run_together(arms, text, len(prompt), plain.new_tokens)
        print(f"  {index + 1}/{len(prompts)}", flush=True)
    texts = [truths[0], *truths]
    lengths = [len(prompts[0]), *map(len, prompts)]
    return {one.label: one.result(plain, texts, lengths) for one in series}


def makers(name: str, drafter: str, vocab: int) -> dict[str, Make]:
    """What makes the drafters of this name, by label; a replay of each table's curve of the set."""
    if drafter != "replay":
        return {drafter: lambda target: load_drafter(drafter, target)}
    made: dict[str, Make] = {}
    for table in TABLES:
        process, truth = published(table, name), Truth()

        def make(_: Target, process: Any = process, truth: Truth = truth) -> Drafter:
            return ReplayDrafter(truth, process, vocab=vocab)

        made[f"replay {table}"] = make
    return made


def report(results: dict[str, dict[str, Any]]) -> None:
    for name, by_label in results.items():
        for label, result in by_label.items():
            over = {key: f"{value['ratio']:.3f}" for key, value in result["bastion_over"].items()}
            print(f"{name}, {label}: best {result['best_fixed']}, bastion over {over}")
            if result["recorded_rounds"] is not None:
                recorded = result["recorded_rounds"]["over_best_fixed"]
                print(f"  recorded rounds: {recorded['ratio']:.3f} {recorded['interval_95']}")


def overall(by_set: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One drafter over all sets: `bastion` against the one fixed size that is best on the whole."""
    rows = {
        policy: [row for found in by_set.values() for row in found["rows"][policy]]
        for policy in ("bastion", *FIXED)
    }
    pairs = {name: [(row["tokens"], row["seconds"]) for row in own] for name, own in rows.items()}
    rates = {
        name: sum(tokens for tokens, _ in own) / sum(seconds for _, seconds in own)
        for name, own in pairs.items()
    }
    best = max(FIXED, key=lambda name: rates[name])
    return {
        "best_fixed": best,
        "tokens_per_s": rates,
        "bastion_over_best_fixed": paired_ratio(pairs["bastion"], pairs[best]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--drafters", nargs="+", default=list(ACCEPTANCE), choices=list(ACCEPTANCE))
    options = parser.parse_args()
    ensure_demo_model(say=print)
    writer = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="plain")
    loaded, vocab = writer.target.loaded, writer.target.architecture.vocab
    header = {"environment": environment(), "dtype": str(torch.bfloat16), "target": DEMO_NAME}
    for drafter in options.drafters:
        results: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in options.sets:
                prompts = [
                    writer.encode(line["prompt"], chat=True)
                    for line in read_prompts(name, options.prompts_per_set)
                ]
                plain = Arm(
                    TreeDecoder(ForcedTarget(Target(loaded)), policy="plain"), options.new_tokens
                )
                work = (options.new_tokens, Path(folder))
                series = [
                    Series.open(name, label, make, loaded, work)
                    for label, make in makers(name, drafter, vocab).items()
                ]
                print(f"{drafter}, {name}")
                results[name] = run_set(writer, prompts, series, plain)
        report(results)
        labels = next(iter(results.values()))
        stored = header | {"acceptance": ACCEPTANCE[drafter], "new_tokens": options.new_tokens}
        stored["overall"] = {
            label: overall({name: by_label[label] for name, by_label in results.items()})
            for label in labels
        }
        store(f"controller_{drafter.replace('+', '_')}", stored | {"sets": results})


if __name__ == "__main__":
    main()

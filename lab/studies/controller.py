"""The adaptive policy against fixed tree sizes at published acceptance, live on a CPU.

    python -m lab.studies.controller [--prompts-per-set 5]

SmolLM2-135M in bfloat16 decodes prompts of three sets: plainly, and with a simulated drafter by
`bastion`, `bastion:paper`, `bastion:printed`, `chain` and the best-first tree of each fixed size.
The model and its times are real. Acceptance is simulated at the rates of a published table for
the set, and labelled so; `rooftree bench --by-round --same-text` does the same with real
drafters. All arms decode the text that plain decoding wrote (`bench.arms.given_text`). They
decode it together: each arm has its own target around the same weights and runs one round in its
turn, the order rotated by one each time, so that a slow moment of the machine affects all alike.

For each set and table it stores tokens/s of each arm, the best fixed size in hindsight, and
paired bootstrap intervals over the prompts; and the same figures from the rounds that `bastion`
recorded, with the profile's costs and every size applied to the same rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from costmodel.acceptance import published
from decoder.engine import TreeDecoder
from decoder.generation import DecodeRun
from decoder.model.demo_model import DEMO_NAME, ensure_demo_model
from decoder.model.loading import LoadedModel
from decoder.model.target import make_target
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth
from lab.studies.common import environment, read_prompts, store
from lab.studies.recorded_rounds import Text, hindsight_of, read_trace, summary
from lab.studies.rounds import pooled_ratio
from profiler.measure.samples import in_turn

SETS = ("gsm8k", "humaneval", "mt_bench")
TABLES = ("bastion", "ddtree")
FIXED = tuple(f"fixed:{nodes}" for nodes in (1, 3, 7, 15, 31, 63))
PAPER = ("bastion:paper", "bastion:printed")
POLICIES = ("bastion", *PAPER, "chain", *FIXED)
MOST = 127
WARM_UP_TOKENS = 96


@dataclass(slots=True)
class Arm:
    """A decoder, and its tokens, seconds, rounds and nodes for each prompt."""

    decoder: TreeDecoder
    new_tokens: int
    trace: Path | None = None
    rows: list[dict[str, float]] = field(default_factory=list)

    def begin(self, text: list[int], prompt: int, new_tokens: int) -> DecodeRun:
        """Start the text's prompt, to be decoded round by round."""
        self.decoder.target.follow(text)
        return self.decoder.stream(text[:prompt], max_new_tokens=new_tokens)

    def note(self, run: DecodeRun) -> None:
        """Record a finished run. Its seconds are those of its own rounds."""
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


@dataclass(frozen=True, slots=True)
class Series:
    """The arms of all policies at one table's acceptance on one prompt set."""

    label: str
    drafter: SimulatedDrafter
    arms: dict[str, Arm]

    @classmethod
    def open(cls, name: str, table: str, loaded: LoadedModel, work: tuple[int, Path]) -> Series:
        """work: new tokens per prompt, and a folder for traces."""
        new_tokens, folder = work
        drafter = SimulatedDrafter(Truth(), published(table, name), vocab=loaded.architecture.vocab)
        arms = {}
        for policy in POLICIES:
            trace = folder / f"{name}.{table}.{policy}.jsonl".replace(":", "-")
            decoder = TreeDecoder(
                GivenTextTarget(make_target(loaded)),
                drafter=drafter,
                policy=policy,
                max_nodes=MOST,
                trace=trace,
            )
            arms[policy] = Arm(decoder, new_tokens, trace)
        return cls(f"replay {table}", drafter, arms)

    def result(self, plain: Arm, texts: list[list[int]], prompts: list[int]) -> dict[str, Any]:
        """texts: all decoded texts, warm-up first; prompts: their prompt lengths."""
        figures = {name: arm.figures() for name, arm in self.arms.items()}
        best = max(FIXED, key=lambda name: figures[name]["tokens_per_s"])
        bastion = self.arms["bastion"].pairs()
        against = {"best_fixed": self.arms[best], "plain": plain} | {
            name: self.arms[name] for name in ("chain", *PAPER)
        }
        return {
            "drafter": self.drafter.name,
            "best_fixed": best,
            "bastion_over": {
                name: pooled_ratio(bastion, arm.pairs()) for name, arm in against.items()
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
        hindsights = hindsight_of(run, self.drafter, cost)
        return summary(run[1:], hindsights[1:], cost)


def run_together(arms: dict[str, Arm], text: list[int], prompt: int, new_tokens: int) -> None:
    """Decode one text with every arm, one round each in turn."""
    runs = {name: arm.begin(text, prompt, new_tokens) for name, arm in arms.items()}
    for _ in in_turn({name: run.rounds() for name, run in runs.items()}, rotation=0):
        pass
    for name, run in runs.items():
        arms[name].note(run)


def run_set(
    writer: TreeDecoder, prompts: list[list[int]], series: list[Series], plain: Arm
) -> dict[str, Any]:
    """Decode a set with all arms, prompt by prompt; the first prompt also warms up.

    writer  plain decoding with an ordinary target
    """
    truths = [
        prompt + writer.generate(prompt, max_new_tokens=plain.new_tokens).token_ids
        for prompt in prompts
    ]
    arms = {"plain": plain} | {
        f"{one.label} {name}": arm for one in series for name, arm in one.arms.items()
    }
    for one in series:
        for text in truths:
            one.drafter.truth.add(text)
    # The warm-up compiles kernels and meets new shapes.
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


def report(results: dict[str, dict[str, Any]]) -> None:
    for name, by_label in results.items():
        for label, result in by_label.items():
            over = {key: f"{value['ratio']:.3f}" for key, value in result["bastion_over"].items()}
            print(f"{name}, {label}: best {result['best_fixed']}, bastion over {over}")
            recorded = result["recorded_rounds"]["over_best_fixed"]
            print(f"  recorded rounds: {recorded['ratio']:.3f} {recorded['interval_95']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts-per-set", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    options = parser.parse_args()
    ensure_demo_model(say=print)
    writer = TreeDecoder.from_pretrained(DEMO_NAME, dtype="bfloat16", policy="plain")
    loaded = writer.target.loaded
    header = {"environment": environment(), "dtype": str(torch.bfloat16), "target": DEMO_NAME}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sets:
            prompts = [
                writer.encode(line["prompt"], chat=True)
                for line in read_prompts(name, options.prompts_per_set)
            ]
            plain = Arm(
                TreeDecoder(GivenTextTarget(make_target(loaded)), policy="plain"),
                options.new_tokens,
            )
            work = (options.new_tokens, Path(folder))
            series = [Series.open(name, table, loaded, work) for table in TABLES]
            print(name)
            results[name] = run_set(writer, prompts, series, plain)
    report(results)
    stored = header | {"acceptance": "simulated", "new_tokens": options.new_tokens}
    store("controller_replay", stored | {"sets": results})


if __name__ == "__main__":
    main()

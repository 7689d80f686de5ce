"""The numbers of README, docs and model card, from stored results and nothing else.

python -m benchmarks.readme          # prints the blocks
python -m benchmarks.readme --write  # puts them between their markers
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.bench_tables import (
    arm_table,
    family_tables,
    heading,
    main_arms,
    set_table,
    sweep_table,
)
from benchmarks.common import RESULTS
from benchmarks.trained import blockpilot_table, demo_table, specblock_table
from profiler.bench.record import Result
from profiler.bench.store import read_result

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / page
    for page in ("README.md", "docs/benchmark.md", "docs/training.md", "decoder/demo/README.md")
)
BLOCK = re.compile(r"<!-- ([a-z-]+): begin -->\n(.*?)<!-- \1: end -->", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ratio(value: dict[str, Any]) -> str:
    low, high = value["interval_95"]
    return f"{value['pooled']:.2f}x ({low:.2f} to {high:.2f})"


def live(found: dict[str, Any]) -> str:
    """A ratio of `bastion` to a fixed size, with its interval."""
    low, high = found["interval_95"]
    return f"{found['ratio']:.2f}x ({low:.2f} to {high:.2f})"


def simulated() -> list[tuple[str, float, float]]:
    """Place, mean and worst of `bastion` over the best fixed size, by costs of that place."""
    places = result("controller_simulated")["places"]
    found = {name: place["over_best_fixed"]["bastion"] for name, place in places.items()}
    return [(name, one["mean"], one["worst"]) for name, one in found.items()]


def numbers() -> str:
    """The block, in Markdown."""
    replay = result("controller_replay")["sets"]
    held_out, startup = result("held_out"), result("startup")
    speed, no_loss, exact = (result(f"real_text_{name}") for name in ("speed", "no_loss", "exact"))
    chosen, linear = held_out["selected_calibration"], held_out["linear_calibration"]
    machine = speed["environment"]
    rates = speed["tokens_per_s"]
    differing = len({one["prompt"] for one in exact["differences"]})
    rows = [
        ("profile against fresh measurements, fresh process: median / worst error",
         f"{chosen['median_error']:.1%} / {chosen['worst_error']:.1%}"
         f" at {len(held_out['points'])} points (measurements repeat to"
         f" {held_out['repeat_noise']:.1%})"),
        ("tokens/s lost by choosing the tree size from the profile: mean / worst",
         f"{chosen['regret_mean']:.2%} / {chosen['regret_worst']:.1%}"),
        ("the same for the linear calibration alone",
         f"errors {linear['median_error']:.1%} / {linear['worst_error']:.1%}, lost"
         f" {linear['regret_mean']:.1%} / {linear['regret_worst']:.1%}"),
        ("RMSE that the linear calibration takes off the bare roofline",
         f"{held_out['linear_rmse_reduction']:.0%} (paper, on GPUs: 87-92 %)"),
        ("our plain step over transformers' plain `generate`",
         ratio(speed["plain_over_transformers_plain"])),
        ("draft trees over our plain step", ratio(speed["trees_over_plain"])),
        ("draft trees over transformers' prompt lookup",
         ratio(speed["trees_over_transformers_lookup"])),
        ("tokens a verification", f"{speed['tokens_per_verification']:.2f}"),
        ("tokens/s: transformers, its prompt lookup, our plain step, our trees",
         ", ".join(f"{rates[name]:.1f}" for name in
                   ("transformers_plain", "transformers_lookup", "plain", "trees"))),
        ("a drafter that is always wrong and always sure, over plain",
         ratio(no_loss["wrong_over_plain"])),
        ("the n-gram drafter on encyclopaedia text, over plain",
         ratio(no_loss["trees_over_plain"])),
        ("float32, T = 0: texts that differ from transformers' greedy `generate`",
         f"{differing} of {exact['prompts']}"),
        ("`bastion` over the best fixed size in hindsight, gsm8k, humaneval, mt_bench, at published"
         " acceptance (simulated, Qwen3-8B of BASTION's table 1)",
         "; ".join(live(one["replay bastion"]["bastion_over"]["best_fixed"])
                   for one in replay.values())),
        ("the same in simulation, 92 published acceptances: mean, worst",
         "; ".join(f"{place} {mean:.3f}, {worst:.3f}" for place, mean, worst in simulated())),
        ("share of a cycle that is not the verification forward",
         f"{1 - speed['stage_shares']['verify']:.1%}"),
        ("`rooftree --help`; profile lookup and load (medians)",
         f"{startup['help']['median_s'] * 1e3:.0f} ms;"
         f" {startup['lookup_and_load']['median_s'] * 1e3:.1f} ms"),
        ("building the best tree of 256 / 1024 nodes over 15 positions",
         f"{startup['build']['256']['median_s'] * 1e6:.0f} /"
         f" {startup['build']['1024']['median_s'] * 1e6:.0f} us"),
    ]  # fmt: skip
    lines = [
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch_version']},"
        f" transformers {machine['transformers_version']}, {machine['created_utc'][:10]};"
        f" SmolLM2-135M-Instruct, n-gram drafter, {speed['dtype']} where not said otherwise;"
        f" {len(speed['rows'])} prompts of gsm8k, humaneval and mt_bench, {speed['new_tokens']} new"
        " tokens; ratios are pooled over prompts, with 95 % bootstrap intervals.",
        "",
        "| what | measured |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows),
    ]
    return "\n".join(lines)


@cache
def bench_result(name: str = "bench") -> Result:
    return read_result(RESULTS / f"{name}.json")


def bench_short() -> str:
    """The stored run in short: policies, the best sizes and the peers."""
    result = bench_result()
    return "\n".join([heading(result), "", *arm_table(result, main_arms(result))])


def bench_whole() -> str:
    """The stored run with every arm, the sweeps and the prompt sets."""
    result = bench_result()
    parts = [
        [heading(result)],
        arm_table(result, [arm.name for arm in result.arms]),
        sweep_table(result),
        ["Over plain decoding, and tokens a verification, by prompt set:"],
        set_table(result),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def bench_families(name: str) -> str:
    """A stored run of drafters of one kind: its heading and its tables of families."""
    result = bench_result(name)
    return "\n".join([heading(result), "", *family_tables(result)])


def bench_arms(name: str) -> str:
    """A stored run with every arm."""
    result = bench_result(name)
    arms = arm_table(result, [arm.name for arm in result.arms])
    return "\n".join([heading(result), "", *arms])


BLOCKS: Mapping[str, Callable[[], str]] = {
    "numbers": numbers,
    "bench-short": bench_short,
    "bench-whole": bench_whole,
    "bench-again": lambda: "\n\n".join(map(bench_arms, ("bench_again", "bench_30_prompts"))),
    "bench-other-sets": lambda: bench_arms("bench_other_sets"),
    "bench-own-texts": lambda: bench_arms("bench_own_texts"),
    "bench-drafters": lambda: bench_families("bench_drafters"),
    "bench-updates": lambda: bench_families("bench_updates"),
    "bench-studies": lambda: bench_arms("bench_studies"),
    "trained-demo": demo_table,
    "trained-specblock": specblock_table,
    "trained-blockpilot": blockpilot_table,
}


def with_numbers(text: str) -> str:
    """`text` with every block between its markers."""

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name}: begin -->\n{BLOCKS[name]()}\n<!-- {name}: end -->"

    return BLOCK.sub(filled, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    for page in PAGES:
        text = with_numbers(page.read_text(encoding="utf-8"))
        if write:
            page.write_text(text, encoding="utf-8")
        else:
            print("\n\n".join(found[0] for found in BLOCK.finditer(text)))


if __name__ == "__main__":
    main()

"""The README's numbers, from stored results and nothing else.

python -m benchmarks.readme          # prints the block
python -m benchmarks.readme --write  # puts it between the README's markers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def ratio(value: dict[str, Any]) -> str:
    low, high = value["interval_95"]
    return f"{value['pooled']:.2f}x ({low:.2f} to {high:.2f})"


def numbers() -> str:
    """The block, in Markdown."""
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


def with_numbers(text: str) -> str:
    """`text` with the block between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{numbers()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(with_numbers(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(numbers())


if __name__ == "__main__":
    main()

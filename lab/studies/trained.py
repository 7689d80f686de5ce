"""Stores the --json output of the training commands, and makes tables of it.

python -m lab.studies.trained demo=printed.json specblock=other.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.studies.common import RESULTS

TRAINED = RESULTS / "trained_drafters.json"
DEMO = ("demo-start", "demo")  # runs, each from the end of the one before, of the shipped drafter


def runs() -> dict[str, dict[str, Any]]:
    """Every stored run by its name: settings, counts, environment and validations."""
    stored: dict[str, dict[str, Any]] = json.loads(TRAINED.read_text(encoding="utf-8"))
    return stored


def demo_table() -> str:
    """The shipped drafter's data, steps and figures, in Markdown."""
    stored = runs()
    return "\n\n".join(_history(stored[name]) for name in DEMO if name in stored)


def _history(run: Mapping[str, Any]) -> str:
    settings, last, history = run["settings"], run["last"], run["history"]
    machine = run["environment"]
    depths = sorted(int(name.split("_")[1]) for name in last if name.startswith("accepted_"))
    shares = [f"{last[f'accepted_{depth}']:.0%}" for depth in depths]
    some = history[:: max(1, len(history) // 6)]
    rows = some if some[-1] == last else [*some, last]
    # The first runs used templates alone and do not name them.
    openings = run["collecting"].get("openings", "templates")
    # Training builds no trees of scores that depend on the token before.
    trees = [f"{row['tree']:.2f}" if "tree" in row else "-" for row in rows]
    begun = f"From {run['from']}: " if run.get("from") else ""
    return "\n".join(
        [
            f"{begun}{run['texts']:,} texts ({run['tokens']:,} tokens written by the target, "
            f"openings: {openings}), "
            f"{run['held_out']} more held out; {settings['steps']:,} steps of {settings['batch']} "
            f"texts, AdamW at {settings['learning_rate']:g}, {last['seconds'] / 60:.0f} minutes "
            f"on one core of {machine['device']} beside other work, torch "
            f"{machine['fields']['torch_version']}, {machine['created_utc'][:10]}.",
            "",
            "Held-out texts, greedy, the target's tokens as truth, the bonus token included:",
            "",
            "| after step | chain of 7, tokens a verification | best-first tree of 16 nodes |",
            "|---|---|---|",
            *(
                f"| {row['step']:,.0f} | {row['chain']:.2f} | {tree} |"
                for row, tree in zip(rows, trees, strict=True)
            ),
            "",
            f"| first i places right | {' | '.join(map(str, depths))} |",
            "|---" * (len(depths) + 1) + "|",
            f"| share of blocks | {' | '.join(shares)} |",
        ]
    )


def blockpilot_table() -> str:
    """Acceptance of each block size on held-out prompts, and of the predictor's choices."""
    run = runs()["blockpilot"]
    held_out, sizes = run["held_out"], run["block_sizes"]
    cells = [*held_out["fixed"], held_out["chosen"], held_out["hindsight"]]
    names = [f"block of {size}" for size in sizes] + ["BlockPilot", "the best of each, afterwards"]
    return "\n".join(
        [
            f"{run['trained']['samples']} prompts to train on, {held_out['samples']} that chose "
            "the epoch; tokens a verification on these, as chains, bonus token included:",
            "",
            f"| {' | '.join(names)} |",
            "|---" * len(names) + "|",
            f"| {' | '.join(f'{length:.2f}' for length in cells)} |",
        ]
    )


def without_places(printed: Mapping[str, Any]) -> dict[str, Any]:
    """A run without its folder; of the drafter that it continued from, the name alone."""
    run = {name: value for name, value in printed.items() if name != "drafter"}
    return run | ({"from": Path(run["from"]).name} if run.get("from") else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE")
    stored = runs() if TRAINED.is_file() else {}
    for argument in parser.parse_args().runs:
        name, _, place = argument.partition("=")
        stored[name] = without_places(json.loads(Path(place).read_text(encoding="utf-8")))
    TRAINED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""All figures of a result in one record of JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from profiler.bench.acceptance import acceptance_by_arm, acceptance_of
from profiler.bench.families import ablations, block_sizes, updates
from profiler.bench.figures import arm_figures
from profiler.bench.hindsight import hindsight
from profiler.bench.record import Result


def summarise(result: Result) -> dict[str, Any]:
    """Figures of every arm over all prompts and over each set, each drafter's sweep, and drafters
    of one kind beside each other."""
    sweeps = [hindsight(result, drafter.name) for drafter in result.drafters]
    return {
        "arms": [asdict(arm_figures(result, arm.name)) for arm in result.arms],
        "sets": {
            name: [asdict(arm_figures(result, arm.name, name)) for arm in result.arms]
            for name in result.sets
        },
        "hindsight": [asdict(sweep) for sweep in sweeps if sweep is not None],
        "updates": [asdict(own) for own in updates(result)],
        "ablations": [asdict(family) for family in ablations(result)],
        "block_sizes": [asdict(family) for family in block_sizes(result)],
    }


def derived(result: Result) -> dict[str, Any]:
    """What a result file holds beside the record, for readers that derive nothing themselves.

    `acceptance` is what `rooftree plan --acceptance` reads; that of other arms lies under
    `acceptance_by_arm`.
    """
    return {
        "summary": summarise(result),
        "acceptance": acceptance_of(result),
        "acceptance_by_arm": acceptance_by_arm(result),
    }

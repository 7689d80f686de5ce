"""Planned speedups of policies against those that `rooftree bench` measured, on other prompts.

    python -m lab.studies.measured_speedups RESULT.json PROFILE.yaml [--arms chain+ngram,...]

The prompts of every set are dealt to two halves in turn. What a policy's rounds looked like (nodes
and committed tokens) is taken from one half; its speed over plain decoding is planned from those
rounds and the profile alone, and compared with the speed that was measured on the other half;
then the other way round. No time that was measured in the benchmark is used for the plan.

Planned, at one request at once: the tokens of the rounds times plain steps of the profile, over
the cycles that the planner's step model gives for trees of those sizes, each at its own context.
A round without a draft is a plain step. For an adaptive policy this is the planner's expectation
over the sizes that it chose there; beside it stands the best fixed size of the sweep, which the
planner knows without having run the adaptive policy, where the result has one. `cost_error` is the
error of a plan from the scored prompts' own rounds: what is left without the luck of the halves.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.planning.batching import Overheads
from costmodel.planning.drafting import find_drafter
from costmodel.planning.engines import engine_rules
from costmodel.planning.forwards import ProfileForward
from costmodel.planning.request import ServingPolicy
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.simulation.steps import exact_steps
from costmodel.profile.profile import Profile
from lab.bench.analysis.hindsight import fixed_arms
from lab.bench.analysis.ratios import Ratio, paired_ratio, tally
from lab.bench.record import PLAIN, Arm, Response, Result
from lab.bench.store import read_result
from lab.studies.common import store

# Contexts are told apart in steps of so many tokens.
CONTEXT_STEP = 32

# Seconds of a cycle with a tree of so many nodes at a context.
CycleTime = Callable[[int, int], float]


def cycle_times(profile: Profile, drafter: str | None) -> CycleTime:
    """The planner's cycles of one request in this project's own decoder. Raises InputError."""
    steps = ProfileForward(profile=profile)
    server = Server(
        forward=steps,
        rules=engine_rules("rooftree"),
        overheads=Overheads(),
        policy=ServingPolicy(),
        drafter=None if drafter is None else find_drafter(steps, drafter),
    )

    @cache
    def seconds(nodes: int, context: int) -> float:
        point = OperatingPoint(
            running=1,
            shape="tree" if nodes else "plain",
            nodes=nodes,
            committed=1.0,
            cycle_s=0.0,
            tpot_s=0.0,
            prefill_s=0.0,
            ttft_s=0.0,
            requests_per_s=0.0,
        )
        return exact_steps(server, (point,))(1, 0, float(context))

    return lambda nodes, context: seconds(nodes, max(context // CONTEXT_STEP, 1) * CONTEXT_STEP)


def planned_speedup(
    responses: Sequence[Response], prompt_tokens: dict[str, int], cycle_s: CycleTime
) -> float:
    """Plain steps for the tokens of these responses over the cycles of their rounds.

    Raises InputError where there are no rounds.
    """
    plain_s = drafted_s = 0.0
    for response in responses:
        if response.rounds is None:
            raise InputError(f"the arm '{response.arm}' does not tell its rounds")
        context = prompt_tokens[response.prompt]
        plain_s += sum(cycle_s(0, context + done) for done in range(response.decoded_tokens))
        for nodes, accepted in zip(response.rounds.nodes, response.rounds.accepted, strict=True):
            drafted_s += cycle_s(nodes, context)
            context += 1 + accepted
    if not drafted_s:
        raise InputError("no round was recorded: there is nothing to plan from")
    return plain_s / drafted_s


def halves(result: Result) -> tuple[frozenset[str], frozenset[str]]:
    """Prompts of every set in turn, so that both halves have all sets."""
    found: tuple[list[str], list[str]] = ([], [])
    for name in result.sets:
        inside = [prompt.id for prompt in result.prompts if prompt.set == name]
        for index, prompt in enumerate(inside):
            found[index % 2].append(prompt)
    return frozenset(found[0]), frozenset(found[1])


def compare(result: Result, profile: Profile, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each arm and direction. Raises InputError."""
    if profile.target.architecture_hash != result.target.hash:
        raise InputError(f"the profile is of {profile.target.name}, not of {result.target.name}")
    rows = []
    for name in names:
        arm = result.arm(name)
        for known, scored in itertools.permutations(halves(result)):
            measured = _measured(result, name, scored)
            if measured is None:
                raise InputError(f"the arm '{name}' decoded nothing that can be compared")
            rows.append(_row(result, profile, arm, (known, scored), measured))
    return rows


def mean_errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean absolute error of each arm over both directions."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(abs(row["error"]))
    return {name: sum(errors) / len(errors) for name, errors in found.items()}


def _row(
    result: Result,
    profile: Profile,
    arm: Arm,
    split: tuple[frozenset[str], frozenset[str]],
    measured: Ratio,
) -> dict[str, Any]:
    planned, own = (_planned(result, profile, arm, half) for half in split)
    row: dict[str, Any] = {
        "arm": arm.name,
        "prompts_planned_from": len(split[0]),
        "prompts_measured": measured.prompts,
        "planned": round(planned, 4),
        "measured": round(measured.pooled, 4),
        "measured_low": measured.low and round(measured.low, 4),
        "measured_high": measured.high and round(measured.high, 4),
        "error": round(planned / measured.pooled - 1, 4),
        "cost_error": round(own / measured.pooled - 1, 4),
    }
    sweep = [] if arm.nodes or arm.drafter is None else fixed_arms(result, arm.drafter)
    if sweep:
        fixed = [(_planned(result, profile, one, split[0]), one.nodes) for one in sweep]
        best, nodes = max(fixed, key=lambda pair: pair[0])
        row |= {"best_fixed_planned": round(best, 4), "best_fixed_nodes": nodes}
    return row


def _planned(result: Result, profile: Profile, arm: Arm, known: frozenset[str]) -> float:
    responses = [response for response in result.of(arm.name) if response.prompt in known]
    lengths = {prompt.id: prompt.tokens for prompt in result.prompts}
    hashes = {drafter.name: drafter.hash for drafter in result.drafters}
    drafter = None if arm.drafter is None else hashes[arm.drafter]
    return planned_speedup(responses, lengths, cycle_times(profile, drafter))


def _measured(result: Result, arm: str, scored: frozenset[str]) -> Ratio | None:
    ours, plain = (
        tally([one for one in result.of(name) if one.prompt in scored], "decode")
        for name in (arm, PLAIN)
    )
    return paired_ratio(ours, plain)


def default_arms(result: Result) -> list[str]:
    """The first chain, the middle fixed size and the first bastion, of the first drafter."""
    ours = [arm for arm in result.arms if arm.kind == "policy" and not arm.variant]
    fixed = sorted((arm for arm in ours if arm.nodes), key=lambda arm: arm.nodes or 0)
    found = [
        next((arm for arm in ours if arm.policy == name), None) for name in ("chain", "bastion")
    ]
    middle = fixed[len(fixed) // 2] if fixed else None
    return [arm.name for arm in (found[0], middle, found[1]) if arm is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--arms", default="", help="names, with commas [chain, fixed, bastion]")
    chosen = parser.parse_args()
    result, profile = read_result(chosen.result), Profile.from_yaml(chosen.profile)
    names = [name for name in chosen.arms.split(",") if name] or default_arms(result)
    rows = compare(result, profile, names)
    for row in rows:
        print(
            f"{row['arm']}: planned {row['planned']:.3f}, measured {row['measured']:.3f}"
            f" ({row['error']:+.1%}; from its own rounds {row['cost_error']:+.1%})"
        )
    for name, error in mean_errors(rows).items():
        print(f"{name}: {error:.1%} mean error over both halves")
    store(
        "measured_speedups",
        {
            "environment": dataclasses.asdict(result.environment),
            "target": result.target.name,
            "profile_created_utc": profile.provenance.created_utc,
            "rows": rows,
            "mean_errors": mean_errors(rows),
        },
    )


if __name__ == "__main__":
    main()

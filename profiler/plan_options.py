"""A plan from the texts of the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from costmodel.capacity.arrivals import VARIATION, Sampling
from costmodel.capacity.goals import Goals
from costmodel.capacity.operating import Policy, Traffic
from costmodel.capacity.planner import Plan, plan
from costmodel.capacity.request import (
    PlanRequest,
    parse_degrees,
    parse_names,
    parse_prices,
    parse_rate,
)
from costmodel.capacity.requests import Requests, read_trace
from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError

# What --simulate without a number stands for: as many requests as is usual, or the whole trace.
EVERY = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `rooftree plan`, as they are typed."""

    target: str
    gpus: str
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    rate: str | None = None
    slo: str = ""
    acceptance: str | None = None
    temperature: str = "0"
    prices: tuple[str, ...] = ()
    tp: str = "1"
    policy: str = "auto"
    engine: str = "vllm"
    drafter: str | None = None
    weights: str = "bfloat16"
    cache: str = "bfloat16"
    utilisation: float = 0.8
    max_running: int = 256
    simulate: int | None = None
    trace: Path | None = None
    seed: int | None = None
    length_variation: float | None = None


def make_plan(options: PlanOptions) -> Plan:
    """Read the texts and plan. Raises InputError."""
    o = options
    gpus, goals = parse_names(o.gpus), Goals.parse(o.slo)
    trace = None if o.trace is None else read_trace(o.trace)
    traffic, rate = _traffic(o, trace)
    request = PlanRequest(
        target=o.target,
        gpus=gpus,
        traffic=traffic,
        rate=rate,
        goals=goals,
        acceptance=o.acceptance,
        temperature=int(o.temperature),
        prices=_prices(o.prices, gpus),
        degrees=parse_degrees(o.tp),
        policy=Policy.parse(o.policy),
        engine=o.engine,
        drafter=o.drafter,
        precision=Precision(weights=o.weights, cache=o.cache),
        utilisation=o.utilisation,
        most_running=o.max_running,
        sampling=_sampling(o, goals, trace),
    )
    return plan(request)


def _prices(texts: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """Prices by the names in `gpus`, whose capitals do not matter."""
    names = {gpu.lower(): gpu for gpu in gpus}
    return {names.get(name.lower(), name): price for name, price in parse_prices(texts).items()}


def _traffic(options: PlanOptions, trace: Requests | None) -> tuple[Traffic, float]:
    """Mean lengths and requests a second: the options', else those of the trace."""
    given = {
        "--prompt-tokens": options.prompt_tokens,
        "--output-tokens": options.output_tokens,
    }
    named = [name for name, value in given.items() if value is not None]
    if trace is None:
        missing = [name for name in (*given, "--rate") if name not in named]
        if options.rate is not None:
            missing.remove("--rate")
        if missing:
            raise InputError(
                f"say what the traffic is: {', '.join(missing)} missing",
                hint="Or give --trace FILE.csv with arrival_s,prompt_tokens,output_tokens",
            )
        prompt, output = (float(value or 0) for value in given.values())
        return Traffic(prompt_tokens=prompt, output_tokens=output), parse_rate(options.rate or "")
    if named:
        raise InputError(f"the trace has lengths of its own, but {named[0]} is given too")
    traffic = Traffic(
        prompt_tokens=float(trace.prompt_tokens.mean()),
        output_tokens=float(trace.output_tokens.mean()),
    )
    if options.rate is not None:
        return traffic, parse_rate(options.rate)
    if not math.isfinite(trace.rate_per_s):
        raise InputError("all requests of the trace arrive at once", hint="Give --rate")
    return traffic, trace.rate_per_s


def _sampling(options: PlanOptions, goals: Goals, trace: Requests | None) -> Sampling | None:
    """What is simulated, if anything: percentiles as goals ask for it too."""
    if options.simulate is None and not goals.percentiles:
        for name in ("seed", "length_variation"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"--{name.replace('_', '-')} is of a simulation", hint="Give --simulate too"
                )
        return None
    if trace is not None and options.length_variation is not None:
        raise InputError("the trace has lengths of its own, but --length-variation is given too")
    variation = VARIATION if options.length_variation is None else options.length_variation
    return Sampling(
        requests=None if options.simulate == EVERY else options.simulate,
        seed=options.seed or 0,
        variation=variation,
        trace=trace,
    )

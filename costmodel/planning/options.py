"""Plan requests from the texts of the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from costmodel.catalog import find_device
from costmodel.compose.serving_tables import Cache, Precision, Weights
from costmodel.errors import InputError
from costmodel.planning.request import (
    VARIATION,
    Goals,
    PlanRequest,
    ServingPolicy,
    SimulationSettings,
    parse_number,
    split_commas,
)
from costmodel.planning.traffic import Trace, Traffic, read_trace

# Value of --simulate without a number: REQUESTS requests, or the whole trace.
DEFAULT_REQUESTS = -1
_PERIODS_S = {
    "s": 1.0,
    "sec": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "d": 86400.0,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `rooftree plan` as they are typed."""

    target: str
    gpus: str
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    rate: str | None = None
    slo: str = ""
    acceptance: str | None = None
    temperature: str = "0"
    prices: tuple[str, ...] = ()
    currency: str = "USD"
    tp: str = "1"
    policy: str = "auto"
    engine: str = "vllm"
    drafter: str | None = None
    weights: Weights = "bfloat16"
    cache: Cache = "bfloat16"
    utilisation: float = 0.8
    max_running: int = 256
    simulate: int | None = None
    trace: Path | None = None
    seed: int | None = None
    length_variation: float | None = None


def request_from_options(options: PlanOptions) -> PlanRequest:
    """The request that the options describe. Raises InputError."""
    o = options
    gpus, goals = tuple(split_commas(o.gpus)), Goals.parse(o.slo)
    trace = None if o.trace is None else read_trace(o.trace)
    traffic, rate = _traffic(o, trace)
    return PlanRequest(
        target=o.target,
        gpus=gpus,
        traffic=traffic,
        rate=rate,
        goals=goals,
        acceptance=o.acceptance,
        temperature=int(o.temperature),
        prices=_prices(o.prices, gpus),
        currency=o.currency,
        degrees=parse_degrees(o.tp),
        policy=ServingPolicy.parse(o.policy),
        engine=o.engine,
        drafter=o.drafter,
        precision=Precision(weights=o.weights, cache=o.cache),
        utilisation=o.utilisation,
        most_running=o.max_running,
        simulation=_simulation(o, goals, trace),
    )


def parse_rate(text: str) -> float:
    """Requests a second from `5/s`, `300/min` or `5`. Raises InputError."""
    count, slash, unit = text.strip().partition("/")
    if slash and unit.strip() not in _PERIODS_S:
        raise InputError(f"'{text}' is not a rate", hint="Write 5/s, 300/min or 18000/h")
    return parse_number(count, text) / (_PERIODS_S[unit.strip()] if slash else 1.0)


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Prices from texts such as `h100-sxm=2.5,l40s=1`. Raises InputError."""
    prices: dict[str, float] = {}
    for part in (part for text in texts for part in split_commas(text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"'{part}' is not a price", hint="Write h100-sxm=2.5, per GPU and hour"
            )
        if name.strip() in prices:
            raise InputError(f"the price of {name.strip()} is given twice")
        prices[name.strip()] = parse_number(value, part)
    return prices


def parse_degrees(text: str) -> tuple[int, ...]:
    """Tensor-parallel degrees from `1,2,4`, ascending. Raises InputError."""
    degrees = split_commas(text)
    if not degrees or not all(part.isdecimal() for part in degrees):
        raise InputError(f"'{text}' are no tensor-parallel degrees", hint="Write --tp 1,2,4")
    return tuple(sorted({int(part) for part in degrees}))


def _prices(texts: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """Prices keyed by the names in `gpus`: a device may have another of its names in each."""
    names = {_slug(gpu): gpu for gpu in gpus}
    prices: dict[str, float] = {}
    for name, price in parse_prices(texts).items():
        gpu = names.get(_slug(name), name)
        if gpu in prices:
            raise InputError(f"the price of {gpu} is given twice")
        prices[gpu] = price
    return prices


def _slug(gpu: str) -> str:
    """The slug of a known device's name; any other text as it is."""
    try:
        return find_device(gpu).slug
    except InputError:
        return gpu


def _traffic(options: PlanOptions, trace: Trace | None) -> tuple[Traffic, float]:
    """Mean lengths and requests a second, from the options or the trace."""
    lengths = {
        "--prompt-tokens": options.prompt_tokens,
        "--output-tokens": options.output_tokens,
    }
    if trace is None:
        missing = [name for name, value in lengths.items() if value is None]
        missing += ["--rate"] if options.rate is None else []
        if missing:
            raise InputError(
                f"say what the traffic is: {', '.join(missing)} missing",
                hint="Or give --trace FILE.csv with arrival_s,prompt_tokens,output_tokens",
            )
        prompt, output = (float(value or 0) for value in lengths.values())
        return Traffic(prompt_tokens=prompt, output_tokens=output), parse_rate(options.rate or "")
    for name, value in lengths.items():
        if value is not None:
            raise InputError(f"the trace has lengths of its own, but {name} is given too")
    if options.rate is not None:
        return trace.means, parse_rate(options.rate)
    if not math.isfinite(trace.rate_per_s):
        raise InputError("all requests of the trace arrive at once", hint="Give --rate")
    return trace.means, trace.rate_per_s


def _simulation(
    options: PlanOptions, goals: Goals, trace: Trace | None
) -> SimulationSettings | None:
    """Settings of the simulation, where --simulate or a percentile goal needs one."""
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
    return SimulationSettings(
        requests=None if options.simulate == DEFAULT_REQUESTS else options.simulate,
        seed=options.seed or 0,
        variation=variation,
        trace=trace,
    )

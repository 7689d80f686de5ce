"""The request for a plan: traffic, goals, prices, policy, and what to simulate."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np

from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError
from costmodel.planning.engines import RULES
from costmodel.planning.traffic import Trace, Traffic

PERCENTS = (50, 90, 95, 99)
DEGREES = (1, 2, 4, 8, 16)
# Requests of one server that are simulated unless a number is given.
REQUESTS = 2000
# Percentiles of fewer requests are too noisy to be stated.
LEAST_REQUESTS = 100
# Standard deviation of lengths over their mean unless it is given: between equal lengths (0) and
# exponentially distributed ones (1).
VARIATION = 0.7
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_HINT = "Use --slo tpot=30ms,ttft=1s for means, ttft.p95=1s for a percentile"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PercentileGoal:
    """A limit on a percentile: `percent` % of the requests see at most `seconds`."""

    metric: Literal["tpot", "ttft"]
    percent: int
    seconds: float

    def __post_init__(self) -> None:
        if self.metric not in ("tpot", "ttft"):
            raise InputError(f"no goal is called '{self.metric}'", hint=_HINT)
        if self.percent not in PERCENTS:
            names = ", ".join(f"p{percent}" for percent in PERCENTS)
            raise InputError(f"the percentile p{self.percent} is no goal", hint=f"Use {names}")
        _check_time(self.name, self.seconds)

    @property
    def name(self) -> str:
        """The name as it is typed, such as `ttft.p95`."""
        return f"{self.metric}.p{self.percent}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Limits on latency: means (None: no limit) and percentiles, which need a simulation."""

    tpot_s: float | None = None
    ttft_s: float | None = None
    percentiles: tuple[PercentileGoal, ...] = ()

    def __post_init__(self) -> None:
        for field in ("tpot_s", "ttft_s"):
            value = getattr(self, field)
            if value is not None:
                _check_time(field[:-2], value)

    def __bool__(self) -> bool:
        return self.tpot_s is not None or self.ttft_s is not None or bool(self.percentiles)

    @classmethod
    def parse(cls, text: str) -> Goals:
        """Goals from text such as `tpot=30ms,ttft=1s,ttft.p95=2s`. Raises InputError."""
        means: dict[str, float] = {}
        percentiles: list[PercentileGoal] = []
        seen: set[str] = set()
        for part in split_commas(text):
            name, _, value = part.partition("=")
            name = name.strip().lower()
            metric, dot, percent = name.partition(".")
            if metric not in ("tpot", "ttft") or (dot and not re.fullmatch(r"p\d+", percent)):
                raise InputError(f"no goal is called '{name}'", hint=_HINT)
            if name in seen:
                raise InputError(f"the goal {name} is given twice")
            seen.add(name)
            if value.strip().replace(".", "", 1).isdecimal():  # 30 is hardly ever 30 s a token
                raise InputError(f"the goal {part} has no unit", hint=f"Write {part}ms or {part}s")
            seconds = parse_seconds(value)
            if dot:
                percentiles.append(
                    PercentileGoal(
                        metric="tpot" if metric == "tpot" else "ttft",
                        percent=int(percent[1:]),
                        seconds=seconds,
                    )
                )
            else:
                means[f"{metric}_s"] = seconds
        return cls(**means, percentiles=tuple(percentiles))

    def describe(self) -> str:
        """`30 ms a token, 1 s to the first, ttft.p95 2 s`; `no goals` without any."""
        limits = [f"{self.tpot_s * 1e3:g} ms a token"] if self.tpot_s else []
        limits += [f"{self.ttft_s:g} s to the first"] if self.ttft_s else []
        limits += [f"{goal.name} {seconds_text(goal.seconds)}" for goal in self.percentiles]
        return ", ".join(limits) or "no goals"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingPolicy:
    """The draft trees that may be used.

    `auto`: plain steps, chains, and trees where the engine verifies them; `plain`: no drafts;
    `chain`: plain steps and chains, or with `nodes` chains of so many tokens only; `fixed`: trees
    of `nodes` nodes only.
    """

    kind: str = "auto"
    nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> ServingPolicy:
        """A policy from `auto`, `plain`, `chain`, `chain:N` or `fixed:N`. Raises InputError."""
        kind, _, count = text.strip().lower().partition(":")
        if kind in ("auto", "plain", "chain") and not count:
            return cls(kind=kind)
        if kind in ("chain", "fixed") and count.isdecimal() and int(count) >= 1:
            return cls(kind=kind, nodes=int(count))
        raise InputError(
            f"no policy is called '{text}'",
            hint="Use auto, plain, chain, chain:N or fixed:N with N drafted tokens, such as"
            " fixed:32",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """The requests of a simulation: their number and origin.

    Without a trace, one server gets `requests` requests: Poisson arrivals and log-normal lengths
    whose standard deviation is `variation` times their mean. With a trace, its first `requests`
    requests are dealt to all servers (None: the whole trace).
    """

    requests: int | None = None
    seed: int = 0
    variation: float = VARIATION
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < LEAST_REQUESTS:
            raise InputError(
                f"{self.requests} requests are too few for percentiles",
                hint=f"Simulate {LEAST_REQUESTS} or more",
            )
        if self.trace is not None and len(self.trace) < LEAST_REQUESTS:
            raise InputError(
                f"the trace has {len(self.trace)} requests, too few for percentiles",
                hint=f"Give {LEAST_REQUESTS} or more, or their means as --prompt-tokens,"
                " --output-tokens and --rate",
            )
        if self.seed < 0:
            raise InputError(f"the seed must be 0 or more (is {self.seed})")
        if not 0 <= self.variation < float("inf"):
            raise InputError(f"the variation of lengths must be 0 or more (is {self.variation:g})")

    @property
    def count(self) -> int:
        """Number of simulated requests."""
        if self.trace is None:
            return self.requests or REQUESTS
        return min(self.requests or len(self.trace), len(self.trace))

    def describe(self) -> str:
        """The requests in one phrase."""
        if self.trace is not None:
            return f"{self.count} requests of the trace, dealt to the servers in turn"
        return (
            f"{self.count} requests of one server, Poisson arrivals, log-normal lengths with a"
            f" standard deviation of {self.variation:g} x the mean, seed {self.seed}"
        )

    def check_window(self, target: str, positions: int | None) -> None:
        """Raise InputError for a request of the trace longer than the target's `positions`."""
        if self.trace is None or positions is None:
            return
        tokens = (self.trace.prompt_tokens + self.trace.output_tokens)[: self.count]
        longest = int(np.argmax(tokens))
        if tokens[longest] > positions:
            raise InputError(
                f"request {longest + 1} of the trace has {tokens[longest]} tokens, {target} holds"
                f" {positions}",
                hint="Leave such requests out of the trace, or choose another model",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of `plan`.

    `gpus` are device slugs or paths of profiles. `rate` is in requests a second. `prices` are
    per GPU and hour in `currency`, keyed by the names in `gpus`. `utilisation` is the share of a
    server's throughput that it is loaded to. `most_running` limits the requests at once on a
    server (max-num-seqs of the engines). Goals for percentiles need `simulation`. Raises
    InputError for settings that contradict each other.
    """

    target: str
    gpus: tuple[str, ...]
    traffic: Traffic
    rate: float
    goals: Goals = dataclasses.field(default_factory=Goals)
    acceptance: str | None = None
    temperature: int = 0
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    currency: str = "USD"
    degrees: tuple[int, ...] = (1,)
    policy: ServingPolicy = dataclasses.field(default_factory=ServingPolicy)
    engine: str = "vllm"
    drafter: str | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    utilisation: float = 0.8
    most_running: int = 256
    simulation: SimulationSettings | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_gpus()
        if self.engine not in RULES:
            raise InputError(
                f"no engine is called '{self.engine}'", hint=f"Use one of: {', '.join(RULES)}"
            )
        if self.goals.percentiles and self.simulation is None:
            raise InputError(
                f"the goal {self.goals.percentiles[0].name} is a percentile, which needs a"
                " simulation",
                hint="Give --simulate, or simulation=SimulationSettings() in Python",
            )
        if self.policy.kind in ("chain", "fixed") and self.acceptance is None:
            raise InputError(
                f"the policy {self.policy.kind} needs acceptance data",
                hint="Give --acceptance, such as --acceptance gsm8k, or --policy plain",
            )
        if self.policy.kind == "fixed" and not RULES[self.engine].verifies_trees:
            raise InputError(
                f"{self.engine} verifies chains only, and the policy fixed:{self.policy.nodes} is"
                " of trees",
                hint="Use --policy chain, or plan for this decoder with --engine rooftree",
            )
        if self.policy.kind == "plain" and self.acceptance is not None:
            raise InputError(
                "plain decoding accepts nothing, but acceptance data is given",
                hint="Leave out --acceptance, or use --policy auto",
            )

    def _check_gpus(self) -> None:
        if not self.gpus:
            raise InputError("say which GPUs", hint="Give --gpus, such as --gpus h100-sxm,l40s")
        if len(set(self.gpus)) < len(self.gpus):
            raise InputError("a GPU is named twice in --gpus")
        if not re.fullmatch(r"\S{1,8}", self.currency) or not self.currency.isprintable():
            raise InputError(
                f"{self.currency!r} is no currency", hint="Write a code or sign, such as EUR"
            )
        for name, price in self.prices.items():
            if name not in self.gpus:
                raise InputError(
                    f"there is a price for {name}, which is not among the GPUs",
                    hint=f"The GPUs are {', '.join(self.gpus)}",
                )
            if not 0 < price < float("inf"):
                raise InputError(f"the price of {name} must be above 0 (is {price:g})")

    def _check_numbers(self) -> None:
        lengths = (self.traffic.prompt_tokens, self.traffic.output_tokens)
        if not all(1 <= length < float("inf") for length in lengths):
            raise InputError("prompt and output tokens must be at least 1")
        if not 0 < self.rate < float("inf"):
            raise InputError(f"the rate must be above 0 (is {self.rate:g})")
        if not 0 < self.utilisation <= 1:
            raise InputError(
                f"the utilisation must lie above 0 and be at most 1 (is {self.utilisation:g})"
            )
        if self.most_running < 1:
            raise InputError("at least one request must run at once")
        for degree in self.degrees:
            if degree not in DEGREES:
                raise InputError(
                    f"a tensor-parallel degree of {degree} is not planned",
                    hint=f"Use some of {', '.join(map(str, DEGREES))}",
                )


def seconds_text(seconds: float) -> str:
    """A time for people, such as `30 ms` or `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def parse_seconds(text: str) -> float:
    """Seconds from `30ms`, `1s` or `0.5`. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", text)
    if match and match[2] in _UNITS_S:
        return parse_number(match[1], text) * _UNITS_S[match[2]]
    raise InputError(f"'{text}' is not a time", hint="Write 30ms or 1s")


def split_commas(text: str) -> list[str]:
    """The parts between commas, stripped; empty ones are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_number(text: str, option: str) -> float:
    """A float from `text`; `option`, the text around it, is named in the InputError raised."""
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{option}' has no number that can be read") from None


def _check_time(name: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise InputError(f"the goal {name} must be a time above 0 (is {seconds!r})")

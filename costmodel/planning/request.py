"""The request for a plan: goals, prices, policy, what to simulate; also from typed options."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from costmodel.catalog import TargetEntry, find_device, load_devices
from costmodel.errors import InputError
from costmodel.planning.engines import RULES, planned_version
from costmodel.planning.traffic import SimulationSettings, Traffic, read_trace
from costmodel.weights import CACHE_BYTES, WEIGHT_BYTES, Cache, is_label

PERCENTS = (50, 90, 95, 99)
DEGREES = (1, 2, 4, 8, 16)
MOST_GROUPS = 128  # of data-parallel devices
CURRENCY = "USD"  # of prices
# Value of --simulate without a number: REQUESTS requests, or the whole trace.
DEFAULT_REQUESTS = -1
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_PERIODS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0,
              "d": 86400.0}  # fmt: skip
STEP_TOKENS, PREFIX_HITS = "step-tokens", "prefix-hits"
_HINT = "Use --slo tpot=30ms,ttft=1s for means, ttft.p95=1s for a percentile"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PercentileGoal:
    """A limit on tpot or ttft: `percent` % of the requests see at most `seconds`."""

    metric: str
    percent: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.metric}.p{self.percent}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Limits on latency: means (None: no limit) and percentiles, which need a simulation."""

    tpot_s: float | None = None
    ttft_s: float | None = None
    percentiles: tuple[PercentileGoal, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.limits)

    @property
    def limits(self) -> list[tuple[str, str, int | None, float]]:
        """Each goal's name, metric, percentile (None: the mean) and seconds."""
        means = (("tpot", self.tpot_s), ("ttft", self.ttft_s))
        limits = [(goal.name, goal.metric, goal.percent, goal.seconds) for goal in self.percentiles]
        return [*((name, name, None, s) for name, s in means if s is not None), *limits]

    @classmethod
    def parse(cls, text: str) -> Goals:
        """Goals from text such as `tpot=30ms,ttft=1s,ttft.p95=2s`. Raises InputError."""
        means: dict[str, float] = {}
        percentiles: list[PercentileGoal] = []
        for part in split_commas(text):
            name, _, value = part.partition("=")
            name = name.strip().lower()
            metric, dot, percent = name.partition(".")
            if metric not in ("tpot", "ttft") or (dot and not re.fullmatch(r"p\d+", percent)):
                raise InputError(f"no goal is called '{name}'", hint=_HINT)
            if f"{name}_s" in means or name in [goal.name for goal in percentiles]:
                raise InputError(f"the goal {name} is given twice")
            if value.strip().replace(".", "", 1).isdecimal():  # 30 is hardly ever 30 s a token
                raise InputError(f"the goal {part} has no unit", hint=f"Write {part}ms or {part}s")
            seconds = parse_seconds(value)
            if dot:
                goal = PercentileGoal(metric=metric, percent=int(percent[1:]), seconds=seconds)
                percentiles.append(goal)
            else:
                means[f"{metric}_s"] = seconds
        return cls(**means, percentiles=tuple(percentiles))

    def check(self, *, simulated: bool) -> None:
        """Raise InputError for goals that are no times, or that need a simulation."""
        for goal in self.percentiles:
            if goal.percent not in PERCENTS:
                names = ", ".join(f"p{percent}" for percent in PERCENTS)
                raise InputError(f"the percentile p{goal.percent} is no goal", hint=f"Use {names}")
            if not simulated:
                raise InputError(
                    f"the goal {goal.name} is a percentile, which needs a simulation",
                    hint="Give --simulate, or simulation=SimulationSettings() in Python",
                )
        for name, _, _, seconds in self.limits:
            if not 0 < seconds < math.inf:
                raise InputError(f"the goal {name} must be a time above 0 (is {seconds!r})")

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
class Precision:
    """Types of weights and of cached keys and values; the LM head stays in bfloat16.

    Weights of None: those that the target's checkpoint stores. `fp8`: one stored scale per tensor;
    `fp8_dynamic`: one computed for every product; `fp8_block`: one per block; `mxfp4`: experts
    alone. Or the label of a quantised checkpoint, which is planned from a profile with that label.
    """

    weights: str | None = None
    cache: Cache = "bfloat16"

    def of(self, target: TargetEntry) -> Precision:
        """The same, with weights named."""
        return dataclasses.replace(self, weights=self.weights or target.weights)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of `plan`.

    `gpus` are device slugs or paths of profiles. `rate` is in requests a second. `prices` are
    per GPU and hour in CURRENCY, keyed by the names in `gpus`. `utilisation` is the share of a
    server's throughput that it is loaded to where `servers`, their number, is None.
    `engine_version`, such as 0.19, may be empty. `step_tokens` are the most of a step (None: the
    engine's default), `prefix_hits` the share of prompt tokens found in the cache. `data_parallel`
    groups of each degree's devices share the experts of a mixture, with `expert_parallel` whole
    ones. `most_running` limits the requests at once on a server, or group (max-num-seqs of the
    engines). Goals for percentiles need `simulation`. Raises InputError for values out of range
    and settings that contradict each other.
    """

    target: str
    gpus: tuple[str, ...]
    traffic: Traffic
    rate: float
    goals: Goals = dataclasses.field(default_factory=Goals)
    acceptance: str | None = None
    temperature: int = 0
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    degrees: tuple[int, ...] = (1,)
    data_parallel: int = 1
    expert_parallel: bool = False
    policy: ServingPolicy = dataclasses.field(default_factory=ServingPolicy)
    engine: str = "vllm"
    engine_version: str = ""
    step_tokens: int | None = None
    prefix_hits: float = 0.0
    drafter: str | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    utilisation: float = 0.8
    servers: int | None = None
    most_running: int = 256
    simulation: SimulationSettings | None = None

    def __post_init__(self) -> None:
        lengths = (self.traffic.prompt_tokens, self.traffic.output_tokens)
        steps, degrees = self.step_tokens, [n for n in self.degrees if n not in DEGREES]
        checks = (
            (not all(1 <= length < math.inf for length in lengths),
             "prompt and output tokens must be at least 1", ""),
            (not 0 < self.rate < math.inf, f"the rate must be above 0 (is {self.rate:g})", ""),
            (not 0 < self.utilisation <= 1, "the utilisation must lie above 0 and be at most 1 (is"
             f" {self.utilisation:g})", ""),
            (self.servers is not None and self.servers < 1, "at least one server must run", ""),
            (self.most_running < 1, "at least one request must run at once", ""),
            (steps is not None and steps < 1,
             f"a step must have room for tokens ({STEP_TOKENS} {steps})", ""),
            (not 0 <= self.prefix_hits < 1, "the share of prefix hits must be 0 or more and below 1"
             f" (is {self.prefix_hits:g})", f"Write {PREFIX_HITS}=0.3 where 30 % of the prompt"
             " tokens are found in the cache"),
            (not 1 <= self.data_parallel <= MOST_GROUPS,
             f"the data-parallel groups must be 1 to {MOST_GROUPS} (are {self.data_parallel})", ""),
            (bool(degrees), f"a tensor-parallel degree of {next(iter(degrees), 0)} is not planned",
             f"Use some of {', '.join(map(str, DEGREES))}"),
            (not self.gpus, "say which GPUs", "Give --gpus, such as --gpus h100-sxm,l40s"),
            (len(set(self.gpus)) < len(self.gpus), "a GPU is named twice in --gpus", ""),
        )  # fmt: skip
        _refuse(checks)
        for name, price in self.prices.items():
            if name not in self.gpus:
                raise InputError(
                    f"there is a price for {name}, which is not among the GPUs",
                    hint=f"The GPUs are {', '.join(self.gpus)}",
                )
            if not 0 < price < math.inf:
                raise InputError(f"the price of {name} must be above 0 (is {price:g})")
        weights = self.precision.weights or "bfloat16"
        labels = (weights,) if is_label(weights) else ()
        for kind, name, names in (
            ("engine is", self.engine, tuple(RULES)),
            ("weights are", weights, (*WEIGHT_BYTES, *labels)),
            ("cache is", self.precision.cache, tuple(CACHE_BYTES)),
        ):
            if name not in names:
                hint = f"Use one of: {', '.join(names)}"
                if kind == "weights are":
                    hint += "; or a checkpoint's label as `rooftree support` shows it"
                raise InputError(f"no {kind} called '{name}'", hint=hint)
        planned_version(self.engine, self.engine_version)
        self.goals.check(simulated=self.simulation is not None)
        if self.simulation is not None:
            self.simulation.check()
        policy = self.policy
        contradictions = (
            (policy.kind in ("chain", "fixed") and self.acceptance is None,
             f"the policy {policy.kind} needs acceptance data",
             "Give --acceptance, such as --acceptance gsm8k, or --policy plain"),
            (policy.kind == "fixed" and not RULES[self.engine].verifies_trees,
             f"{self.engine} verifies chains only, and the policy fixed:{policy.nodes} is of trees",
             "Use --policy chain, or plan for this decoder with --engine rooftree"),
            (policy.kind == "plain" and self.acceptance is not None,
             "plain decoding accepts nothing, but acceptance data is given",
             "Leave out --acceptance, or use --policy auto"),
        )  # fmt: skip
        _refuse(contradictions)

    @property
    def engine_name(self) -> str:
        """The engine, its version and settings as they are typed."""
        name = f"{self.engine}@{self.engine_version}" if self.engine_version else self.engine
        name += f",{STEP_TOKENS}={self.step_tokens}" if self.step_tokens else ""
        return name + (f",{PREFIX_HITS}={self.prefix_hits:g}" if self.prefix_hits else "")

    @property
    def replays(self) -> bool:
        """Whether a trace is served by given servers, so that every request of it counts."""
        trace = self.simulation is not None and self.simulation.trace is not None
        return trace and self.servers is not None


def _refuse(checks: Iterable[tuple[bool, str, str]]) -> None:
    """Raise InputError for the first that holds, with its problem and hint."""
    for wrong, problem, hint in checks:
        if wrong:
            raise InputError(problem, hint=hint)


def request_from_options(options: Mapping[str, Any]) -> PlanRequest:
    """The request that the options of `rooftree plan` describe, as typed. Raises InputError."""
    o = options
    gpus = tuple(load_devices()) if o["gpus"].strip() == "all" else tuple(split_commas(o["gpus"]))
    goals = Goals.parse(o["slo"])
    trace = None if o["trace"] is None else read_trace(o["trace"])
    lengths = {"--prompt-tokens": o["prompt_tokens"], "--output-tokens": o["output_tokens"]}
    if trace is None:
        needed = lengths | {"--rate": o["rate"]}
        if missing := [name for name, value in needed.items() if value is None]:
            raise InputError(
                f"say what the traffic is: {', '.join(missing)} missing",
                hint="Or give --trace FILE.csv with arrival_s,prompt_tokens,output_tokens",
            )
        prompt, output = (float(length) for length in lengths.values())
        traffic = Traffic(prompt_tokens=prompt, output_tokens=output)
    else:
        if twice := next((name for name, length in lengths.items() if length is not None), None):
            raise InputError(f"the trace has lengths of its own, but {twice} is given too")
        if o["rate"] is None and not math.isfinite(trace.rate_per_s):
            raise InputError("all requests of the trace arrive at once", hint="Give --rate")
        traffic = trace.means
    servers, utilisation = parse_servers(o["servers"])
    simulation = None
    if o["simulate"] is not None or goals.percentiles:
        requests = None if o["simulate"] == DEFAULT_REQUESTS else o["simulate"]
        simulation = SimulationSettings(requests=requests, trace=trace)
    return PlanRequest(
        target=o["target"],
        gpus=gpus,
        traffic=traffic,
        rate=trace.rate_per_s if trace and o["rate"] is None else parse_rate(o["rate"]),
        goals=goals,
        acceptance=o["acceptance"],
        temperature=o["temperature"],
        prices=_prices(o["prices"], gpus),
        **parse_parallel(o["tp"]),
        policy=ServingPolicy.parse(o["policy"]),
        **parse_engine(o["engine"]),
        drafter=o["drafter"],
        precision=Precision(weights=o["weights"], cache=o["cache"]),
        utilisation=0.8 if servers is not None else utilisation,
        servers=servers,
        most_running=o["max_running"],
        simulation=simulation,
    )


def parse_engine(text: str) -> dict[str, Any]:
    """Fields from `vllm@0.19,step-tokens=2048,prefix-hits=0.3`. Raises InputError."""
    name, *settings = split_commas(text) or [""]
    engine, at, version = name.partition("@")
    if at and not version:
        raise InputError(f"'{name}' names no version", hint="Write vllm@0.19")
    parsed: dict[str, Any] = {"engine": engine, "engine_version": version}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if (field := {STEP_TOKENS: "step_tokens", PREFIX_HITS: "prefix_hits"}.get(key)) is None:
            raise InputError(
                f"'{key}' is no setting of an engine",
                hint=f"Write --engine {engine},{STEP_TOKENS}=2048,{PREFIX_HITS}=0.3",
            )
        if field in parsed:
            raise InputError(f"{key} is given twice")
        if field == "step_tokens" and not value.isdecimal():
            raise InputError(f"'{setting}' is no whole number of tokens")
        parsed[field] = int(value) if field == "step_tokens" else _number(value, setting)
    return parsed


def parse_rate(text: str) -> float:
    """Requests a second from `5/s`, `300/min` or `5`. Raises InputError."""
    count, slash, unit = text.strip().partition("/")
    if slash and unit.strip() not in _PERIODS_S:
        raise InputError(f"'{text}' is not a rate", hint="Write 5/s, 300/min or 18000/h")
    return _number(count, text) / (_PERIODS_S[unit.strip()] if slash else 1.0)


def parse_servers(text: str) -> tuple[int | None, float]:
    """Servers from `3`, or none and the load of each from `80%`. Raises InputError."""
    number, percent, rest = text.strip().partition("%")
    if rest or not (percent or number.isdecimal()):
        raise InputError(f"'{text}' is no number of servers", hint="Write 3, or 80% for their load")
    return (None, _number(number, text) / 100) if percent else (int(number), 1.0)


def _prices(texts: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    """Prices from texts such as `h100-sxm=2.5,l40s=1`, keyed by the names in `gpus`.

    A device may have another of its names in each.
    """

    def slug(gpu: str) -> str:
        try:
            return find_device(gpu).slug
        except InputError:
            return gpu

    names = {slug(gpu): gpu for gpu in gpus}
    prices: dict[str, float] = {}
    for part in (part for text in texts for part in split_commas(text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"'{part}' is not a price", hint="Write h100-sxm=2.5, per GPU and hour"
            )
        gpu = names.get(slug(name.strip()), name.strip())
        if gpu in prices:
            raise InputError(f"the price of {gpu} is given twice")
        prices[gpu] = _number(value, part)
    return prices


def parse_parallel(text: str) -> dict[str, Any]:
    """Tensor-parallel degrees from `1,2,4`, ascending, and vLLM's own arguments behind them.

    Those are --data-parallel-size N (-dp N) and --enable-expert-parallel (-ep). Raises InputError.
    """
    first, *arguments = text.replace("=", " ").split() or [""]
    degrees = split_commas(first)
    if not degrees or not all(part.isdecimal() for part in degrees):
        raise InputError(f"'{text}' are no tensor-parallel degrees", hint="Write --tp 1,2,4")
    parallel: dict[str, Any] = {"degrees": tuple(sorted({int(part) for part in degrees}))}
    while arguments:
        argument = arguments.pop(0)
        if argument in ("--enable-expert-parallel", "-ep"):
            parallel["expert_parallel"] = True
        elif argument in ("--data-parallel-size", "-dp") and arguments and arguments[0].isdecimal():
            parallel["data_parallel"] = int(arguments.pop(0))
        else:
            raise InputError(
                f"'{argument}' is no argument of a parallel server",
                hint='Write --tp "2 --data-parallel-size 4 --enable-expert-parallel"',
            )
    return parallel


def parse_seconds(text: str) -> float:
    """Seconds from `30ms`, `1s` or `0.5`. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", text)
    if match and match[2] in _UNITS_S:
        return _number(match[1], text) * _UNITS_S[match[2]]
    raise InputError(f"'{text}' is not a time", hint="Write 30ms or 1s")


def seconds_text(seconds: float) -> str:
    """A time for people, such as `30 ms` or `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def split_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{option}' has no number that can be read") from None

"""What a plan is asked: traffic, goals, prices, a simulation; and how their texts are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from costmodel.capacity.arrivals import Sampling
from costmodel.capacity.engines import RULES
from costmodel.capacity.goals import Goals, number, parts
from costmodel.capacity.operating import Policy, Traffic
from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError

_PER = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0}
DEGREES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A question to `plan`.

    `rate`: requests a second; `prices`: money per GPU and hour by the names in `gpus`;
    `utilisation`: share of what a server completes that it is loaded to; `most_running`: of
    requests at once on a server (engines call it max-num-seqs). `gpus` are slugs, or paths of
    profiles. `sampling`: what is simulated, which goals for percentiles need.
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
    policy: Policy = dataclasses.field(default_factory=Policy)
    engine: str = "vllm"
    drafter: str | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    utilisation: float = 0.8
    most_running: int = 256
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        if not self.gpus:
            raise InputError("say which GPUs", hint="Give --gpus, such as --gpus h100-sxm,l40s")
        if len(set(self.gpus)) < len(self.gpus):
            raise InputError("a GPU is named twice in --gpus")
        for name in self.prices:
            if name not in self.gpus:
                raise InputError(
                    f"there is a price for {name}, which is not among the GPUs",
                    hint=f"The GPUs are {', '.join(self.gpus)}",
                )
        if self.engine not in RULES:
            raise InputError(
                f"no engine is called '{self.engine}'", hint=f"Use one of: {', '.join(RULES)}"
            )
        if self.goals.percentiles and self.sampling is None:
            raise InputError(
                f"the goal {self.goals.percentiles[0].name} is a percentile, which only a"
                " simulation tells",
                hint="Give a Sampling",
            )
        needs = self.policy.kind in ("chain", "fixed")
        if needs and self.acceptance is None:
            raise InputError(
                f"the policy {self.policy.kind} needs acceptance data",
                hint="Give --acceptance, such as --acceptance gsm8k, or --policy plain",
            )
        if self.policy.kind == "plain" and self.acceptance is not None:
            raise InputError(
                "plain decoding accepts nothing, but acceptance data is given",
                hint="Leave out --acceptance, or use --policy auto",
            )

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
        for name, price in self.prices.items():
            if not 0 < price < float("inf"):
                raise InputError(f"the price of {name} must be above 0 (is {price:g})")


def parse_rate(text: str) -> float:
    """5/s, 300/min, 5. Raises InputError."""
    count, slash, unit = text.strip().partition("/")
    if slash and unit.strip() not in _PER:
        raise InputError(f"'{text}' is not a rate", hint="Write 5/s, 300/min or 18000/h")
    return number(count, text) / (_PER[unit.strip()] if slash else 1.0)


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """h100-sxm=2.5, several of them or in one text with commas. Raises InputError."""
    prices: dict[str, float] = {}
    for part in (part for text in texts for part in parts(text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"'{part}' is not a price", hint="Write h100-sxm=2.5, per GPU and hour"
            )
        if name.strip() in prices:
            raise InputError(f"the price of {name.strip()} is given twice")
        prices[name.strip()] = number(value, part)
    return prices


def parse_degrees(text: str) -> tuple[int, ...]:
    """1,2,4. Raises InputError."""
    degrees = parts(text)
    if not degrees or not all(part.isdecimal() for part in degrees):
        raise InputError(f"'{text}' are no tensor-parallel degrees", hint="Write --tp 1,2,4")
    return tuple(sorted({int(part) for part in degrees}))


def parse_names(text: str) -> tuple[str, ...]:
    """a,b,c."""
    return tuple(parts(text))

"""What a plan is asked: traffic, goals, prices; and how their texts are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from costmodel.capacity.engines import RULES
from costmodel.capacity.operating import Policy, Traffic
from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError

_PER = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0, "d": 86400.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
DEGREES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """Largest means that are allowed; None: any."""

    tpot_s: float | None = None
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("tpot_s", "ttft_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"the goal {field[:-2]} must be a time above 0 (is {value!r})")

    @classmethod
    def parse(cls, text: str) -> Goals:
        """tpot=30ms,ttft=1s; either may be left out. Raises InputError."""
        found: dict[str, float] = {}
        for part in _parts(text):
            name, _, value = part.partition("=")
            name = name.strip().lower()
            if name not in ("tpot", "ttft"):
                raise InputError(
                    f"no goal is called '{name}'", hint="Use --slo tpot=30ms,ttft=1s, or one"
                )
            if f"{name}_s" in found:
                raise InputError(f"the goal {name} is given twice")
            found[f"{name}_s"] = parse_seconds(value)
        return cls(**found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A question to `plan`.

    `rate`: requests a second; `prices`: money per GPU and hour by the names in `gpus`;
    `utilisation`: share of what a server completes that it is loaded to; `most_running`: of
    requests at once on a server (engines call it max-num-seqs). `gpus` are slugs, or paths of
    profiles.
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


def parse_seconds(text: str) -> float:
    """30ms, 1s, 0.5. Raises InputError."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", text)
    if found and found[2] in _SECONDS:
        return _float(found[1], text) * _SECONDS[found[2]]
    raise InputError(f"'{text}' is not a time", hint="Write 30ms or 1s")


def parse_rate(text: str) -> float:
    """5/s, 300/min, 5. Raises InputError."""
    number, slash, unit = text.strip().partition("/")
    if slash and unit.strip() not in _PER:
        raise InputError(f"'{text}' is not a rate", hint="Write 5/s, 300/min or 18000/h")
    return _float(number, text) / (_PER[unit.strip()] if slash else 1.0)


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """h100-sxm=2.5, several of them or in one text with commas. Raises InputError."""
    prices: dict[str, float] = {}
    for part in (part for text in texts for part in _parts(text)):
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"'{part}' is not a price", hint="Write h100-sxm=2.5, per GPU and hour"
            )
        if name.strip() in prices:
            raise InputError(f"the price of {name.strip()} is given twice")
        prices[name.strip()] = _float(value, part)
    return prices


def parse_degrees(text: str) -> tuple[int, ...]:
    """1,2,4. Raises InputError."""
    parts = _parts(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"'{text}' are no tensor-parallel degrees", hint="Write --tp 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def parse_names(text: str) -> tuple[str, ...]:
    """a,b,c."""
    return tuple(_parts(text))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _float(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{whole}' has no number that can be read") from None

"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Duration(click.ParamType):
    """Seconds, or a number with s, m or h."""

    name = "duration"
    UNITS_S: ClassVar = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a duration; write 30s, 2m or 1h.", param, ctx)
        return float(match[1]) * self.UNITS_S[match[2]]


class PicturePath(click.Path):
    """The path of a picture, whose ending says its form."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        from profiler.report.drawing import check_picture

        path = Path(super().convert(value, param, ctx))
        check_picture(path)
        return path


class Numbers(click.ParamType):
    """Whole numbers separated by commas."""

    name = "n,n,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of whole numbers, as 256,1024.", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


target_option = click.option(
    "--target", help="Folder, hub id or known target [default: fits this device]."
)
device_option = click.option(
    "--device", help="cpu, cuda or cuda:N [default: CUDA where there is one]."
)
dtype_option = click.option("--dtype", help="bfloat16, float16, float32 [default: the device's].")
runtime_option = click.option(
    "--runtime",
    type=click.Choice(["auto", "packed", "graphs", "eager"]),
    default="auto",
    show_default=True,
    help="packed reorders the weights once (CPU), graphs captures the forwards (CUDA); auto: "
    "packed on a CPU, graphs on CUDA.",
)
quantization_option = click.option(
    "--quantization",
    type=click.Choice(["int8"]),
    help="Round the weights to int8, one scale an output (runtime packed).",
)
weights_option = click.option(
    "--weights", default="pretrained", help="pretrained, or random to try a shape."
)
profile_option = click.option(
    "--profile", type=click.Path(path_type=Path), help="Use this profile file."
)
require_profile_option = click.option(
    "--require-profile", is_flag=True, help="Fail when no profile is found."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout."
)


def seed_option(
    largest: int | None = None, help: str | None = None
) -> Callable[[Decorated], Decorated]:
    """`--seed`, a whole number from 0 to `largest`."""
    return click.option(
        "--seed", type=click.IntRange(0, largest), default=0, show_default=True, help=help
    )


def execution_options(command: Decorated) -> Decorated:
    """`--device`, `--dtype`, `--runtime`, `--quantization`: where and how the target runs."""
    return device_option(dtype_option(runtime_option(quantization_option(command))))

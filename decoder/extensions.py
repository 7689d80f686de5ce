"""Drafters and policies of other packages, by `package:Class` or by entry point.

An entry point in the group `rooftree.drafters` or `rooftree.policies` gives a class or a function
a name of its own; `package.module:Class` needs none. It is called with those of the keyword
arguments that it names: a drafter's `target`, a policy's `cost` and `max_nodes`, and `arguments`,
the text behind the first colon of the name: an entry point `beam` also makes `beam:4x15`.

A class that reads checkpoints needs no name. With the functions `recognises(config)` and
`from_pretrained(name, target)` it is asked before the decoder's own formats.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from costmodel.errors import InputError, reason_of
from costmodel.plugins import load_entry_point, load_plugins

DRAFTERS = "rooftree.drafters"
POLICIES = "rooftree.policies"
REFERENCE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", re.ASCII)

Factory = Callable[..., object]


def make_extension(name: str, group: str, kind: type[Any], **available: object) -> Any:
    """The object of a name; None unless it is `package:Class` or of an entry point in the group.

    available  keyword arguments; a class or function is called with those that it names
    Modules are looked for on Python's path, then in the working directory.
    Raises InputError where the module, or what it should define, is missing or fails.
    """
    first, _, arguments = name.partition(":")
    for part, behind in ((name, ""), (first, arguments)):
        for entry in entry_points(group=group, name=part):
            named = load_entry_point(entry)
            if hasattr(named, "recognises"):
                return None  # it is made from a checkpoint, not by its name
            return build(named, kind, name, available | {"arguments": behind})
    reference = REFERENCE.fullmatch(name)
    if reference is None:
        return None
    module = _module(name, reference[1])
    factory: Factory | None = getattr(module, reference[2], None)
    if factory is None:
        classes = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise InputError(
            f"'{name}': the module '{module.__name__}' has no '{reference[2]}'",
            hint=f"Its classes are {', '.join(classes)}." if classes else "It has no class.",
        )
    return build(factory, kind, name, available)


def checkpoint_formats() -> dict[str, Any]:
    """The classes of other packages that recognise checkpoints, by the names of entry points."""
    return {name: one for name, one in load_plugins(DRAFTERS) if hasattr(one, "recognises")}


def build(factory: Factory, kind: type[Any], name: str, available: dict[str, object]) -> Any:
    """The object of type `kind` that a class or function makes. Raises InputError."""
    hint = f"Name a subclass of rooftree.{kind.__name__}, or a function that makes one."
    accepted = available
    if not callable(factory):
        raise InputError(f"'{name}' is no class or function", hint=hint)
    try:
        parameters = inspect.signature(factory).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            named = [one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY]
            accepted = {name: available[name] for name in named if name in available}
        made = factory(**accepted)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"'{name}' cannot be made: {reason_of(error)}",
            hint=f"It is called with those of {', '.join(available)} that it names.",
        ) from error
    if not isinstance(made, kind):
        raise InputError(f"'{name}' makes a {type(made).__name__}", hint=hint)
    return made


def is_installed(extension: object, group: str) -> bool:
    """Whether an object's class is of this package or of one with an entry point in the group."""
    package = _top(type(extension).__module__)
    return package == _top(__name__) or any(
        _top(entry.module) == package for entry in entry_points(group=group)
    )


def _module(name: str, module: str) -> Any:
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # behind all others, so that it hides none
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise InputError(
                f"'{name}': there is no module '{missing}'",
                hint="Install it, or run in the folder that it lies in.",
            ) from error
        raise InputError(f"'{name}': importing it fails: {reason_of(error)}") from error


def _top(module: str) -> str:
    return module.partition(".")[0]

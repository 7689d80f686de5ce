"""A check that the packages of rooftree are not hidden by a user's modules of the same name.

`costmodel`, `decoder` and `profiler` are ordinary names. A file `decoder.py` in the working
directory or on PYTHONPATH would be imported instead, and fail far from its cause.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

PACKAGES = ("costmodel", "decoder", "integrations", "profiler")


class ShadowedPackageError(ImportError):
    """A module of the user has the name of one of rooftree's packages."""


def check_packages() -> None:
    """Raise ShadowedPackageError unless each package is the one installed with rooftree."""
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in PACKAGES:
        location = _location(name)
        if location is None:
            raise ShadowedPackageError(
                f"the package '{name}' of rooftree is not in {folder}. Install rooftree again.",
                name=name,
            )
        if os.path.realpath(location) != os.path.join(folder, name):
            raise ShadowedPackageError(
                f"{_shown(location)} hides rooftree's own package '{name}'. Rename it, or run "
                "rooftree from another folder and without that one on PYTHONPATH.",
                name=name,
                path=location,
            )


def _location(name: str) -> str | None:
    """The folder of a package, or the file of a module, that `import name` gives."""
    module = sys.modules.get(name)
    if module is not None:
        return _loaded_location(module)
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next(iter(spec.submodule_search_locations), None)
    return spec.origin


def _loaded_location(module: ModuleType) -> str | None:
    folders = getattr(module, "__path__", None)
    return next(iter(folders), None) if folders is not None else getattr(module, "__file__", None)


def _shown(location: str) -> str:
    """The path, a folder with a slash at its end."""
    return os.path.join(location, "") if os.path.isdir(location) else location

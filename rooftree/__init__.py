"""The public face of rooftree.

    from rooftree import TreeDecoder, calibrate, find_profile, plan

Each name is imported from the package that defines it when it is first used, so that
`import rooftree` alone imports neither PyTorch nor numpy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.errors import InputError, ProfileError, RooftreeError
    from costmodel.planning.request import Goals, PlanRequest, ServingPolicy
    from costmodel.planning.result import Plan
    from costmodel.planning.search import plan
    from costmodel.planning.traffic import SimulationSettings, Traffic, read_trace
    from costmodel.profile.lookup import find_profile, load_profile
    from costmodel.profile.profile import Profile
    from decoder.drafters.base import Drafter, DraftRequest, DraftSession, Draws
    from decoder.engine import Generation, TreeDecoder
    from decoder.policies.base import Cost, Limits, Policy, TreeRequest
    from decoder.profiling.startup import ProfileChoice
    from decoder.statistics import Round
    from decoder.tree.draft_tree import (
        EMPTY,
        Candidates,
        CandidateTree,
        DraftTree,
        Lattice,
        best_first,
    )
    from decoder.tree.growth import Growth, TopPaths
    from decoder.tree.pairs import PairLattice
    from profiler.calibrate.run import CalibrationListener, CalibrationResult, calibrate
    from profiler.calibrate.source import CalibrationSettings

    __version__: str

__all__ = [
    "EMPTY",
    "CalibrationListener",
    "CalibrationResult",
    "CalibrationSettings",
    "CandidateTree",
    "Candidates",
    "Cost",
    "DraftRequest",
    "DraftSession",
    "DraftTree",
    "Drafter",
    "Draws",
    "Generation",
    "Goals",
    "Growth",
    "InputError",
    "Lattice",
    "Limits",
    "PairLattice",
    "Plan",
    "PlanRequest",
    "Policy",
    "Profile",
    "ProfileChoice",
    "ProfileError",
    "RooftreeError",
    "Round",
    "ServingPolicy",
    "ShadowedPackageError",
    "SimulationSettings",
    "TopPaths",
    "Traffic",
    "TreeDecoder",
    "TreeRequest",
    "__version__",
    "best_first",
    "calibrate",
    "find_profile",
    "load_profile",
    "plan",
    "read_trace",
]

# The module of each name, as in the imports for type checkers above.
_NAMES_BY_MODULE = {
    "costmodel.errors": ("InputError", "ProfileError", "RooftreeError"),
    "costmodel.planning.request": ("Goals", "PlanRequest", "ServingPolicy"),
    "costmodel.planning.result": ("Plan",),
    "costmodel.planning.search": ("plan",),
    "costmodel.planning.traffic": ("SimulationSettings", "Traffic", "read_trace"),
    "costmodel.profile.lookup": ("find_profile", "load_profile"),
    "costmodel.profile.profile": ("Profile",),
    "decoder.drafters.base": ("DraftRequest", "DraftSession", "Drafter", "Draws"),
    "decoder.engine": ("Generation", "TreeDecoder"),
    "decoder.policies.base": ("Cost", "Limits", "TreeRequest", "Policy"),
    "decoder.profiling.startup": ("ProfileChoice",),
    "decoder.statistics": ("Round",),
    "decoder.tree.draft_tree": (
        "EMPTY",
        "CandidateTree",
        "Candidates",
        "DraftTree",
        "Lattice",
        "best_first",
    ),
    "decoder.tree.growth": ("Growth", "TopPaths"),
    "decoder.tree.pairs": ("PairLattice",),
    "profiler.calibrate.run": ("CalibrationListener", "CalibrationResult", "calibrate"),
    "profiler.calibrate.source": ("CalibrationSettings",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


class ShadowedPackageError(ImportError):
    """A module of the user has the name of one of rooftree's packages, which are ordinary names."""


def check_packages() -> None:
    """Raise ShadowedPackageError unless each package is the one installed with rooftree.

    A file `decoder.py` beside a script would be imported instead, and fail far from its cause.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("costmodel", "decoder", "integrations", "profiler"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ShadowedPackageError(f"{home} has no package '{name}'. Install rooftree again.")
        folders = spec.submodule_search_locations
        place = next(iter(folders)) if folders else str(spec.origin)
        if os.path.realpath(place) != os.path.join(home, name):
            raise ShadowedPackageError(
                f"{place} hides rooftree's own package '{name}'. Rename it, or run rooftree from "
                "another folder and without that one on PYTHONPATH."
            )


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from costmodel.io import tool_version

        value: Any = tool_version()
    elif name in _MODULES:
        check_packages()
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

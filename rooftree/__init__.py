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
    from costmodel.errors import InputError as InputError
    from costmodel.errors import ProfileError as ProfileError
    from costmodel.errors import RooftreeError as RooftreeError
    from costmodel.planning.request import Goals as Goals
    from costmodel.planning.request import PlanRequest as PlanRequest
    from costmodel.planning.request import ServingPolicy as ServingPolicy
    from costmodel.planning.result import Plan as Plan
    from costmodel.planning.search import plan as plan
    from costmodel.planning.traffic import SimulationSettings as SimulationSettings
    from costmodel.planning.traffic import Traffic as Traffic
    from costmodel.planning.traffic import read_trace as read_trace
    from costmodel.profile.lookup import find_profile as find_profile
    from costmodel.profile.lookup import load_profile as load_profile
    from costmodel.profile.profile import Profile as Profile
    from decoder.drafters.base import Drafter as Drafter
    from decoder.drafters.base import DraftRequest as DraftRequest
    from decoder.drafters.base import DraftSession as DraftSession
    from decoder.drafters.base import Draws as Draws
    from decoder.engine import Generation as Generation
    from decoder.engine import TreeDecoder as TreeDecoder
    from decoder.policies.base import Cost as Cost
    from decoder.policies.base import Limits as Limits
    from decoder.policies.base import Policy as Policy
    from decoder.policies.base import TreeRequest as TreeRequest
    from decoder.profiling.startup import ProfileChoice as ProfileChoice
    from decoder.statistics import Round as Round
    from decoder.tree.draft_tree import EMPTY as EMPTY
    from decoder.tree.draft_tree import Candidates as Candidates
    from decoder.tree.draft_tree import CandidateTree as CandidateTree
    from decoder.tree.draft_tree import DraftTree as DraftTree
    from decoder.tree.draft_tree import Lattice as Lattice
    from decoder.tree.draft_tree import best_first as best_first
    from decoder.tree.growth import Growth as Growth
    from decoder.tree.growth import TopPaths as TopPaths
    from profiler.calibrate.run import CalibrationListener as CalibrationListener
    from profiler.calibrate.run import CalibrationResult as CalibrationResult
    from profiler.calibrate.run import calibrate as calibrate
    from profiler.calibrate.source import CalibrationSettings as CalibrationSettings

    __version__: str

# The module of each name, as in the imports for type checkers above.
_NAMES_BY_MODULE = {
    "costmodel.errors": "InputError ProfileError RooftreeError",
    "costmodel.planning.request": "Goals PlanRequest ServingPolicy",
    "costmodel.planning.result": "Plan",
    "costmodel.planning.search": "plan",
    "costmodel.planning.traffic": "SimulationSettings Traffic read_trace",
    "costmodel.profile.lookup": "find_profile load_profile",
    "costmodel.profile.profile": "Profile",
    "decoder.drafters.base": "DraftRequest DraftSession Drafter Draws",
    "decoder.engine": "Generation TreeDecoder",
    "decoder.policies.base": "Cost Limits TreeRequest Policy",
    "decoder.profiling.startup": "ProfileChoice",
    "decoder.statistics": "Round",
    "decoder.tree.draft_tree": "EMPTY CandidateTree Candidates DraftTree Lattice best_first",
    "decoder.tree.growth": "Growth TopPaths",
    "profiler.calibrate.run": "CalibrationListener CalibrationResult calibrate",
    "profiler.calibrate.source": "CalibrationSettings",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted(["ShadowedPackageError", "__version__", *_MODULES])  # noqa: PLE0605


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

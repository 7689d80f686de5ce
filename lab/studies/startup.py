"""Start-up times: `rooftree --help`, profile lookup and load, tree building.

    python -m lab.studies.startup [--repeats 30]

`--help` is timed as a whole process. Lookup and load is the decoder's work at its start, timed
in a warm process that reads the file anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from costmodel.online.cycle import CycleCost
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from decoder.tree.draft_tree import Lattice, best_first
from lab.studies.common import environment, store


def timed(function: Callable[[], object], repeats: int) -> dict[str, float]:
    function()
    times = []
    for _ in range(repeats):
        start_s = perf_counter()
        function()
        times.append(perf_counter() - start_s)
    return {"median_s": median(times), "min_s": min(times), "max_s": max(times)}


def lookup(profile: Profile, folder: Path) -> None:
    """The decoder's start-up: find, read and validate the profile, prepare the cost model."""
    match = ProfileStore([folder]).find(profile.key)
    CycleCost.from_profile(match.profile, "ngram").cycle_s(np.arange(128), 700)


def steep_lattice() -> Lattice:
    """15 positions of a typical drafter: the best token 0.7, each next one a third of the last."""
    row = 0.7 * 3.0 ** -np.arange(1024)
    tokens = np.arange(15 * 1024, dtype=np.int64).reshape(15, 1024)
    return Lattice(tokens, np.tile(row, (15, 1)) * 0.95 ** np.arange(15)[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    stored = [item.profile for item in ProfileStore().list()]
    measured = [one for one in stored if one and one.surface and "ngram" in one.drafters]
    if not measured:
        raise SystemExit("there is no measured profile: run `rooftree calibrate` first")
    profile = max(measured, key=lambda one: len(one.surface.rows) if one.surface else 0)
    lattice = steep_lattice()
    help_command = [Path(sys.executable).with_name("rooftree"), "--help"]
    result = {
        "environment": environment(),
        "help": timed(
            lambda: subprocess.run(help_command, check=True, capture_output=True), repeats
        ),
        "profile_points": len(profile.surface.rows) if profile.surface else 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        ProfileStore([folder]).save(profile)
        result["lookup_and_load"] = timed(lambda: lookup(profile, Path(folder)), repeats)
    result["build"] = {
        str(nodes): timed(lambda n=nodes: best_first(lattice, n), 20 * repeats)
        for nodes in (64, 256, 1024)
    }
    store("startup", result)


if __name__ == "__main__":
    main()

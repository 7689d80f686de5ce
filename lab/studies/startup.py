"""Start-up times: `rooftree --help`, profile lookup and load, tree building; the first token.

    python -m lab.studies.startup [--repeats 30] [--first-token]

`--help` is timed as a whole process, the lookup in a warm one. `--first-token`: of new processes
without a profile, and what their probes say beside a calibration.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from costmodel.online import CycleCost
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from decoder.model.demo_model import ensure_demo_model
from decoder.tree.draft_tree import Lattice, best_first
from lab.studies.common import AVX2, environment, store


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


FIRST_TOKEN = """
import sys, time; start_s = time.perf_counter()
from rooftree import TreeDecoder
decoder = TreeDecoder.from_pretrained(sys.argv[1], drafter=sys.argv[2])
next(iter(decoder.stream("Once upon a time, there was a girl who lived in", max_new_tokens=8)))
print(time.perf_counter() - start_s)
"""


def first_token(drafter: str, kind: dict[str, str], truth: Profile) -> dict[str, float]:
    """Seconds to the first token, cold and compiled, and the probe's times over the true ones."""
    model, result = ensure_demo_model(say=print), {}
    rows, context = (one.ravel() for one in np.meshgrid([1, 4, 16, 32, 64], [256, 1024]))
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as compiled:
        places = {"ROOFTREE_HOME": home, "NUMBA_CACHE_DIR": compiled}
        for case in ("cold_s", "compiled_s"):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_TOKEN, str(model), drafter],
                env=os.environ | kind | places, check=True, capture_output=True, text=True,
            )  # fmt: skip
            result[case] = float(done.stdout.split()[-1])
            (path,) = Path(home).rglob("*.yaml")
            times = [one.verify_calibration().predict_s(rows, context)
                     for one in (Profile.from_yaml(path), truth)]  # fmt: skip
            result[f"probe_{case[:-2]}"] = float(np.exp(np.log(times[0] / times[1]).mean()))
            path.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--first-token", action="store_true")
    options = parser.parse_args()
    repeats = options.repeats
    if options.first_token:
        for kind in ({}, AVX2):
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "measured.yaml"
                command = [sys.executable, "-m", "rooftree", "calibrate", "--output", output]
                subprocess.run(command, env=os.environ | kind)
                truth = Profile.from_yaml(output)
            runs = [
                {"code": "now", "drafter": name} | first_token(name, kind, truth)
                for _ in range(2)
                for name in ("ngram", "ngram+demo")
            ]
            result = {"environment": environment(), "held_to": kind, "runs": runs}
            store("first_token_avx2" if kind else "first_token", result)
        return
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

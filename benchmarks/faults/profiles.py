"""Mutants of profiles: changed in their structure, their numbers and their text.

    python -m benchmarks.faults.profiles [--mutants 20000] [--seed 0] [--log FILE]

A mutant must be refused in one short line, or be as good as any other profile: read back as it
is written, predict finite seconds above 0 everywhere, choose tree sizes, be shown and planned
with. Anything else is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import math
import random
import signal
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.faults.profile_changes import STRUCTURE, TEXT, Data, at, places, rehash
from costmodel.calibration.physical import fit_physical
from costmodel.calibration.stairs import fit_stairs
from costmodel.calibration.two_branch import fit_two_branch
from costmodel.errors import ProfileError, RooftreeError
from costmodel.io import shipped_directory
from costmodel.online.cycle import CycleCost
from costmodel.online.estimator import MODES, OnlineEstimator
from costmodel.planning.options import PlanOptions, request_from_options
from costmodel.planning.search import plan
from costmodel.profile.profile import Profile
from costmodel.profile.text import dump_yaml
from decoder.policies.base import Limits
from decoder.policies.bastion import Bastion
from decoder.tree.draft_tree import Lattice
from profiler.report.profiles import (
    linear_line,
    plot_profile,
    print_profile,
    profile_rows,
    verdict,
)

LABEL = "mutant.yaml"
LONGEST_MESSAGE = 700
LIMIT_S = 10.0  # of the processor; an ordinary mutant takes some 50 ms
THOROUGH = 500  # one accepted mutant in so many is drawn, and planned with in every form
ROWS = (1, 2, 7, 16, 17, 63, 64, 128, 1000, 5000, 10**6)
CONTEXTS = (0, 1, 1000, 20_000, 10**8)
BATCHES = (1, 8, 10**5)
NODES = 64


class Fault(Exception):
    """A mutant that was neither refused in one line nor as good as any profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A damaged profile; `how` names what was done to which file."""

    how: str
    raw: bytes


@cache
def bases() -> tuple[tuple[str, Data], ...]:
    """Sound profiles: shipped ones, and measured ones that have every section."""
    found = []
    for name in ("h100-sxm/qwen3-8b", "a100-sxm-80gb/qwen3-30b-a3b"):
        path = shipped_directory() / f"{name}.bfloat16.kernels.tp1.yaml"
        found.append((name, Profile.from_yaml(path)))
    shipped = found[0][1]
    data = {name: yaml.safe_load(profile.to_yaml()) for name, profile in found}
    measured = _measured(shipped)
    for selected in ("linear", "two_branch", "physical", "stairs", "surface"):
        one = copy.deepcopy(measured)
        one["calibration"]["selected"] = selected
        data[f"measured {selected}"] = one
    return tuple(data.items())


def _measured(shipped: Profile) -> Data:
    """The shipped profile as if measured here, with all calibrations, stages and checks."""
    data: Data = yaml.safe_load(shipped.to_yaml())
    points = shipped.surface.points()  # type: ignore[union-attr]
    few = points.take(np.arange(0, len(points), 4))
    data["surface"] = {name: list(data["surface"][name])[::4] for name in data["surface"]}
    physical = fit_physical(few, shipped.roofline())
    data["calibration"] |= {
        "two_branch": fit_two_branch(few, shipped.roofline()).model_dump(exclude_none=True),
        "physical": physical.model_dump(exclude_none=True),
        "stairs": fit_stairs(few, physical).scales.model_dump(),
    }
    four = {"median_s": [1e-5, 2e-5, 4e-5, 9e-5], "mad_s": [1e-6, None, 2e-6, 3e-6], "n": [5] * 4}
    nodes = {"nodes": [1, 15, 63, 255], **four}
    data["stages"] |= {"build": nodes, "accept": nodes, "accept_sampled": nodes}
    data["stages"]["commit"] = {"tokens": [1, 2, 4, 16], **four}
    drafter = {"name": "ngram", "context": [64, 256, 1024, 4096], **four}
    data["drafters"] = {"ngram-1": drafter, "abc123": drafter | {"kind": "quick"}}
    data["drafters"]["abc123"]["created_utc"] = "2026-03-01T12:00:00Z"
    error = {"points": 2, "mape": 0.01, "median": 0.01, "p95": 0.02, "worst": 0.02}
    data["calibration"]["cross_validated"] = {"surface": error}
    data["held_out"] = {
        "error": error, "linear_error": error, "repeat_noise": 0.01, "rows": [3, 100],
        "context": [100, 900], "batch": [1, 1], "measured_s": [0.01, 0.02],
        "predicted_s": [0.01, 0.02],
    }  # fmt: skip
    data["regret"] = {"mean": 0.001, "worst": 0.01, "curves": 18, "contexts": [256, 1024]}
    data["runtime"] |= {"kind": "graphs", "buckets": [1, 16, 32, 64, 128], "torch": "2.13.0"}
    data["provenance"] |= {"kind": "measured", "duration_s": 30.0, "sm_clock_hz": 1.8e9}
    data["provenance"] |= {"temperature_c": 61.0, "power_w": 300.0, "busy_processes": ["Xorg"]}
    data["device"] |= {"driver": "560.35", "power_limit_w": 700.0, "mig": "1g.10gb"}
    return copy.deepcopy(data)


def mutants(seed: int) -> Iterator[Mutant]:
    """Mutants without end, the same for the same seed."""
    draw = random.Random(seed)
    while True:
        name, base = draw.choice(bases())
        data, done = copy.deepcopy(base), []
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            change = draw.choice(STRUCTURE)
            with contextlib.suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):
                change(data, draw)  # an earlier change may have removed its object
            done.append(change.__name__)
        if draw.random() < 0.5:
            rehash(data)
        try:
            raw = dump_yaml(data).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, ValueError, TypeError):
            continue
        if not done or draw.random() < 0.25:
            spoil = draw.choice(TEXT)
            raw = spoil(raw, draw)
            done.append(spoil.__name__)
        yield Mutant(how=f"{name}: {', '.join(done)}", raw=raw)


def check(mutant: Mutant) -> str:
    """`refused` or `accepted`. Raises Fault."""
    try:
        with _alarm(), warnings.catch_warnings():
            warnings.simplefilter("error")
            profile = _read(mutant.raw)
            if profile is None:
                return "refused"
            _reads_back(profile)
            _predicts(profile)
            _chooses(profile)
            thorough = zlib.crc32(mutant.raw) % THOROUGH == 0
            _is_shown(profile, draw=thorough)
            _plans(profile, search=thorough)
    except Fault:
        raise
    except Exception as failure:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise Fault(f"{type(failure).__name__} in {place}: {str(failure)[:200]}") from failure
    return "accepted"


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Turn a hang of the body into a Fault."""

    def ring(*_: object) -> None:
        raise Fault(f"no answer within {LIMIT_S:.0f} s of the processor")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _read(raw: bytes) -> Profile | None:
    """The profile; None where it is refused as it should be."""
    try:
        return Profile.from_bytes(raw, LABEL)
    except ProfileError as refusal:
        text = str(refusal)
        if not refusal.problem.startswith(f"{LABEL}: ") or not refusal.hint:
            raise Fault(f"a message without file or hint: {text[:200]}") from None
        if len(text) > LONGEST_MESSAGE:
            raise Fault(f"a message of {len(text)} letters: {text[:200]}") from None
        if not text.isprintable():
            raise Fault(f"a message that steers the terminal: {text[:200]!r}") from None
        return None


def _reads_back(profile: Profile) -> None:
    text = profile.to_yaml()
    if Profile.from_bytes(text.encode(), LABEL).to_yaml() != text:
        raise Fault("it reads back as another")


def _positive(seconds: Any, what: str) -> None:
    values = np.asarray(seconds, dtype=np.float64)
    if not (np.all(np.isfinite(values)) and np.all(values > 0)):
        raise Fault(f"{what} is not finite and above 0: {values.ravel()[:5]}")


def _predicts(profile: Profile) -> None:
    rows, contexts, batches = np.meshgrid(ROWS, CONTEXTS, BATCHES)
    for what, calibration in (
        ("the selected calibration", profile.verify_calibration()),
        ("the linear calibration", profile.linear_calibration()),
        ("the physical roofline", profile.roofline("physical")),
    ):
        _positive(calibration.predict_s(rows, contexts, batches), what)
        _positive(calibration.predict_s(np.array([1, 3, 64]), 500), what)


def _chooses(profile: Profile) -> None:
    """Trees by every correction, before and after verifications that took far more or less."""
    drafter = next(iter(profile.drafters), None)
    cost = CycleCost.from_profile(profile, drafter)
    probabilities = np.tile(np.geomspace(0.5, 0.01, 8), (8, 1))
    candidates = Lattice(np.tile(np.arange(8), (8, 1)), probabilities)
    for mode in MODES:
        estimator = OnlineEstimator(cost, mode)
        policy = Bastion(estimator, NODES)
        for context, off in ((0, 1.0), (1000, 3.0), (50_000, 0.3)):
            tree = policy.choose(candidates, context, Limits(nodes=NODES, depth=8))
            if not 0 <= tree.nodes <= NODES:
                raise Fault(f"a tree of {tree.nodes} nodes")
            _positive(estimator.cycle_s(np.arange(NODES + 1), context), f"a cycle ({mode})")
            _positive(estimator.plain_s(context), f"a plain step ({mode})")
            expected_s = float(cost.verify_s(tree.nodes, context))
            estimator.observe(float(cost.bucket_rows(tree.nodes)), context, off * expected_s)


def _is_shown(profile: Profile, *, draw: bool) -> None:
    path = Path(LABEL)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_profile(path, profile)
        print(linear_line(profile), verdict(profile))
        print(profile_rows(profile), profile.provenance.kind)
    words = shown.getvalue().replace("%", " ").split()
    if "nan" in words or "inf" in words:
        raise Fault(f"it is shown with nan or inf: {' '.join(words)[:200]}")
    if draw:
        with tempfile.TemporaryDirectory() as folder:
            plot_profile(profile, Path(folder) / "profile.png")


def _plans(profile: Profile, *, search: bool) -> None:
    """A plan on this profile, with `search` for the best trees; refusing it is right too."""
    drafting = {"acceptance": "gsm8k"} if search else {"policy": "plain", "max_running": 16}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(profile.to_yaml(), encoding="utf-8")
        options = PlanOptions(
            target=profile.target.name, gpus=str(path), prompt_tokens=500.0, output_tokens=200.0,
            rate="5/s", tp=str(profile.runtime.tensor_parallel), **drafting,
        )  # fmt: skip
        try:
            result = plan(request_from_options(options)).as_dict()
        except RooftreeError as refusal:
            if len(str(refusal)) > LONGEST_MESSAGE + len(folder):
                raise Fault(f"a message of {len(str(refusal))} letters") from None
            return
    for place in places(result):
        value = at(result, place)
        if isinstance(value, float) and not math.isfinite(value):
            raise Fault(f"the plan's {'.'.join(map(str, place))} is {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the mutants with a fault")
    options = parser.parse_args()
    counts = {"refused": 0, "accepted": 0, "fault": 0}
    for number, mutant in enumerate(mutants(options.seed)):
        if number == options.mutants:
            break
        try:
            counts[check(mutant)] += 1
        except Fault as fault:
            counts["fault"] += 1
            print(f"{number} ({mutant.how}): {fault}", flush=True)
            if options.keep is not None:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{options.seed}-{number}.yaml").write_bytes(mutant.raw)
        if number % 1000 == 999:
            print(f"{number + 1}: {counts}", flush=True)
    print(counts)
    sys.exit(1 if counts["fault"] else 0)


if __name__ == "__main__":
    main()

"""Profiles as a format of the campaign: sound ones of every kind, and all uses of a damaged one.

A damaged profile must be refused in one short line, or be as good as any other: read back as it
is written, predict finite seconds above 0 everywhere, choose tree sizes, be shown and planned
with.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
import yaml

from costmodel.calibration.physical import fit_physical
from costmodel.calibration.stairs import fit_stairs
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
from lab.papers.bastion.two_branch import fit_two_branch
from lab.studies.faults.formats import Format, finite, newest, one_in
from lab.studies.faults.judge import LONGEST_MESSAGE, Wrong
from lab.studies.faults.profile_changes import Data, at, places
from profiler.report.profiles import (
    linear_line,
    plot_profile,
    print_profile,
    profile_rows,
    verdict,
)

THOROUGH = 500  # one accepted profile in so many is drawn, and planned with in every form
ROWS = (1, 2, 7, 16, 17, 63, 64, 128, 1000, 5000, 10**6)
CONTEXTS = (0, 1, 1000, 20_000, 10**8)
BATCHES = (1, 8, 10**5)
NODES = 64


def sound_profiles() -> dict[str, Data]:
    """Shipped profiles, and measured ones that have every section."""
    shipped = {
        name: Profile.from_yaml(shipped_directory() / f"{name}.bfloat16.kernels.tp1.yaml")
        for name in ("h100-sxm/qwen3-8b", "a100-sxm-80gb/qwen3-30b-a3b")
    }
    data = {
        name.partition("/")[2]: yaml.safe_load(profile.to_yaml())
        for name, profile in shipped.items()
    }
    measured = _measured(shipped["h100-sxm/qwen3-8b"])
    for selected in ("linear", "two_branch", "physical", "stairs", "surface"):
        one = copy.deepcopy(measured)
        one["calibration"]["selected"] = selected
        data[f"measured-{selected}"] = one
    return data


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


def make_profiles(folder: Path) -> None:
    for name, data in sound_profiles().items():
        (folder / f"{name}.yaml").write_text(dump_yaml(data), encoding="utf-8")


def use_profile(folder: Path) -> None:
    path = newest(folder, "*.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile, thorough = _read(path), one_in(THOROUGH, path)
        try:
            _reads_back(profile)
            _predicts(profile)
            _chooses(profile)
            _is_shown(profile, draw=thorough)
        except RooftreeError as error:
            raise Wrong(f"accepted, and refused later: {type(error).__name__}") from error
        _plans(profile, path, search=thorough)


def _read(path: Path) -> Profile:
    """The profile. Raises ProfileError as it should be, and Wrong where the message is not."""
    try:
        return Profile.from_bytes(path.read_bytes(), path.name)
    except ProfileError as refusal:
        if not refusal.problem.startswith(f"{path.name}: ") or not refusal.hint:
            raise Wrong("a message without file or hint") from None
        if not str(refusal).isprintable():
            raise Wrong("a message that steers the terminal") from None
        raise


def _reads_back(profile: Profile) -> None:
    text = profile.to_yaml()
    if Profile.from_bytes(text.encode(), "again").to_yaml() != text:
        raise Wrong("it reads back as another")


def _predicts(profile: Profile) -> None:
    rows, contexts, batches = np.meshgrid(ROWS, CONTEXTS, BATCHES)
    for what, calibration in (
        ("the selected calibration", profile.verify_calibration()),
        ("the linear calibration", profile.linear_calibration()),
        ("the physical roofline", profile.roofline("physical")),
    ):
        finite(calibration.predict_s(rows, contexts, batches), what)
        finite(calibration.predict_s(np.array([1, 3, 64]), 500), what)


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
                raise Wrong(f"a tree of {tree.nodes} nodes")
            finite(estimator.cycle_s(np.arange(NODES + 1), context), f"a cycle ({mode})")
            finite(estimator.plain_s(context), f"a plain step ({mode})")
            expected_s = float(cost.verify_s(tree.nodes, context))
            estimator.observe(float(cost.bucket_rows(tree.nodes)), context, off * expected_s)


def _is_shown(profile: Profile, *, draw: bool) -> None:
    path = Path("profile.yaml")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_profile(path, profile)
        print(linear_line(profile), verdict(profile))
        print(profile_rows(profile), profile.provenance.kind)
    words = shown.getvalue().replace("%", " ").split()
    if "nan" in words or "inf" in words:
        raise Wrong("it is shown with nan or inf")
    if draw:
        with tempfile.TemporaryDirectory() as folder:
            plot_profile(profile, Path(folder) / "profile.png")


def _plans(profile: Profile, path: Path, *, search: bool) -> None:
    """A plan on this profile, with `search` for the best trees; refusing it is right too."""
    drafting = {"acceptance": "gsm8k"} if search else {"policy": "plain", "max_running": 16}
    options = PlanOptions(
        target=profile.target.name, gpus=str(path), prompt_tokens=500.0, output_tokens=200.0,
        rate="5/s", tp=str(profile.runtime.tensor_parallel), **drafting,
    )  # fmt: skip
    try:
        result = plan(request_from_options(options)).as_dict()
    except RooftreeError as refusal:
        if len(str(refusal)) > LONGEST_MESSAGE:
            raise Wrong(f"a plan's message of {len(str(refusal))} letters") from None
        return
    for place in places(result):
        value = at(result, place)
        if isinstance(value, float) and not math.isfinite(value):
            raise Wrong(f"the plan's {'.'.join(map(str, place))} is {value}")


PROFILE = Format(name="profile", make=make_profiles, kinds={"*.yaml": "profile"}, use=use_profile)

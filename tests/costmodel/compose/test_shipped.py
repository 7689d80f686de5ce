"""Every shipped calibration: valid, found, physical; and what tables cover beside."""

import contextlib
import dataclasses
import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose import support
from costmodel.compose.support import composes, supported
from costmodel.compose.transfer import transfer_profile
from costmodel.io import shipped_directory
from costmodel.profile.grade import grade
from costmodel.profile.lookup import find_profile
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore, profile_file_name
from integrations.aiconfigurator.package import SYSTEMS, data_folder
from tests.costmodel.planning.conftest import SHIPPED
from tests.costmodel.profile.test_grade import judged

ALL_PATHS = sorted(shipped_directory().glob("*/*.yaml"))
SENT = [path for path in ALL_PATHS if "kind: measured" in path.read_text(encoding="utf-8")]
PATHS = [path for path in ALL_PATHS if path not in SENT]  # made from others' measurements
NAMES = [f"{path.parent.name}/{path.name}" for path in PATHS]


def check_sent(path: Path) -> None:
    """What CONTRIBUTING.md says of a measured profile that somebody sends."""
    profile = Profile.from_yaml(path)
    assert profile.to_yaml() == path.read_text(encoding="utf-8"), "it was edited"
    assert profile.provenance.kind == "measured"
    name = f"{profile.device.slug}/{profile_file_name(profile)}"
    assert f"{path.parent.name}/{path.name}" == name, "the lookup does not find it"
    assert grade(profile).word != "do not use", str(grade(profile))
    points = profile.surface.points()
    bound_s = profile.roofline("physical").seconds(points.rows, points.context, points.batch)
    assert np.all(points.seconds >= bound_s), "faster than the physical roofline"


@pytest.mark.parametrize(("edit", "reason"), [
    (lambda text: text, ""),
    (lambda text: "# mine\n" + text, "it was edited"),
    (lambda text: text.replace("dtype: bfloat16", "dtype: float16"), "lookup does not find"),
    (lambda text: text.replace("  worst: 0.01\n", "  worst: 0.09\n"), "do not use"),
    (lambda text: text.replace("bytes_per_s: 4.0e+12", "bytes_per_s: 1.0e+12"), "the physical"),
])  # fmt: skip
def test_a_sent_profile_with_a_fault_is_refused(tmp_path, edit, reason):
    path = ProfileStore([tmp_path]).save(judged())
    text = path.read_text(encoding="utf-8")
    path.write_text(edit(text), encoding="utf-8")
    assert (edit(text) == text) == (not reason)
    with pytest.raises(AssertionError, match=reason) if reason else contextlib.nullcontext():
        check_sent(path)


@cache
def read(path: Path) -> Profile:
    return Profile.from_yaml(path)


@pytest.fixture(params=PATHS, ids=NAMES)
def shipped(request):
    return read(request.param)


def test_measured_profiles_that_were_sent_are_what_they_should_be():
    for path in SENT:
        check_sent(path)


def test_the_lookup_finds_it_under_graphs(shipped):
    """Also where the driver or error correction keeps some of the memory."""
    for reported in (1.0, 0.995, 0.938):
        memory = {"memory_bytes": int(reported * shipped.device.memory_bytes)}
        key = dataclasses.replace(shipped.key, runtime="graphs", attention="split", **memory)
        found = SHIPPED.find(key)
        assert found.profile.key == shipped.key
        assert found.online_correction and not found.needs_floor_probe
        assert SHIPPED.find(dataclasses.replace(key, runtime="eager")).needs_floor_probe


def test_no_point_is_faster_than_the_physical_bound(shipped):
    calibration, bound = shipped.verify_calibration(), shipped.roofline("physical")
    rows = np.arange(1, 1025)
    for context in (0, 100, 256, 777, 4096, 16384, 32768):
        assert np.all(calibration.predict_s(rows, context) >= bound.seconds(rows, context))
    plain = shipped.stages.plain
    assert np.all(np.array(plain.median_s) >= bound.seconds(1, plain.context, plain.batch))
    for rows in (1, 16, 64, 256, 1024):  # more context never takes less time, but for rounding
        seconds = [float(calibration.predict_s(rows, c)) for c in (64, 256, 1024, 4096, 16384)]
        assert np.all(np.diff(seconds) >= -1e-15), (rows, seconds)
    # Two rows cost half more than one at most, beyond the bar; of a mixture they may read twice as
    # many experts.
    for context in (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        one, two = calibration.predict_s(np.array([1, 2]), context)
        needed = float(bound.seconds(2, context) / bound.seconds(1, context))
        limit = max(1.5, needed) * (1 + shipped.provenance.error_bar)
        assert two <= limit * one, context


@pytest.mark.parametrize("target", sorted({path.name for path in PATHS}))
def test_no_device_is_slower_than_one_that_is_weaker_in_every_peak(target):
    """At any rows and context of a grid, beyond the 80 % interval of both error bars."""
    profiles = [read(path) for path in PATHS if path.name == target]
    rows = np.array([1, 2, 3, 4, 8, 12, 16, 32, 48, 64, 128, 256, 512, 1024])
    contexts = np.array([64, 256, 1024, 4096, 8192, 16384, 32768])[:, None]
    seconds = [p.verify_calibration().predict_s(rows, contexts) for p in profiles]
    compared = 0
    for (i, strong), (j, weak) in itertools.permutations(enumerate(profiles), 2):
        peaks = [(one.peaks.flops_per_s, one.peaks.bytes_per_s) for one in (strong, weak)]
        if any(np.less(*peaks)):
            continue
        compared += 1
        bar = np.hypot(strong.provenance.error_bar, weak.provenance.error_bar)
        slower = seconds[i] > np.exp(1.606 * bar) * seconds[j]
        names = f"{strong.device.name} slower than {weak.device.name}"
        assert not slower.any(), (names, np.max(seconds[i] / seconds[j]), bar)
    assert compared >= 20


def test_it_says_where_it_comes_from_and_how_far_to_trust_it(shipped):
    path = shipped_directory() / shipped.device.slug / profile_file_name(shipped)
    assert shipped.to_yaml() == path.read_text(encoding="utf-8")
    made = shipped.provenance
    assert made.kind in ("composed", "transferred")
    assert made.source and "error bar" in made.note
    assert 0.02 < made.error_bar < 0.2
    if made.kind == "composed":
        doubted = re.search(r"([\d.]+)% as splitting keys in a verification is unver", made.note)
        assert 0.01 < float(doubted[1]) / 100 < made.error_bar
    assert shipped.runtime.kind == "kernels"
    assert shipped.device.name == find_device(shipped.device.name).name


def test_what_is_composed_is_what_the_tables_hold_on_every_device_with_some():
    pytest.importorskip("aiconfigurator_core")
    # GLM has two key-value heads, which devices repeat.
    for name in ("qwen3-8b", "glm-4-9b-0414", "qwen3-30b-a3b", "openai/gpt-oss-120b"):
        architecture = find_target(name).architecture
        assert not any(composes(find_device("h100-sxm"), architecture, n) for n in (1, 2, 4, 8))
    pytest.importorskip("aiconfigurator_core")
    with_tables = {path.parents[1].name for path in data_folder().glob("*/attention/*")}
    assert with_tables - set(SYSTEMS.values()) == {"b60"}  # Intel's, on which no runtime decodes
    assert set(SYSTEMS.values()) <= with_tables
    for slug in SYSTEMS:
        assert find_profile(slug, "qwen3-8b", store=SHIPPED).provenance.kind == "composed"


def test_a_profile_for_a_device_without_bfloat16_is_of_float16():
    source = find_profile("h100", "qwen3-4b", store=SHIPPED)
    moved = transfer_profile(source, find_device("t4"))
    assert (source.runtime.dtype, moved.runtime.dtype) == ("bfloat16", "float16")
    assert transfer_profile(source, find_device("a10")).runtime.dtype == "bfloat16"


def test_without_the_tables_the_reason_is_given(monkeypatch):
    names = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
    monkeypatch.setattr(support, "load_devices", lambda: {"h100-sxm": find_device("h100-sxm")})
    monkeypatch.setattr(support, "load_targets", lambda: {one: find_target(one) for one in names})
    monkeypatch.setattr(support, "_tables", support._tables.__wrapped__)  # without its cache
    monkeypatch.setattr(
        "integrations.aiconfigurator.package.importlib.util.find_spec", lambda _: None
    )
    rows = {(row.device, row.target): row for row in supported(SHIPPED)}
    absent = rows["h100-sxm", "Qwen/Qwen3-32B"]
    assert absent.provenance is None and "is not installed" in absent.reason
    assert rows["h100-sxm", "Qwen/Qwen3-8B"].provenance == "composed"

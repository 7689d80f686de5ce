"""Every shipped calibration: valid, found, physical, documented."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.shipped import ROOT, document, recipes
from costmodel.device import find_device
from costmodel.files import shipped_directory
from costmodel.profile import Profile
from costmodel.registry import ProfileStore
from costmodel.targets import find_target

PATHS = sorted(shipped_directory().glob("*/*.yaml"))
NAMES = [f"{path.parent.name}/{path.name}" for path in PATHS]
WANTED = (
    "a100-sxm-80gb", "h100-sxm", "h200", "b200", "l40s", "rtx-pro-6000-server", "rtx-a6000",
    "rtx-pro-6000-workstation", "a100-pcie-80gb", "h100-pcie",
)  # fmt: skip


@pytest.fixture(params=PATHS, ids=NAMES)
def shipped(request):
    return Profile.from_yaml(request.param)


def test_every_file_has_a_command_and_every_command_a_file():
    assert sorted(made.path for made in recipes()) == NAMES


@pytest.mark.parametrize("device", WANTED)
@pytest.mark.parametrize("target", ["qwen3-4b", "qwen3-8b", "llama-3.1-8b-instruct"])
def test_the_promised_pairs_are_there(device, target):
    assert f"{device}/{target}.bfloat16.kernels.tp1.yaml" in NAMES


@pytest.mark.parametrize("reported", [1.0, 0.995, 0.938])
def test_the_lookup_finds_it_under_graphs(shipped, reported):
    """Also where the driver or error correction keeps some of the memory."""
    key = dataclasses.replace(
        shipped.key,
        runtime="graphs",
        attention="split",
        memory_bytes=int(reported * shipped.device.memory_bytes),
    )
    found = ProfileStore([shipped_directory()]).find(key)
    assert found.profile.key == shipped.key
    assert found.online_correction and not found.needs_floor_probe
    assert (
        ProfileStore([shipped_directory()])
        .find(dataclasses.replace(key, runtime="eager"))
        .needs_floor_probe
    )


def test_no_point_is_faster_than_the_physical_bound(shipped):
    calibration, bound = shipped.verify_calibration(), shipped.roofline("physical")
    rows = np.arange(1, 1025)
    for context in (0, 64, 100, 256, 777, 1024, 3000, 4096, 10000, 16384, 32768):
        assert np.all(calibration.predict_s(rows, context) >= bound.seconds(rows, context))
    plain = shipped.stages.plain
    assert np.all(np.array(plain.median_s) >= bound.seconds(1, plain.context, plain.batch))


def test_it_says_where_it_comes_from_and_how_far_to_trust_it(shipped):
    made = shipped.provenance
    assert made.kind in ("composed", "transferred")
    assert made.source and "error bar" in made.note
    assert 0.02 < made.error_bar < 0.2
    assert shipped.runtime.kind == "kernels"
    assert shipped.device.name == find_device(shipped.device.name).name


def test_more_context_never_takes_less_time(shipped):
    calibration = shipped.verify_calibration()
    for rows in (1, 16, 64, 256, 1024):
        seconds = [float(calibration.predict_s(rows, c)) for c in (64, 256, 1024, 4096, 16384)]
        assert seconds == sorted(seconds)


def test_a_fine_tune_with_the_same_sizes_is_served():
    coder = find_target("Qwen/Qwen3-Coder-30B-A3B-Instruct").architecture
    path = shipped_directory() / "h100-sxm" / "qwen3-30b-a3b.bfloat16.kernels.tp1.yaml"
    assert Profile.from_yaml(path).target.architecture_hash == coder.hash


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "calibrations.md").read_text(encoding="utf-8") == document()

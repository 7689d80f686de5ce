"""Scaling a profile to a sibling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel.compose.transfer import transfer_profile
from costmodel.device import find_device
from costmodel.errors import InputError
from costmodel.files import shipped_directory
from costmodel.profile import Profile


@pytest.fixture(scope="module")
def source():
    return Profile.from_yaml(
        shipped_directory() / "h100-sxm" / "qwen3-8b.bfloat16.kernels.tp1.yaml"
    )


def faster(profile, *, bandwidth=1.0, flops=1.0):
    spec = find_device(profile.device.name)
    return dataclasses.replace(
        spec,
        name="Test GPU",
        slug="test-gpu",
        peak_bytes_per_s=bandwidth * spec.peak_bytes_per_s,
        peak_flops_per_s=flops * spec.peak_flops_per_s,
    )


def ratios(profile, device):
    moved = transfer_profile(profile, device)
    return np.array(moved.surface.median_s) / np.array(profile.surface.median_s)


def test_both_peaks_scale_everything(source):
    assert ratios(source, faster(source, bandwidth=2, flops=2)) == pytest.approx(0.5, rel=1e-9)


def test_bandwidth_scales_what_is_memory_bound(source):
    rows = np.array(source.surface.rows)
    ratio = ratios(source, faster(source, bandwidth=0.5))
    assert ratio[rows <= 16] == pytest.approx(2.0, rel=0.01)
    assert np.all(ratio[rows == 1024] < 1.2)


def test_flops_scale_what_is_compute_bound(source):
    rows = np.array(source.surface.rows)
    ratio = ratios(source, faster(source, flops=0.5))
    assert ratio[rows <= 16] == pytest.approx(1.0, rel=0.01)
    assert np.all(ratio[rows == 1024] > 1.8)


def test_it_says_where_it_comes_from(source):
    moved = transfer_profile(source, find_device("h100-pcie"))
    assert moved.provenance.kind == "transferred"
    assert moved.device.name == "NVIDIA H100 PCIe"
    assert "NVIDIA H100 80GB HBM3" in moved.provenance.source
    assert "bandwidth (x 0.609)" in moved.provenance.note
    assert moved.provenance.error_bar > source.provenance.error_bar
    assert moved.stages.plain is not None and moved.stages.prefill is not None


def test_what_cannot_be_transferred(source):
    with pytest.raises(InputError, match="already"):
        transfer_profile(source, find_device("h100-sxm"))
    eager = source.model_copy(
        update={"runtime": source.runtime.model_copy(update={"kind": "eager"})}
    )
    with pytest.raises(InputError, match="host's time"):
        transfer_profile(eager, find_device("h100-pcie"))
    cpu = source.model_copy(update={"device": source.device.model_copy(update={"kind": "cpu"})})
    with pytest.raises(InputError, match="whole GPU"):
        transfer_profile(cpu, find_device("h100-pcie"))

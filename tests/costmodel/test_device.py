"""The shipped list of devices and the lookup by name."""

from __future__ import annotations

import csv

import pytest

from costmodel.device import (
    DeviceFingerprint,
    Peaks,
    device_by_name,
    device_slug,
    find_device,
    load_devices,
    slugify,
)
from costmodel.errors import DeviceError, InputError

ROW = (
    "{name: Card, bf16_tflops: 10, memory_gb_per_s: 100, memory_gib: 8, l2_mib: 4,"
    " sm_count: 10, tdp_w: 100, confidence: recalled}"
)


def test_every_device_matches_the_facts(shared_dir):
    with open(shared_dir / "facts/devices.csv", newline="") as stream:
        facts = {row["nvml_name"]: row for row in csv.DictReader(stream)}
    devices = load_devices()
    assert {spec.name for spec in devices.values()} == set(facts)
    for name, row in facts.items():
        spec = device_by_name(name)
        assert spec.peak_flops_per_s == pytest.approx(float(row["bf16_dense_tflops"]) * 1e12)
        assert spec.peak_bytes_per_s == pytest.approx(float(row["memory_gb_per_s"]) * 1e9)
        assert spec.memory_bytes == int(row["memory_gb"]) * 2**30
        assert spec.l2_bytes == int(row["l2_mb"]) * 2**20
        assert (spec.sm_count, spec.tdp_w) == (int(row["sm_count"]), int(row["tdp_w"]))
        assert spec.confidence == row["confidence"]
        fp8 = row["fp8_dense_tflops"]
        assert (spec.fp8_flops_per_s is None) == (fp8 == "")
        if fp8:
            assert spec.fp8_flops_per_s == pytest.approx(float(fp8) * 1e12)


def test_slugs_are_short_unique_and_stable_names():
    devices = load_devices()
    assert all(slug == slugify(slug) and len(slug) <= 24 for slug in devices)
    assert all(find_device(slug).slug == slug for slug in devices)
    assert device_slug("NVIDIA H100 80GB HBM3") == "h100-sxm"
    assert device_slug("AMD EPYC 7B13 64-Core (r)") == "amd-epyc-7b13-64-core-r"


def test_the_lookup_by_nvml_name_is_exact():
    assert device_by_name("NVIDIA H200").slug == "h200"
    assert device_by_name("NVIDIA H20") is None
    assert device_by_name("nvidia h200") is None


@pytest.mark.parametrize(
    ("query", "slug"),
    [
        ("h200", "h200"),
        ("H100-SXM", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("nvidia rtx a6000", "rtx-a6000"),
        ("4090", "rtx-4090"),
        ("Server Edition", "rtx-pro-6000-server"),
    ],
)
def test_a_part_that_fits_one_device_is_enough(query, slug):
    assert find_device(query).slug == slug


@pytest.mark.parametrize("query", ["a100", "rtx pro 6000", "h100", "nvidia"])
def test_an_ambiguous_device_is_an_error_that_lists_the_fits(query):
    with pytest.raises(DeviceError, match="ambiguous") as caught:
        find_device(query)
    assert caught.value.hint.count(",") >= 1


@pytest.mark.parametrize("query", ["", "v100", "???"])
def test_an_unknown_device_is_an_error_that_lists_all(query):
    with pytest.raises(DeviceError, match="no known device") as caught:
        find_device(query)
    assert "h100-sxm" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must map"),
        ("card: 3", "card: must be a mapping"),
        (f"card: {ROW.replace('bf16_tflops: 10, ', '')}", "'bf16_tflops' is missing"),
        (f"card: {ROW.replace('s: 100', 's: -1')}", "memory_gb_per_s must be a finite number"),
        (f"card: {ROW.replace('l2_mib: 4', 'l2_mib: .nan')}", "l2_mib"),
        (f"card: {ROW.replace('l2_mib: 4', 'l2_mib: true')}", "l2_mib must be a number"),
        (f"card: {ROW.replace('recalled', 'sure')}", "confidence"),
        (f"Card: {ROW}", "slug"),
        (f"card: {ROW}\ncard2: {ROW}", "two slugs have the name 'Card'"),
        (f"card: {ROW}\ncard: {ROW}", "appears twice"),
    ],
)
def test_wrong_tables_name_the_entry(tmp_path, text, message):
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_devices(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast", True])
def test_peaks_are_finite_and_positive(value):
    with pytest.raises(InputError, match="bytes_per_s"):
        Peaks(flops_per_s=1e12, bytes_per_s=value)


def test_a_fingerprint_knows_its_folder():
    assert DeviceFingerprint(kind="cuda", name="NVIDIA B200", memory_bytes=1).slug == "b200"

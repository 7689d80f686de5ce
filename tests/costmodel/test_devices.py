"""The shipped list of devices and the lookup by name."""

from __future__ import annotations

import csv

import pytest

from costmodel.catalog import (
    DeviceFingerprint,
    Peaks,
    device_by_name,
    device_slug,
    find_device,
    load_devices,
    slugify,
)
from costmodel.errors import InputError

ROW = (
    "{name: Card, bf16_tflops: 10, memory_gb_per_s: 100, memory_gib: 8, l2_mib: 4,"
    " sm_count: 10, tdp_w: 100, confidence: recalled, source: a sheet}"
)


def test_every_device_matches_the_facts(shared_dir):
    with open(shared_dir / "facts/devices.csv", newline="") as stream:
        facts = {row["nvml_name"]: row for row in csv.DictReader(stream)}
    devices = load_devices()
    assert {spec.name for spec in devices.values()} >= set(facts)
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
    assert device_by_name("NVIDIA H20-3e") is None
    assert device_by_name("nvidia h200") is None


@pytest.mark.parametrize(
    ("query", "slug"),
    [
        ("h200", "h200"),
        ("H100-SXM", "h100-sxm"),
        ("h100 sxm", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("nvidia rtx a6000", "rtx-a6000"),
        ("h100", "h100-sxm"),
        ("4090", "rtx-4090"),
    ],
)
def test_a_slug_a_name_and_an_alias_find_their_device_in_any_case(query, slug):
    assert find_device(query).slug == slug


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("h20", "NVIDIA H20"),
        ("l40", "NVIDIA L40"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("a10", "NVIDIA A10"),
        ("l4", "NVIDIA L4"),
        ("gb200", "NVIDIA GB200"),
        ("b300", "NVIDIA B300 SXM6 AC"),
        ("h800", "NVIDIA H800"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_a_name_that_is_part_of_another_is_never_that_other(query, name):
    assert find_device(query).name == name


@pytest.mark.parametrize(
    ("query", "near"),
    [
        ("a100", "a100-sxm-80gb"),
        ("rtx pro 6000", "rtx-pro-6000-server"),
        ("Server Edition", "rtx-pro-6000-server"),
        ("nvidia", ""),
        ("a10g", "a10"),
        ("h200?", "h200"),
        ("v100", "h100-sxm"),
        ("", ""),
        ("???", ""),
    ],
)
def test_a_part_of_a_name_finds_nothing_but_names_the_nearest(query, near):
    with pytest.raises(InputError, match="no known device is called") as caught:
        find_device(query)
    assert near in caught.value.hint
    assert "`rooftree devices` lists all" in caught.value.hint


def test_the_devices_that_plans_are_asked_for_are_known():
    wanted = (
        "t4", "a10", "l40", "h20", "h800", "gh200", "b300", "gb200", "gb300", "mi300x", "mi325x",
        "mi355x", "rtx-5090", "rtx-4090", "rtx-3090", "l4",
    )  # fmt: skip
    for slug in wanted:
        spec = load_devices()[slug]
        assert spec.source
        # The figures that bound a forward: those of devices sold since 2018.
        assert 60e12 <= spec.peak_flops_per_s <= 3e15
        assert 300e9 <= spec.peak_bytes_per_s <= 8e12


def test_a_device_without_bfloat16_has_the_rate_of_float16():
    assert (load_devices()["t4"].dtype, load_devices()["a10"].dtype) == ("float16", "bfloat16")
    assert load_devices()["t4"].peaks.flops_per_s == 65e12  # NVIDIA's T4 data sheet


@pytest.mark.parametrize(
    ("reported", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Tesla T4", "t4"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
    ],
)
def test_what_drivers_report_finds_the_device(reported, slug):
    assert device_by_name(reported).slug == slug
    assert device_slug(reported) == slug


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must map"),
        ("card: 3", "card: must be a mapping"),
        (f"card: {ROW.replace('bf16_tflops: 10, ', '')}", "'bf16_tflops' is missing"),
        (f"card: {ROW.replace('s: 100', 's: -1')}", "memory_gb_per_s must be a number from"),
        (f"card: {ROW.replace('l2_mib: 4', 'l2_mib: .nan')}", "l2_mib"),
        (f"card: {ROW.replace('l2_mib: 4', 'l2_mib: true')}", "l2_mib must be a number"),
        (f"card: {ROW.replace('l2_mib: 4', 'l2_mib: 1.0e-9')}", "l2_mib must be a number from"),
        (f"card: {ROW.replace('recalled', 'sure')}", "confidence"),
        (f"Card: {ROW}", "slug"),
        (f"card: {ROW}\ncard2: {ROW}", "card and card2 share the name 'card'"),
        (f"one: {ROW}\ntwo: {{aliases: [ONE], {ROW[1:].replace('Card', 'Two')}", "share the name"),
        (f"card: {{aliases: Two, {ROW[1:]}", "aliases must be a list of names"),
        (f"card: {{aliases: [3], {ROW[1:]}", "aliases must be a list of names"),
        (f"card: {ROW.replace('a sheet', '[]')}", "source must be a text"),
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

"""The shipped list of devices and the lookup by name."""

from __future__ import annotations

import csv

import pytest

from costmodel.catalog import (
    DeviceFingerprint,
    device_by_name,
    device_slug,
    find_device,
    load_devices,
    slugify,
)
from costmodel.errors import InputError


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
    for spec in devices.values():  # none has a name of another
        assert all(find_device(n) is spec for n in (spec.slug, spec.name, *spec.aliases))
    assert device_slug("AMD EPYC 7B13 64-Core (r)") == "amd-epyc-7b13-64-core-r"


@pytest.mark.parametrize(
    ("reported", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Tesla T4", "t4"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
    ],
)
def test_what_drivers_report_is_found_exactly(reported, slug):
    assert device_by_name(reported).slug == device_slug(reported) == slug
    assert device_by_name(reported.lower()) is None
    assert device_by_name(f"{reported}-3e") is None


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
        ("a10", "NVIDIA A10"),
        ("l4", "NVIDIA L4"),
        ("b300", "NVIDIA B300 SXM6 AC"),
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
        ("a10g", "a10"),
        ("v100", "h100-sxm"),
        ("", ""),
    ],
)
def test_a_part_of_a_name_finds_nothing_but_names_the_nearest(query, near):
    with pytest.raises(InputError, match="no known device is called") as caught:
        find_device(query)
    assert near in caught.value.hint
    assert "`rooftree devices` lists all" in caught.value.hint


def test_the_figures_are_those_of_devices_sold_since_2018():
    wanted = (
        "t4", "a10", "l40", "h20", "h800", "gh200", "b300", "gb200", "gb300", "mi300x", "mi325x",
        "mi355x", "rtx-5090", "rtx-4090", "rtx-3090", "l4",
    )  # fmt: skip
    assert set(wanted) <= load_devices().keys()
    for spec in load_devices().values():
        assert spec.source and spec.confidence in ("corroborated", "recalled")
        assert 60e12 <= spec.peak_flops_per_s <= 3e15
        assert 200e9 <= spec.peak_bytes_per_s <= 8e12
        assert 8e9 <= spec.memory_bytes <= 320e9 and 1e6 <= spec.l2_bytes <= 300e6
        assert 30 <= spec.sm_count <= 320 and 50 <= spec.tdp_w <= 1600


def test_a_device_without_bfloat16_has_the_rate_of_float16():
    assert (load_devices()["t4"].dtype, load_devices()["a10"].dtype) == ("float16", "bfloat16")
    assert load_devices()["t4"].peaks.flops_per_s == 65e12  # NVIDIA's T4 data sheet


def test_a_fingerprint_knows_its_folder():
    assert DeviceFingerprint(kind="cuda", name="NVIDIA B200", memory_bytes=1).slug == "b200"

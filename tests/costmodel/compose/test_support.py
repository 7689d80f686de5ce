"""What tables cover, and profiles of devices that run another 16-bit type."""

from __future__ import annotations

import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.aiconfigurator import SYSTEMS, data_folder
from costmodel.compose.support import MeasuredShapes, supported
from costmodel.compose.transfer import transfer_profile
from costmodel.io import shipped_directory
from costmodel.profile.lookup import find_profile
from costmodel.profile.store import ProfileStore

SHIPPED = ProfileStore([shipped_directory()])
SQUARES = {(n, k) for n in (1024, 8192, 65536) for k in (1024, 4096, 16384)}


def covered(name: str, heads: dict[int, set[tuple[int, int]]], products=(SQUARES,)) -> list[int]:
    tables = MeasuredShapes(heads=heads, products=products)
    architecture = find_target(name).architecture
    return [degree for degree in (1, 2, 4, 8) if tables.cover(architecture, degree)]


def test_attention_is_covered_by_as_many_heads_of_the_size():
    assert covered("qwen3-8b", {128: {(32, 8)}}) == [1, 2, 4, 8]
    assert covered("qwen3-8b", {128: {(16, 8)}}) == [2, 4, 8]
    assert covered("qwen3-8b", {128: {(96, 4)}}) == [2, 4, 8]
    assert covered("qwen3-8b", {64: {(32, 8)}}) == []


def test_a_degree_has_to_divide_heads_and_ffn():
    # GLM-4-9B has two key-value heads
    assert covered("glm-4-9b-0414", {128: {(32, 8)}}) == [1, 2]


def test_every_product_of_every_engine_has_to_be_near():
    heads = {128: {(32, 8)}}
    assert covered("qwen3-8b", heads, (SQUARES, {(64, 64)})) == []
    assert covered("qwen3-8b", heads, ({(4096, 4096)},)) == []  # the LM head is 37 times as wide


def test_a_profile_for_a_device_without_bfloat16_is_of_float16():
    source = find_profile("h100", "qwen3-4b", store=SHIPPED)
    moved = transfer_profile(source, find_device("t4"))
    assert (source.runtime.dtype, moved.runtime.dtype) == ("bfloat16", "float16")
    assert transfer_profile(source, find_device("a10")).runtime.dtype == "bfloat16"


def test_without_the_tables_the_reason_is_given(monkeypatch):
    monkeypatch.setattr("costmodel.compose.aiconfigurator.importlib.util.find_spec", lambda _: None)
    rows = {(row.device, row.target): row for row in supported(SHIPPED)}
    absent = rows["h100-sxm", "Qwen/Qwen3-32B"]
    assert absent.provenance is None and "is not installed" in absent.reason
    assert rows["h100-sxm", "Qwen/Qwen3-8B"].provenance == "composed"


def test_every_device_with_tables_has_composed_profiles():
    pytest.importorskip("aiconfigurator_core")
    with_tables = {path.parents[1].name for path in data_folder().glob("*/attention/*")}
    assert with_tables - set(SYSTEMS.values()) == {"b60"}  # Intel's, on which no runtime decodes
    assert set(SYSTEMS.values()) <= with_tables
    for slug in SYSTEMS:
        assert find_profile(slug, "qwen3-8b", store=SHIPPED).provenance.kind == "composed"


@pytest.mark.parametrize("device", ["b300", "gb200", "gb300"])
def test_blackwell_devices_have_composed_profiles(device):
    for target in ("qwen3-4b", "qwen3-8b", "llama-3.1-8b-instruct", "qwen3-30b-a3b"):
        assert find_profile(device, target, store=SHIPPED).provenance.kind == "composed"


def test_a_mixture_is_composable_where_its_experts_were_measured():
    pytest.importorskip("aiconfigurator_core")
    rows = {(row.device, row.target): row for row in supported(SHIPPED)}
    mixtral = rows["b200", "mistralai/Mixtral-8x7B-v0.1"]
    assert (mixtral.provenance, mixtral.degrees) == ("operators", (1,))
    absent = rows["b200", "openai/gpt-oss-20b"]
    assert absent.provenance is None and "experts were not measured" in absent.reason

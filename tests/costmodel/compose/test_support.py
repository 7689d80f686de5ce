"""What tables cover, and profiles of devices that run another 16-bit type."""

from __future__ import annotations

import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose import support
from costmodel.compose.aiconfigurator import SYSTEMS, data_folder
from costmodel.compose.support import composes, supported
from costmodel.compose.transfer import transfer_profile
from costmodel.io import shipped_directory
from costmodel.profile.lookup import find_profile
from costmodel.profile.store import ProfileStore

SHIPPED = ProfileStore([shipped_directory()])


@pytest.fixture
def few(monkeypatch):
    """Two devices and four targets are all that is known."""
    names = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b")
    devices = {slug: find_device(slug) for slug in ("h100-sxm", "b200")}
    monkeypatch.setattr(support, "load_devices", lambda: devices)
    monkeypatch.setattr(
        support, "load_targets", lambda: {name: find_target(name) for name in names}
    )


def test_what_is_composed_is_what_the_tables_hold():
    pytest.importorskip("aiconfigurator_core")
    h100 = find_device("h100-sxm")

    def degrees(name: str) -> list[int]:
        architecture = find_target(name).architecture
        return [degree for degree in (1, 2, 4, 8) if not composes(h100, architecture, degree)]

    assert degrees("qwen3-8b") == [1, 2, 4, 8]
    assert degrees("glm-4-9b-0414") == [1, 2]  # two key-value heads
    assert degrees("qwen3-30b-a3b") == [1]
    assert degrees("openai/gpt-oss-20b") == []


def test_a_profile_for_a_device_without_bfloat16_is_of_float16():
    source = find_profile("h100", "qwen3-4b", store=SHIPPED)
    moved = transfer_profile(source, find_device("t4"))
    assert (source.runtime.dtype, moved.runtime.dtype) == ("bfloat16", "float16")
    assert transfer_profile(source, find_device("a10")).runtime.dtype == "bfloat16"


def test_without_the_tables_the_reason_is_given(few, monkeypatch):
    monkeypatch.setattr(support, "_tables", support._tables.__wrapped__)  # without its cache
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


def test_a_mixture_is_composable_where_its_experts_were_measured(few):
    pytest.importorskip("aiconfigurator_core")
    rows = {(row.device, row.target): row for row in supported(SHIPPED)}
    mixtral = rows["b200", "mistralai/Mixtral-8x7B-v0.1"]
    assert (mixtral.provenance, mixtral.degrees) == ("operators", (1,))
    absent = rows["b200", "openai/gpt-oss-20b"]
    assert absent.provenance is None and "have no experts of 2880 x 2880" in absent.reason

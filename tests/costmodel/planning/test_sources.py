"""The hint where a device has no profile: the transfer of smallest error bar."""

from __future__ import annotations

import re

import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.aiconfigurator import SYSTEMS, find_system, load_published
from costmodel.compose.transfer import transferred_error
from costmodel.compose.transfer_errors import transfer_errors
from costmodel.errors import DeviceError, ProfileError
from costmodel.io import shipped_directory
from costmodel.planning.sources import find_forward
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore

SHIPPED = ProfileStore([shipped_directory()])


@pytest.mark.parametrize("device", ["l4", "rtx-5090", "h20", "mi300x"])
def test_the_hint_names_the_source_of_the_smallest_bar(device):
    target = find_target("Qwen/Qwen3-8B")
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device(device), target, SHIPPED)
    named = re.search(r"Scale the one of (\S+), error bar (\S+)%: `rooftree transfer (\S+) --to"
                      r" (\S+)`", missing.value.hint)  # fmt: skip
    assert named is not None, missing.value.hint
    bars = {}
    for path in shipped_directory().glob("*/qwen3-8b.*.yaml"):
        profile = Profile.from_yaml(path)
        if profile.provenance.kind == "composed":
            bars[path.parent.name] = transferred_error(profile, find_device(device))
    assert bars[named[1]] == min(bars.values()) == pytest.approx(float(named[2]) / 100)
    assert named[3] == f"{named[1]}/qwen3-8b" and named[4] == device


def test_without_any_profile_of_the_target_it_says_how_to_get_one(tmp_path):
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device("l4"), find_target("Qwen/Qwen3-8B"), ProfileStore([tmp_path]))
    errors = {slug: transfer_errors().expected(slug, "l4")[0] for slug in SYSTEMS}
    best = min(errors, key=errors.__getitem__)
    assert f"rooftree compose --device {best} --target Qwen/Qwen3-8B" in missing.value.hint
    assert f"rooftree transfer {best}/qwen3-8b --to l4" in missing.value.hint


def test_composing_a_device_without_tables_names_the_nearest_with_them():
    with pytest.raises(DeviceError) as missing:
        find_system(find_device("h100-pcie"), "vllm")
    error, _ = transfer_errors().expected("h100-sxm", "h100-pcie")
    assert (
        f"from h100-sxm with the smallest error of the scaling, {error:.1%}" in missing.value.hint
    )


@pytest.mark.parametrize("device", ["b200", "t4"])
def test_compose_is_named_only_where_it_has_the_experts(device, tmp_path):
    pytest.importorskip("aiconfigurator_core")
    hints = {}
    for name in ("openai/gpt-oss-20b", "mistralai/Mixtral-8x7B-v0.1"):
        with pytest.raises(ProfileError) as missing:
            find_forward(find_device(device), find_target(name), ProfileStore([tmp_path]))
        hints[name] = missing.value.hint
    assert "compose" not in hints["openai/gpt-oss-20b"]
    assert "rooftree calibrate" in hints["openai/gpt-oss-20b"]
    command = re.search(r"rooftree compose --device (\S+) --target (\S+)`", hints[name])
    assert command is not None and command[2] == name
    named = find_device(command[1])
    architecture = find_target(name).architecture
    tables = load_published(named, experts=True)
    assert tables.expert_table(architecture).tokens.size  # what `rooftree compose` looks up

"""The hint where a device has no profile: the transfer of smallest error bar."""

from __future__ import annotations

import re

import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.aiconfigurator import SYSTEMS, load_published
from costmodel.compose.support import supported
from costmodel.compose.transfer import transfer_profile, transferred_error
from costmodel.compose.transfer_errors import transfer_errors
from costmodel.errors import InputError, ProfileError
from costmodel.io import shipped_directory
from costmodel.planning.request import Precision
from costmodel.planning.sources import find_forward
from costmodel.profile.lookup import named_profile
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore

SHIPPED = ProfileStore([shipped_directory()])
FILE = "qwen3-8b.bfloat16.kernels.tp1.yaml"


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


def test_a_degree_needs_a_source_of_the_same_degree(tmp_path):
    """Scaling a profile of one device would give another of one device."""
    device, target = find_device("l4"), find_target("Qwen/Qwen3-8B")
    with pytest.raises(ProfileError) as missing:
        find_forward(device, target, SHIPPED, tensor_parallel=2)
    composed, scaled = re.findall("`rooftree (.*?)`", missing.value.hint)
    best = re.match(r"compose --device (\S+) --target Qwen/Qwen3-8B --tp 2$", composed)
    assert best is not None, composed
    assert scaled == f"transfer {best[1]}/qwen3-8b.bfloat16.kernels.tp2 --to l4"
    fields = Profile.from_yaml(shipped_directory() / "l40s" / FILE).as_dict()
    fields["runtime"]["tensor_parallel"] = 2
    own = ProfileStore([tmp_path, shipped_directory()])
    own.save(Profile.model_validate(fields))
    with pytest.raises(ProfileError) as missing:
        find_forward(device, target, own, tensor_parallel=2)
    assert "`rooftree transfer l40s/qwen3-8b.bfloat16.kernels.tp2 --to l4`" in missing.value.hint
    # The command as it stands makes what the plan looks for.
    _, source = named_profile("l40s/qwen3-8b.bfloat16.kernels.tp2", own)
    own.save(transfer_profile(source, device))
    assert find_forward(device, target, own, tensor_parallel=2).tensor_parallel == 2


def test_a_fine_tune_is_scaled_from_the_file_that_is_there():
    tuned = find_target("Qwen/Qwen3-Coder-30B-A3B-Instruct")
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device("h20"), tuned, SHIPPED)
    source = re.search(r"`rooftree transfer (\S+) --to h20`", missing.value.hint)
    assert source is not None, missing.value.hint
    _, profile = named_profile(source[1], SHIPPED)
    assert profile.target.architecture_hash == tuned.architecture.hash


def test_no_command_is_named_that_does_not_help_a_precision():
    """Neither a transfer nor a calibration has times of fp8."""
    fp8 = Precision(weights="fp8")
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device("l4"), find_target("Qwen/Qwen3-8B"), SHIPPED, precision=fp8)
    assert "`" not in missing.value.hint
    assert missing.value.hint.startswith("Leave out --weights and --cache: other precisions")


def labelled(tmp_path, label, weight_bytes=None) -> ProfileStore:
    """A store with one profile: that of Qwen3-8B on an L40S, said to be of such weights."""
    fields = Profile.from_yaml(shipped_directory() / "l40s" / FILE).as_dict()
    fields["provenance"]["kind"] = "measured"
    fields["runtime"] |= {"kind": "graphs", "quantization": label}
    fields["runtime"] |= {"weight_bytes": weight_bytes} if weight_bytes else {}
    store = ProfileStore([tmp_path])
    store.save(Profile.model_validate(fields))
    return store


def planned(store, label):
    target = find_target("Qwen/Qwen3-8B")
    return find_forward(find_device("l40s"), target, store, precision=Precision(weights=label))


@pytest.mark.parametrize(
    ("label", "stored", "held"),
    [
        ("compressed-tensors-w8a16-g32", None, 1 + 2 / 32),
        ("compressed-tensors-w8a16-g32", 2.0, 2.0),  # unpacked, as it was measured
        ("gptq-4bit-g128", None, 0.5 + 2.5 / 128),
        ("bitsandbytes-4bit", None, 0.5 + 4 / 64),
        ("quanto-qint8", None, 1.0),
        ("torchao-int4weightonly-0a1b2c", None, 0.5),
        ("torchao-int8dynamicactivationint8weight-0a1b2c", None, 1.0),
        ("torchao-intxweightonly-0a1b2c", 1.1, 1.1),
        ("fp8-128x128", None, 1 + 4 / 128**2),
        ("int8", None, 1.0),
    ],
)
def test_quantised_weights_are_planned_by_their_label(tmp_path, label, stored, held):
    forward = planned(labelled(tmp_path, label, stored), label)
    assert forward.origin.kind == "measured"
    assert forward.value_bytes.weight == pytest.approx(held)
    plain = Profile.from_yaml(shipped_directory() / "l40s" / FILE).verify_calibration()
    seconds = float(forward.profile.verify_calibration().predict_s(16, 1024))
    assert seconds == pytest.approx(float(plain.predict_s(16, 1024)), rel=0.02)


def test_labels_are_never_mixed_up(tmp_path, monkeypatch):
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    store = labelled(tmp_path, "fp8-128x128")
    for other in ("fp8", "fp8_block", "bfloat16", "gptq-4bit"):
        with pytest.raises(ProfileError, match="no profile of Qwen/Qwen3-8B on l40s") as missing:
            planned(store, other)
    assert missing.value.hint.startswith("There are profiles of fp8-128x128; or measure such")
    store = labelled(tmp_path / "odd", "gptq_marlin")
    with pytest.raises(InputError, match="weights 'gptq_marlin', and their bytes in"):
        planned(store, "gptq_marlin")


def test_support_has_a_row_for_each_label(tmp_path, monkeypatch):
    monkeypatch.setattr("costmodel.compose.support.SYSTEMS", {})
    rows = [row for row in supported(labelled(tmp_path, "gptq_marlin")) if row.weights]
    (row,) = rows
    assert (row.device, row.target, row.weights) == ("l40s", "Qwen/Qwen3-8B", "gptq_marlin")
    assert (row.provenance, row.degrees) == ("measured", (1,))
    assert row.reason == "not planned, as the bytes of weights 'gptq_marlin' are not known"


def test_a_mixture_on_several_gpus_is_measured_on_as_many():
    """Neither composed, where there are tables, nor scaled where there are none."""
    small = find_target("openai/gpt-oss-20b")
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device("l4"), small, SHIPPED, tensor_parallel=2)
    command = "rooftree calibrate vllm --target openai/gpt-oss-20b --tensor-parallel-size 2"
    assert f"`{command}`" in missing.value.hint
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(InputError, match="experts are composed on one device only"):
        find_forward(find_device("b200"), small, SHIPPED, tensor_parallel=2)


def test_a_mixture_is_composed_only_where_its_experts_were_measured(tmp_path):
    pytest.importorskip("aiconfigurator_core")
    mixtral, small = (find_target(n) for n in ("Mixtral-8x7B-v0.1", "openai/gpt-oss-20b"))
    b200, t4, empty = find_device("b200"), find_device("t4"), ProfileStore([tmp_path])
    assert find_forward(b200, mixtral, empty).origin.kind == "composed"
    with pytest.raises(InputError, match="have no experts of 2880 x 2880, 4 of 32"):
        find_forward(b200, small, empty)
    with pytest.raises(ProfileError) as missing:
        find_forward(t4, mixtral, empty)
    command = re.search(r"rooftree compose --device (\S+) --target (\S+)`", missing.value.hint)
    assert command is not None and command[2] == mixtral.name
    tables = load_published(find_device(command[1]), experts=True)
    assert tables.expert_table(mixtral.architecture).tokens.size  # what `compose` looks up
    with pytest.raises(ProfileError) as missing:
        find_forward(t4, small, empty)
    assert "compose" not in missing.value.hint and "rooftree calibrate" in missing.value.hint

"""Times where a device has no profile: composed, or scaled with the smallest error bar."""

import dataclasses
import re
from collections import Counter

import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.support import supported
from costmodel.compose.transfer import transfer_errors, transferred_error
from costmodel.errors import InputError, ProfileError
from costmodel.io import shipped_directory
from costmodel.planning import sources
from costmodel.planning.engines import weight_bytes
from costmodel.planning.request import Precision
from costmodel.planning.search import make_server, plan
from costmodel.profile.store import ProfileStore
from integrations.aiconfigurator import tables as aiconfigurator
from integrations.aiconfigurator.package import SYSTEMS
from tests.costmodel.conftest import altered, shipped, without_tables
from tests.costmodel.planning.conftest import SHIPPED, asked, find_forward

QWEN = find_target("Qwen/Qwen3-8B")


@pytest.mark.parametrize(("slug", "target", "base"), [
    *((slug, "Qwen/Qwen3-8B", "qwen3-8b") for slug in ("l4", "gb10", "jetson-thor", "mi300x")),
    ("h20", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
])  # fmt: skip
def test_a_device_without_times_has_those_scaled_with_the_smallest_bar(slug, target, base):
    device = find_device(slug)
    forward = find_forward(device, find_target(target), SHIPPED)
    folders = [path.parent.name for path in shipped_directory().glob(f"*/{base}.*")]
    bars = {
        profile.device.name: transferred_error(profile, device)
        for profile in (shipped(folder, base) for folder in folders)
        if profile.provenance.kind == "composed"
    }
    assert forward.origin.kind == "transferred" and forward.device.name == device.name
    assert forward.origin.error == min(bars.values())
    source = re.match(r"composed profile of (.*?) \(", forward.origin.text)
    assert source is not None and bars[source[1]] == min(bars.values())


def test_a_plan_scales_a_profile_once(monkeypatch):
    made = []
    scale = sources.transfer_profile
    monkeypatch.setattr(
        sources, "transfer_profile", lambda *of: made.append((of[0], scale(*of))) or made[-1][1]
    )
    assert plan(asked(gpus=("l4",), rate=1.0, acceptance="gsm8k"), SHIPPED).best is not None
    ((source, profile),) = made
    assert profile.calibration.stairs == source.calibration.stairs


def test_a_24_gb_card_holds_what_its_server_said():
    """vLLM 0.19 on an RTX 4090, Llama-3.1-8B: 2588 blocks of 16 tokens."""
    request = asked(target="meta-llama/Llama-3.1-8B-Instruct", gpus=("rtx-4090",))
    forward = find_forward(find_device("rtx-4090"), find_target(request.target), SHIPPED)
    server = make_server(request, forward, None)
    assert server.cache_tokens() == pytest.approx(2588 * 16, rel=0.01)


def test_without_a_profile_one_is_composed_elsewhere_and_scaled(tmp_path):
    pytest.importorskip("aiconfigurator_core")
    device, empty = find_device("l4"), ProfileStore([tmp_path])
    errors = {slug: transfer_errors().expected(slug, "l4")[0] for slug in SYSTEMS}
    best = find_device(min(errors, key=errors.__getitem__))
    for weights in ("bfloat16", "fp8"):
        precision = Precision(weights=weights)
        scaled, source = (
            find_forward(one, QWEN, empty, precision=precision) for one in (device, best)
        )
        assert scaled.origin.text.startswith(f"composed profile of {best.name} (")
        assert scaled.origin.error > max(errors[best.slug], source.origin.error)
        assert scaled.value_bytes == source.value_bytes


def test_a_degree_needs_a_source_of_the_same_degree(tmp_path, monkeypatch):
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    device = find_device("l4")
    with pytest.raises(ProfileError) as missing:
        find_forward(device, QWEN, SHIPPED, tensor_parallel=2)
    assert missing.value.hint == "`pip install 'rooftree[operators]'` is enough"
    own = ProfileStore([tmp_path, shipped_directory()])
    own.save(altered(shipped("l40s"), runtime={"tensor_parallel": 2}))
    forward = find_forward(device, QWEN, own, tensor_parallel=2)
    assert (forward.origin.kind, forward.tensor_parallel) == ("transferred", 2)


def labelled(tmp_path, label, weight_bytes=None) -> ProfileStore:
    """A store with one profile: that of Qwen3-8B on an L40S, said to be of such weights."""
    runtime = {"kind": "graphs", "quantization": label, "weight_bytes": weight_bytes}
    store = ProfileStore([tmp_path])
    store.save(altered(shipped("l40s"), provenance={"kind": "measured"}, runtime=runtime))
    return store


def planned(store, label):
    return find_forward(find_device("l40s"), QWEN, store, precision=Precision(weights=label))


@pytest.mark.parametrize(("label", "stored", "held"), [
    ("compressed-tensors-w8a16-g32", None, 1 + 2 / 32),
    ("compressed-tensors-w8a16-g32", 2.0, 2.0),  # unpacked, as it was measured
    ("gptq-4bit-g128", None, 0.5 + 2.5 / 128), ("bitsandbytes-4bit", None, 0.5 + 4 / 64),
    ("quanto-qint8", None, 1.0), ("torchao-int4weightonly-0a1b2c", None, 0.5),
    ("torchao-int8dynamicactivationint8weight-0a1b2c", None, 1.0),
    ("torchao-intxweightonly-0a1b2c", 1.1, 1.1), ("fp8-128x128", None, 1 + 4 / 128**2),
    ("int8", None, 1.0),
])  # fmt: skip
def test_quantised_weights_are_planned_by_their_label(tmp_path, label, stored, held):
    forward = planned(labelled(tmp_path, label, stored), label)
    assert forward.origin.kind == "measured"
    assert forward.value_bytes.weight == pytest.approx(held)
    plain = shipped("l40s").verify_calibration()
    seconds = float(forward.profile.verify_calibration().predict_s(16, 1024))
    assert seconds == pytest.approx(float(plain.predict_s(16, 1024)), rel=0.02)


def test_labels_are_never_mixed_up_and_support_has_a_row_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    store = labelled(tmp_path, "fp8-128x128")
    for other in ("fp8", "fp8_block", "bfloat16", "gptq-4bit"):
        with pytest.raises(ProfileError, match="no profile of Qwen/Qwen3-8B on l40s") as missing:
            planned(store, other)
        label = other == "gptq-4bit"
        assert ("There are profiles of fp8-128x128; or measure" in missing.value.hint) == label
    store = labelled(tmp_path / "odd", "gptq_marlin")
    with pytest.raises(InputError, match="weights 'gptq_marlin', and their bytes in"):
        planned(store, "gptq_marlin")
    monkeypatch.setattr("costmodel.compose.support.published_tables", without_tables)
    stored = supported(store)
    (row,) = [row for row in stored if row.weights and row.provenance]
    assert (row.device, row.target, row.weights) == ("l40s", "Qwen/Qwen3-8B", "gptq_marlin")
    assert (row.provenance, row.degrees) == ("measured", (1,))
    assert row.reason == "not planned, as the bytes of weights 'gptq_marlin' are not known"


def test_a_mixture_is_planned_as_its_experts_were_measured(tmp_path):
    pytest.importorskip("aiconfigurator_core")
    empty, target = ProfileStore([tmp_path]), find_target("openai/gpt-oss-20b")
    one, two = (find_forward(find_device("b200"), target, empty, tensor_parallel=n) for n in (1, 2))
    held = weight_bytes(target.architecture, one.value_bytes)
    assert one.origin.kind == "composed" and held == pytest.approx(13.8e9, rel=0.01)
    assert 0.5 < two.decode(8, 1024).total / one.decode(8, 1024).total < 1
    scaled = find_forward(find_device("rtx-5090"), target, empty)
    assert scaled.origin.kind == "transferred" and scaled.value_bytes == one.value_bytes
    coder = find_forward(find_device("b200"), find_target("Qwen3-Coder-Next"), empty,
                         tensor_parallel=2)  # fmt: skip
    assert "estimated from bytes and FLOPs: experts" in coder.profile.provenance.note
    more_heads = dataclasses.replace(target.architecture, heads=72)
    odd = dataclasses.replace(target, architecture=more_heads)
    with pytest.raises(ProfileError) as missing:
        find_forward(find_device("t4"), odd, empty, tensor_parallel=16)
    assert "none is composed elsewhere and scaled: tensor_parallel 16" in missing.value.problem
    command = f"rooftree calibrate vllm --target {target.name}"
    command += " --engine-option tensor_parallel_size=16"
    assert f"`{command}`" in missing.value.hint


@pytest.mark.slow
def test_a_process_reads_each_operator_table_once(tmp_path, monkeypatch):
    pytest.importorskip("aiconfigurator_core")
    counts, read = Counter(), aiconfigurator.read_table
    monkeypatch.setattr(
        aiconfigurator, "read_table", lambda path, names: counts.update([path]) or read(path, names)
    )
    for name, precision in (("14B", Precision()), ("32B", Precision(weights="fp8"))):
        target = find_target(f"Qwen/Qwen3-{name}")
        find_forward(find_device("h200"), target, ProfileStore([tmp_path]), precision=precision)
    assert set(counts.values()) == {1}

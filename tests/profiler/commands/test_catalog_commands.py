"""`rooftree support`, `devices` and `targets`: tables and JSON."""

import json

import pytest

from costmodel.catalog import load_devices, load_targets
from costmodel.compose.support import supported
from costmodel.profile.store import ProfileStore
from tests.profiler.made_profile import make_profile


@pytest.fixture
def no_tables(monkeypatch):
    """As where the extra `operators` is not installed; reading its tables takes seconds."""
    monkeypatch.setattr("costmodel.compose.support.SYSTEMS", {})


def test_support_has_every_pair_and_says_where_times_come_from(no_tables, run):
    ProfileStore().save(make_profile("NVIDIA H20"))
    exit_code, out, _ = run("support", "--json")
    rows = {(row["device"], row["target"]): row for row in json.loads(out)["support"]}
    assert exit_code == 0
    assert len(rows) == len(load_devices()) * len(load_targets())
    eight = "Qwen/Qwen3-8B"
    assert rows["h100-sxm", eight]["provenance"] == "composed"
    assert 0 < rows["h100-sxm", eight]["error_bar"] < 1
    assert rows["h100-pcie", eight]["provenance"] == "transferred"
    assert rows["h20", eight]["provenance"] == "measured"
    assert rows["t4", eight]["provenance"] is None
    assert "rooftree transfer" in rows["t4", eight]["reason"]
    # The base model has the sizes of the instructed one, whose profile is shipped.
    assert rows["h100-sxm", "meta-llama/Llama-3.1-8B"]["provenance"] == "composed"
    assert "latent attention" in rows["h100-sxm", "deepseek-ai/DeepSeek-V3"]["reason"]


def test_support_of_one_device_or_target(no_tables, run, refused):
    for name in ("H100", "qwen3-8b"):
        _, out, _ = run("support", name)
        assert "h100-sxm" in out and "composed" in out and "%" in out
    assert "Nearest: h100-sxm" in refused("support", "h100-sx")


@pytest.mark.slow
def test_plans_from_operator_tables_are_counted():
    pytest.importorskip("aiconfigurator_core")
    rows = {(row.device, row.target): row for row in supported()}
    dense = rows["h100-sxm", "Qwen/Qwen3-32B"]
    assert (dense.provenance, dense.degrees) == ("operators", (1, 2, 4, 8))
    # The B300's tables have at most 96 heads of size 128, so 128 heads need two devices. Whether
    # the weights fit is left to the plan: on two, 203 GB each in fp8 do, 406 GB in bfloat16 not.
    assert rows["b300", "meta-llama/Llama-3.1-405B"].degrees == (2, 4, 8)
    assert rows["a100-sxm-80gb", "google/gemma-3-1b-it"].provenance is None
    assert rows["h100-sxm", "openai/gpt-oss-20b"].provenance is None


def test_devices_as_json_are_the_specs(run):
    _, out, _ = run("devices", "--json")
    records = {record["slug"]: record for record in json.loads(out)["devices"]}
    assert records.keys() == load_devices().keys()
    assert records["h20"]["peak_bytes_per_s"] == 4.0e12
    assert all(record["source"] for record in records.values())


def test_one_device_has_its_names_and_source(run, refused):
    _, out, _ = run("devices", "h100")
    assert "NVIDIA H100 80GB HBM3" in out and "data sheet" in out
    assert "Nearest" in refused("devices", "h10")


def test_targets_as_json_have_sizes_and_whether_plans_can_be_made(run):
    _, out, _ = run("targets", "--json")
    records = {record["name"]: record for record in json.loads(out)["targets"]}
    assert records.keys() == load_targets().keys()
    moe = records["Qwen/Qwen3-30B-A3B"]
    # 3.3 of 30.5 billion, as its card says
    assert moe["active_parameters"] == pytest.approx(3.3e9, rel=0.02)
    assert records["deepseek-ai/DeepSeek-V3"]["cache_bytes_per_token"] == 70_272
    assert "latent attention" in records["deepseek-ai/DeepSeek-V3"]["plan"]


def test_one_target_may_be_a_config(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
    }))  # fmt: skip
    _, out, _ = run("targets", str(path), "--json")
    (record,) = json.loads(out)["targets"]
    assert (record["layers"], record["kind"]) == (2, "llama")

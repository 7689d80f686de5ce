"""`rooftree support`, `devices` and `targets`: tables of 80 columns, and JSON."""

import json

import pytest

from costmodel.catalog import load_devices, load_targets
from costmodel.compose.support import supported
from costmodel.profile.store import ProfileStore
from profiler import cli
from tests.profiler.made_profile import make_profile


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty data directory of the user's, and a terminal of 80 columns."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def run(capsys):
    def call(*arguments):
        exit_code = cli.run(arguments)
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return call


@pytest.fixture
def no_tables(monkeypatch):
    """As where the extra `operators` is not installed; reading its tables takes seconds."""
    monkeypatch.setattr("costmodel.compose.support.SYSTEMS", {})


def test_support_has_every_pair_and_says_where_times_come_from(no_tables, run):
    own = ProfileStore().save(make_profile("NVIDIA H20"))
    assert own.parent.name == "h20"
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


def test_the_matrix_has_a_letter_for_every_origin(no_tables, run):
    ProfileStore().save(make_profile("NVIDIA H20"))
    _, out, _ = run("support")
    lines = out.splitlines()
    letters = dict(line.split() for line in lines if len(line.split()) == 2 and line[1] == " ")
    columns = lines[0].split()[1:]
    (row,) = [line.split()[1:] for line in lines if line.startswith("Qwen3-8B ")]
    origins = {letters[label]: origin for label, origin in zip(columns, row, strict=True)}
    assert (origins["h100-sxm"], origins["h100-pcie"], origins["h20"]) == ("c", "t", "m")
    assert "mi355x" in out and "rooftree transfer" in out


def test_support_of_one_device_or_target(no_tables, run):
    for name in ("H100", "qwen3-8b"):
        _, out, _ = run("support", name)
        assert "h100-sxm" in out and "composed" in out and "%" in out
    exit_code, _, err = run("support", "h100-sx")
    assert exit_code == 2 and "Nearest: h100-sxm" in err


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


def test_one_device_has_its_names_and_source(run):
    _, out, _ = run("devices", "h100")
    assert "NVIDIA H100 80GB HBM3" in out and "data sheet" in out
    exit_code, out, err = run("devices", "h10")
    assert (exit_code, out) == (2, "") and "Nearest" in err


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

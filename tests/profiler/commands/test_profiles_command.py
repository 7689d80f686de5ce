"""`rooftree profiles`, `support`, `devices` and `targets`, with good and with broken files."""

import json
import re

import pytest

from costmodel.catalog import find_target, load_devices, load_targets
from costmodel.compose.support import supported
from costmodel.errors import ProfileError
from costmodel.io import shipped_directory
from costmodel.profile.store import ProfileStore
from tests.costmodel.conftest import altered, shipped, without_tables
from tests.costmodel.planning.conftest import find_forward
from tests.profiler.made_profile import TARGET, make_profile

SHIPPED_FILE = "qwen3-8b.bfloat16.kernels.tp1.yaml"


@pytest.fixture
def home(run, tmp_path):
    """The user's data directory, which is empty."""
    return tmp_path / "home"


def test_list_as_json_has_stable_fields_and_names_a_broken_profile(run):
    path = ProfileStore().save(make_profile())
    exit_code, out, _ = run("profiles", "list", "--json")
    assert exit_code == 0
    (record,) = [record for record in json.loads(out)["profiles"] if record["path"] == str(path)]
    assert record == {
        "path": str(path), "problem": "", "device": "Test GPU", "target": TARGET,
        "architecture_hash": find_target(TARGET).architecture.hash, "dtype": "bfloat16",
        "runtime": "graphs", "tensor_parallel": 1, "provenance": "measured",
        "created_utc": "2026-01-02T03:04:05Z", "held_out_median": None, "regret_worst": None,
        "grade": "usable",
    }  # fmt: skip
    broken = path.with_name("broken.yaml")
    broken.write_text(path.read_text()[:200])
    exit_code, out, err = run("profiles", "list")
    assert exit_code == 0 and str(path) in out
    assert err.startswith(f"cannot be used: {broken}")


def test_show_by_path_and_by_name(home, run):
    profile = make_profile()
    path = str(ProfileStore().save(profile))
    by_path = run("profiles", "show", path)
    for name in ("TEST-GPU/qwen3-8b", "Test GPU/Qwen/Qwen3-8B"):
        assert run("profiles", "show", name) == by_path
    exit_code, out, err = by_path
    assert (exit_code, err) == (0, "")
    assert "by the linear calibration (fitted, not measured), ms:" in out
    table = out.partition("One verification forward")[2].splitlines()
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    assert rows == [[count, "5.00", "5.00"] for count in ("1", "2", "4", "8", "16")]
    shown = json.loads(run("profiles", "show", path, "--json")[1])
    assert shown["path"] == path
    assert shown["profile"] == json.loads(json.dumps(profile.as_dict()))


@pytest.mark.parametrize(("name", "message"), [
    ("test-gpu", "fits 2 profiles"),
    ("qwen3-8b", "no stored profile is called 'qwen3-8b', .* as test-gpu/qwen3-8b, a100"),
    ("missing.yaml", "^rooftree: missing.yaml: there is no such file. Check the path"),
    ("/no/missing.yaml", "^rooftree: /no/missing.yaml: there is no such file. Check the path"),
    ("no-such-device/qwen3-8b", "no known device is called 'no-such-device'"),
    ("h20/qwen3-8b", "no stored profile is called"),  # a name of another device shows none
    ("NVIDIA L40/qwen3-8b", "no stored profile is called"),
    ("a10", "no stored profile is called"),
])  # fmt: skip
def test_show_of_an_unknown_or_ambiguous_name_is_one_line(home, refused, name, message):
    for dtype in ("bfloat16", "float16"):
        ProfileStore().save(make_profile(dtype=dtype))
    assert re.search(message, refused("profiles", "show", name))


def test_a_profile_of_ones_own_hides_the_shipped_one_and_makes_nothing_ambiguous(home, run):
    assert run("profiles", "show", "h100-sxm/qwen3-8b")[0] == 0
    for degree in (2, 1):
        mine = altered(shipped("h100-sxm"), runtime={"tensor_parallel": degree})
        own = ProfileStore().save(mine)
        exit_code, out, _ = run("profiles", "show", "h100-sxm/qwen3-8b", "--json")
        assert exit_code == 0
        folder = home if degree == 1 else shipped_directory()
        assert json.loads(out)["path"] == str(folder / "h100-sxm" / SHIPPED_FILE)
    shown = [run("profiles", "show", name, "--json")[1] for name in ("H100/qwen3-8b", str(own))]
    assert shown[0] == shown[1]
    _, out, _ = run("profiles", "show", "h100-sxm/qwen3-8b.bfloat16.kernels.tp2", "--json")
    assert json.loads(out)["profile"]["runtime"]["tensor_parallel"] == 2


def test_validate_says_ok_or_what_is_wrong_and_plot_writes_a_picture(run):
    good = ProfileStore().save(make_profile())
    assert run("profiles", "validate", str(good)) == (0, f"{good}: ok\n", "")
    bad = good.with_name("bad.yaml")
    bad.write_text(good.read_text().replace("dtype: bfloat16", "dtype: int3"))
    missing = good.with_name("missing.yaml")
    exit_code, out, err = run("profiles", "validate", str(good), str(bad), str(missing))
    assert exit_code == 3
    lines = out.splitlines()
    assert lines[0] == f"{good}: ok"
    assert lines[1].startswith(f"{bad}: runtime.dtype")
    assert lines[2].startswith(f"{missing}: there is no such file")
    assert err == "rooftree: 2 of 3 profiles cannot be used\n"
    name = "h100-sxm/qwen3-8b"  # it takes names as show does
    assert run("profiles", "validate", name) == (0, f"{name}: ok\n", "")
    assert run("profiles", "validate", "qwen3-8b")[1].startswith("no stored profile is called")
    picture = good.with_name("picture.png")
    assert run("profiles", "plot", str(good), str(picture)) == (0, f"{picture}\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture
def no_tables(monkeypatch):
    """As where the extra `operators` is not installed; reading its tables takes seconds."""
    monkeypatch.setattr("costmodel.compose.support.published_tables", without_tables)


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
    assert rows["t4", "Qwen/Qwen3-Next-80B-A3B-Instruct"]["provenance"] is None
    # The base model has the sizes of the instructed one, whose profile is shipped.
    assert rows["h100-sxm", "meta-llama/Llama-3.1-8B"]["provenance"] == "composed"


@pytest.mark.parametrize("device", ["rtx-4090", "t4", "mi300x"])
def test_support_says_of_other_gpus_what_plans_do(monkeypatch, device):
    """Both ask the same functions; without the operator tables, which take seconds."""
    monkeypatch.setattr("costmodel.compose.support.published_tables", without_tables)
    monkeypatch.setattr("costmodel.planning.sources.operators_installed", lambda: False)
    rows = {row.target: row for row in supported() if row.device == device}
    store = ProfileStore()
    told = set()
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "zai-org/GLM-4.6", "google/gemma-3-1b-it"):
        try:
            planned = find_forward(load_devices()[device], load_targets()[name], store).profile
        except ProfileError:
            assert rows[name].provenance is None
            told.add(None)
            continue
        assert planned.provenance.kind == "transferred"
        assert (rows[name].provenance, 1 in rows[name].degrees) == ("scaled", True)
        assert rows[name].error_bar == planned.provenance.error_bar
        told.add("scaled")
    assert told == {None, "scaled"}


def test_support_of_one_device_or_target(no_tables, run, refused):
    exit_code, out, _ = run("support")
    assert exit_code == 0 and "s no profile; plans scale another device's" in out
    _, out, _ = run("support", "qwen3-8b")
    assert "h100-sxm" in out and "composed" in out and "%" in out
    assert "Nearest: h100-sxm" in refused("support", "h100-sx")
    small = refused("support", "smollm2")
    assert "no target and no device is called 'smollm2'. Nearest: HuggingFaceTB/SmolLM2" in small


@pytest.mark.slow
def test_plans_from_operator_tables_are_counted():
    pytest.importorskip("aiconfigurator_core")
    rows = {(row.device, row.target): row for row in supported()}
    # Its 128 heads are read from 64. Whether the weights fit is left to the plan: on two devices
    # 203 GB each in fp8 do, 406 GB in bfloat16 do not.
    assert rows["b300", "meta-llama/Llama-3.1-405B"].degrees == (1, 2, 4, 8)
    assert rows["a100-sxm-80gb", "google/gemma-3-1b-it"].provenance is None
    experts = rows["h100-sxm", "openai/gpt-oss-20b"]
    assert (experts.provenance, experts.weights) == ("operators", "mxfp4")


def test_devices_and_targets_as_json_are_the_specs_and_whether_plans_can_be_made(run, refused):
    _, out, _ = run("devices", "--json")
    records = {record["slug"]: record for record in json.loads(out)["devices"]}
    assert records.keys() == load_devices().keys()
    assert records["h20"]["peak_bytes_per_s"] == 4.0e12
    _, out, _ = run("devices", "h100")
    assert "NVIDIA H100 80GB HBM3" in out and "data sheet" in out
    assert "Nearest" in refused("devices", "h10")
    _, out, _ = run("targets", "--json")
    records = {record["name"]: record for record in json.loads(out)["targets"]}
    assert records.keys() == load_targets().keys()
    moe = records["Qwen/Qwen3-30B-A3B"]
    # 3.3 of 30.5 billion, as its card says
    assert moe["active_parameters"] == pytest.approx(3.3e9, rel=0.02)
    assert records["deepseek-ai/DeepSeek-V3"]["cache_bytes_per_token"] == 70_272
    assert "latent attention" in records["deepseek-ai/DeepSeek-V3"]["plan"]

"""`rooftree compose` and `rooftree transfer` as a user calls them."""

import importlib.util
import json
from pathlib import Path

import pytest

from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from profiler import cli

SOURCE = shipped_directory() / "h100-sxm" / "qwen3-8b.bfloat16.kernels.tp1.yaml"
A6000 = Path(__file__).parents[4] / "shared" / "data" / "operators" / "rtx-a6000_llama-3.1-8b_tp1"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `rooftree ...` with an empty data directory: exit code, stdout, stderr."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))

    def call(*arguments):
        exit_code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return call


def test_transfer_writes_a_profile_and_says_how_good_it_is(run, tmp_path):
    exit_code, out, _ = run("transfer", str(SOURCE), "--to", "h100-pcie")
    path = tmp_path / "home" / "h100-pcie" / SOURCE.name
    assert exit_code == 0
    assert f"profile: {path}" in out and "error bar: " in out
    assert Profile.from_yaml(path).provenance.kind == "transferred"


def test_transfer_as_json_into_a_file(run, tmp_path):
    path = tmp_path / "mine.yaml"
    exit_code, out, _ = run(
        "transfer", str(SOURCE), "--to", "h100-pcie", "--output", str(path), "--json"
    )
    record = json.loads(out)
    assert exit_code == 0
    assert record["path"] == str(path)
    assert record["profile"]["device"]["name"] == "NVIDIA H100 PCIe"
    assert record["error_bar"] == Profile.from_yaml(path).provenance.error_bar


def test_compose_from_a_folder(run, tmp_path):
    if not A6000.is_dir():
        pytest.skip("the folder ../shared is not here")
    exit_code, out, _ = run(
        "compose", "--operators", str(A6000), "--target", "qwen3-4b", "--output", str(tmp_path),
        "--json",
    )  # fmt: skip
    record = json.loads(out)
    assert exit_code == 0
    made = record["profile"]["provenance"]
    assert made["kind"] == "composed"
    assert "k = 2560 below 4096" in made["note"]
    assert record["profile"]["runtime"]["kind"] == "kernels"


def test_compose_from_a_folder_of_another_gpu(run):
    if not A6000.is_dir():
        pytest.skip("the folder ../shared is not here")
    exit_code, _, err = run(
        "compose", "--device", "h200", "--operators", str(A6000), "--target", "qwen3-8b"
    )
    assert exit_code == 2
    assert "holds operators of NVIDIA RTX A6000, not of NVIDIA H200" in err


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (("compose", "--target", "qwen3-8b"), 2, "say which GPU"),
        (("compose", "--device", "l4", "--target", "qwen3-8b"), 4, "no published operator tables"),
        (("compose", "--device", "nothing", "--target", "qwen3-8b"), 2, "no known device"),
        (("compose", "--device", "h200", "--target", "nothing"), 2, "no known target"),
        (("compose", "--target", "qwen3-8b", "--operators", "/nowhere"), 2, "is not a folder"),
        (("transfer", str(SOURCE), "--to", "h100-sxm"), 2, "already"),
        (("transfer", "nothing", "--to", "h200"), 2, "no known device is called 'nothing'"),
    ],
)
def test_bad_input_is_one_line(run, arguments, exit_code, text):
    code, out, err = run(*arguments)
    assert (code, out) == (exit_code, "")
    assert text in err
    assert "Traceback" not in err


def test_without_the_extra_it_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("compose", "--device", "h200", "--target", "qwen3-8b")
    assert code == 2
    assert "pip install 'rooftree[operators]'" in err

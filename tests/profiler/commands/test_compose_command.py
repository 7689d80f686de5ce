"""`rooftree compose` and `rooftree transfer` as a user calls them."""

import json

import pytest

from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile

SOURCE = shipped_directory() / "h100-sxm" / "qwen3-8b.bfloat16.kernels.tp1.yaml"


def test_transfer_and_compose_write_profiles_and_say_how_good_they_are(
    run, tmp_path, refused, measured
):
    transfer = ["transfer", str(SOURCE), "h100-pcie"]
    exit_code, out, _ = run(*transfer)
    path = tmp_path / "home" / "h100-pcie" / SOURCE.name
    assert exit_code == 0
    assert f"profile: {path}" in out and "error bar: " in out
    assert Profile.from_yaml(path).provenance.kind == "transferred"
    path = tmp_path / "mine.yaml"
    record = json.loads(run(*transfer, "--output", str(path), "--json")[1])
    assert record["path"] == str(path)
    assert record["profile"]["device"]["name"] == "NVIDIA H100 PCIe"
    assert record["error_bar"] == Profile.from_yaml(path).provenance.error_bar
    a6000 = str(measured / "operators" / "rtx-a6000_llama-3.1-8b_tp1")
    output = ["--output", str(tmp_path), "--json"]
    exit_code, out, _ = run("compose", "--operators", a6000, "--target", "qwen3-4b", *output)
    assert exit_code == 0
    profile = json.loads(out)["profile"]
    assert profile["provenance"]["kind"] == "composed"
    assert "k = 2560 below 4096" in profile["provenance"]["note"]
    assert profile["runtime"]["kind"] == "kernels"
    line = refused("compose", "--device", "h200", "--operators", a6000, "--target", "qwen3-8b")
    assert "holds operators of NVIDIA RTX A6000, not of NVIDIA H200" in line


@pytest.mark.parametrize(("arguments", "exit_code", "text"), [
    (("compose", "--target", "qwen3-8b"), 2, "say which GPU"),
    (("compose", "--device", "l4", "--target", "qwen3-8b"), 4, "no published operator tables"),
    (("compose", "--target", "qwen3-8b", "--operators", "/nowhere"), 2, "name vllm"),
    (("transfer", str(SOURCE), "h100-sxm"), 2, "already"),
    (("transfer", str(SOURCE), "h200"), 3, "it would hide a better profile: "),
    (("transfer", "nothing", "h200"), 2, "no stored profile is called 'nothing'"),
])  # fmt: skip
def test_bad_input_is_one_line(refused, arguments, exit_code, text):
    assert text in refused(*arguments, exit_code=exit_code)

"""`rooftree fit --from ... --output` and `rooftree export`, from a file to an engine's settings."""

import json
import re

import pytest

from costmodel.profile.profile import Profile
from profiler.cli import run
from tests.costmodel.imports.files import forward_s, write_points

ON = ["--device", "h100-sxm", "--target", "Qwen/Qwen3-8B"]


@pytest.fixture
def forward(tmp_path):
    return write_points(tmp_path / "forward.csv", batches=(1,))


def test_from_a_file_to_an_engine(forward, tmp_path, capsys):
    made = tmp_path / "mine.yaml"
    words = ["fit", str(forward), *ON, "--source", "vLLM 0.33.0"]
    assert run([*words, "--output", str(made), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["path"] == str(made)
    assert record["profile"]["provenance"]["kind"] == "imported"
    assert Profile.from_yaml(made).surface.median_s[0] == pytest.approx(forward_s(1, 256, 1))
    export = ["export", str(made), "--engine", "vllm", "--acceptance", "0.7"]
    assert run([*export, "--drafter", "ngram"]) == 0
    text = capsys.readouterr().out
    config = json.loads(re.search(r"--speculative-config '(.*)'", text)[1])
    assert "mine.yaml" in text and "vllm serve Qwen/Qwen3-8B" in text
    assert config["num_speculative_tokens_per_batch_size"][-1][1] == 256


def test_without_output_the_errors_are_reported(forward, capsys):
    assert run(["fit", str(forward), *ON, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["points"] == 18 and report["target"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--output", "p.yaml"], "Give --source"), (["--tp", "0"], "is not in the range")],
)
def test_what_is_missing_is_one_line(forward, capsys, words, message):
    assert run(["fit", str(forward), *ON, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_a_plan_and_a_profile_give_the_same_settings(capsys):
    wanted = ["--acceptance", "0.7", "--drafter", "ngram"]
    lengths = ["--prompt-tokens", "1000", "--output-tokens", "500"]
    for engine in ("vllm", "tensorrt-llm", "sglang-dspark"):
        assert run(["export", "h100-sxm/qwen3-8b", "--engine", engine, *wanted]) == 0
        alone = capsys.readouterr().out.splitlines()
        plan = ["plan", "--target", "qwen3-8b", "--gpus", "h100-sxm", "--rate", "1/s"]
        assert run([*plan, *lengths, *wanted, "--export", engine]) == 0
        planned = capsys.readouterr().out.splitlines()
        assert alone[1:] == planned[1:]


def test_without_acceptance_nothing_is_drafted(capsys):
    export = ["export", "h100-sxm/qwen3-8b"]
    assert run([*export, "--engine", "vllm"]) == 0
    captured = capsys.readouterr()
    assert "no acceptance data" in captured.out and "no acceptance data" in captured.err
    assert run([*export, "--engine", "sglang-dspark-steps"]) == 0
    captured = capsys.readouterr()
    assert "sample_steps_per_sec" in captured.out and not captured.err

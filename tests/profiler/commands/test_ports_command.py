"""`rooftree fit --from ... --output` and `rooftree export`, from a file to an engine's settings."""

import json
import re

import pytest

from costmodel.profile.profile import Profile
from tests.costmodel.imports.files import forward_s, write_points

ON = ["--device", "h100-sxm", "--target", "Qwen/Qwen3-8B"]


@pytest.fixture
def forward(tmp_path):
    return str(write_points(tmp_path / "forward.csv", batches=(1,)))


def test_from_a_file_to_an_engine(forward, tmp_path, run):
    made = str(tmp_path / "mine.yaml")
    words = ["fit", forward, *ON, "--source", "vLLM 0.33.0"]
    record = json.loads(run(*words, "--output", made, "--json")[1])
    assert record["path"] == made
    assert record["profile"]["provenance"]["kind"] == "imported"
    assert Profile.from_yaml(made).surface.median_s[0] == pytest.approx(forward_s(1, 256, 1))
    export = ["export", made, "--engine", "vllm", "--acceptance", "0.7"]
    code, text, _ = run(*export, "--drafter", "ngram")
    config = json.loads(re.search(r"--speculative-config '(.*)'", text)[1])
    assert code == 0 and "mine.yaml" in text and "vllm serve Qwen/Qwen3-8B" in text
    assert config["num_speculative_tokens_per_batch_size"][-1][1] == 256


def test_without_output_the_errors_are_reported(forward, run, refused):
    report = json.loads(run("fit", forward, *ON, "--json")[1])
    assert report["points"] == 18 and report["target"] == "Qwen/Qwen3-8B"
    assert "Give --source" in refused("fit", forward, *ON, "--output", "p.yaml")


def test_a_plan_and_a_profile_give_the_same_settings(run):
    wanted = ["--acceptance", "0.7", "--drafter", "ngram"]
    lengths = ["--prompt-tokens", "1000", "--output-tokens", "500"]
    for engine in ("vllm", "tensorrt-llm", "sglang-dspark"):
        alone = run("export", "h100-sxm/qwen3-8b", "--engine", engine, *wanted)
        plan = ["plan", "--target", "qwen3-8b", "--gpus", "h100-sxm", "--rate", "1/s"]
        planned = run(*plan, *lengths, *wanted, "--export", engine)
        assert alone[0] == planned[0] == 0
        assert alone[1].splitlines()[1:] == planned[1].splitlines()[1:]


def test_without_acceptance_nothing_is_drafted(run):
    export = ["export", "h100-sxm/qwen3-8b", "--engine"]
    code, out, err = run(*export, "vllm")
    assert code == 0 and "no acceptance data" in out and "no acceptance data" in err
    code, out, err = run(*export, "sglang-dspark-steps")
    assert code == 0 and "sample_steps_per_sec" in out and not err

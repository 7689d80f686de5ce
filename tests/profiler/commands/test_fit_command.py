"""`rooftree fit` and `export`: tables good and bad, and from a file to an engine's settings."""

import csv
import json
import re

import numpy as np
import pytest

from costmodel.imports import read_csv
from costmodel.profile.profile import Profile
from tests.costmodel.conftest import grid
from tests.integrations.written_times import forward_s, write_points

KNOWN = ["--device", "rtx-a6000", "--target", "Llama-3.1-8B-Instruct"]
COLUMNS = ("new_tokens", "context_tokens", "microseconds")


def write(path, rows, columns=COLUMNS):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return str(path)


@pytest.mark.slow
def test_errors_of_every_calibration_are_reported(tmp_path, run):
    random = np.random.default_rng(0)
    rows, context = grid([1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 256], [64, 512, 2048, 8192])
    micros = 22_000 * (1 + rows / 300) * np.where(rows > 128, 1.2, 1.0) + 0.9 * context
    micros *= np.exp(0.003 * random.standard_normal(len(rows)))
    table = write(tmp_path / "points.csv", list(zip(rows, context, micros, strict=True)))
    report = json.loads(run("fit", table, *KNOWN, "--json")[1])
    assert report["points"] == 48 and report["fitted"] == 48
    assert set(report["calibrations"]) == {"linear", "physical", "stairs"}
    for calibration in report["calibrations"].values():
        held_out = calibration["held_out"]
        assert 0 <= held_out["mape"] <= held_out["worst"] and held_out["p95"] <= held_out["worst"]
        assert 0 <= held_out["regret"] <= held_out["regret_worst"] <= 1
    best = report["calibrations"][report["selected"]]["held_out"]
    assert best["mape"] < 0.015
    assert best["mape"] < report["calibrations"]["linear"]["held_out"]["mape"]


def test_the_whole_forward_is_preferred_and_repeats_are_averaged(tmp_path):
    rows = [
        (1, 64, 1, 5),
        (1, 64, 1, 7),
        (2, 64, 1, 8),
        (4, 64, 1, 9),
        (8, 64, 1, ""),
        (8, 128, 1, 10),
    ]
    columns = ("new_tokens", "context_tokens", "attention_us", "forward_us")
    points = read_csv(write(tmp_path / "t.csv", rows, columns)).points
    assert points.seconds.tolist() == pytest.approx([6e-6, 8e-6, 9e-6, 10e-6])


GOOD = [(1, 64, 5.0), (2, 64, 6.0), (4, 64, 7.0), (8, 64, 8.0)]


@pytest.mark.parametrize(("rows", "columns", "message"), [
    ([], COLUMNS, "no rows with a time"),
    (GOOD[:2], COLUMNS, "2 shapes"),
    ([(r, c, 5.0) for r, c, _ in GOOD], COLUMNS, "all times"),
    ([*GOOD, (16, 64, -3.0)], COLUMNS, "line 6: microseconds must be a number above 0"),
    ([*GOOD, (16, 64, "nan")], COLUMNS, "must be a finite number"),
    ([*GOOD, (16, 64, "soon")], COLUMNS, "must be a finite number"),
    ([*GOOD, (0, 64, 5.0)], COLUMNS, "new_tokens must be a whole number of 1 or more"),
    ([*GOOD, (1.5, 64, 5.0)], COLUMNS, "new_tokens must be a whole number"),
    ([*GOOD, (2, -1, 5.0)], COLUMNS, "context_tokens must be a whole number of 0 or more"),
    ([(1, c, 5.0 + c) for c in (1, 2, 3, 4)], COLUMNS, "one row count only"),
    (GOOD, ("rows", "context_tokens", "seconds"), "no column new_tokens"),
    (GOOD, ("new_tokens", "context_tokens", "time"), "no column of times"),
])  # fmt: skip
def test_bad_tables_are_one_clear_line(tmp_path, refused, rows, columns, message):
    line = refused("fit", write(tmp_path / "bad.csv", rows, columns), *KNOWN)
    assert message in line and "bad.csv" in line


ON = ["--device", "h100-sxm", "--target", "Qwen/Qwen3-8B"]


def test_from_a_file_to_an_engine(tmp_path, run, refused):
    forward = str(write_points(tmp_path / "forward.csv", batches=(1,)))
    assert "Give --source" in refused("fit", forward, *ON, "--output", "p.yaml")
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


def test_a_plan_and_a_profile_give_the_same_settings_and_none_without_acceptance(run):
    wanted = ["--acceptance", "0.7", "--drafter", "ngram"]
    lengths = ["--prompt-tokens", "1000", "--output-tokens", "500"]
    alone = run("export", "h100-sxm/qwen3-8b", "--engine", "tensorrt-llm", *wanted)
    plan = ["plan", "--target", "qwen3-8b", "--gpus", "h100-sxm", "--rate", "1/s"]
    planned = run(*plan, *lengths, *wanted, "--export", "tensorrt-llm")
    assert alone[0] == planned[0] == 0
    assert alone[1].splitlines()[1:] == planned[1].splitlines()[1:]
    export = ["export", "h100-sxm/qwen3-8b", "--engine"]
    code, out, err = run(*export, "vllm")
    assert code == 0 and "no acceptance data" in out and "no acceptance data" in err
    code, out, err = run(*export, "sglang-dspark-steps")
    assert code == 0 and "sample_steps_per_sec" in out and not err

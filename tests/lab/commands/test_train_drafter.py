"""`rooftree train-drafter` from its command line, on a tiny target."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab.papers.specblock import figures
from profiler import cli
from tests.tiny_folder import write_tokenizer, write_weights


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    return str(write_tokenizer(write_weights(folder, num_hidden_layers=4, eos_token_id=None)))


def run(capture: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Its exit status and what it printed."""
    status = cli.run(["train-drafter", *words])
    printed = capture.readouterr()
    return status, printed.out, printed.err


def config_of(folder: str | Path) -> dict[str, object]:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("words", "said"), [
    (["--set", "without=[]"], "there is no setting 'without'"),
    (["--set", "template=x"], "--set template=x: Input should be a valid dictionary"),
    (["--set", "layers=17"], "--set layers=17: Input should be less than or equal to 16"),
    (["--set", "openings=closed"], "--set openings=closed: Input should be"),
    (["--from", "demo", "--set", "layers=2"], "--from brings its own layers"),
    (["--from", "nowhere/at/all"], "nowhere/at/all"),
    (["--from", "demo"], "hidden size is 576, the target's is 32"),
    (["--from", "ngram", "--kind", "specblock"], "ngram is no SpecBlock drafter"),
])  # fmt: skip
def test_wrong_words_are_named(capsys, target, tmp_path, words, said):
    output = tmp_path / "work"
    status, out, err = run(capsys, "--target", target, "--output", str(output), *words)
    assert status == 2 and said in err and "Traceback" not in err
    assert not out and not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "specblock"])
def test_trains_and_goes_on_from_what_it_trained(capsys, monkeypatch, target, tmp_path, kind):
    common = ["--kind", kind, "--target", target, "--texts", "64", "--steps", "1", "--json"]
    common += ["--set", "answer_tokens=16"]
    status, out, err = run(capsys, *common, "--output", str(tmp_path / "first"))
    assert status == 0, err
    first = json.loads(out)
    assert first["kind"] == kind and first["collecting"]["openings"] == "free"
    assert first["texts"] + first["held_out"] <= 64 and first["last"]["step"] == 1
    assert (Path(first["drafter"]) / "model.safetensors").exists()
    again = [*common, "--output", str(tmp_path / "second"), "--from", first["drafter"]]
    more = ("--set", "openings=templates", "--set", "learning_rate=1e-4")
    status, out, err = run(capsys, *again, *more)
    assert status == 0, err
    second = json.loads(out)
    assert second["collecting"]["openings"] == "templates"
    assert second["settings"]["learning_rate"] == 1e-4
    config = config_of(first["drafter"])
    assert config == config_of(second["drafter"])
    texts = str(tmp_path / "first" / "texts")
    if kind == "specblock":
        weights = [load_file(Path(one["drafter"]) / "model.safetensors") for one in (first, second)]
        seen = [one.pop("examples") for one in weights]
        assert (seen[1] > seen[0]).all()  # the rank head stays in
        torch.testing.assert_close(*weights, atol=1e-3, rtol=0)  # a step of 1e-4 beyond the first
        words = ["figures", first["drafter"], "--target", target, "--texts", texts]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(figures, "split", lambda texts: ([], texts[:2]))  # so few hold out none
        figures.main()
        assert "rank > 10: frequency, precision, recall, F1 | " in capsys.readouterr().out
    if kind == "dflash":
        other = [*common, "--kind", "dspark", "--from", first["drafter"]]
        status, _, err = run(capsys, *other, "--output", str(tmp_path / "third"))
        assert status == 0, err
        third = config_of(tmp_path / "third/drafter")
        assert third["block_size"] == config["block_size"]
        assert not third["dflash_config"]["shift_label"]
        words = ["--target", target, "--drafter", first["drafter"], "--texts", texts, "--json"]
        wanted = ("epochs=2", "hidden=8", "texts=9", "max_new_tokens=8", "held_out=0", "layers=3",
                  "input=softmax")  # fmt: skip
        settings = [word for one in wanted for word in ("--set", one)]
        words = ["train-blockpilot", *words, *settings, "--output", str(tmp_path / "pilot")]
        assert cli.run(words) == 0
        pilot = json.loads(capsys.readouterr().out)
        assert (pilot["epoch"], pilot["trained"]["samples"], pilot["held_out"]) == (2, 9, None)
        assert (Path(pilot["drafter"]) / "model.safetensors").exists()
        config = config_of(pilot["drafter"])
        assert (config["num_layers"], config["input"]) == (3, "softmax")
        rows = pilot["figure_3"]
        assert [row["block_size"] for row in rows] == [1, *pilot["block_sizes"]]
        assert (rows[0]["length"], rows[0]["over_plain"]) == (1.0, 1.0)
        assert sum(row["best_for"] for row in rows) == pytest.approx(1.0)
        assert cli.run([*words, "--set", "temperature=1"]) == 2
        assert "were written at temperature 0.0, not 1" in capsys.readouterr().err

"""`rooftree bench` with trained drafters of every kind that is set beside its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.model.loading import load_model
from decoder.model.target import make_target
from lab.bench.store import read_result
from lab.papers.blockpilot.drafter import PilotConfig, save_predictor
from profiler import cli
from tests.decoder.draft_models import dflash_folder
from tests.lab.papers.blockpilot.test_blockpilot import predictor_of
from tests.lab.papers.specblock.specblock_models import specblock_folder
from tests.tiny_folder import isolate, write_all

VOCAB = 260  # of the tiny target


def write_drafters(folder: Path) -> list[str]:
    """What `--drafter` takes, for the tiny target in the folder."""
    specblock = {"vocab_size": VOCAB, "feature_layers": [0, 1, 1]}
    specblock_folder(folder / "whole" / "drafter", **specblock)
    specblock_folder(folder / "part" / "drafter", layer_shift=False, **specblock)
    layers = {"mask_token_id": 96, "target_layer_ids": [0]}
    flash = dflash_folder(
        folder / "flash", vocab_size=VOCAB, num_target_layers=2, dflash_config=layers
    )[0]
    loaded = load_model(str(folder / "tiny"), dtype=torch.float32, device=torch.device("cpu"))
    drafter = DFlashDrafter(make_target(loaded), flash)
    config = PilotConfig(
        drafter="../flash",
        drafter_hash=drafter.architecture_hash,
        block_size=5,
        candidates=(3, 4, 5, 6, 7),
        vocab=VOCAB,
        hidden=16,
    )
    save_predictor(folder / "pilot", predictor_of(config))
    names = ("whole/drafter", "part/drafter", "whole/drafter@adapt=no-bandit", "flash@block=3",
             "flash", "pilot")  # fmt: skip
    return [str(folder / name) for name in names]


@pytest.mark.slow
def test_a_run_sets_them_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isolate(monkeypatch, tmp_path)
    words = ["bench", "--target", str(write_all(tmp_path / "tiny")), "--device", "cpu"]
    words += ["--dtype", "float32", "--policy", "chain", "--peers", "none", "--new-tokens", "6"]
    for name in write_drafters(tmp_path):
        words += ["--drafter", name]
    prompts, output = tmp_path / "letters.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "ababab"}\n{"prompt": "cdcdcd"}\n')
    assert cli.run([*words, "--prompts", str(prompts), "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for title in ("Updates while serving", "What the updates gained", "SpecBlock's ablations",
                  "DFlash's block sizes and BlockPilot"):  # fmt: skip
        assert title in shown
    result = read_result(output)
    labels = ["whole/drafter", "part/drafter", "whole/drafter@adapt=no-bandit", "flash@block=3",
              "flash", "pilot"]  # fmt: skip
    assert [arm.name for arm in result.arms] == ["plain", *(f"chain+{name}" for name in labels)]
    for arm in result.arms:
        texts = [one.tokens for one in result.of(arm.name)]
        assert texts == [one.tokens for one in result.of("plain")]
        updates = [one.update is not None and one.update.trained for one in result.of(arm.name)]
        assert updates == [bool(arm.updates)] * 2
    text = output.read_text()
    assert str(tmp_path) not in text
    summary = json.loads(text)["summary"]
    [learnt], [parts], [blocks] = (
        summary[name] for name in ("updates", "ablations", "block_sizes")
    )
    assert (learnt["updates"], learnt["fixed"]) == ({"full": 2}, "chain+whole/drafter")
    assert [one["without"] for one in parts["members"]] == [[], ["no-shift"]]
    assert [one["block_size"] for one in blocks["members"]] == [3, 5, None]
    assert blocks["base"] == "chain+pilot"

"""The trained drafter that the package ships: its folder, and what it does with the demo model."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import DEMO_DRAFTER
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice

PROMPTS = ("List the days of the week.", "What is 12 times 7? Explain step by step.")
NEW_TOKENS = 20


def test_the_folder_is_small_and_readable_by_all():
    files = {path.name: path for path in DEMO_DRAFTER.iterdir()}
    assert set(files) == {"README.md", "config.json", "draft_tokens.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in files.values()) <= 26e6
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files.values())


def test_the_weights_are_finite_and_of_the_published_format():
    config = json.loads((DEMO_DRAFTER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["DFlashDraftModel"]
    read = len(config["dflash_config"]["target_layer_ids"])
    with safe_open(DEMO_DRAFTER / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("fc.weight").get_shape() == [576, 576 * read]
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            assert torch.isfinite(weights.get_tensor(name)).all(), name


@pytest.mark.slow
def test_it_drafts_for_the_demo_model_and_changes_no_text(smollm2_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    options = {"drafter": "demo", "policy": "fixed:15", "profile": ProfileChoice(calibrate=False)}
    decoder = TreeDecoder.from_pretrained(smollm2_folder, dtype="float32", **options)
    assert isinstance(decoder.drafter, DFlashDrafter)
    plain = TreeDecoder(decoder.target, policy="plain")
    lengths = []
    for prompt in PROMPTS:
        drafted = decoder.generate(prompt, chat=True, max_new_tokens=NEW_TOKENS)
        alone = plain.generate(prompt, chat=True, max_new_tokens=NEW_TOKENS)
        assert drafted.token_ids == alone.token_ids
        lengths.append(drafted.stats.tokens_per_verification)
    assert np.mean(lengths) > 1.8  # an untrained drafter of this shape is at 1.0

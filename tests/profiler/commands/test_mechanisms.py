"""The commands on targets of other mechanisms of attention, from a folder to a plan."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from lab.tiny_models import tiny_model
from lab.training.corpus import read_corpus
from profiler import cli
from tests.conftest import CALIBRATED
from tests.decoder.models import greedy
from tests.tiny_folder import fake_clock, isolate, write_tokenizer

VOCAB, PROMPT = 260, "abcabcabcabcabcabcabcabcabcabcabcabcabca"
KINDS = ("gpt_oss", "deepseek_v32", "qwen3_5_text")  # windows and sinks, latents, states
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 4, "max_position_embeddings": 512,
         "index_topk": 24, "index_n_heads": 8, "index_head_dim": 16}  # fmt: skip


def folder_of(kind: str, place: Path) -> tuple[str, torch.nn.Module]:
    """A random model with windows of 32 tokens, in a folder with a tokenizer."""
    model = tiny_model(kind, **SIZES).float()
    model.save_pretrained(place)
    return str(write_tokenizer(place)), model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_a_folder_to_a_plan(kind, tmp_path, monkeypatch, capsys):
    transformers.logging.set_verbosity_error()
    isolate(monkeypatch, tmp_path)
    fake_clock(monkeypatch)
    target, model = folder_of(kind, tmp_path / "target")

    def run(*words: str) -> dict:
        status = cli.run([*words, "--json"])
        printed = capsys.readouterr()
        assert status in (CALIBRATED if words[0] == "calibrate" else (0,)), printed.err
        return json.loads(printed.out)

    monkeypatch.setattr("lab.training.recipe.parse_dtype", lambda *_: torch.float32)
    work = ("--output", str(tmp_path / "work"), "--texts", "64", "--steps", "1",
            "--set", "prompt_tokens=12", "--set", "answer_tokens=24")  # fmt: skip
    drafter = run("train-drafter", "--target", target, *work)["drafter"]
    [text, *_] = read_corpus(tmp_path / "work/texts", VOCAB)
    prompt, answer = text.tokens[: text.prompt_tokens], text.tokens[text.prompt_tokens :]
    assert greedy(model, prompt, len(answer)) == list(answer)
    both = ("--target", target, "--drafter", drafter, "--device", "cpu", "--dtype", "float32")
    profile = str(tmp_path / "profile.yaml")
    sweep = ("--contexts", "32,128", "--max-nodes", "15", "--time-budget", "5s")
    run("calibrate", *both, *sweep, "--output", profile)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    wanted = greedy(model, tokenizer(PROMPT)["input_ids"], 24)
    for policy in ("bastion", "fixed:12", "plain"):
        words = ("--policy", policy, "--prompt", PROMPT, "--max-new-tokens", "24")
        assert run("generate", *both, *words)["token_ids"] == wanted
    run("plan", "--target", target, "--gpus", profile, "--rate", "1/s", "--acceptance", "0.6",
        "--prompt-tokens", "40", "--output-tokens", "40")  # fmt: skip

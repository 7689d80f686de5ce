"""Training a drafter: the objective against the drafter's own forward, resuming, refusals."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from costmodel.errors import InputError
from decoder.drafters.blocks import DraftCache, Rotary
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from decoder.model.target import make_target
from lab.training import corpus
from lab.training import prompts as refused
from lab.training.corpus import Collecting, TrainingText, collect, read_corpus, split
from lab.training.dflash import (
    DFlashObjective,
    DFlashTraining,
    fresh_config,
    fresh_model,
    head_tokens,
    spread_layers,
)
from lab.training.features import Example, Examples, FrozenHead
from lab.training.loop import CHECKPOINT, TrainingSettings, chosen, learning_rate, train
from lab.training.prompts import make_opening
from lab.training.recipe import Recipe, mask_token, train_dflash
from tests.tiny_folder import write_tokenizer, write_weights

CPU, VOCAB = torch.device("cpu"), 260
WANTED = DFlashTraining(
    layers=2, block_size=4, target_layers=(0, 2), anchors=6, vocabulary=64, decay=2.0, likeness=0.5
)
COLLECTING = Collecting(batches=2, batch_texts=4, prompt_tokens=6, answer_tokens=24)
SETTINGS = TrainingSettings(
    steps=12, batch=2, learning_rate=3e-3, warmup=2, autocast=False, save_every=4, seed=5
)
RECIPE = Recipe(collecting=COLLECTING, drafter=WANTED, settings=SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("target")
    return write_tokenizer(write_weights(place, num_hidden_layers=4, eos_token_id=None))


@pytest.fixture
def loaded(folder):
    return load_model(
        str(folder), weights="pretrained", dtype=torch.float32, device=CPU, download=False
    )


def some_texts(count: int, length: int = 40) -> list[TrainingText]:
    random = np.random.default_rng(0)
    return [
        TrainingText(tuple(random.integers(0, 60, length).tolist()), int(random.integers(2, 9)))
        for _ in range(count)
    ]


def objective_of(loaded, texts, seed: int = 0) -> DFlashObjective:
    published = fresh_config(loaded, WANTED, mask_token(loaded))
    model = fresh_model(loaded, published, seed)
    vocab = loaded.architecture.vocab
    return DFlashObjective(loaded, model, WANTED, head_tokens(texts, 64, vocab))


def examples_of(loaded, texts, objective, folder) -> Examples:
    layers = [number + 1 for number in objective.model.config.target_layer_ids]
    return Examples(loaded, texts, layers, folder)


def test_blocks_trained_together_are_the_blocks_that_are_drafted(loaded, tmp_path):
    texts = some_texts(1)
    objective = objective_of(loaded, texts)
    model = objective.model
    example = examples_of(loaded, texts, objective, tmp_path)[0]
    anchors = torch.tensor([3, 4, 11, 37])
    with torch.no_grad():
        together = objective.states(example.tokens, example.features, anchors)
    rotary = Rotary(model.config.shape, CPU)
    embedding = loaded.model.get_input_embeddings()
    for number, anchor in enumerate(anchors.tolist()):
        cache = DraftCache(model.config.shape, model.config.layers, torch.float32, CPU)
        block = torch.tensor([int(example.tokens[anchor])] + [model.config.mask_token_id] * 3)
        with torch.no_grad():
            known = rotary(torch.arange(anchor), torch.float32)
            model.passes().add_context(example.features[:anchor], known, cache)
            own = rotary(torch.arange(anchor, anchor + 4), torch.float32)
            alone = model.passes().block(embedding(block), own, cache)
        torch.testing.assert_close(together[number], alone, atol=1e-5, rtol=1e-5)


def test_the_loss_is_what_its_definition_says(loaded, tmp_path):
    texts = some_texts(2)
    objective = objective_of(loaded, texts)
    example = examples_of(loaded, texts, objective, tmp_path)[0]
    kept = head_tokens(texts, 64, loaded.architecture.vocab).tolist()
    generator = torch.Generator().manual_seed(3)
    loss, _ = objective.loss(example, generator, 0)

    again = torch.Generator().manual_seed(3)
    first, last = example.prompt_tokens, len(example.tokens) - 2
    anchors = (first + torch.randperm(last - first + 1, generator=again)[:6]).sort().values
    head = loaded.model.get_output_embeddings().weight[kept]
    total, weights = 0.0, 0.0
    with torch.no_grad():
        states = objective.states(example.tokens, example.features, anchors)
    for number, anchor in enumerate(anchors.tolist()):
        for depth in range(1, 4):
            if anchor + depth >= len(example.tokens):
                continue
            token = int(example.tokens[anchor + depth])
            if token not in kept:
                continue
            logits = (states[number, depth] @ head.T).double()
            weight = math.exp(-(depth - 1) / WANTED.decay)
            real = example.final[anchor + depth - 1].double()
            distance = (states[number, depth].double() - real).square().sum() / real.square().sum()
            entropy = logits.logsumexp(0) - logits[kept.index(token)]
            total += weight * float((entropy + 0.5 * distance).detach())
            weights += weight
    assert float(loss.detach()) == pytest.approx(total / weights, rel=1e-4)


def test_features_are_the_targets_hidden_states_and_are_kept(loaded, tmp_path, monkeypatch):
    texts = some_texts(1)
    examples = Examples(loaded, texts, [1, 3], tmp_path)
    found = examples[0]
    with torch.no_grad():
        whole = loaded.model(torch.tensor([texts[0].tokens]), output_hidden_states=True)
    wanted = torch.cat([whole.hidden_states[1][0], whole.hidden_states[3][0]], dim=-1)
    torch.testing.assert_close(found.features, wanted)
    logits = loaded.model.get_output_embeddings()(found.final)
    torch.testing.assert_close(logits, whole.logits[0])
    monkeypatch.setattr(Examples, "_compute", None)  # what is kept is not computed again
    torch.testing.assert_close(examples[0].features, wanted)


def test_a_damaged_file_of_features_is_made_again(loaded, tmp_path):
    examples = Examples(loaded, some_texts(1), [1], tmp_path)
    before = examples[0].features
    [place] = tmp_path.glob("features-*/*.safetensors")
    place.write_bytes(place.read_bytes()[:40])
    torch.testing.assert_close(examples[0].features, before)


def test_training_lowers_the_loss(loaded, tmp_path):
    texts = some_texts(2, length=24)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    settings = replace(SETTINGS, steps=40, save_every=10)
    history = train(objective, examples, examples, settings, tmp_path / "run")
    assert [row["step"] for row in history] == [10, 20, 30, 40]
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


def test_a_killed_run_ends_as_one_that_was_not(loaded, tmp_path):
    texts = some_texts(6)

    def run(place: Path, stop_after: int | None) -> dict[str, torch.Tensor]:
        objective = objective_of(loaded, texts)
        examples = examples_of(loaded, texts, objective, tmp_path)
        told = 0

        def say(line: str) -> None:
            nonlocal told
            told += 1
            if told == stop_after:
                raise KeyboardInterrupt

        train(objective, examples, [examples[0]], SETTINGS, place, say)
        return objective.model.state_dict()

    whole = run(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", 2)
    resumed = run(tmp_path / "cut", None)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_other_settings_is_refused(loaded, tmp_path):
    texts = some_texts(2)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    train(objective, examples, [], replace(SETTINGS, steps=4), tmp_path / "run")
    other = replace(SETTINGS, steps=4, learning_rate=1e-5)
    with pytest.raises(InputError, match="other settings: learning_rate"):
        train(objective, examples, [], other, tmp_path / "run")


def test_a_finished_run_is_gone_on_with_for_more_steps(loaded, tmp_path):
    texts = some_texts(4)
    objective = objective_of(loaded, texts[:3])
    fewer = examples_of(loaded, texts[:3], objective, tmp_path)
    examples = examples_of(loaded, texts, objective, tmp_path)
    short = replace(SETTINGS, steps=4, save_every=2)
    first = train(objective, fewer, [], short, tmp_path / "run")
    before = {name: weight.clone() for name, weight in objective.model.state_dict().items()}
    said: list[str] = []
    fresh = objective_of(loaded, texts)
    longer = replace(SETTINGS, steps=6, save_every=1)
    history = train(fresh, examples, [], longer, tmp_path / "run", said.append)
    assert said[0] == "going on behind step 4"
    assert [row["step"] for row in history] == [2, 4, 5, 6]
    assert history[:2] == first
    seconds = [row["seconds"] for row in history]
    assert seconds == sorted(seconds)
    assert any(not torch.equal(before[n], w) for n, w in fresh.model.state_dict().items())
    with pytest.raises(InputError, match="6 steps behind it, and 4 were asked for"):
        train(fresh, examples, [], short, tmp_path / "run")


@pytest.mark.parametrize("damage", [b"", b"no checkpoint at all", None])
def test_a_damaged_checkpoint_is_named(loaded, tmp_path, damage):
    texts = some_texts(2)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    settings = replace(SETTINGS, steps=2)
    train(objective, examples, [], settings, tmp_path / "run")
    place = tmp_path / "run" / CHECKPOINT
    place.write_bytes(place.read_bytes()[:2000] if damage is None else damage)
    with pytest.raises(InputError, match="cannot be read") as error:
        train(objective, examples, [], settings, tmp_path / "run")
    assert "remove it" in (error.value.hint or "")


def test_every_example_comes_once_before_any_comes_again():
    settings = replace(SETTINGS, batch=3)
    order = [index for step in range(14) for index in chosen(step, 7, settings)]
    for epoch in range(6):
        assert sorted(order[7 * epoch : 7 * (epoch + 1)]) == list(range(7))
    assert order[:7] != order[7:14]


def test_the_learning_rate_rises_and_falls():
    settings = TrainingSettings(steps=110, warmup=10, learning_rate=1.0)
    assert learning_rate(0, settings) == pytest.approx(0.1)
    assert learning_rate(9, settings) == pytest.approx(1.0)
    assert learning_rate(60, settings) == pytest.approx(0.55)
    assert learning_rate(110, settings) == pytest.approx(0.1)


def test_validation_counts_what_plain_text_would_accept(loaded, tmp_path):
    texts = some_texts(3)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    figures = objective.validate(examples)
    assert figures["chain"] == pytest.approx(1 + sum(figures[f"accepted_{i}"] for i in (1, 2, 3)))
    assert figures["tree"] >= figures["chain"]


def test_collected_texts_are_greedy_and_the_same_after_a_stop(loaded, tmp_path):
    collect(loaded, tmp_path / "whole", COLLECTING)
    collect(loaded, tmp_path / "cut", replace(COLLECTING, batches=1))
    collect(loaded, tmp_path / "cut", COLLECTING)
    texts = read_corpus(tmp_path / "whole", VOCAB)
    assert texts == read_corpus(tmp_path / "cut", VOCAB)
    assert len(texts) >= 6
    for text in texts[:3]:
        whole = torch.tensor([text.tokens])
        with torch.no_grad():
            best = loaded.model(whole).logits[0].argmax(-1)
        greedy = best[text.prompt_tokens - 1 : -1].tolist()
        assert greedy == list(text.tokens[text.prompt_tokens :])


def test_a_folder_of_other_texts_is_refused(loaded, tmp_path):
    collect(loaded, tmp_path, replace(COLLECTING, batches=1))
    with pytest.raises(InputError, match="another way"):
        collect(loaded, tmp_path, replace(COLLECTING, batches=1, seed=9))
    (tmp_path / "corpus.json").write_text('{"batch": 6')
    with pytest.raises(InputError, match=r"corpus\.json cannot be read"):
        collect(loaded, tmp_path, replace(COLLECTING, batches=1))


@pytest.mark.parametrize(
    "content",
    [
        "{", '{"tokens": 3, "prompt_tokens": 1}', "{}", "[1]", "\udcff", "[" * 9999,
        '{"tokens": [1, 2, -1, 4], "prompt_tokens": 1}',
        '{"tokens": [1, 2, 260, 4], "prompt_tokens": 1}',
        '{"tokens": [1, 2, 3.0, 4], "prompt_tokens": 1}',
        '{"tokens": [1, 2, 3, 4], "prompt_tokens": 4}',
        '{"tokens": [1, 2, 3, 4], "prompt_tokens": NaN}',
    ],
)  # fmt: skip
def test_damaged_texts_are_named(tmp_path, content):
    place = tmp_path / "texts-00000.jsonl"
    place.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"texts-00000\.jsonl") as caught:
        read_corpus(tmp_path, VOCAB)
    assert "Remove the file" in caught.value.hint


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_settings_beside_no_texts_are_written_again(loaded, tmp_path, content):
    """They describe nothing, and would else block the folder for good."""
    (tmp_path / "corpus.json").write_text(content)
    collect(loaded, tmp_path, replace(COLLECTING, batches=1))
    assert read_corpus(tmp_path, VOCAB)
    collect(loaded, tmp_path, replace(COLLECTING, batches=1))


@pytest.mark.parametrize(
    "changed",
    [
        {"history": [{"step": float("nan"), "seconds": 1.0}]}, {"history": []}, {"history": [3]},
        {"settings": 3}, {"settings": None},
    ],
)  # fmt: skip
def test_a_checkpoint_of_odd_values_is_named(loaded, tmp_path, changed):
    texts = some_texts(2)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    settings = replace(SETTINGS, steps=1)
    train(objective, examples, [], settings, tmp_path / "run")
    place = tmp_path / "run" / CHECKPOINT
    torch.save(torch.load(place, weights_only=True) | changed, place)
    with pytest.raises(InputError, match="cannot be read"):
        train(objective, examples, [], settings, tmp_path / "run")


def test_a_full_disk_is_named_and_training_goes_on(loaded, tmp_path, monkeypatch):
    def no_space(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    texts = some_texts(2)
    objective = objective_of(loaded, texts)
    examples = examples_of(loaded, texts, objective, tmp_path)
    list(examples)  # cached
    train(objective, examples, [], replace(SETTINGS, steps=2, save_every=1), tmp_path / "run")
    kept = (tmp_path / "run" / CHECKPOINT).read_bytes()
    longer = replace(SETTINGS, steps=4, save_every=1)
    with monkeypatch.context() as patch:
        patch.setattr("costmodel.io.os.write", no_space)
        with pytest.raises(InputError, match=r"checkpoint\.pt: not written, the disk is full"):
            train(objective_of(loaded, texts), examples, [], longer, tmp_path / "run")
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == kept
    said = []
    train(objective_of(loaded, texts), examples, [], longer, tmp_path / "run", said.append)
    assert said[0] == "going on behind step 2"


@pytest.mark.parametrize(("layers", "wanted"), [(2, (0,)), (3, (1,)), (4, (1, 2)),
                                                (30, (1, 8, 14, 21, 28))])  # fmt: skip
def test_feature_layers_of_small_targets(layers, wanted):
    """Each once, none the last one, whose output transformers gives after the norm."""
    assert spread_layers(layers) == wanted


def test_a_drafter_for_a_target_of_two_layers_is_one_that_drafts(tmp_path):
    folder = write_tokenizer(write_weights(tmp_path / "two", num_hidden_layers=2))
    loaded = load_model(str(folder), weights="pretrained", dtype=torch.float32, device=CPU)
    recipe = replace(RECIPE, drafter=replace(WANTED, layers=3, target_layers=None))
    trained = train_dflash(loaded, tmp_path / "run", recipe)
    loaded = load_model(str(folder), weights="pretrained", dtype=torch.float32, device=CPU)
    decoder = TreeDecoder(make_target(loaded), drafter=str(trained.folder), policy="fixed:4")
    assert len(decoder.generate([3, 4, 5], max_new_tokens=5).token_ids) == 5
    beyond = replace(RECIPE, drafter=replace(WANTED, target_layers=(0, 1)))
    loaded = load_model(str(folder), weights="pretrained", dtype=torch.float32, device=CPU)
    with pytest.raises(InputError, match="reads layer 1 of a target of 2 layers"):
        train_dflash(loaded, tmp_path / "other", beyond)


def test_equal_prompts_are_never_on_both_sides():
    texts = some_texts(200)
    train_side, held_out = split(texts + texts)
    prompts = {text.tokens[: text.prompt_tokens] for text in train_side}
    assert held_out and not prompts & {t.tokens[: t.prompt_tokens] for t in held_out}


EVALUATION = "A quick brown fox jumps over the lazy dog while nine cats watch it from the wall."


def test_evaluation_prompts_are_refused(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(refused, "hashes", lambda: frozenset(refused.sketch(EVALUATION)))
    with pytest.raises(InputError, match="training prompt 2 is, or shares 8 words"):
        collect(loaded, tmp_path, COLLECTING, ["Say hello.", EVALUATION.upper()])
    assert not list(tmp_path.glob("texts-*"))


def test_what_the_target_writes_of_an_evaluation_prompt_is_left_out(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "is_evaluation", lambda text: True)
    writer = corpus.Writer(loaded, COLLECTING)
    openings = corpus._openings(0, COLLECTING, ())
    kept = writer.texts(openings, seed=0)
    assert len(kept) <= sum(not opening.chat for opening in openings)


def test_the_shared_prompt_sets_are_all_refused(shared_dir):
    files = sorted((shared_dir / "prompts").glob("*.jsonl"))
    assert files
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)["prompt"]
            if len(prompt.split()) >= 30:
                inside = " ".join(prompt.split()[:60])
                assert refused.is_evaluation("Please answer: " + inside), inside[:80]


def test_a_drafter_from_one_command_drafts_for_its_target(loaded, folder, tmp_path):
    trained = train_dflash(loaded, tmp_path, RECIPE)
    assert trained.history[-1]["step"] == SETTINGS.steps
    target = make_target(
        load_model(
            str(folder), weights="pretrained", dtype=torch.float32, device=CPU, download=False
        )
    )
    drafter = DFlashDrafter(target, trained.folder)
    assert drafter.max_depth == WANTED.block_size - 1
    plain = TreeDecoder(target, policy="plain").generate([5, 6, 7], max_new_tokens=20)
    drafted = TreeDecoder(target, drafter=drafter, policy="fixed:6")
    assert drafted.generate([5, 6, 7], max_new_tokens=20).token_ids == plain.token_ids


@pytest.mark.slow
def test_a_trained_drafter_is_gone_on_from(loaded, tmp_path):
    """With a rate of next to nothing it stays what it was, in other texts and a fresh run."""
    first = train_dflash(loaded, tmp_path / "first", RECIPE)
    still = replace(SETTINGS, steps=1, learning_rate=1e-9)
    again = replace(RECIPE, settings=still, start=str(first.folder))
    again = replace(again, collecting=replace(COLLECTING, seed=1))
    second = train_dflash(loaded, tmp_path / "second", again)
    was, became = (load_file(run.folder / "model.safetensors") for run in (first, second))
    for name, weight in was.items():
        torch.testing.assert_close(became[name], weight, atol=1e-6, rtol=0)


def test_a_start_that_does_not_fit_the_target_is_refused(loaded, tmp_path):
    first = train_dflash(loaded, tmp_path / "first", RECIPE)
    config = json.loads((first.folder / "config.json").read_text(encoding="utf-8"))
    changed = config | {"use_sliding_window": True, "sliding_window": 4}
    changed["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    for wrong, said in ((config | {"vocab_size": 7}, "vocab"), (changed, "windows")):
        (first.folder / "config.json").write_text(json.dumps(wrong), encoding="utf-8")
        with pytest.raises(InputError, match=said):
            train_dflash(loaded, tmp_path / "second", replace(RECIPE, start=str(first.folder)))
    assert not (tmp_path / "second").exists()  # found before any text was written


def test_half_of_free_openings_are_hardly_more_than_a_word():
    random = Random(0)
    free = [make_opening(random, "free") for _ in range(400)]
    assert 150 < sum(opening.kind == "start" for opening in free) < 250
    assert {opening.kind for opening in free} == {"maths", "code", "task", "article", "start"}
    for opening in free:
        if opening.kind == "start":
            assert opening.open and opening.chat
            assert len(opening.text.split()) <= 8 and "{" not in opening.text
            assert opening.text == opening.text.rstrip()  # tokens begin with their space
    assert all(make_opening(random, "templates").kind != "start" for _ in range(400))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_frozen_head_is_cast_once(autocast):
    rows, states = torch.randn(12, 8), torch.randn(3, 5, 8, requires_grad=True)
    head = FrozenHead(rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = head(states)
        expected = torch.nn.functional.linear(states, rows)
        assert head(states).dtype == expected.dtype
    assert torch.equal(logits, expected)
    logits.float().sum().backward()
    torch.testing.assert_close(states.grad[0, 0], rows.sum(0), atol=0.1, rtol=0.02)
    assert head.dtype == torch.float32 and not rows.requires_grad


def test_an_example_of_unequal_lengths_is_refused():
    with pytest.raises(InputError, match="5 tokens has features of 4"):
        Example(torch.zeros(5), 2, torch.zeros(4, 3), torch.zeros(5, 3))

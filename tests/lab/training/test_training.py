"""Training a drafter: the objective against the drafter's own forward, resuming, refusals."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.base import DraftRequest
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.model.loading import load_model
from decoder.model.making import make_target
from decoder.tree.draft_tree import chain
from decoder.tree.growth import TopPaths
from lab.training import dflash
from lab.training import prompts as refused
from lab.training.corpus import Collecting, TrainingText, collect, read_corpus
from lab.training.dflash import DFlashObjective, DFlashTraining, fresh_config, head_tokens
from lab.training.features import Examples
from lab.training.kinds import KINDS
from lab.training.loop import TrainingSettings, train
from lab.training.recipe import Recipe, mask_token, train_dflash
from tests.conftest import WHOLE
from tests.tiny_folder import write_tokenizer, write_weights

CPU, VOCAB = torch.device("cpu"), 260
WANTED = DFlashTraining(
    layers=2, block_size=4, target_layers=(0, 2), anchors=6, vocabulary=64, decay=2.0, likeness=0.5,
    soft=0.25,
)  # fmt: skip
COLLECTING = Collecting(batches=2, batch_texts=4, prompt_tokens=6, answer_tokens=24)
SETTINGS = TrainingSettings(
    steps=12, batch=2, learning_rate=3e-3, warmup=2, autocast=False, save_every=4, seed=5
)
RECIPE = Recipe(collecting=COLLECTING, drafter=WANTED, settings=SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("target")
    return write_tokenizer(write_weights(place, num_hidden_layers=4, eos_token_id=None))


def opened(folder):
    wanted = {"weights": "pretrained", "dtype": torch.float32, "device": CPU}
    return load_model(str(folder), download=False, **wanted)


@pytest.fixture
def loaded(folder):
    return opened(folder)


def some_texts(count: int, length: int = 40) -> list[TrainingText]:
    random = np.random.default_rng(0)
    drawn = ((random.integers(0, 60, length), random.integers(2, 9)) for _ in range(count))
    return [TrainingText(tuple(text.tolist()), int(prompt)) for text, prompt in drawn]


def objective_of(loaded, texts, wanted=WANTED, kind="dflash") -> DFlashObjective:
    published = fresh_config(loaded, wanted, mask_token(loaded), kind)
    config = KINDS[kind].drafter.model_type.config_type.parse(published)
    tokens = head_tokens(texts, wanted.vocabulary, VOCAB)
    return DFlashObjective(loaded, dflash.fresh_model(loaded, config, 0, tokens), wanted)


def examples_of(loaded, texts, objective, folder) -> Examples:
    layers = [number + 1 for number in objective.model.config.target_layer_ids]
    return Examples(loaded, texts, layers, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_drafted(loaded, folder, tmp_path, kind):
    """Path scores of greedy drafts, by training on their text and by the saved drafter."""
    (text,) = some_texts(1)
    wanted = replace(WANTED, vocabulary=16, rank=8, state=12)  # all are candidates
    objective = objective_of(loaded, [text], wanted, kind)
    example = examples_of(loaded, [text], objective, tmp_path)[0]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in objective.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    objective.model.save(tmp_path / "drafter")
    drafter = load_drafter(str(tmp_path / "drafter"), make_target(opened(folder)))
    request = DraftRequest(depth=drafter.max_depth, width=16, growth=TopPaths())
    for anchor in (3, 4, 11, 36):
        context = np.array(text.tokens[: anchor + 1])
        session = drafter.start(context[:-1], example.features[:anchor])
        path = chain(session.draft(context, request), drafter.max_depth)
        assert path.nodes == drafter.max_depth
        tokens = torch.from_numpy(np.concatenate((context, path.tokens)))
        with torch.no_grad():
            _, logits = objective.scores(tokens, example.features, torch.tensor([anchor]), 4)
        places = np.searchsorted(objective.model.head_tokens, path.tokens)
        chances = logits[0].softmax(-1)[range(path.nodes), places].double()
        np.testing.assert_allclose(path.scores, chances.cumprod(0), rtol=1e-4)


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
            logs = logits.log_softmax(0)
            likely = (real @ head.T.double()).softmax(0)
            entropy = -0.75 * logs[kept.index(token)] - 0.25 * (likely * logs).sum()
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


def test_texts_can_be_sampled_from_the_targets_whole_distribution(loaded, tmp_path):
    """The first tokens after one prompt in ten bins of equal probability: chi-square, 9 degrees."""
    wanted = replace(COLLECTING, batches=1, batch_texts=800, answer_tokens=4)
    collect(loaded, tmp_path, replace(wanted, answer_temperature=1.0), ["hello"] * 800)
    texts = read_corpus(tmp_path, VOCAB, temperature=1.0)
    prompt = texts[0].tokens[: texts[0].prompt_tokens]
    with torch.no_grad():
        p = loaded.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    order = p.argsort(descending=True)
    bins = torch.empty(VOCAB, dtype=torch.int64)
    bins[order] = (p[order].cumsum(0) * 10).long().clamp(max=9)
    firsts = torch.tensor([text.tokens[text.prompt_tokens] for text in texts])
    counts, expected = bins[firsts].bincount(minlength=10), bins.bincount(p, 10) * 800
    assert float(((counts - expected) ** 2 / expected).sum()) < 28
    with pytest.raises(InputError, match=r"were written at temperature 1.0, not 0"):
        read_corpus(tmp_path, VOCAB, temperature=0.0)


@pytest.mark.parametrize("content", [
    "{", '{"tokens": 3, "prompt_tokens": 1}', "{}", "[1]", "\udcff", "[" * 9999,
    '{"tokens": [1, 2, -1, 4], "prompt_tokens": 1}',
    '{"tokens": [1, 2, 260, 4], "prompt_tokens": 1}',
    '{"tokens": [1, 2, 3.0, 4], "prompt_tokens": 1}',
    '{"tokens": [1, 2, 3, 4], "prompt_tokens": 4}',
    '{"tokens": [1, 2, 3, 4], "prompt_tokens": NaN}',
])  # fmt: skip
def test_damaged_texts_are_named(tmp_path, content):
    place = tmp_path / "texts-00000.jsonl"
    place.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"texts-00000\.jsonl") as caught:
        read_corpus(tmp_path, VOCAB)
    assert "Remove the file" in caught.value.hint


def test_options_of_the_template_reach_the_texts(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "target")
    template = "{{ messages[0].content }}{% if not thinking %}!{% endif %}"
    (place / "chat_template.jinja").write_text(template)
    target = opened(place)
    for thinking in (True, False):
        wanted = replace(COLLECTING, batches=1, template={"thinking": thinking})
        collect(target, tmp_path / f"texts-{thinking}", wanted, ["hello"])
        (text,) = read_corpus(tmp_path / f"texts-{thinking}", VOCAB)
        assert text.prompt_tokens == len("hello" if thinking else "hello!")
    with pytest.raises(InputError, match="no option 'thinks'"):
        collect(target, tmp_path / "other", replace(wanted, template={"thinks": 1}), ["hello"])


def test_a_drafter_for_a_target_of_two_layers_is_one_that_drafts(tmp_path):
    folder = write_tokenizer(write_weights(tmp_path / "two", num_hidden_layers=2))
    loaded = opened(folder)
    drafter, run = replace(WANTED, layers=3, target_layers=None), replace(SETTINGS, steps=1)
    recipe = replace(RECIPE, drafter=drafter, settings=run)
    trained = train_dflash(loaded, tmp_path / "run", recipe)
    loaded = opened(folder)
    decoder = TreeDecoder(make_target(loaded), drafter=str(trained.folder), policy="fixed:4")
    assert len(decoder.generate([3, 4, 5], max_new_tokens=5).token_ids) == 5
    beyond = replace(RECIPE, drafter=replace(WANTED, target_layers=(0, 1)))
    loaded = opened(folder)
    with pytest.raises(InputError, match="reads layer 1 of a target of 2 layers"):
        train_dflash(loaded, tmp_path / "other", beyond)


EVALUATION = "A quick brown fox jumps over the lazy dog while nine cats watch it from the wall."


def test_evaluation_prompts_are_refused(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(refused, "hashes", lambda: frozenset(refused.sketch(EVALUATION)))
    with pytest.raises(InputError, match="training prompt 2 is, or shares 8 words"):
        collect(loaded, tmp_path, COLLECTING, ["Say hello.", EVALUATION.upper()])
    assert not list(tmp_path.glob("texts-*"))


def test_the_shipped_hashes_refuse_the_evaluation_sets():
    """The book's first words here; the other sets, kept out of this repository, where they are."""
    prompts = [
        "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money "
        "in my purse, and nothing particular to interest me on shore, I thought I would sail"
    ]
    for file in (WHOLE / "prompts").glob("*.jsonl"):
        prompts += [json.loads(line)["prompt"] for line in file.open(encoding="utf-8")]
    for prompt in prompts:
        inside = " ".join(prompt.split()[:60])
        if len(prompt.split()) >= 30:
            assert refused.is_evaluation("Please answer: " + inside), inside[:80]
    assert not refused.is_evaluation(EVALUATION)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_from_one_command_drafts_for_its_target(loaded, folder, tmp_path, kind):
    trained = train_dflash(loaded, tmp_path, replace(RECIPE, kind=kind))
    assert trained.history[-1]["step"] == SETTINGS.steps
    assert trained.history[-1]["loss"] < trained.history[0]["loss"]
    target = make_target(opened(folder))
    plain = TreeDecoder(target, policy="plain").generate([5, 6, 7], max_new_tokens=20)
    drafted = TreeDecoder(target, drafter=str(trained.folder), policy="fixed:6")
    assert (type(drafted.drafter), drafted.drafter.name) == (KINDS[kind].drafter, kind)
    assert drafted.drafter.max_depth == WANTED.block_size - drafted.drafter.model.config.first_row
    result = drafted.generate([5, 6, 7], max_new_tokens=20)
    assert result.token_ids == plain.token_ids and max(result.stats.tree_nodes) > 1

"""Recurrent states under draft trees, against transformers' decoding of each path."""

import copy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from costmodel.errors import InputError
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.engine import TreeDecoder
from decoder.model import mixers, recurrence, selfcheck
from decoder.model.kv_cache import KVCache
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.recurrence import Ancestors, StateCache, path_windows
from decoder.model.target import Step
from lab.tiny_models import VOCAB, tiny_model
from tests.decoder.model.row_decoding import decoded, off, paths_of, read, tree_of
from tests.decoder.models import OracleDrafter, generated, target_of
from tests.tiny_folder import isolate

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17, 60]
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2}
MECHANISMS = ("qwen3_5_text", "lfm2", "falcon_h1")
KINDS = (
    *MECHANISMS, "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2_moe",
    "granitemoehybrid", "bamba", "zamba2", "nemotron_h",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(selfcheck, "_checked", {})
    return isolate(monkeypatch, tmp_path / "home")


def hybrid(kind, dtype=torch.float64):
    return tiny_model(kind).to(dtype)


def prefilled(model):
    target = make_target(borrow_model(model), owned=False)
    target.reserve(128)
    target.prefill(torch.tensor(PROMPT))
    return target


def seeded(shape, nodes, seed):
    return tree_of(shape, nodes, np.random.default_rng(seed))


def check_rows(target, model, text, root, tree, bound):
    """The rows of a tree against each path's decoding; `text` is what is committed."""
    [rows] = target.verify([Step(root, tree)])
    tokens, committed = tree.row_tokens(root), text[len(PROMPT) :]
    wanted = decoded(model, PROMPT, [[*committed, *tokens[path]] for path in paths_of(tree)])
    assert float(off(rows, wanted).max()) < bound


@pytest.mark.parametrize(("kind", "dtype"), [
    *((kind, torch.float64) for kind in KINDS), *((kind, torch.float32) for kind in MECHANISMS),
])  # fmt: skip
def test_each_row_is_the_decoding_of_its_path_before_and_after_a_commit(kind, dtype):
    model = hybrid(kind, dtype)
    target = prefilled(model)
    tree = seeded("random", 9, 1)
    check_rows(target, model, PROMPT, 7, tree, BOUNDS[dtype])
    path = max(paths_of(tree), key=len)
    target.commit(path)
    text = [*PROMPT, *(int(token) for token in tree.row_tokens(7)[path])]
    check_rows(target, model, text, 11, seeded("comb", 6, 2), BOUNDS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    *MECHANISMS, "kimi_linear", "gpt_oss", "llama4_text", "gemma2", "deepseek_v3", "deepseek_v32",
])  # fmt: skip
def test_trees_behind_a_text_that_passes_the_windows(kind):
    """Of every mechanism: windows, sinks, chunks, soft caps, latents and an indexer's keys too."""
    model, random = hybrid(kind), np.random.default_rng(0)
    for name, weights in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weights)
    target, committed = make_target(borrow_model(model), owned=False), []
    prompt = random.integers(1, VOCAB, 45).tolist()
    target.reserve(128)
    target.prefill(torch.tensor(prompt))
    for shape in ("comb", "star", "chain", "random"):
        tree = tree_of(shape, 12, random)
        tokens, paths = tree.row_tokens(7), paths_of(tree)
        [rows] = target.verify([Step(7, tree)])
        wanted = decoded(model, prompt, [[*committed, *tokens[path]] for path in paths])
        # Of 2,016 trees of each the worst row was 1.8e-4 off: parts run in float32.
        assert float(off(rows, wanted).max()) < 3e-4
        assert torch.equal(rows.argmax(-1), wanted.argmax(-1))
        target.commit(paths[-1])
        committed += tokens[paths[-1]].tolist()


@pytest.mark.parametrize("kind", MECHANISMS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_states_do_not_drift_over_many_commits(kind, dtype):
    model = hybrid(kind, dtype)
    target = prefilled(model)
    theirs = DynamicCache(config=model.config)
    read(model, theirs, [PROMPT])
    for index in range(8):
        tree = seeded("random", 6, index)
        target.verify([Step(index + 1, tree)])
        path = max(paths_of(tree), key=len) if index % 4 else [0]
        target.commit(path)
        for token in tree.row_tokens(index + 1)[path]:
            read(model, theirs, [[token]])
    ours = target.cache.states
    numbers = [number for number, (form, *_) in enumerate(ours.shapes) if form != "conv"]
    wanted = [getattr(layer, "recurrent_states", {}).get(0) for layer in theirs.layers]
    wanted = [state[0] for state in wanted if state is not None]
    for number, other in zip(numbers, wanted, strict=True):
        mine = ours.state(number, 0)
        mine = mine.mT if ours.shapes[number][0] == "ssm" else mine
        assert mine.dtype == torch.float32
        most = max(float(other.abs().max()), 1.0)
        assert float((mine - other).abs().max()) < BOUNDS[dtype] * most


@pytest.mark.parametrize("kind", MECHANISMS)
def test_rows_in_several_forwards_are_rows_of_one(kind):
    """As a drafter grows its tree, a level a forward."""
    target, tree = prefilled(hybrid(kind)), seeded("random", 8, 4)
    [whole] = target.verify([Step(7, tree)])
    path = max(paths_of(tree), key=len)
    target.commit(path)
    [next_whole] = target.verify([Step(9)])

    target.reserve(64)
    target.prefill(torch.tensor(PROMPT))
    tokens, depths = tree.row_tokens(7), tree.row_depths()
    visible = np.zeros((9, 9), dtype=np.bool_)
    for row, seen in enumerate(paths_of(tree)):
        visible[row, seen] = True
    levels = ((0, 1), (1, 4), (4, 9))
    parts = [target.extend(tokens[a:b], depths[a:b], visible[a:b, :b]) for a, b in levels]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)
    target.commit(path)
    [again] = target.verify([Step(9)])
    torch.testing.assert_close(again, next_whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_prompt_in_pieces_and_sequences_of_a_batch(kind, monkeypatch):
    model = hybrid(kind)
    target = make_target(borrow_model(model), owned=False)
    monkeypatch.setattr("decoder.model.target.PREFILL_CHUNK", 4)
    texts = [PROMPT, PROMPT[:5], PROMPT[3:]]
    target.reserve(64, 3)
    for place, text in enumerate(texts):
        [wanted] = decoded(model, text[:-1], [text[-1:]])
        assert off(target.prefill(torch.tensor(text), place), wanted) < 1e-5
    trees = [seeded("comb", 4, 1), seeded("star", 3, 2), seeded("chain", 0, 0)]
    steps = [Step(7 + place, tree, place) for place, tree in enumerate(trees)]
    for step, rows, text in zip(steps, target.verify(steps), texts, strict=True):
        tokens = step.tree.row_tokens(step.root)
        wanted = decoded(model, text, [tokens[path] for path in paths_of(step.tree)])
        assert float(off(rows, wanted).max()) < 1e-5


@pytest.mark.parametrize("kind", MECHANISMS)  # others: tests/lab/studies/test_families.py
def test_texts_are_transformers_own(kind):
    model = hybrid(kind)
    truth = generated(model, PROMPT, 14, pad_token_id=0)
    second = [*PROMPT, *truth, 9, 8, 7]  # a chat's second turn
    follows = generated(model, second, 5, pad_token_id=0)
    for owned, policy in ((False, "plain"), (False, "beam:3x4"), (True, "fixed:7")):
        target = make_target(borrow_model(copy.deepcopy(model) if owned else model), owned=owned)
        drafter = "ngram" if policy == "plain" else OracleDrafter([*PROMPT, *truth], VOCAB)
        decoder = TreeDecoder(target, drafter=drafter, policy=policy)
        assert decoder.generate(PROMPT, max_new_tokens=14).token_ids == truth
        assert decoder.generate(second, max_new_tokens=5).token_ids == follows


def test_texts_of_a_batch_and_of_a_stream_are_those_alone():
    model = hybrid("qwen3_5_text")
    prompts = [PROMPT, PROMPT[:4], [1, 2, 3]]
    truths = [generated(model, prompt, 24, pad_token_id=0) for prompt in prompts]
    decoder = TreeDecoder(target_of(model), policy="fixed:7")
    together = decoder.generate_batch(prompts, max_new_tokens=24)
    assert [one.token_ids for one in together] == truths
    run = decoder.stream(PROMPT, max_new_tokens=24)
    list(run.rounds())
    assert run.token_ids == truths[0]


@pytest.mark.parametrize("drafting", ["falcon_h1", "qwen3_5_text"])
def test_a_drafter_with_states_of_its_own(drafting):
    target = target_of(hybrid("qwen3_5_text"))
    drafter = CausalLMDrafter(target_of(hybrid(drafting)), target=target)
    decoder = TreeDecoder(target, drafter=drafter, policy="chain")
    finished = decoder.generate(PROMPT, max_new_tokens=24)
    assert finished.token_ids == generated(hybrid("qwen3_5_text"), PROMPT, 24, pad_token_id=0)
    assert not finished.stats.warnings
    assert finished.stats.rounds < 10 or drafting == "falcon_h1"  # the same model is right


def test_tables_are_made_once_a_round(monkeypatch):
    target = prefilled(hybrid("qwen3_5_text"))
    made, indexed = (Mock(wraps=one) for one in (Ancestors, path_windows))
    monkeypatch.setattr(mixers, "Ancestors", made)
    monkeypatch.setattr(recurrence, "path_windows", indexed)
    target.verify([Step(7, seeded("comb", 6, 0))])
    assert (made.call_count, indexed.call_count) == (1, 1)


def test_the_check_at_load_sees_a_wrong_commit(monkeypatch):
    monkeypatch.setattr(StateCache, "commit", lambda *_: None)
    with pytest.raises(InputError, match="logits of a tree differ"):
        target_of(hybrid("qwen3_5_text"))


def test_a_cache_with_states_is_copied_and_cut():
    target = target_of(hybrid("qwen3_5_text"))
    cache = target.reserve(32, 2)
    target.prefill(torch.tensor(PROMPT))
    place = {"dtype": target.dtype, "device": target.device}
    larger = KVCache(target.structure, capacity=64, sequences=2, **place)
    larger.copy_from(cache, 0, 1)
    [wanted] = target.verify([Step(7)])
    target.cache = larger
    [rows] = target.verify([Step(7, sequence=1)])
    assert torch.equal(rows, wanted)
    larger.cut(len(PROMPT), 1)
    [rows] = target.verify([Step(7, sequence=1)])
    assert torch.equal(rows, wanted)
    with pytest.raises(InputError, match="cannot go back"):
        larger.cut(3, 1)
    larger.cut(0, 1)
    assert not larger.states.state(0, 1).any()

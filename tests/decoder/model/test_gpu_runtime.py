"""Captured forwards on a GPU: equal to eager forwards, and without waits for the device."""

import warnings

import pytest
import torch

from decoder.decode_loop import run_round
from decoder.engine import TreeDecoder
from decoder.model.making import make_target
from decoder.model.runtime.fused import unfuse
from decoder.model.target import Step, Target
from tests.decoder import models
from tests.decoder.draft_models import PUBLISHED, draft_target, published, rounds
from tests.decoder.drafters.test_graphed_drafters import assert_same
from tests.decoder.models import PROMPT, LatticeDrafter, random_model, random_tree, target_of

pytestmark = pytest.mark.gpu


def targets(family="qwen3", dtype=torch.bfloat16) -> tuple[Target, Target]:
    """The same random model under graphs and eagerly."""
    loaded = target_of(random_model(family, dtype=dtype).cuda(), "eager").loaded
    return make_target(loaded, runtime="graphs"), make_target(loaded, runtime="eager")


def drafting(folder, kind, runtime):
    """A float32 target on the GPU under this runtime, and a drafter of this kind for it."""
    loaded = draft_target(runtime="eager").loaded
    unfuse(loaded.model)  # joined weights would stay on the CPU
    loaded.model.cuda()
    target = make_target(loaded, runtime=runtime)
    return target, published(kind, target, folder)


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_what_eager_gives(rows, dtype):
    tree = random_tree(rows, 0)
    found = []
    for target in targets(dtype=dtype):
        target.capture((0, 1))
        target.reserve(400)
        target.prefill(torch.tensor(PROMPT).cuda())
        for _ in range(2):
            logits = target.verify([Step(5, tree)])[0].clone()
            features = target.features().clone()
            target.commit([0])
        found.append((logits, features))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found[0], found[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [2, 600, 1025])
def test_a_prompt_by_flash_attention_is_one_by_our_kernel(length, monkeypatch):
    target, _ = targets()
    tokens = (torch.arange(length) * 7 % 97).cuda()
    target.reserve(1100)
    ours = target.prefill(tokens).clone()
    monkeypatch.setattr("decoder.model.runtime.fused.flash_usable", lambda query: False)
    target.reserve(1100)
    torch.testing.assert_close(ours, target.prefill(tokens), atol=5e-2, rtol=5e-2)


def test_a_padded_batch_gives_plain_decoding():
    model = random_model("llama-gqa", dtype=torch.float32)
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:7] * 6]
    truths = [models.greedy(model, prompt, 20) for prompt in prompts]
    target = make_target(target_of(model.cuda(), "eager").loaded, runtime="graphs")
    decoder = TreeDecoder(target, policy="fixed:7", drafter=LatticeDrafter(97))
    results = decoder.generate_batch(prompts, max_new_tokens=20)
    assert [result.token_ids for result in results] == truths
    assert target.runtime.warnings == ()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_captured_drafters_propose_what_eager_ones_do(tmp_path, kind):
    found = []
    for runtime in ("graphs", "eager"):
        target, drafter = drafting(tmp_path / runtime, kind, runtime)
        walk = rounds(target, drafter, PROMPT, [3, 0, 1, 4, 2])
        found.append([session.draft(context, models.request(4)) for session, context in walk])
        assert target.runtime.warnings == ()
    for graphed, eager in zip(*found, strict=True):
        assert_same(graphed, eager, atol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}])
def test_a_round_waits_for_the_candidates_alone(tmp_path, monkeypatch, sampling):
    """Its tokens are copied behind the replay, and waited for by an event; sampled, by a copy."""
    target, drafter = drafting(tmp_path, "dflash", "graphs")
    decoder = TreeDecoder(target, policy="fixed:6", drafter=drafter)
    text = decoder.generate(PROMPT, max_new_tokens=30, **sampling)  # captures what is needed
    waits = []

    def counted(parts, sequences):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                finished = run_round(parts, sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in said))
        return finished

    monkeypatch.setattr("decoder.generation.run_round", counted)
    assert decoder.generate(PROMPT, max_new_tokens=30, **sampling).token_ids == text.token_ids
    drafted = waits[:-2]  # the last rounds may want no more than the bonus token
    assert len(drafted) > 2 and drafted == [1 + bool(sampling)] * len(drafted)

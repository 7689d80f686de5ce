"""Captured forwards on a GPU: the numbers of eager ones, without waiting for the device."""

import numpy as np
import pytest
import torch

from decoder.engine import TreeDecoder
from decoder.runtime.capture import CudaCapture
from decoder.runtime.functions import GraphedFunction
from decoder.target import Step, Target
from tests.decoder.models import LatticeDrafter, greedy, random_model, target_of
from tests.decoder.test_graphs import PROMPT, random_tree

pytestmark = pytest.mark.gpu


def targets(family="qwen3", dtype=torch.bfloat16) -> tuple[Target, Target]:
    """The same random model under graphs and eagerly."""
    model = random_model(family, dtype=dtype).cuda()
    return Target(target_of(model).loaded, runtime="graphs"), Target(
        target_of(model).loaded, runtime="eager"
    )


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


def test_a_padded_batch_gives_plain_decoding():
    model = random_model("llama-gqa", dtype=torch.float32)
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:7] * 6]
    truths = [greedy(model, prompt, 20) for prompt in prompts]
    target = Target(target_of(model.cuda()).loaded, runtime="graphs")
    decoder = TreeDecoder(target, policy="fixed:7", drafter=LatticeDrafter(97))
    results = decoder.generate_batch(prompts, max_new_tokens=20)
    assert [result.token_ids for result in results] == truths
    assert target.runtime.warnings == ()


def test_a_replayed_forward_waits_for_nothing():
    target, _ = targets()
    target.reserve(400)
    target.prefill(torch.tensor(PROMPT).cuda())
    steps = [Step(5, random_tree(17, 0))]
    target.verify(steps)
    target.commit([0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.verify(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captures_are_counted_in_memory():
    target, _ = targets()
    target.reserve(400)
    target.runtime.prepare(target.cache, 64)
    assert len(target.runtime.shapes(target.cache)) == 9
    assert target.runtime.memory_bytes >= 0 and target.runtime.warnings == ()


def test_a_drafters_function_is_captured():
    device = torch.device("cuda")
    weight = torch.randn(64, 64, device=device)
    graphed = GraphedFunction(lambda a: (a @ weight, a.sum(-1)), CudaCapture(device))
    for seed in range(3):
        a = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, 64))).float().cuda()
        product, total = graphed(a)
        torch.testing.assert_close(product, a @ weight)
        torch.testing.assert_close(total, a.sum(-1))
    assert graphed.refused is None

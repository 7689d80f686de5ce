"""What a decode round asks the device for: each answer would be waited for on an accelerator.

On a CPU nothing waits, so the questions themselves are counted: every call that brings
numbers of a tensor to Python, and every operation whose result has a size that only the
device knows.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from decoder.decode_loop import run_round
from decoder.engine import TreeDecoder
from tests.decoder.drafters.test_graphed_drafters import PROMPT
from tests.decoder.model.test_graphs import graph_target
from tests.decoder.models import OracleDrafter, greedy, random_model, target_of

ASKS = {
    "cpu", "tolist", "item", "__int__", "__float__", "__bool__", "__index__",
    "nonzero", "masked_select", "unique", "equal", "allclose", "multinomial",
}  # fmt: skip


class Questions(TorchFunctionMode):
    """Counts, and names, what is asked while it is entered."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, function, types, arguments=(), named=None):
        name = (resolve_name(function) or "").rpartition(".")[2]
        by_mask = name == "__getitem__" and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (arguments[1] if isinstance(arguments[1], tuple) else arguments[1:])
        )
        if name in ASKS or by_mask:
            self.asked.append(name)
        return function(*arguments, **(named or {}))


def questions_of_rounds(monkeypatch, decoder, prompts, new_tokens, **sampling):
    """For each round: what it asked, the nodes and accepted tokens of its sequences."""
    rounds = []

    def counted(parts, sequences):
        with Questions() as questions:
            finished = run_round(parts, sequences)
        accepted = [sequence.stats.accepted_depths[-1] for sequence in sequences]
        rounds.append((questions.asked, accepted))
        return finished

    monkeypatch.setattr("decoder.generation.run_round", counted)
    results = decoder.generate_batch(prompts, max_new_tokens=new_tokens, **sampling)
    assert len(rounds) > 2
    return rounds, [result.token_ids for result in results]


@pytest.fixture
def accelerator(monkeypatch):
    """The way that is taken where a copy to the host has to be waited for."""
    monkeypatch.setattr("decoder.acceptance.rules.argmax_at_once", lambda device: True)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("policy", ["plain", "fixed:9"])
def test_accepted_tokens_come_in_one_copy(monkeypatch, accelerator, texts, policy, captured):
    """Of all sequences together; captured forwards choose their tokens, so that none is asked."""
    model = random_model("llama-gqa")
    prompts = [PROMPT, PROMPT[:2], PROMPT[3:]][:texts]
    truths = [greedy(model, prompt, 20) for prompt in prompts]
    drafter = OracleDrafter(prompts[0] + truths[0], 97)
    target = graph_target(model)[0] if captured else target_of(model)
    decoder = TreeDecoder(target, policy=policy, drafter=drafter)
    if captured:
        decoder.generate(prompts[0], max_new_tokens=20)  # captures what is needed
    rounds, found = questions_of_rounds(monkeypatch, decoder, prompts, 20)
    assert found == truths
    assert [asked for asked, _ in rounds] == [[] if captured else ["cpu"]] * len(rounds)
    assert policy == "plain" or max(accepted[0] for _, accepted in rounds) > 1


def test_a_cpu_looks_at_visited_rows_only(monkeypatch):
    model = random_model("llama-gqa")
    truth = greedy(model, PROMPT, 20)
    drafter = OracleDrafter(PROMPT + truth, 97)
    decoder = TreeDecoder(target_of(model), policy="fixed:9", drafter=drafter)
    rounds, found = questions_of_rounds(monkeypatch, decoder, [PROMPT], 20)
    assert found == [truth]
    for asked, (accepted,) in rounds:
        assert asked == ["__int__"] * (accepted + 1)


@pytest.mark.parametrize("candidates", [97, 16])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.8}])
def test_sampled_tokens_come_in_one_copy(monkeypatch, cut, candidates):
    """With the text of draws row by row; top-p of 16 candidates may have to ask for more."""
    monkeypatch.setattr("decoder.acceptance.sampling.CANDIDATES", candidates)
    prompts = [PROMPT, PROMPT[:2]]
    model, options = random_model("llama-gqa"), {"temperature": 0.7, "seed": 5} | cut
    plain = TreeDecoder(target_of(model), policy="plain")
    alone = plain.generate_batch(prompts, max_new_tokens=20, **options)
    truths = [result.token_ids for result in alone]
    drafter = OracleDrafter(prompts[0] + truths[0], 97)
    for at_once in (False, True):
        monkeypatch.setattr("decoder.acceptance.rules.argmax_at_once", lambda _, way=at_once: way)
        decoder = TreeDecoder(target_of(model), policy="fixed:9", drafter=drafter)
        rounds, found = questions_of_rounds(monkeypatch, decoder, prompts, 20, **options)
        assert found == truths
        counts = [asked.count("tolist") for asked, _ in rounds]
        if not at_once:
            assert counts == [sum(accepted) + len(accepted) for _, accepted in rounds]
        elif candidates == 97 or "top_k" in cut:
            assert [asked for asked, _ in rounds] == [["cpu"]] * len(rounds)
    assert max(accepted[0] for _, accepted in rounds) > 1

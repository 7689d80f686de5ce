"""The decode loop: plain decoding's tokens, or an error where logits are no numbers."""

import json
import re

import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.policies.base import Fixed
from tests.decoder.models import PROMPT, OracleDrafter, decoder_of, greedy, random_model, target_of

pytestmark = pytest.mark.cpu_kind


@pytest.mark.parametrize("wanted", [1, 2, 3, 17])
def test_exactly_the_tokens_asked_for(wanted):
    model = random_model("llama-gqa")
    truth = greedy(model, PROMPT, wanted)
    drafter = OracleDrafter(PROMPT + truth + [1] * 20, 97, rank=0)
    result = decoder_of(model, "chain", drafter).generate(PROMPT, max_new_tokens=wanted)
    assert result.token_ids == truth
    assert result.stats.new_tokens == wanted


def test_another_decoder_of_the_same_target_takes_no_features_away():
    class Reader(NgramDrafter):
        feature_layers = (1, 2)

        def start(self, prompt, features, logits):
            seen.append(features)
            return super().start(prompt, features, logits)

    seen: list[torch.Tensor | None] = []
    target = target_of(random_model("llama-gqa"))
    decoder = TreeDecoder(target, policy="fixed:3", drafter=Reader())
    TreeDecoder(target, policy="plain").generate(PROMPT, max_new_tokens=2)
    decoder.generate(PROMPT, max_new_tokens=2)
    assert seen[-1].shape == (len(PROMPT), 2 * target.architecture.hidden)


def test_the_end_token_ends_the_text_in_the_middle_of_a_path():
    model = random_model("llama-gqa")
    truth = greedy(model, PROMPT, 30)
    end = truth[11]
    cut = truth[: truth.index(end) + 1]
    unused = next(token for token in range(97) if token not in truth)
    model.generation_config.eos_token_id = [end, unused]
    drafter = OracleDrafter(PROMPT + truth, 97, rank=0)
    result = decoder_of(model, "chain", drafter).generate(PROMPT, max_new_tokens=30)
    assert result.token_ids == cut
    assert result.stats.finish == "eos"
    assert result.stats.tokens_per_verification == (len(cut) - 1) / result.stats.rounds


def test_the_trace_tells_every_round(tmp_path):
    path = tmp_path / "rounds.jsonl"
    decoder = decoder_of(random_model("llama-gqa"), "fixed:7", trace=path)
    stats = [decoder.generate(PROMPT, max_new_tokens=20).stats for _ in range(2)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["text"] for record in records] == [0] * stats[0].rounds + [1] * stats[1].rounds
    second = records[stats[0].rounds :]
    assert [record["nodes"] for record in second] == stats[1].tree_nodes
    assert [record["accepted"] for record in second] == stats[1].accepted_depths
    assert sum(record["verify_s"] for record in second) == pytest.approx(stats[1].stages.verify_s)
    assert second[0]["context"] == len(PROMPT)
    assert second[0]["predicted_cycle_s"] is None


@pytest.mark.parametrize(
    ("prompt", "message"), [([97], "97 lies outside the vocabulary"), ("hello", "no tokenizer")]
)
def test_prompts_that_it_cannot_read(prompt, message):
    with pytest.raises(InputError, match=message):
        decoder_of(random_model("llama-gqa"), "fixed:4").generate(prompt)


def test_sampled_texts_are_priced_by_the_acceptance_of_sampling():
    seen = []

    class Priced(Fixed):
        def choose(self, candidates, context, limits):
            seen.append(decoder.cost_source.cost.sampled)
            return super().choose(candidates, context, limits)

    decoder = decoder_of(random_model("llama-gqa"), "bastion")
    decoder.policy = Priced(3)
    for temperature, sampled in ((0.0, False), (0.7, True), (0.0, False)):
        seen.clear()
        decoder.generate([5, 17, 3, 88, 5, 17, 3], max_new_tokens=9, temperature=temperature)
        assert set(seen) == {sampled}


TOKENS = 24


@pytest.fixture(params=["row by row", "all rows at once"])
def way(request, monkeypatch):
    at_once = request.param == "all rows at once"
    monkeypatch.setattr("decoder.acceptance.rules.argmax_at_once", lambda device: at_once)


def broken_at(text, value):
    """The position after a token that appears late and first there, and a model broken by it."""
    at = next(i for i in range(3, len(text)) if text[i] not in [*PROMPT, *text[:i]])
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[text[at]] = value
    return len(PROMPT) + at + 1, model


@pytest.mark.parametrize("policy", ["plain", "fixed:9", "chain"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_error_names_the_position(way, policy, value, temperature):
    options = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": 3}
    whole = decoder_of(random_model("llama-gqa"), "plain").generate(PROMPT, **options).token_ids
    position, model = broken_at(whole, value)
    run = decoder_of(model, policy).stream(PROMPT, **options)
    message = re.escape(f"position {position} of the text")
    with pytest.raises(InputError, match=message) as caught:
        for _ in run.rounds():
            pass
    assert "float32" in caught.value.hint
    # Whole rounds only: what was accepted in the last one is not written.
    assert run.token_ids == whole[: len(run.token_ids)]
    assert run.stats.finish == "interrupted"


def test_the_prefill_names_the_position_too(way):
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPT[-1]] = float("nan")
    with pytest.raises(InputError, match=f"position {len(PROMPT)} of the text"):
        decoder_of(model, "plain").generate(PROMPT, max_new_tokens=4)

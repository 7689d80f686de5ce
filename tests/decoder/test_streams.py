"""Streams that are interrupted, closed or left, and threads; the next call is right."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.profiling.startup import ProfileChoice
from tests.decoder.models import decoder_of, greedy, random_model

PROMPT = "some text, some text"
TOKENS = 40


@pytest.fixture(scope="module")
def decoder(tiny_target):
    return TreeDecoder.from_pretrained(tiny_target, dtype="float64", device="cpu", policy="fixed:9")


@pytest.fixture(scope="module")
def truth(decoder):
    return decoder.generate(PROMPT, max_new_tokens=TOKENS).text


def test_leaving_the_loop_and_coming_back_goes_on(decoder, truth):
    stream = decoder.stream(PROMPT, max_new_tokens=TOKENS)
    parts = []
    for piece in stream:
        parts.append(piece)
        if len(parts) == 3:
            break
    parts += stream
    assert "".join(parts) == truth and len(parts) > 5
    assert list(stream) == []


@pytest.mark.parametrize("batch", [False, True])
def test_drift_is_said_once_and_after_the_text(tiny_target, monkeypatch, caplog, batch):
    choice = {"policy": "bastion", "profile": ProfileChoice(calibrate=False)}
    decoder = TreeDecoder.from_pretrained(tiny_target, device="cpu", **choice)
    cost = decoder.cost_source.cost

    def said() -> list[str]:  # a first compilation has words of its own
        return [one.message for one in caplog.records if one.name == "decoder.generation"]

    monkeypatch.setattr(cost, "observe", lambda *_: setattr(cost, "drift_warning", "slower"))
    if batch:
        results = decoder.generate_batch([PROMPT, PROMPT], max_new_tokens=TOKENS)
        assert [one.stats.warnings for one in results] == [["slower"], []]
    else:
        run = decoder.stream(PROMPT, max_new_tokens=TOKENS)
        assert [said() for _ in run if said()] == []
        assert run.stats.warnings == ["slower"]
    assert said() == ["slower"]
    decoder.generate(PROMPT, max_new_tokens=TOKENS)
    assert said() == ["slower"]


def test_an_older_stream_says_that_it_cannot_go_on(decoder, truth):
    """Two streams have one cache: the second is right, the first does not go on wrongly."""
    first = decoder.stream(PROMPT, max_new_tokens=TOKENS)
    start = next(first)
    second = decoder.stream(PROMPT[5:], max_new_tokens=TOKENS)
    begun = next(second)
    with pytest.raises(InputError, match="its target began another text"):
        start += "".join(first)
    assert first.stats.finish == "interrupted"
    rest = begun + "".join(second)
    assert rest == decoder.generate(PROMPT[5:], max_new_tokens=TOKENS).text
    assert truth.startswith(start)


INSIDE = ["target.verify", "target.commit", "policy.choose_together", "policy.observe"]


@pytest.mark.parametrize("where", INSIDE)
def test_an_interrupt_in_a_round(decoder, truth, monkeypatch, where):
    """Ctrl-C arrives anywhere: the pieces so far are right, and so is the next call."""
    interrupt(monkeypatch, decoder, where, call=3)
    stream, text = decoder.stream(PROMPT, max_new_tokens=TOKENS), ""
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            text += piece
    assert truth.startswith(text)
    assert len(text) > 0
    assert stream.stats.finish == "interrupted"
    assert list(stream) == []
    monkeypatch.undo()
    assert decoder.generate(PROMPT, max_new_tokens=TOKENS).text == truth


def interrupt(monkeypatch, decoder, where, call):
    """KeyboardInterrupt at the given call of a method."""
    part, name = where.split(".")
    owner, calls = getattr(decoder, part), []
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(type(owner), name, staticmethod(interrupted))


def test_an_interrupt_in_a_forward_gives_a_borrowed_model_back(monkeypatch):
    """In the middle of a layer: hooks and attention are off again, the cache is sound."""
    model = random_model("llama-gqa")
    prompt, before = [5, 17, 3, 88, 5, 17], model.config._attn_implementation
    truth = greedy(model, prompt, 20)
    monkeypatch.setattr(NgramDrafter, "feature_layers", (0, 2), raising=False)
    decoder = TreeDecoder.from_pretrained(model, policy="fixed:5", drafter="ngram")
    calls = []

    def broken(*_):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(prompt, max_new_tokens=20)
    handle.remove()
    assert model.config._attn_implementation == before
    assert not model.model.layers[1]._forward_hooks
    assert not model.get_input_embeddings()._forward_hooks
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == truth


class TestOverflow:
    def test_more_than_the_positions_is_refused_before_anything_runs(self, monkeypatch):
        decoder = decoder_of(random_model("llama-gqa"), "fixed:9")
        monkeypatch.setattr(decoder.target, "prefill", lambda *_: pytest.fail("nothing may run"))
        with pytest.raises(InputError, match="exceed the 512 positions"):
            decoder.generate([1] * 500, max_new_tokens=13)

    def test_the_last_position_is_used_with_trees_that_reach_beyond_it(self):
        """A tree is no deeper than what is wanted, however much the policy would verify."""
        model = random_model("llama-gqa")
        prompt = [int(t) for t in torch.randint(0, 97, (500,), generator=torch.Generator())]
        decoder = decoder_of(model, "fixed:200")
        result = decoder.generate(prompt, max_new_tokens=12)
        assert result.token_ids == greedy(model, prompt, 12)


@pytest.mark.parametrize("policy", ["fixed:9", "chain"])
def test_generate_gives_every_thread_its_text(policy):
    model, barrier = random_model("llama-gqa"), Barrier(4)
    prompts = [[5 + number, 17, 3, 88, 5 + number, 17] for number in range(4)]
    expected = [greedy(model, prompt, 24) for prompt in prompts]
    decoder = decoder_of(model, policy)

    def write(prompt):
        barrier.wait()
        return [decoder.generate(prompt, max_new_tokens=24).token_ids for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, prompts)) == [[text] * 5 for text in expected]

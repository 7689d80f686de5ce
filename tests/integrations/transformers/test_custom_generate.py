"""`model.generate(custom_generate=...)` against transformers' own generate on the same model."""

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import chi2_contingency
from transformers import AutoModelForCausalLM, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from costmodel.errors import InputError
from decoder.acceptance.sampling import Sampling
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from integrations.transformers.custom_generate import CustomGenerate, sampling_of
from tests.decoder.models import PROMPT, WholeDrafter, random_model
from tests.tiny_folder import write_all

RAGGED = [PROMPT, [1, 2, 3], [60], [7] * 14]
PAD = 0


def tree(model, **options):
    options = {"policy": "fixed:9"} | options
    return CustomGenerate(TreeDecoder.from_pretrained(model, **options))


def padded(prompts):
    """Prompts with padding on the left, and the mask that says so."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(model, prompts, **options):
    """What transformers gives, and what it gives with the tree decoder."""
    options = {"do_sample": False, "max_new_tokens": 20} | options
    inputs = padded(prompts)
    theirs = model.generate(**inputs, **options)
    return theirs, model.generate(**inputs, **options, custom_generate=tree(model))


@pytest.fixture(scope="module")
def model():
    return random_model("llama-gqa")


def test_rows_that_end_early_are_padded(model):
    free, _ = both(model, RAGGED, pad_token_id=PAD)
    ends = [int(free[0, -15]), int(free[1, -12])]
    for pad in ({"pad_token_id": 9}, {}):
        options = {"eos_token_id": ends, **pad}
        theirs, ours = both(model, RAGGED, **options)
        assert torch.equal(theirs, ours)
        lengths = (theirs != theirs[:, -1:]).sum(1)
        assert len(set(lengths.tolist())) > 1


@pytest.mark.parametrize("options", [
    {"max_new_tokens": None, "max_length": 23},
    {"position_ids": torch.arange(len(PROMPT))[None]},
    {"return_dict_in_generate": True},
])  # fmt: skip
def test_other_ways_to_ask(model, options):
    theirs, ours = both(model, [PROMPT], **options)
    if "return_dict_in_generate" in options:
        assert isinstance(ours, GenerateDecoderOnlyOutput)
        theirs, ours = theirs.sequences, ours.sequences
    assert torch.equal(theirs, ours)


class SumOfThree(transformers.StoppingCriteria):
    """Ends a text whose last three tokens add up to 5 modulo 7."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(1) % 7 == 5


def test_stopping_criteria_of_ones_own(model):
    criteria = StoppingCriteriaList([SumOfThree()])
    theirs, ours = both(model, [PROMPT], stopping_criteria=criteria)
    assert torch.equal(theirs, ours)
    assert ours.shape[1] < len(PROMPT) + 20


def test_the_model_is_given_back_and_nothing_is_random_in_greedy_decoding(model):
    before = model.config.to_dict(), model.config._attn_implementation
    state = torch.get_rng_state()
    generate = tree(model)
    model.generate(**padded([PROMPT]), max_new_tokens=9, do_sample=False, custom_generate=generate)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert generate.stats[0].new_tokens == 9
    assert generate.stats[0].rounds == len(generate.stats[0].tree_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [NgramDrafter(), WholeDrafter(97, depth=3, width=4)])
def test_samples_have_the_distribution_of_generate(drafter):
    """The first two new tokens of many rows, top-k 50 by default left in: one chi-square."""
    model = random_model("llama-gqa", scale=16.0, dtype=torch.float32)
    options = {"do_sample": True, "max_new_tokens": 3, "temperature": 0.7, "top_p": 0.8}
    rows, prompts = 800, padded([PROMPT])
    torch.manual_seed(0)
    theirs = model.generate(**prompts, **options, num_return_sequences=rows)
    generate = tree(model, drafter=drafter, policy="fixed:6")
    few = {**prompts, **options, "num_return_sequences": rows // 10, "custom_generate": generate}
    ours = torch.cat([model.generate(**few) for _ in range(10)])
    pairs = [(output[:, -3] * 97 + output[:, -2]).numpy() for output in (theirs, ours)]
    table = np.array([np.bincount(pair, minlength=97 * 97) for pair in pairs])
    often = table.sum(0) >= 12
    pooled = np.column_stack((table[:, often], table[:, ~often].sum(1)))
    pooled = pooled[:, pooled.sum(0) > 0]
    assert pooled.shape[1] >= 6
    assert chi2_contingency(pooled).pvalue > 0.001
    # What top-p and top-k leave out is never drawn.
    assert set(ours[:, -3].tolist()) <= set(theirs[:, -3].tolist())


def test_from_processors():
    warpers = [transformers.TopKLogitsWarper(7), transformers.TopPLogitsWarper(0.9)]
    warpers.insert(0, transformers.TemperatureLogitsWarper(0.5))
    given = Sampling(temperature=0.5, top_k=7, top_p=0.9)
    assert sampling_of(LogitsProcessorList(warpers), True) == given
    assert sampling_of(LogitsProcessorList(), True) == Sampling(temperature=1.0)
    assert sampling_of(LogitsProcessorList(warpers), False) == Sampling()


class Shift(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, -1)


@pytest.mark.parametrize("policy", ["fixed:9", "plain"])
@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[49, 43], [96]]},
    {"suppress_tokens": [43, 96], "begin_suppress_tokens": [87]},
    {"min_new_tokens": 12, "eos_token_id": list(range(40))},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 7},
    {"sequence_bias": [[[17, 3], 5.0], [[9], -3.0]]},
])  # fmt: skip
def test_greedy_output_is_that_of_generate(options, policy):
    # In float32, to which transformers brings the logits for its processors.
    model = random_model("llama-gqa", dtype=torch.float32)
    inputs = padded([PROMPT, [1, 2, 3]])
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": PAD} | options
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=PAD)
    theirs = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=tree(model, policy=policy))
    assert torch.equal(theirs, ours)
    assert not torch.equal(theirs, plain), "the option changes nothing here"


class Listener:
    def __init__(self):
        self.tokens, self.calls, self.ended = [], 0, 0

    def put(self, value):
        self.calls += 1
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


class TestStreaming:
    def test_a_streamer_gets_the_tokens_of_each_round_of_one_text(self, model):
        listener = Listener()
        output = model.generate(
            **padded([PROMPT]), max_new_tokens=20, do_sample=False, streamer=listener,
            custom_generate=tree(model),
        )  # fmt: skip
        assert listener.tokens == output[0].tolist()  # the prompt first, from transformers
        assert 3 < listener.calls < 22
        assert listener.ended == 1
        with pytest.raises(InputError, match="a streamer takes one text"):
            model.generate(
                **padded(RAGGED), max_new_tokens=5, pad_token_id=PAD, streamer=Listener(),
                custom_generate=tree(model),
            )  # fmt: skip

    def test_stop_strings_end_the_text_as_in_transformers(self, tmp_path):
        write_all(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        inputs = tokenizer("hällo hällo", return_tensors="pt")
        options = {"max_new_tokens": 30, "do_sample": False}
        free = model.generate(**inputs, **options)
        middle = tokenizer.decode(free[0, inputs["input_ids"].shape[1] + 8 :])[:2]
        options |= {"stop_strings": [middle], "tokenizer": tokenizer}
        theirs = model.generate(**inputs, **options)
        ours = model.generate(**inputs, **options, custom_generate=tree(model))
        assert torch.equal(theirs, ours)
        assert ours.shape[1] < free.shape[1]
        del options["tokenizer"]
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(**inputs, **options, custom_generate=tree(model))


class TestRefusals:
    @pytest.mark.parametrize(("options", "problem"), [
        ({"num_beams": 2}, "beam search is not what"),
        ({"num_beams": 2, "do_sample": True}, "is not what the tree decoder does"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is not what"),
        ({"guidance_scale": 1.5}, "ClassifierFree.* is not applied"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper is not applied"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper is not applied"),
        ({"return_dict_in_generate": True, "output_scores": True}, "does not return scores"),
        ({"logits_processor": LogitsProcessorList([Shift()])}, "Shift is not applied"),
        ({"max_new_tokens": 600}, "prompt 1 of 1: .*exceed the 512 positions"),
        ({"position_ids": torch.arange(4, 4 + len(PROMPT))[None]}, "do not count"),
    ])  # fmt: skip
    def test_what_cannot_be_done_exactly(self, model, options, problem):
        options = {"do_sample": False, "max_new_tokens": 5} | options
        generate = tree(model)
        with pytest.raises(InputError, match=problem):
            model.generate(**padded([PROMPT]), **options, custom_generate=generate)
        plain = {**padded([PROMPT]), "max_new_tokens": 5, "do_sample": False}
        theirs, ours = model.generate(**plain), model.generate(**plain, custom_generate=generate)
        assert torch.equal(theirs, ours)

    @pytest.mark.parametrize("mask", [[[1, 1, 0]], [[1, 0, 1]]])
    def test_padding_elsewhere(self, model, mask):
        with pytest.raises(InputError, match="more than padding on the left"):
            options = {"max_new_tokens": 5, "custom_generate": tree(model)}
            model.generate(torch.tensor([[4, 5, 6]]), attention_mask=torch.tensor(mask), **options)

    def test_a_filled_cache_another_model_and_criteria_over_the_whole_batch(self, model):
        cache = model(torch.tensor([PROMPT[:4]]), use_cache=True).past_key_values
        with pytest.raises(InputError, match="cannot go on from a filled one"):
            model.generate(
                torch.tensor([PROMPT]), past_key_values=cache, max_new_tokens=5,
                custom_generate=tree(model),
            )  # fmt: skip
        other, generate = random_model("qwen3"), tree(model)
        with pytest.raises(InputError, match="a decoder of another model"):
            other.generate(torch.tensor([PROMPT]), max_new_tokens=5, custom_generate=generate)
        criteria = StoppingCriteriaList([SumOfThree()])
        with pytest.raises(InputError, match="SumOfThree may look at the whole batch"):
            both(model, RAGGED, stopping_criteria=criteria, eos_token_id=3, pad_token_id=PAD)

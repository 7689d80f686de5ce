"""At T = 0 the output is plain decoding's, in float64 without exception.

Every policy meets every drafter, every policy meets every model family, and every drafter
meets every family: a design that covers all pairs, because the full product takes minutes.
The truth is decoded without a cache by transformers' own attention.
"""

import copy
from functools import cache, partial
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from costmodel.acceptance import AcceptanceProcess
from decoder.cpu import this_cpu
from decoder.drafters.causal_lm import CausalLMDrafter
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.policies.bastion import parse_policy
from decoder.tree.draft_tree import CandidateTree, Lattice
from lab.bench.simulated import SimulatedDrafter, Truth
from tests.decoder import models
from tests.decoder.adversaries import ADVERSARIES, MASK
from tests.decoder.draft_models import PUBLISHED, published
from tests.decoder.model.test_fused import FUSIBLE
from tests.decoder.models import HYBRIDS, OracleDrafter, decoder_of, greedy, random_model, target_of

PROMPT = [5, 17, 0, 88, 5, 17, MASK, 41, 5, 17]
TOKENS = 24
VOCAB = models.SIZES["vocab_size"]


@cache
def model_of(family):
    """A random model that often writes id 0 and the mask id."""
    model = random_model(family)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[[0, MASK]] += 0.3 * weight.std()
    return model


@cache
def truth_of(family):
    return greedy(model_of(family), PROMPT, TOKENS)


def replay(truth, vocab):
    process = AcceptanceProcess(label="test", kind="given", rank1=(0.7,) * 6)
    return SimulatedDrafter(Truth([truth]), process, vocab=vocab)


def autoregressive(seed):
    """A smaller model's drafts; with seed 0 the model is the target's twin and mostly right."""
    model = partial(random_model, "llama-gqa", seed=seed)
    return lambda truth, vocab: CausalLMDrafter(target_of(model()))


def overflowed(truth, vocab):
    """A drafting model whose logits are no numbers."""
    model = random_model("llama-gqa")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    return CausalLMDrafter(target_of(model))


# Each takes the true text (prompt included) and the vocabulary.
DRAFTERS = {
    "ngram": lambda truth, vocab: NgramDrafter(),
    "random": lambda truth, vocab: models.LatticeDrafter(vocab),
    "second rank": lambda truth, vocab: OracleDrafter(truth, vocab, rank=1),
    "last rank": lambda truth, vocab: OracleDrafter(truth, vocab, rank=2), "replay": replay,
    "twin": autoregressive(seed=0), "stranger": autoregressive(seed=5),
    "overflowed model": overflowed, **ADVERSARIES,
}  # fmt: skip
EVERY = (*models.FAMILIES, *HYBRIDS)
POLICIES = ("plain", "chain", "fixed:1", "fixed:13", "fixed:120", "bastion")
# The family turns with both, so that each policy and each drafter meets all of them.
CASES = [
    (policy, drafter, EVERY[(i + j) % len(EVERY)])
    for (i, policy), (j, drafter) in product(enumerate(POLICIES), enumerate(DRAFTERS))
]
PACKED_CASES = [
    (policy, drafter, FUSIBLE[(i + j) % len(FUSIBLE)])
    for (i, policy), (j, drafter) in product(enumerate(POLICIES[1:]), enumerate(DRAFTERS))
]
# Each drafter that reads the target meets four families with a third of the policies each, and
# each family two of these drafters; then each meets packed weights.
TURNS = [(turn, EVERY[(turn + turn // len(EVERY)) % len(EVERY)]) for turn in range(20)]
READING = [
    *(pytest.param(kind, family, POLICIES[turn % 3 :: 3], False,
                   marks=pytest.mark.slow if family in HYBRIDS else ())
      for (turn, family), kind in zip(TURNS, 4 * [*PUBLISHED], strict=True)),
    *(pytest.param(kind, "qwen3", POLICIES[1::2], True, marks=pytest.mark.cpu_kind)
      for kind in PUBLISHED),
]  # fmt: skip


def policy_of(name):
    return parse_policy(name, lambda fit=None: models.StairCost(), max_nodes=60)


def decoder_for(family, policy, drafter, **options):
    truth = PROMPT + truth_of(family)
    decoder = decoder_of(model_of(family), "plain", DRAFTERS[drafter](truth, VOCAB), **options)
    decoder.policy = policy_of(policy)
    return decoder


@pytest.mark.parametrize("family", EVERY)
def test_the_texts_are_worth_testing(family):
    """Not one token over and over, and no near-tie that float64 could not tell apart."""
    model, truth = model_of(family), truth_of(family)
    best = models.plain_logits(model, PROMPT + truth)[len(PROMPT) - 1 : -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4
    assert len(set(truth)) >= 5


@pytest.mark.parametrize(("policy", "drafter", "family"), CASES)
def test_output_is_that_of_plain_decoding(policy, drafter, family):
    decoder = decoder_for(family, policy, drafter)
    for _ in range(2):  # again, with what policy and drafter have learnt
        assert decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids == truth_of(family)


@pytest.mark.parametrize(("policy", "drafter"), [
    *((policy, "right") for policy in POLICIES[1:]), ("fixed:120", "second rank"),
    ("fixed:120", "last rank"),
])  # fmt: skip
def test_trees_are_accepted_where_the_drafter_is_right(policy, drafter):
    """On whichever branch, so that the cases above compare more than plain steps."""
    decoder = decoder_for("qwen3", policy, drafter)
    stats = decoder.generate(PROMPT, max_new_tokens=TOKENS).stats
    assert stats.accepted_tokens >= 10
    assert stats.rounds < TOKENS - 10


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_text_is_that_of_plain_sampling(drafter):
    """Where trees are walked, the same seed gives the same text whatever is drafted."""
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 30, "seed": 3}
    policies, texts = ("plain", "fixed:13", "bastion"), set()
    for policy in policies:
        decoder = decoder_for("llama-gqa", policy, drafter, acceptance="walk")
        result = decoder.generate(PROMPT, max_new_tokens=TOKENS, **sampling)
        texts.add(tuple(result.token_ids))
    assert len(texts) == 1


class DamagedWhole(models.WholeDrafter):
    """q over the whole vocabulary with some numbers, or all, that are none."""

    def __init__(self, value, share):
        super().__init__(VOCAB, depth=4, width=3)
        self._value, self._share = value, share

    def draft(self, context, request):
        lattice = super().draft(context, request)
        if lattice.whole is None:
            return lattice
        generator = torch.Generator().manual_seed(len(context))
        bad = torch.rand(lattice.whole.shape, generator=generator) < self._share
        whole = lattice.whole.masked_fill(bad, self._value)
        best = whole.gather(1, torch.from_numpy(lattice.tokens)).double().numpy()
        return Lattice(lattice.tokens, best, whole)


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_sampled_trees_from_damaged_distributions_keep_the_targets(rule, share, value):
    """With top-k 1 sampling has one possible text, the greedy one, whatever is drawn."""
    model, truth = model_of("qwen3"), truth_of("qwen3")
    decoder = decoder_of(model, "fixed:13", DamagedWhole(value, share), acceptance=rule)
    result = decoder.generate(PROMPT, max_new_tokens=TOKENS, temperature=0.9, top_k=1)
    assert result.token_ids == truth
    many = decoder.generate(PROMPT, max_new_tokens=TOKENS, temperature=0.9, seed=2)
    assert len(many.token_ids) == TOKENS


@cache
def packed(family, **sizes):
    """A packed target, in bfloat16 where the CPU multiplies in it, and its plain text."""
    dtype = torch.bfloat16 if this_cpu().bfloat16 else torch.float32
    plain = TreeDecoder(target_of(random_model(family, dtype=dtype, **sizes)), policy="plain")
    assert plain.target.runtime.kind == "packed"
    return plain.target, plain.generate(PROMPT, max_new_tokens=TOKENS).token_ids


@pytest.mark.cpu_kind
@pytest.mark.parametrize(("policy", "drafter", "family"), PACKED_CASES)
def test_trees_by_packed_weights_are_plain_decodings_without_exception(policy, drafter, family):
    """Whatever is rounded: a row's numbers are the same among any others."""
    target, truth = packed(family)
    decoder = TreeDecoder(target, policy="plain", drafter=DRAFTERS[drafter](PROMPT + truth, VOCAB))
    decoder.policy = policy_of(policy)
    for _ in range(2):
        assert decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids == truth


@pytest.mark.parametrize(("kind", "family", "policies", "is_packed"), READING)
def test_drafters_that_read_the_target(tmp_path, kind, family, policies, is_packed):
    """They need a deeper target for the hidden states that they read."""
    if is_packed:
        target, truth = packed(family, num_hidden_layers=6)
    else:
        target = target_of(random_model(family, num_hidden_layers=6))
        truth = greedy(target.model, PROMPT, TOKENS)
    drafter = published(kind, target, tmp_path / "drafter")
    decoder = TreeDecoder(target, policy="plain", drafter=drafter)
    for policy in policies:
        decoder.policy = policy_of(policy)
        assert decoder.generate(PROMPT, max_new_tokens=TOKENS).token_ids == truth


class TestUsable:
    """What is left of damaged candidates, by hand."""

    def test_a_lattice_keeps_what_is_sound_in_order(self):
        nan = float("nan")
        lattice = Lattice(
            np.array([[1, 2, 3, 4], [5, 99, 6, 7], [1, 2, 3, 4], [1, 2, 3, 4]]),
            np.array([[0.4, nan, 0.3, 0.2], [0.5, 0.3, 7.0, 0.1], [nan] * 4, [0.4, 0.3, 0.2, 0.1]]),
        )
        found = lattice.sound(10)
        assert found.tokens.tolist() == [[1, 3, 4], [6, 5, 7]]
        assert found.probabilities.tolist() == [[0.4, 0.3, 0.2], [1.0, 0.5, 0.1]]

    def test_a_tree_loses_what_hangs_below_a_bad_node(self):
        tree = CandidateTree(
            tokens=np.array([1, 2, -3, 4, 5, 6]),
            parents=np.array([0, 1, 1, 3, 2, 0]),
            probabilities=np.array([0.9, 0.5, 0.4, 0.9, 1.5, float("nan")]),
        )
        found = tree.sound(10)
        assert found.tokens.tolist() == [1, 2, 5]
        assert found.parents.tolist() == [0, 1, 2]
        assert found.probabilities.tolist() == [0.9, 0.5, 1.0]


class TestSlidingWindow:
    """Right beyond the window, of all layers or of some, also where a prompt takes chunks."""

    LAYERS: ClassVar = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    MODELS: ClassVar = {
        "mistral": (MistralForCausalLM, MistralConfig, {}),
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, LAYERS),
    }

    @pytest.mark.parametrize("family", MODELS)
    @pytest.mark.parametrize(("tokens", "new"), [(20, 24), (700, 8)])
    def test_texts_beyond_the_window(self, family, tokens, new):
        sizes = models.SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 1024}
        model_class, config_class, more = self.MODELS[family]
        torch.manual_seed(2)
        config = config_class(**sizes | more, sliding_window=32)
        model = model_class(config).double().eval()
        single = copy.deepcopy(model).float()
        prompt = np.random.default_rng(1).integers(1, VOCAB, tokens).tolist()
        truth = greedy(model, prompt, new)
        drafter = OracleDrafter(prompt + truth, VOCAB, rank=1)
        for policy in ("plain", "fixed:12", "beam:3x4"):
            decoder = decoder_of(model, policy, drafter)
            assert decoder.generate(prompt, max_new_tokens=new).token_ids == truth
        [first, second] = decoder.generate_batch([prompt, prompt[:9]], max_new_tokens=new)
        assert first.token_ids == truth
        assert second.token_ids == greedy(model, prompt[:9], new)
        packed = make_target(borrow_model(single), owned=True)
        again = TreeDecoder(make_target(packed.loaded, owned=True), drafter=drafter)
        assert packed.runtime.kind == "packed"
        assert again.generate(prompt, max_new_tokens=new).token_ids == truth

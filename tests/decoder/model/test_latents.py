"""Latent attention and its indexers under draft trees, against transformers without a cache."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from costmodel.errors import InputError
from decoder.model import latents, selfcheck
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.target import Step
from tests.decoder.model.row_decoding import paths_of
from tests.decoder.models import SIZES, plain_logits, random_tree

HEADS, CHOSEN, INDEX_WIDTH = 4, 12, 16
MORE = {
    "num_key_value_heads": HEADS, "q_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "pad_token_id": 0,
}  # fmt: skip
INDEXED = {"index_topk": CHOSEN, "index_head_dim": INDEX_WIDTH, "index_n_heads": 32}
SHARED = INDEXED | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
KINDS = [  # latents wider than what is made of them are never expanded
    ("deepseek_v2", {"kv_lora_rank": 40}, 0), ("deepseek_v3", {"kv_lora_rank": 12}, 0),
    ("glm4_moe_lite", {"kv_lora_rank": 12}, 0), ("deepseek_v32", {"kv_lora_rank": 12} | INDEXED, 2),
    ("glm_moe_dsa", {"kv_lora_rank": 40} | SHARED, 2),
]  # fmt: skip


@pytest.fixture
def afresh(monkeypatch):
    """Nothing is known from earlier tests."""
    monkeypatch.setattr(selfcheck, "_checked", {})
    monkeypatch.setattr(selfcheck, "_read", lambda key: None)


def random_latent_model(kind, **more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | MORE | more))
    model = model.double().eval()
    model.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(0.2 / weight.std().clamp_min(1e-6))
    return model


@pytest.mark.parametrize(("kind", "more", "indexers"), KINDS)
def test_two_sequences_of_different_lengths(kind, more, indexers, afresh):
    model = random_latent_model(kind, **more)
    target = make_target(borrow_model(model), owned=False)
    random = np.random.default_rng(1)
    texts = [random.integers(1, 97, tokens).tolist() for tokens in (40, 7)]
    cache = target.reserve(64, sequences=2)
    for sequence, text in enumerate(texts):
        logits = target.prefill(torch.tensor(text), sequence)
        wanted = plain_logits(model, text)[-1]
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    for turn in range(2):
        trees = [random_tree(6 + sequence, 10 * turn + sequence) for sequence in range(2)]
        steps = [Step(root=3, tree=tree, sequence=i) for i, tree in enumerate(trees)]
        for sequence, (tree, rows) in enumerate(zip(trees, target.verify(steps), strict=True)):
            paths = paths_of(tree)
            tokens = tree.row_tokens(3)
            for row, path in enumerate(paths):
                wanted = plain_logits(model, texts[sequence] + tokens[path].tolist())[-1]
                torch.testing.assert_close(rows[row], wanted, rtol=1e-5, atol=1e-6)
            target.commit(paths[-1], sequence)
            texts[sequence] += tokens[paths[-1]].tolist()
    values = sum(plane[:, 0, :, 0].numel() for plane in cache.planes)
    width = more["kv_lora_rank"] + MORE["qk_rope_head_dim"]
    assert values == model.config.num_hidden_layers * width + indexers * INDEX_WIDTH
    assert values == target.architecture.token_values  # of plans


@pytest.mark.parametrize("fault", ["all keys", "another order"])
def test_an_indexers_choice_is_tried(fault, afresh, monkeypatch):
    right = latents._chosen_mask

    def wrong(part, chosen, states):
        return part.tail_mask if fault == "all keys" else right(part, chosen + 1, states)

    monkeypatch.setattr(latents, "_chosen_mask", wrong)
    with pytest.raises(InputError, match="logits of a tree differ"):
        make_target(borrow_model(random_latent_model(KINDS[3][0], **KINDS[3][1])), owned=False)


def test_a_model_that_an_earlier_process_tried(monkeypatch):
    model = random_latent_model("deepseek_v3", kv_lora_rank=12)
    make_target(borrow_model(model), owned=False)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "expand_kv", attention.expand_kv.follows)
    target = make_target(borrow_model(model), owned=False)
    target.reserve(8)
    logits = target.prefill(torch.tensor([3, 1, 4]))
    torch.testing.assert_close(logits, plain_logits(model, [3, 1, 4])[-1], rtol=1e-4, atol=1e-5)


def test_beside_quantised_weights_keys_are_stored_expanded(afresh, monkeypatch):
    """Weights that cannot be taken apart are followed as transformers multiplies by them."""
    monkeypatch.setattr(latents, "keeps_latents", lambda module: False)
    monkeypatch.setattr("decoder.model.structure.keeps_latents", lambda module: False)
    target = make_target(borrow_model(random_latent_model("deepseek_v3", kv_lora_rank=12)))
    assert target.structure.stores[1] == (HEADS, 16, 12, 1)
    with pytest.raises(InputError, match="its indexer chooses keys of quantised weights"):
        make_target(borrow_model(random_latent_model(KINDS[3][0], **KINDS[3][1])), owned=False)

"""DFlash 2 and Domino against their equations."""

import json

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.factory import load_drafter
from decoder.profiling.probe import time_drafter
from decoder.tree.draft_tree import Lattice, best_first, chain
from lab.drafters.dflash2.drafter import DFlash2Drafter
from lab.drafters.domino.drafter import DominoDrafter
from tests.decoder import draft_models as made
from tests.decoder.draft_models import PROMPT, VOCAB, conditional_folder, draft_target, rounds
from tests.decoder.drafters.test_dflash import reference_states
from tests.decoder.models import paths_of, request
from tests.tiny_folder import change_config

pytestmark = pytest.mark.cpu_kind

ACCEPTED, BLOCK = [3, 0, 4], 5


SHAPE = best_first(Lattice(np.ones((4, 3), np.int64), np.full((4, 3), 0.5)), 20)


def flat(config):
    """A DFlash 2 config in the speculators library's form."""
    inner = dict(config["dflash_config"])
    ids = [i + 1 for i in inner.pop("target_layer_ids")]
    own = {"speculators_model_type": "dflash2", "aux_hidden_state_layer_ids": ids}
    own |= {"architectures": ["DFlash2DraftModel"], "draft_vocab_size": VOCAB}
    names = ("architectures", "dflash_config", "auto_map", "block_size", "num_target_layers")
    layer = {name: value for name, value in config.items() if name not in names}
    return own | inner | {"block_size": BLOCK, "transformer_layer_config": layer}


SCALED = {"input_embedding_scale": 0.7, "output_multiplier": 1.3, "final_logit_softcapping": 4.0}
DFLASH2 = {
    "nested": ({}, {}, None), "flat": ({}, {}, flat), "flat-sliding": (made.WINDOWED, {}, flat),
    "three-taps-causal": (made.WINDOWED, {"conv_kernel_size": 3}, None),
    "scaled": ({}, SCALED, None), "reduced": ({}, {}, None),
}  # fmt: skip
KEPT = list(range(3, VOCAB, 2))  # of a reduced head
OTHERS = torch.tensor([token for token in range(VOCAB) if token not in KEPT])


def reduced(folder, config, tensors, name):
    """The checkpoint with a head of the kept tokens, in whose table they alone have rows."""
    made.write_checkpoint(folder, config, tensors | {name: tensors[name][KEPT].clone()})
    (folder / "draft_tokens.json").write_text(json.dumps(KEPT))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("variant", "temperature"), [("nested", 1.0), *((variant, 0.7) for variant in DFLASH2)]
)
def test_dflash2(tmp_path, variant, temperature):
    """Every pair and the greedy walk, from the equations."""
    outer, inner, written = DFLASH2[variant]
    folder, config, tensors = conditional_folder(tmp_path, "dflash2", **inner)
    target = draft_target()
    config |= outer
    more = {"embed_tokens.weight": target.model.get_input_embeddings().weight.clone()}
    more = tensors | more if variant == "flat" else tensors  # a copy, as the library may store
    made.write_checkpoint(folder, written(config) if written else config, more)
    if variant == "reduced":
        reduced(folder, config, tensors, "candidate_selector.successor_codebook")
    # The library's sliding layers see both ways unless told otherwise.
    config |= {"is_causal": False} if written else {}
    inner = config["dflash_config"]
    drafter = load_drafter(str(folder), target)
    assert type(drafter) is DFlash2Drafter
    part = {name.partition("selector.")[2]: tensor for name, tensor in tensors.items()}
    before, after = part["predecessor_codebook"], part["successor_codebook"]
    for session, context in rounds(target, drafter, PROMPT, ACCEPTED):
        states = reference_states(config, tensors, target, context)
        logits = states @ target.head_weight().T * inner.get("output_multiplier", 1.0)
        cap = inner.get("final_logit_softcapping")
        logits = cap * (logits / cap).tanh() if cap else logits
        if variant == "reduced":
            logits[:, OTHERS] = -torch.inf
        between = states @ part["hidden_projection.weight"].T
        pairs = session.draft(context, request(BLOCK, VOCAB, temperature=temperature))
        assert pairs.tokens.shape == (BLOCK - 1, 4)
        walk = [int(context[-1])]
        for d, tokens in enumerate(logits.topk(4).indices.tolist()):
            np.testing.assert_array_equal(pairs.tokens[d], tokens)
            previous = walk[:1] if d == 0 else pairs.tokens[d - 1]
            given = pairs.first[None] if d == 0 else pairs.edges[d - 1]
            for a, row in zip(previous, given, strict=True):
                added = [float((before[a] * between[d] * after[b]).sum()) for b in tokens]
                expected = made.chances(logits[d], tokens, added, temperature)
                np.testing.assert_allclose(row, expected, atol=1e-5)
                if a == walk[-1]:
                    scores = [float(logits[d, b]) + s for b, s in zip(tokens, added, strict=True)]
                    best = tokens[int(np.argmax(scores))]
            walk.append(best)
        assert chain(pairs, BLOCK).tokens.tolist() == walk[1:]
        if variant == "nested":
            drawn = session.draw(context, SHAPE, temperature, torch.Generator().manual_seed(3))
            for row, path in enumerate(paths_of(drawn)):
                if drawn.sources[row] >= 0:
                    d, a = len(path), path[-1] if path else walk[0]
                    tokens = logits[d].topk(4).indices
                    scores = logits[d, tokens] + after[tokens] @ (before[a] * between[d])
                    q = drawn.q[drawn.sources[row]]
                    given = (scores / temperature).softmax(-1)
                    torch.testing.assert_close(q[tokens], given, atol=1e-5, rtol=1e-5)
                    assert float(q.sum()) == pytest.approx(1.0)


def path_logits(config, tensors, target, states, path):
    """Domino's logits of the slot behind a path, which begins with the bonus token."""
    inner = config["dflash_config"]
    gru = torch.nn.GRU(states.shape[1], inner["gru_hidden_dim"], bias=False)
    gru.load_state_dict({n: tensors[f"prefix_gru.{n}"] for n in ("weight_ih_l0", "weight_hh_l0")})
    hidden = states[len(path) - 1]
    logits = target.head_weight() @ hidden
    if len(path) <= inner["pure_draft_prefix_len"]:
        return logits
    state = gru(target.embed(torch.tensor(path)))[0][-1]
    inside = torch.nn.functional.silu(tensors["embed_proj.0.weight"] @ torch.cat((hidden, state)))
    return logits + tensors["embed_proj.2.weight"] @ inside


@torch.inference_mode()
@pytest.mark.parametrize(
    ("plain", "frontier", "whole"), [(1, 1, True), (0, 3, True), (2, 3, False)]
)
def test_domino(tmp_path, plain, frontier, whole):
    """Every node behind its path, the choice of a level's nodes, and the authors' greedy loop."""
    folder, config, tensors = conditional_folder(tmp_path, "domino", pure_draft_prefix_len=plain)
    if not whole:
        reduced(folder, config, tensors, "embed_proj.2.weight")
    others = OTHERS[:0] if whole else OTHERS
    target = draft_target()
    assert type(load_drafter(str(folder), target)) is DominoDrafter
    drafter = DominoDrafter(target, folder, candidates=VOCAB, frontier=frontier)
    assert drafter.max_depth == BLOCK
    for session, context in rounds(target, drafter, PROMPT, ACCEPTED):
        states = reference_states(config, tensors, target, context)
        tree = session.draft(context, request(BLOCK, VOCAB))
        size = VOCAB - len(others)
        assert len(tree.tokens) == BLOCK * size
        paths, scores, expected = [[int(context[-1])]], [1.0], {}
        for token, parent, given in zip(tree.tokens, tree.parents, tree.probabilities, strict=True):
            if parent not in expected:
                logits = path_logits(config, tensors, target, states, paths[parent])
                logits[others] = -torch.inf
                expected[parent] = logits.softmax(-1)
            np.testing.assert_allclose(given, expected[parent][token], atol=1e-5)
            paths.append([*paths[parent], int(token)])
            scores.append(scores[parent] * given)
        for first in range(1, len(scores), size):
            expanded = range(first - size, first - size + frontier) if first > 1 else [0]
            assert set(tree.parents[first - 1 : first - 1 + size]) == set(expanded)
            best = torch.cat([scores[row] * expected[row] for row in expanded]).topk(size).values
            found = scores[first : first + size]  # the greedy path first
            np.testing.assert_allclose(sorted(found, reverse=True), best, rtol=1e-3)
            assert found[1:] == sorted(found[1:], reverse=True)
        walk = [int(context[-1])]
        for _ in range(BLOCK):
            logits = path_logits(config, tensors, target, states, walk)
            logits[others] = -torch.inf
            walk.append(int(logits.argmax()))
        assert chain(tree, BLOCK).tokens.tolist() == walk[1:]
        drawn = session.draw(context, SHAPE, 0.8, torch.Generator().manual_seed(3))
        for row, path in enumerate(paths_of(drawn)):
            if drawn.sources[row] >= 0:
                logits = path_logits(config, tensors, target, states, [walk[0], *path])
                logits[others] = -torch.inf
                q = drawn.q[drawn.sources[row]]
                torch.testing.assert_close(q, (logits / 0.8).softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("changed", [
    {"gru_hidden_dim": 8}, {"emb_dim": 4}, {"pure_draft_prefix_len": 0}, {"conv_kernel_size": 3},
    {"conv_group_size": 16}, {"selector_rank": 4}, {"selector_top_k": 5}, {"markov_rank": 4},
    {"markov_head_type": "gated"},
])  # fmt: skip
def test_what_costs_is_in_the_hash_and_is_timed(tmp_path, changed):
    kind = next(kind for kind, fields in made.CONDITIONAL.items() if set(changed) <= set(fields))
    target, hashes = draft_target(), set()
    for own in ({}, changed):
        folder, *_ = conditional_folder(tmp_path / str(len(own)), kind, **own)
        drafter = load_drafter(str(folder), target)
        hashes.add(drafter.architecture_hash)
    section = time_drafter(drafter, target, until_s=0.0)
    assert len(hashes) == 2
    assert section.name == kind
    assert min(section.median_s) > 0


BAD = {
    "groups": ("dflash2", {"conv_group_size": 5}, "'conv_group_size' must be a divisor of hidden"),
    "top": ("dflash2", {"selector_top_k": 98}, "'selector_top_k' must be a whole number .* 97"),
    "reduced": ("dflash2", {"draft_vocab_size": 50}, "draft_vocab_size = 50, which is not"),
    "in place": ("domino", {"shift_label": False}, "shift_label = False, which is not supported"),
    "no width": ("domino", {"emb_dim": None}, "'emb_dim' must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs(tmp_path, case):
    kind, changed, message = BAD[case]
    folder, config, _ = conditional_folder(tmp_path, kind)
    change_config(folder, dflash_config=config["dflash_config"] | changed)
    with pytest.raises(InputError, match=message):
        load_drafter(str(folder), draft_target())

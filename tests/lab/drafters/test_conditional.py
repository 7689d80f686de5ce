"""DSpark, DFlash 2 and Domino against their equations, in every published form of checkpoints."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.profiling.probe import time_drafter
from decoder.tree.draft_tree import Lattice, best_first, chain
from lab.drafters.dflash2.drafter import DFlash2Drafter
from lab.drafters.domino.drafter import DominoDrafter
from lab.drafters.dspark import drafter as dspark
from lab.drafters.dspark.model import DSparkConfig
from tests.decoder import draft_models as made
from tests.decoder.draft_models import PROMPT, VOCAB, conditional_folder, draft_target, rounds
from tests.decoder.drafters.test_dflash import reference_states
from tests.decoder.models import paths_of, request
from tests.tiny_folder import change_config

pytestmark = pytest.mark.cpu_kind

RANK = made.CONDITIONAL["dspark"]["markov_rank"]


SHAPE = best_first(Lattice(np.ones((4, 3), np.int64), np.full((4, 3), 0.5)), 20)


def check_drawn(session, context, temperature, logits_behind):
    """Drawn children come from the softmax of `logits_behind(path)` [vocab]."""
    drawn = session.draw(context, SHAPE, temperature, torch.Generator().manual_seed(3))
    for row, path in enumerate(paths_of(drawn)):
        if drawn.sources[row] >= 0:
            expected = (logits_behind(path) / temperature).softmax(-1)
            torch.testing.assert_close(drawn.q[drawn.sources[row]], expected, atol=1e-5, rtol=1e-5)


def outer(config):
    """The fields of a config that are not in its dflash_config."""
    return {n: v for n, v in config.items() if n not in ("dflash_config", "auto_map")}


def without(inner, *names):
    return {name: value for name, value in inner.items() if name not in names}


def deepspec(config):
    inner = without(config["dflash_config"], "projector_type", "shift_label")
    more = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    return outer(config) | inner | more | {"confidence_head_with_markov": True}


def specforge(config):
    inner = without(config["dflash_config"], "shift_label")
    return outer(config) | {"architectures": ["DSparkDraftModel"], "dflash_config": inner}


def modelopt(config):
    inner = dict(config["dflash_config"])
    inner["use_confidence_head"] = inner.pop("enable_confidence_head")
    return config | {"dflash_config": inner}


def speculators(config):
    inner = without(config["dflash_config"], "projector_type", "target_layer_ids")
    own = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    ids = config["dflash_config"]["target_layer_ids"]
    own["aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    own |= {"sample_from_anchor": inner.pop("shift_label"), "block_size": config["block_size"]}
    own["draft_vocab_size"] = config.get("draft_vocab_size", VOCAB)
    names = ("architectures", "block_size", "num_target_layers", "draft_vocab_size")
    return own | inner | {"transformer_layer_config": without(outer(config), *names)}


def dspark_folder(folder, spell=deepspec, drafted=VOCAB, more=None, block=5, **inner):
    """A random checkpoint in one of the forms; returns its folder, nested config and tensors."""
    _, config, tensors = made.conditional_folder(folder, "dspark", **inner)
    config["block_size"], stored = block, dict(tensors)
    if drafted != VOCAB:
        config["draft_vocab_size"] = drafted
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:drafted]
        stored = tensors | made.mapping({"vocab_size": VOCAB, "draft_vocab_size": drafted})
    if spell is modelopt:
        named = {name: name.replace("markov_head.", "") for name in stored}
        stored = {named[name].replace("_head.proj", "_proj"): t for name, t in stored.items()}
    return made.write_checkpoint(folder, spell(config), stored | (more or {})), config, tensors


class Equations:
    """The corrected logits of a row behind a path of tokens."""

    def __init__(self, config, tensors, target, context, head, ids):
        self.states = reference_states(config, tensors, target, context)
        self.base = self.states @ head.T
        self.part = {n.removeprefix("markov_head."): t for n, t in tensors.items()}
        self.kind, self.ids = config["dflash_config"]["markov_head_type"], ids

    def added(self, path):
        """What the row that follows these tokens, the bonus token first, adds to its logits."""
        w1, w2 = self.part["markov_w1.weight"], self.part["markov_w2.weight"]
        hidden, last = self.states[len(path) - 1], w1[path[-1]]
        if self.kind == "vanilla":
            return w2 @ last
        if self.kind == "gated":
            g = self.part["gate_proj.weight"] @ torch.cat((hidden, last))
            return w2 @ ((g + self.part["gate_proj.bias"]).sigmoid() * last)
        s = torch.zeros(RANK)
        for row, token in enumerate(path):
            rows = torch.cat((s, w1[token], self.states[row]))
            joint = self.part["joint_proj.weight"] @ rows + self.part["joint_proj.bias"]
            g, c, o = joint.split(RANK)
            s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
        return w2 @ o.tanh()

    def children(self, path, count, temperature):
        """Probability by token of the best `count` of the row's own logits."""
        row = len(path) - 1
        places = self.base[row].topk(min(count, len(self.ids))).indices.tolist()
        added = self.added(path)[places].tolist()
        q = made.chances(self.base[row], places, added, temperature)
        return {int(self.ids[place]): one for place, one in zip(places, q, strict=True)}


GATED, RNN = {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}
CASES = {
    **{spell.__name__: {"spell": spell} for spell in (deepspec, specforge, modelopt, speculators)},
    "gated": GATED,
    "gated-modelopt": GATED | {"spell": modelopt},
    "rnn": RNN | {"spell": specforge},
    "reduced": {"spell": speculators, "drafted": 23},
    "reduced-rnn": RNN | {"spell": speculators, "drafted": 40},
    "embedding": {"target_layer_ids": [-1, 2, 4]},
    "in-place": {"spell": speculators, "shift_label": False, "block": 6},
    "frozen": {"own": {"embed_tokens": 1.0, "lm_head": 1.0}},
    "thawed-embedding": {"own": {"embed_tokens": 1.5, "lm_head": 1.0}},
    "thawed-head": {"own": {"embed_tokens": 1.0, "lm_head": 1.5}},
}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "temperature"), [("deepspec", 1.0), ("rnn", 1.0), *((case, 0.7) for case in CASES)]
)
def test_candidates_and_draws_are_those_of_the_equations(tmp_path, case, temperature):
    """Pairs and levels, the chain, and q over the whole vocabulary behind drawn nodes."""
    changed, target, ids = dict(CASES[case]), draft_target(), torch.arange(VOCAB)
    own = changed.pop("own", {})
    embedding = target.model.get_input_embeddings().weight * own.get("embed_tokens", 1.0)
    head = target.head_weight() * own.get("lm_head", 1.0)
    tables = {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}
    folder, config, tensors = dspark_folder(tmp_path, more=tables if own else {}, **changed)
    if "drafted" in changed:
        sizes = {"vocab_size": VOCAB, "draft_vocab_size": changed["drafted"]}
        ids = made.mapping(sizes)["d2t"] + ids[: changed["drafted"]]
    drafter = load_drafter(str(folder), target)
    assert (drafter.name, drafter.max_depth, drafter.draws) == ("dspark", 5, "levels")
    assert (drafter.model.own_embedding is None) == (own.get("embed_tokens", 1.0) == 1.0)
    assert (drafter.model.own_head is None) == (own.get("lm_head", 1.0) == 1.0)
    seen = SimpleNamespace(model=target.model, embed=lambda tokens: embedding[tokens])
    count = dspark.LEVEL_NODES if changed.get("markov_head_type") == "rnn" else dspark.PAIRED
    for session, context in rounds(target, drafter, PROMPT, [3, 0]):
        equations = Equations(config, tensors, seen, context, head[ids], ids)
        drafts = session.draft(context, request(9, 9, temperature=temperature))
        q = cache(lambda path: equations.children(path, count, temperature))  # noqa: B023
        tree, paths = drafts.as_tree(400), [(int(context[-1]),)]
        nodes = tree.tokens.tolist(), tree.parents, tree.probabilities
        for token, parent, given in zip(*nodes, strict=True):
            assert given == pytest.approx(q(paths[parent])[token], abs=1e-5)
            paths.append((*paths[parent], token))
        path = paths[0]
        for token in chain(drafts, 5).tokens.tolist():
            assert q(path)[token] == max(q(path).values())
            path = (*path, token)

        def behind(path):
            row = equations.base[len(path)] + equations.added([*paths[0], *path])  # noqa: B023
            return torch.full((VOCAB,), -torch.inf).index_copy(0, ids, row)

        check_drawn(session, context, temperature, behind)


@torch.inference_mode()
def test_of_rank_0_it_is_shifted_dflash(tmp_path):
    """As DeepSpec's own DFlash drafters are."""
    target = draft_target()
    folder, config, tensors = dspark_folder(tmp_path / "draft")
    plain = {name: t for name, t in tensors.items() if "_head." not in name}
    inner = made.DFLASH["dflash_config"] | {"shift_label": True}
    made.write_checkpoint(tmp_path / "plain", made.DFLASH | {"dflash_config": inner}, plain)
    none = {"markov_rank": 0, "enable_confidence_head": False}
    made.write_checkpoint(folder, deepspec(config) | none, plain)
    drafts = []
    for drafter in (DFlashDrafter(target, tmp_path / "plain"), load_drafter(str(folder), target)):
        *_, (session, context) = rounds(target, drafter, PROMPT, [2])
        drafts.append(session.draft(context, request(9, 9, whole=True)).whole)
        assert drafter.name == "dflash"
    torch.testing.assert_close(*drafts, atol=0, rtol=0)


def test_speculators_leaves_out_what_is_usual():
    """Its layer's fields are those that differ from Qwen3Config's, here of Qwen3-8B's width."""
    layer = {"model_type": "qwen3", "num_hidden_layers": 5, "intermediate_size": 12288}
    own = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
    own |= {"aux_hidden_state_layer_ids": [2, 10], "mask_token_id": 9, "draft_vocab_size": 32000}
    layer |= {"num_key_value_heads": 8, "rope_parameters": {"rope_theta": 1e6}}
    config = DSparkConfig.parse(own | {"transformer_layer_config": layer, "topk_context": 0})
    shape = config.shape
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (4096, 32, 8, 128)
    assert (config.name, config.layers, config.vocab) == ("dflash", 5, 151936)
    assert (config.target_layer_ids, config.draft_vocab, config.first_row) == ((1, 9), 32000, 1)


ACCEPTED, BLOCK = [3, 0, 4], 5


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

            def behind(path):
                d, a = len(path), path[-1] if path else walk[0]  # noqa: B023
                tokens = logits[d].topk(4).indices  # noqa: B023
                row = logits[d, tokens] + after[tokens] @ (before[a] * between[d])  # noqa: B023
                return torch.full((VOCAB,), -torch.inf).index_copy(0, tokens, row)

            check_drawn(session, context, temperature, behind)


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

        def behind(path):
            row = path_logits(config, tensors, target, states, [walk[0], *path])  # noqa: B023
            return row.index_fill(0, others, -torch.inf)

        check_drawn(session, context, 0.8, behind)


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
    "head": ("dspark", {"markov_head_type": "lstm"}, "must be one of vanilla, gated, rnn"),
    "shift": ("dspark", {"sample_from_anchor": False}, "shift_label = True and sample"),
    "loops": ("dspark", {"num_loops": 2}, "num_loops = 2, which is not supported"),
    "rank": ("dspark", {"dspark_markov_rank": 512}, "dspark_markov_rank = 512, which is not"),
    "attention": ("dspark", {"attention_mode": "mla"}, "attention_mode = 'mla', which is not"),
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

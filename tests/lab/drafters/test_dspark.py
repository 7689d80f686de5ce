"""The DSpark drafter against its equations, in every published form of its checkpoints."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.factory import load_drafter
from decoder.tree.draft_tree import Lattice, best_first, chain
from lab.drafters.dspark import drafter as dspark
from lab.drafters.dspark.config import DSparkConfig
from tests.decoder import draft_models as made
from tests.decoder.draft_models import DFLASH, PROMPT, VOCAB, draft_target, rounds, write_checkpoint
from tests.decoder.drafters.test_dflash import reference_states
from tests.decoder.models import paths_of, request

pytestmark = pytest.mark.cpu_kind

RANK = made.CONDITIONAL["dspark"]["markov_rank"]


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
    return write_checkpoint(folder, spell(config), stored | (more or {})), config, tensors


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
    shape = best_first(Lattice(np.ones((4, 3), np.int64), np.full((4, 3), 0.5)), 20)
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
        drawn = session.draw(context, shape, temperature, torch.Generator().manual_seed(3))
        for row, below in enumerate(paths_of(drawn)):
            if drawn.sources[row] >= 0:
                logits = equations.base[len(below)] + equations.added([*paths[0], *below])
                expected = torch.zeros(VOCAB).index_copy(0, ids, (logits / temperature).softmax(-1))
                given = drawn.q[drawn.sources[row]]
                torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_of_rank_0_it_is_shifted_dflash(tmp_path):
    """As DeepSpec's own DFlash drafters are."""
    target = draft_target()
    folder, config, tensors = dspark_folder(tmp_path / "draft")
    plain = {name: t for name, t in tensors.items() if "_head." not in name}
    inner = DFLASH["dflash_config"] | {"shift_label": True}
    write_checkpoint(tmp_path / "plain", DFLASH | {"dflash_config": inner}, plain)
    none = {"markov_rank": 0, "enable_confidence_head": False}
    write_checkpoint(folder, deepspec(config) | none, plain)
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


BAD = {
    "head": ({"markov_head_type": "lstm"}, "'markov_head_type' must be one of vanilla, gated, rnn"),
    "shift": ({"sample_from_anchor": False, "shift_label": True}, "shift_label = True and sample"),
    "loops": ({"num_loops": 2}, "num_loops = 2, which is not supported"),
    "rank": ({"dspark_markov_rank": 512}, "dspark_markov_rank = 512, which is not supported"),
    "attention": ({"attention_mode": "mla"}, "attention_mode = 'mla', which is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_configs_that_compute_something_else(tmp_path, case):
    inner, message = BAD[case]
    folder, *_ = dspark_folder(tmp_path, modelopt, **inner)
    with pytest.raises(InputError, match=message):
        load_drafter(str(folder), draft_target())

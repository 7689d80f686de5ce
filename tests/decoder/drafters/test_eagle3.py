"""The EAGLE-3 drafter against a straight-line reference, and the checkpoints it loads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from costmodel.errors import InputError
from decoder.drafters.eagle3 import Eagle3Drafter
from decoder.drafters.factory import load_drafter
from decoder.engine import TreeDecoder
from decoder.model.runtime.linear import plain_state
from decoder.tree.growth import TopPaths
from tests.decoder import draft_models as made
from tests.decoder.draft_models import EAGLE3, HIDDEN, LAYERS, PROMPT, VOCAB, draft_target, rms
from tests.decoder.models import as_paths, greedy, paths_of, request, shaped

pytestmark = pytest.mark.cpu_kind

NAMED_LAYERS = "eagle_aux_hidden_state_layer_ids"
GROWTH = TopPaths(width=3, frontier=3, max_depth=4)


def outputs(config, tensors, embedding, hidden):
    """The layer over all rows at once: [rows, hidden] of rows of embeddings and hidden states."""
    part = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    width = config.get("head_dim", config["hidden_size"] // heads)
    normed = rms(hidden, part["hidden_norm.weight"], eps)
    residual = normed if config.get("norm_before_residual") else hidden
    rows = torch.cat((rms(embedding, part["input_layernorm.weight"], eps), normed), dim=-1)
    places = torch.arange(len(rows))
    speeds = config["rope_theta"] ** (-torch.arange(0, width, 2).double() / width)
    query = (rows @ part["self_attn.q_proj.weight"].T).view(-1, heads, width)
    key = (rows @ part["self_attn.k_proj.weight"].T).view(-1, kv_heads, width)
    query, key = (made.turned(rotated, places, speeds) for rotated in (query, key))
    value = (rows @ part["self_attn.v_proj.weight"].T).view(-1, kv_heads, width)
    key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
    future = torch.ones(len(rows), len(rows)).triu(1).bool()
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    drawn = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(rows), -1)
    hidden = residual + drawn @ part["self_attn.o_proj.weight"].T
    rows = rms(hidden, part["post_attention_layernorm.weight"], eps)
    gate, up = rows @ part["mlp.gate_proj.weight"].T, rows @ part["mlp.up_proj.weight"].T
    return hidden + (gate * gate.sigmoid() * up) @ part["mlp.down_proj.weight"].T


class Reference:
    """q after `context` and a drafted path, everything anew for every path."""

    def __init__(self, config, tensors, target, context, layers=(2, LAYERS // 2, LAYERS - 3)):
        self.config, self.tensors = config, tensors
        states = made.plain_states(target, context[:-1])
        features = torch.cat([states[i] for i in layers], dim=-1)
        self.hidden = features @ tensors["fc.weight"].T
        self.next = [int(token) for token in context[1:]]
        table = target.embed(torch.arange(VOCAB))
        self.table = tensors.get("embed_tokens.weight", table)

    def q(self, path=(), temperature=1.0):
        """Probabilities by target token."""
        hidden, tokens = self.hidden, list(self.next)
        for token in path:
            drafted = outputs(self.config, self.tensors, self.table[tokens], hidden)
            hidden, tokens = torch.cat((hidden, drafted[-1:])), [*tokens, token]
        last = outputs(self.config, self.tensors, self.table[tokens], hidden)[-1]
        normed = rms(last, self.tensors["norm.weight"], self.config["rms_norm_eps"])
        q = (normed @ self.tensors["lm_head.weight"].T / temperature).softmax(-1)
        if "d2t" not in self.tensors:
            return dict(enumerate(q.tolist()))
        offsets = self.tensors["d2t"].tolist()
        return {i + offsets[i]: value for i, value in enumerate(q.tolist())}

    def tree(self, width, frontier, depth, temperature=1.0):
        """Probability given its parent of every node, by path."""
        nodes, open_paths = {}, {(): 1.0}
        for _ in range(depth):
            found = {}
            for path, score in open_paths.items():
                q = self.q(path, temperature)
                for token in sorted(q, key=q.get, reverse=True)[:width]:
                    nodes[*path, token] = q[token]
                    found[*path, token] = score * q[token]
            best = sorted(found, key=found.get, reverse=True)[:frontier]
            open_paths = {path: found[path] for path in best}
        return nodes


def assert_same(tree, expected):
    assert as_paths(tree) == pytest.approx(expected, abs=1e-5)


VARIANTS = {
    "equal-vocabularies": ("llama", {}),
    "mapped": ("llama", {"draft_vocab_size": 31}),
    "qwen3-target": ("qwen3", {"draft_vocab_size": 40, "rope_theta": 10000.0}),
    "head-dim": ("qwen3", {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}),
}


class TestAgainstTheReference:
    @torch.inference_mode()
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_several_rounds(self, tmp_path, variant):
        family, changed = VARIANTS[variant]
        prompt = [9] if variant == "mapped" else PROMPT
        target = draft_target(family)
        folder, config, tensors = made.eagle3_folder(tmp_path / "draft", **changed)
        drafter = Eagle3Drafter(target, folder)
        for session, context in made.rounds(target, drafter, prompt, made.ACCEPTED):
            tree = session.draft(context, request(8, 64, GROWTH))
            assert_same(tree, Reference(config, tensors, target, context).tree(3, 3, 4))
            again = session.draft(context, request(8, 64, GROWTH))
            np.testing.assert_array_equal(again.tokens, tree.tokens)
            np.testing.assert_array_equal(again.probabilities, tree.probabilities)
        deep = TopPaths(width=2, frontier=1, max_depth=9)  # beyond the published 8 levels
        tree = session.draft(context, request(9, 64, deep))
        assert_same(tree, Reference(config, tensors, target, context).tree(2, 1, 9))

    @torch.inference_mode()
    @pytest.mark.parametrize(("config", "layers"), [
        ({"eagle_config": {NAMED_LAYERS: [1, 3, 4]}}, (2, 4, 5)),  # outputs of layers
        ({NAMED_LAYERS: [2, 4, 5]}, (2, 4, 5)),  # inputs of layers
        ({NAMED_LAYERS: [3, 1, 0], "eagle_config": {NAMED_LAYERS: []}}, (3, 1, 0)),
    ])  # fmt: skip
    def test_named_feature_layers(self, tmp_path, config, layers):
        target = draft_target()
        folder, config, tensors = made.eagle3_folder(tmp_path / "draft", **config)
        drafter = Eagle3Drafter(target, folder)
        assert drafter.feature_layers == layers
        for session, context in made.rounds(target, drafter, PROMPT, [2]):
            expected = Reference(config, tensors, target, context, layers).tree(3, 3, 4)
            assert_same(session.draft(context, request(8, 64, GROWTH)), expected)

    @torch.inference_mode()
    @pytest.mark.parametrize("layout", ["speculators", "speculators-normed", "own-embedding"])
    def test_other_layouts(self, tmp_path, layout):
        """The layer's fields and tensors nested; an embedding of the drafter's own width."""
        if layout == "own-embedding":
            config = EAGLE3 | {"hidden_size": 24, "target_hidden_size": HIDDEN, "head_dim": 8}
            shapes = made.eagle3_shapes(config) | {"embed_tokens.weight": (VOCAB, 24)}
            tensors = made.random_tensors(shapes)
            written, stored = config, tensors
        else:
            own = {"draft_vocab_size": 31, "norm_before_residual": layout.endswith("normed")}
            config = EAGLE3 | own
            tensors = made.random_tensors(made.eagle3_shapes(config)) | made.mapping(config)
            layer = {name: value for name, value in config.items() if name not in own}
            written = own | {"target_hidden_size": None, "transformer_layer_config": layer}
            stored = {name.replace("midlayer", "layers.0"): one for name, one in tensors.items()}
        folder, target = made.write_checkpoint(tmp_path / "draft", written, stored), draft_target()
        for session, context in made.rounds(target, Eagle3Drafter(target, folder), PROMPT, [2, 1]):
            expected = Reference(config, tensors, target, context).tree(3, 3, 4)
            assert_same(session.draft(context, request(8, 64, GROWTH)), expected)

    @torch.inference_mode()
    def test_drawn_trees_are_drawn_from_q(self, tmp_path):
        target = draft_target()
        folder, config, tensors = made.eagle3_folder(tmp_path / "draft", draft_vocab_size=31)
        drafter = Eagle3Drafter(target, folder)
        *_, (session, context) = made.rounds(target, drafter, PROMPT, [1])
        reference = Reference(config, tensors, target, context)
        parents = [0, 0, 1, 1, 2, 3, 5]
        tree = session.draw(context, shaped(parents), 0.8, torch.Generator().manual_seed(3))
        np.testing.assert_array_equal(tree.parents, parents)
        paths = paths_of(tree)
        for row in set(parents):
            expected = reference.q(paths[row], temperature=0.8)
            wanted = [expected.get(token, 0.0) for token in range(VOCAB)]
            assert tree.q[tree.sources[row]].tolist() == pytest.approx(wanted, abs=1e-5)


class TestCheckpoints:
    def test_pickled_weights_without_running_anything(self, tmp_path):
        folder, config, tensors = made.eagle3_folder(tmp_path / "draft", draft_vocab_size=31)
        pickled = made.write_checkpoint(tmp_path / "pickled", config, tensors)
        (pickled / "model.safetensors").unlink()
        torch.save(tensors, pickled / "pytorch_model.bin")
        target = draft_target()
        expected = plain_state(Eagle3Drafter(target, folder).model)
        for name, tensor in plain_state(Eagle3Drafter(target, pickled).model).items():
            torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
        torch.save({"fc.weight": Path}, pickled / "pytorch_model.bin")
        with pytest.raises(InputError, match="cannot read the weights"):
            Eagle3Drafter(target, pickled)

    @pytest.mark.parametrize("changed", [
        {"num_hidden_layers": LAYERS},  # of its target
        {"draft_vocab_size": None},
        {"draft_vocab_size": ...},  # not there
        {"draft_vocab_size": ..., "architectures": ["LlamaForCausalLM"]},
    ])  # fmt: skip
    def test_fields_that_checkpoints_leave_out(self, tmp_path, changed):
        folder, config, _ = made.eagle3_folder(tmp_path / "draft")
        fields = {name: value for name, value in (config | changed).items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(fields))
        drafter = load_drafter(str(folder), draft_target())
        assert isinstance(drafter, Eagle3Drafter) and drafter.model.config.draft_vocab == VOCAB

    @pytest.mark.parametrize("own_embedding", [False, True])
    def test_a_drafter_may_have_fewer_rows_of_padding(self, tmp_path, own_embedding):
        config = EAGLE3 | {"vocab_size": VOCAB - 7, "draft_vocab_size": VOCAB - 7}
        tensors = made.random_tensors(made.eagle3_shapes(config))
        if own_embedding:
            tensors["embed_tokens.weight"] = torch.randn(VOCAB - 7, HIDDEN)
        target = draft_target()
        drafter = Eagle3Drafter(target, made.write_checkpoint(tmp_path / "draft", config, tensors))
        decoder = TreeDecoder(target, drafter=drafter, policy="fixed:6")
        drafted = decoder.generate(PROMPT, max_new_tokens=24).token_ids
        assert drafted == greedy(target.model, PROMPT, 24)

    @pytest.mark.parametrize("named", [["EagleLlamaForCausalLM"], ["LlamaForCausalLM"]])
    def test_the_first_eagle_is_named(self, tmp_path, named):
        tensors, fields = {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, EAGLE3.copy()
        del fields["draft_vocab_size"]
        fields["architectures"] = named
        folder = made.write_checkpoint(tmp_path / "draft", fields, tensors)
        with pytest.raises(InputError, match="first EAGLE, which is not supported"):
            load_drafter(str(folder), draft_target())


BAD_CONFIGS = {
    "another target's vocabulary": ({"vocab_size": 98, "draft_vocab_size": 31}, "vocabulary is 98"),
    "a wider target": ({"target_hidden_size": 48}, "target hidden size is 48, the target's is 32"),
    "a width without an embedding": (
        {"hidden_size": 40, "target_hidden_size": HIDDEN, "head_dim": 8},
        "it is 40 wide and brings no embedding",
    ),
    "two feature layers": ({NAMED_LAYERS: [1, 2]}, "'eagle_aux_.*_ids' must be 3 layers and is"),
    "a later form": ({"norm_before_fc": True}, "norm_before_fc = True"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(tmp_path, case):
    changed, message = BAD_CONFIGS[case]
    folder = made.eagle3_folder(tmp_path / "draft", **changed)[0]
    with pytest.raises(InputError, match=message):
        Eagle3Drafter(draft_target(), folder)

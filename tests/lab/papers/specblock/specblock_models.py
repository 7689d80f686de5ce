"""Small random SpecBlock checkpoints, and the drafter as its paper says it, one row at a time."""

import numpy as np
import torch

from lab.papers.specblock.training.objective import SpecBlockObjective, SpecBlockSettings
from lab.papers.specblock.training.recipe import first_model
from lab.training.features import Example
from tests.decoder import draft_models as made
from tests.decoder.draft_models import COMMON, HIDDEN, VOCAB, mapping, plain_states, rms

LENGTH = 4  # K
# As the authors' two configs: that of Llama 3.1 has no rotary fields, that of Qwen 3 a head_dim
# which their model does not read.
SPECBLOCK = COMMON | {
    "architectures": ["LlamaForCausalLMSpecBlock"], "model_type": "llama", "num_hidden_layers": 2,
    "draft_vocab_size": 41, "diffspec_draft_token_num": LENGTH, "rank_classes": 4,
}  # fmt: skip
QWEN = SPECBLOCK | {
    "architectures": ["LlamaForCausalLMSpecBlockShift"], "head_dim": 16, "rope_scaling": None,
    "rope_theta": 1000000, "num_ttt_blocks": 3,
}  # fmt: skip
FEATURES = (2, 3, 3)  # low, mid and top of a target of six layers
SUMMARY, BUCKETS, RANK_HIDDEN = 15, 4, 256


def specblock_shapes(config):
    """Names and shapes of the tensors of a checkpoint, written out."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    shapes = {
        "input_layer.condition_proj.weight": (hidden, 3 * hidden),
        "input_layer.condition_norm.weight": (hidden,),
        "input_layer.token_norm.weight": (hidden,),
        "input_layer.query_norm.weight": (hidden,),
        "input_layer.position_queries.weight": (config["diffspec_draft_token_num"], hidden),
        "input_layer.fuse.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config.get("rank_head", True):
        shapes |= {
            "rank_head.0.weight": (RANK_HIDDEN, hidden + SUMMARY),
            "rank_head.2.weight": (BUCKETS, RANK_HIDDEN),
        }
    for i in range(config["num_hidden_layers"]):
        shapes |= made.layer_shapes(i, hidden, ffn, hidden, keys)
        if i and config.get("layer_shift", True):
            shapes[f"shift_proj.{i - 1}.weight"] = (hidden, 2 * hidden)
    return shapes


def specblock_folder(folder, seed=1, like=SPECBLOCK, **changed):
    """A random checkpoint of the released format; returns folder, config and tensors."""
    config = like | changed
    tensors = made.random_tensors(specblock_shapes(config), seed) | mapping(config)
    return made.write_checkpoint(folder, config, tensors), config, tensors


TOKENS = tuple((mapping(SPECBLOCK)["d2t"] + torch.arange(41)).tolist())


class Reference:
    """Rows one after another, every layer of one before the next row begins.

    A row knows the rows it sees by their numbers and the row before it in its block; nothing
    is batched or masked. Weights are used in float64.
    """

    def __init__(self, config, tensors, target, context):
        self.config = config
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.parts = {name: tensor.double() for name, tensor in numbers.items()}
        self.tokens = [int(d) + i for i, d in enumerate(tensors["d2t"])]
        self.table = target.embed(torch.arange(target.architecture.vocab)).double()
        states = plain_states(target, context[:-1])
        layers = config.get("feature_layers", FEATURES)
        features = torch.cat([states[i] for i in layers], dim=-1).double()
        self.keys, self.values, self.inner, self.hidden = [], [], [], []
        self.blocks = []  # of all tokens but the bonus
        for t, feature in enumerate(features):
            self.last = t
            condition = self.parts["input_layer.condition_proj.weight"] @ feature
            seen = [row for rows in self.blocks for row in rows]
            self.blocks.append(self.block(condition, int(context[t + 1]), seen))

    def block(self, condition, token, seen):
        """The K rows of one block at the last token; returns their numbers."""
        rows = []
        for k in range(self.config["diffspec_draft_token_num"]):
            position, before = self.last + 1 + k, rows[-1] if rows else None
            rows.append(self.row(condition, token, k, before, position, [*seen, *rows]))
        return rows

    def row(self, condition, token, k, before, position, seen):
        """One row at in-block position k (from 0); returns its number."""
        config, part, eps = self.config, self.parts, self.config["rms_norm_eps"]
        width = HIDDEN // config["num_attention_heads"]
        speeds = config.get("rope_theta", 10000.0) ** (-torch.arange(0, width, 2).double() / width)
        place = torch.tensor([position])
        number = len(self.hidden)
        state = self.fused(condition, token, k)
        for rows in (self.keys, self.values, self.inner):
            rows.append([])
        for i in range(config["num_hidden_layers"]):
            own = {name.partition(f"layers.{i}.")[2]: tensor for name, tensor in part.items()}
            layer = {name: tensor for name, tensor in own.items() if name}
            self.inner[number].append(state)
            if i and f"shift_proj.{i - 1}.weight" in part:
                other = self.inner[number if before is None else before][i]
                state = part[f"shift_proj.{i - 1}.weight"] @ torch.cat((state, other))
            normed = rms(state, layer["input_layernorm.weight"], eps)
            products = [layer[f"self_attn.{name}_proj.weight"] @ normed for name in "qkv"]
            query, key, value = (product.view(-1, width) for product in products)
            self.keys[number].append(made.turned(key[None], place, speeds)[0])
            self.values[number].append(value)
            query = made.turned(query[None], place, speeds)[0]
            drawn = self.attended(query, i, [*seen, number])
            state = state + layer["self_attn.o_proj.weight"] @ drawn
            normed = rms(state, layer["post_attention_layernorm.weight"], eps)
            gate, up = layer["mlp.gate_proj.weight"] @ normed, layer["mlp.up_proj.weight"] @ normed
            state = state + layer["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        self.hidden.append(state)
        return number

    def fused(self, condition, token, k):
        """Equation (2)."""
        eps = self.config["rms_norm_eps"]
        part = {n.removeprefix("input_layer."): tensor for n, tensor in self.parts.items()}
        rows = {"condition": condition, "token": self.table[token]}
        rows["query"] = part["position_queries.weight"][k]
        fused = torch.cat([rms(row, part[f"{n}_norm.weight"], eps) for n, row in rows.items()])
        if k and not self.config.get("prefix_broadcast", True):
            fused[: 2 * HIDDEN] = 0.0
        return part["fuse.weight"] @ fused

    def attended(self, query, i, seen):
        """What a row's heads draw from the rows it sees, in layer i."""
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        both = [torch.stack([rows[j][i] for j in seen]) for rows in (self.keys, self.values)]
        keys, values = (rows.repeat_interleave(group, dim=1) for rows in both)
        weights = (torch.einsum("hd,khd->hk", query, keys) / query.shape[1] ** 0.5).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, values).flatten()

    def first_block(self):
        """The last token's block, and what its rows see of earlier ones."""
        return self.blocks[-1], [row for rows in self.blocks[:-1] for row in rows]

    def next_block(self, rows, path, place, token):
        """A block from the row at `place` of a block, and what its rows see of earlier ones."""
        path = [*path, *rows[: place + 1]]
        return self.block(self.hidden[rows[place]], token, path), path

    def read(self, row):
        """Logits over drafted tokens, and the bucket, of a row."""
        normed = rms(self.hidden[row], self.parts["norm.weight"], self.config["rms_norm_eps"])
        logits = self.parts["lm_head.weight"] @ normed
        if "rank_head.0.weight" not in self.parts:
            return logits, 0
        return logits, int(self.buckets(normed, logits).argmax())

    def buckets(self, normed, logits):
        """The rank head's logits."""
        seen = torch.cat((normed, torch.tensor(plain_summary(logits.tolist())).double()))
        inner = self.parts["rank_head.0.weight"] @ seen
        return self.parts["rank_head.2.weight"] @ (inner * inner.sigmoid())

    def best(self, row, count, temperature=1.0):
        """The most probable tokens of a row, with their probabilities."""
        q = (self.read(row)[0] / temperature).softmax(0)
        order = sorted(range(len(q)), key=lambda i: -float(q[i]))[:count]
        return [(self.tokens[i], float(q[i])) for i in order]


def plain_summary(logits):
    """The 15 features of appendix B over the 20 most likely tokens, in plain Python."""
    best = sorted(logits, reverse=True)[:20]
    total = sum(np.exp(value - best[0]) for value in best)
    logs = [value - best[0] - np.log(total) for value in best]
    gaps = [best[0] - best[rank - 1] for rank in (2, 3, 5)]
    entropy = -sum(np.exp(value) * value for value in logs)
    return [*logs[:10], *gaps, np.exp(logs[0]), entropy]


def reference_tree(reference, growth, depth=99, width=99, temperature=1.0):
    """Algorithm 2 by paths: probability given the parent of every node that is kept."""
    drafted = []  # (path, score), a path perhaps twice
    begins = [((), 1.0, None)]
    for number in range(growth.blocks):
        following = []
        for path, score, origin in begins:
            first = origin is None
            rows, above = reference.first_block() if first else reference.next_block(*origin)
            chain, chain_score, given_up = path, score, False
            for place, row in enumerate(rows):
                if len(chain) == depth:
                    break
                count = growth.branching[reference.read(row)[1]]
                likely = reference.best(row, 1, temperature)[0][1]
                if first and place == 0:
                    count = growth.beam
                elif count == 0:
                    given_up = True
                if growth.adaptive and first and place == 0:
                    caps = [3] * (likely >= 0.9) + [5] * (likely >= 0.8) + [8] * (likely >= 0.6)
                    count = min([count, *caps])
                elif growth.adaptive:
                    count = min([count, *[2] * (likely >= 0.95), *[3] * (likely >= 0.85)])
                count = 1 if given_up else min(count, width)
                children = reference.best(row, count, temperature)
                ended = place == len(rows) - 1 and not given_up
                for rank, (token, q) in enumerate(children):
                    drafted.append(((*chain, token), chain_score * q))
                    if count > 1 or (ended and rank == 0):
                        following.append((*drafted[-1], (rows, above, place, token)))
                chain, chain_score = (*chain, children[0][0]), chain_score * children[0][1]
        begins = [start for start in following if len(start[0]) < depth]
        if number:
            left = max(1, (growth.nodes - len(drafted)) // len(rows))
            begins = sorted(begins, key=lambda s: -s[1])[: min(growth.beam, left)]
    scores = {(): 1.0}
    for path, score in sorted(drafted, key=lambda one: -one[1]):
        if path not in scores and len(scores) <= growth.nodes:
            scores[path] = score
    return {path: score / scores[path[:-1]] for path, score in scores.items() if path}


def example_of(target, tokens, prompt_tokens, layers=FEATURES):
    """A text as `lab.training.features` reads it, by transformers' own forward."""
    states = plain_states(target, tokens)
    features = torch.cat([states[i] for i in layers], dim=-1)
    return Example(torch.tensor(tokens), prompt_tokens, features, states[-1])


def some_text(length=24, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def settings(**changed):
    return SpecBlockSettings(tokens=TOKENS, **changed)


def specblock_objective(target, settings, generator):
    """The objective of a new drafter for this target; its first weights from the generator."""
    return SpecBlockObjective(target, settings, first_model(target, settings, generator))

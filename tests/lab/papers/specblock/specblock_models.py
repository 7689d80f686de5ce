"""Small random SpecBlock checkpoints, and the drafter as its paper says it, one row at a time."""

import numpy as np
import torch

from decoder.drafters.base import DraftRequest
from decoder.tree.growth import TopPaths
from lab.papers.specblock.training.objective import SpecBlockObjective, SpecBlockSettings
from lab.papers.specblock.training.recipe import first_model
from lab.training.features import Example
from tests.decoder.draft_models import (
    COMMON,
    HIDDEN,
    VOCAB,
    plain_states,
    random_tensors,
    write_checkpoint,
)

LENGTH = 4  # K
SPECBLOCK = COMMON | {
    "architectures": ["SpecBlockDraftModel"],
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "block_length": LENGTH,
    "draft_vocab_size": 41,
    "feature_layers": [1, 3, 5],
    "branching": [2, 4, 10, 0],
}
SUMMARY, BUCKETS, RANK_HIDDEN = 15, 4, 128


def specblock_shapes(config):
    """Names and shapes of the tensors of a checkpoint, written out."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    shapes = {
        "condition.weight": (hidden, 3 * hidden),
        "condition_norm.weight": (hidden,),
        "embedding_norm.weight": (hidden,),
        "query_norm.weight": (hidden,),
        "queries": (config["block_length"], hidden),
        "fuse.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
    }
    if config.get("own_head"):
        shapes["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if config.get("rank_head", True):
        shapes |= {
            "rank.inner.weight": (RANK_HIDDEN, hidden + SUMMARY),
            "rank.inner.bias": (RANK_HIDDEN,),
            "rank.outer.weight": (BUCKETS, RANK_HIDDEN),
            "rank.outer.bias": (BUCKETS,),
        }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.mlp.gate_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.up_proj.weight": (ffn, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, ffn),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
        if config.get("qk_norm"):
            shapes |= {
                f"layers.{i}.self_attn.q_norm.weight": (width,),
                f"layers.{i}.self_attn.k_norm.weight": (width,),
            }
        if i and config.get("layer_shift", True):
            shapes[f"layers.{i}.shift.weight"] = (hidden, 2 * hidden)
    return shapes


def drafted_tokens(count, seed=4):
    """Which tokens of the vocabulary are drafted, ascending."""
    chosen = np.random.default_rng(seed).permutation(VOCAB)[:count]
    return torch.from_numpy(np.sort(chosen))


TOKENS = tuple(drafted_tokens(41).tolist())


def specblock_folder(folder, seed=1, **changed):
    """A random SpecBlock checkpoint; returns folder, config and tensors."""
    config = SPECBLOCK | changed
    tensors = random_tensors(specblock_shapes(config), seed)
    tensors["tokens"] = drafted_tokens(config["draft_vocab_size"])
    tensors["examples"] = torch.tensor([9, 9])
    return write_checkpoint(folder, config, tensors), config, tensors


def asked(depth=99, width=64, temperature=1.0):
    """A request whose rule of growth does not count."""
    return DraftRequest(depth=depth, width=width, growth=TopPaths(), temperature=temperature)


def rms(row, weight, eps):
    return row / (row.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Reference:
    """Rows one after another, every layer of one before the next row begins.

    A row knows the rows it sees by their numbers and the row before it in its block; nothing
    is batched or masked. Weights are used in float64.
    """

    def __init__(self, config, tensors, target, context):
        self.config, self.stored = config, tensors
        self.parts = {
            name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()
        }
        self.tokens = tensors["tokens"].tolist()
        self.table = target.embed(torch.arange(target.architecture.vocab)).double()
        head = target.head_weight().double()
        self.head = self.parts.get("lm_head.weight", head[self.tokens])
        states = plain_states(target, context[:-1])
        features = torch.cat([states[i] for i in config["feature_layers"]], dim=-1).double()
        self.keys, self.values, self.inner, self.hidden = [], [], [], []
        self.positions = []
        prefix = []
        for t, feature in enumerate(features):
            condition = self.parts["condition.weight"] @ feature
            prefix.append(self.row(condition, int(context[t + 1]), 0, None, t, prefix))
        self.condition, self.bonus, self.prefix = condition, int(context[-1]), prefix

    def row(self, condition, token, k, before, position, seen):
        """One row at in-block position k (from 0); returns its number."""
        config, part, eps = self.config, self.parts, self.config["rms_norm_eps"]
        width = config.get("head_dim", HIDDEN // config["num_attention_heads"])
        number = len(self.hidden)
        state = self.fused(condition, token, k)
        self.keys.append([])
        self.values.append([])
        self.inner.append([])
        for i in range(config["num_hidden_layers"]):
            layer = {
                name.removeprefix(f"layers.{i}."): tensor
                for name, tensor in part.items()
                if name.startswith(f"layers.{i}.")
            }
            self.inner[number].append(state)
            if "shift.weight" in layer:
                other = self.inner[number if before is None else before][i]
                state = layer["shift.weight"] @ torch.cat((state, other))
            normed = rms(state, layer["input_layernorm.weight"], eps)
            query, key, value = (
                (layer[f"self_attn.{name}_proj.weight"] @ normed).view(-1, width) for name in "qkv"
            )
            if config.get("qk_norm"):
                query = rms(query, layer["self_attn.q_norm.weight"], eps)
                key = rms(key, layer["self_attn.k_norm.weight"], eps)
            self.keys[number].append(turned(key, position, config["rope_theta"]))
            self.values[number].append(value)
            query = turned(query, position, config["rope_theta"])
            drawn = self.attended(query, i, [*seen, number])
            state = state + layer["self_attn.o_proj.weight"] @ drawn
            normed = rms(state, layer["post_attention_layernorm.weight"], eps)
            gate, up = layer["mlp.gate_proj.weight"] @ normed, layer["mlp.up_proj.weight"] @ normed
            state = state + layer["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        self.hidden.append(state)
        self.positions.append(position)
        return number

    def fused(self, condition, token, k):
        """Equation (2)."""
        part, eps = self.parts, self.config["rms_norm_eps"]
        fused = torch.cat(
            (
                rms(condition, part["condition_norm.weight"], eps),
                rms(self.table[token], part["embedding_norm.weight"], eps),
                rms(part["queries"][k], part["query_norm.weight"], eps),
            )
        )
        if k and not self.config.get("prefix_broadcast", True):
            fused[: 2 * HIDDEN] = 0.0
        return part["fuse.weight"] @ fused

    def attended(self, query, i, seen):
        """What a row's heads draw from the rows it sees, in layer i."""
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        drawn = []
        for head, own in enumerate(query):
            scores = torch.stack([own @ self.keys[j][i][head // group] for j in seen])
            weights = (scores / len(own) ** 0.5).softmax(0)
            values = [self.values[j][i][head // group] for j in seen]
            drawn.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        return torch.cat(drawn)

    def first_block(self):
        """The rows of the first block: its first is the prefix's last."""
        rows = [self.prefix[-1]]
        for k in range(1, self.config["block_length"]):
            position = self.positions[rows[-1]] + 1
            seen = [*self.prefix, *rows[1:]]
            rows.append(self.row(self.condition, self.bonus, k, rows[-1], position, seen))
        return rows, self.prefix[:-1]

    def next_block(self, rows, path, place, token):
        """A block from the row at `place` of a block, and what its rows see of earlier ones."""
        path = [*path, *rows[: place + 1]]
        condition, new = self.hidden[rows[place]], []
        for k in range(self.config["block_length"]):
            before = new[-1] if new else None
            position = self.positions[rows[place]] + 1 + k
            new.append(self.row(condition, token, k, before, position, [*path, *new]))
        return new, path

    def read(self, row):
        """Logits over drafted tokens, and the bucket, of a row."""
        normed = rms(self.hidden[row], self.parts["norm.weight"], self.config["rms_norm_eps"])
        logits = self.head @ normed
        if "rank.inner.weight" not in self.parts:
            return logits, 0
        seen = torch.cat((normed, torch.tensor(plain_summary(logits.tolist())).double()))
        inner = self.parts["rank.inner.weight"] @ seen + self.parts["rank.inner.bias"]
        outer = self.parts["rank.outer.weight"] @ (inner * inner.sigmoid())
        return logits, int((outer + self.parts["rank.outer.bias"]).argmax())

    def best(self, row, count, temperature=1.0):
        """The most probable tokens of a row, with their probabilities."""
        q = (self.read(row)[0] / temperature).softmax(0)
        order = sorted(range(len(q)), key=lambda i: -float(q[i]))[:count]
        return [(self.tokens[i], float(q[i])) for i in order]


def turned(heads, position, theta):
    """Rotary embedding of [heads, width] at one position, pair by pair."""
    width = heads.shape[-1]
    out = heads.clone()
    for i in range(width // 2):
        angle = torch.tensor(position * theta ** (-2 * i / width)).double()
        first, second = heads[:, i], heads[:, i + width // 2]
        out[:, i] = first * angle.cos() - second * angle.sin()
        out[:, i + width // 2] = second * angle.cos() + first * angle.sin()
    return out


def plain_summary(logits):
    """The 15 features of appendix B in plain Python."""
    top = max(logits)
    total = sum(np.exp(value - top) for value in logits)
    logs = sorted((value - top - np.log(total) for value in logits), reverse=True)
    gaps = [logs[0] - logs[rank - 1] for rank in (2, 3, 5)]
    entropy = -sum(np.exp(value) * value for value in logs)
    return [*logs[:10], *gaps, np.exp(logs[0]), entropy]


def nodes_of(tree):
    """Nodes of a candidate tree by path, with their probabilities."""
    paths, nodes = [()], {}
    for token, parent, q in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True
    ):
        paths.append((*paths[parent], token))
        assert paths[-1] not in nodes
        nodes[paths[-1]] = q
    return nodes


def reference_tree(reference, *, branching, starts=4, nodes=60, blocks=2, **limits):
    """Algorithm 2 by paths: probability given the parent of every node that is kept.

    limits  depth, width and temperature as a request has them; uncertain: the buckets whose
            siblings may start a block
    """
    depth, width = limits.get("depth", 99), limits.get("width", 99)
    uncertain = limits.get("uncertain", (1, 2))
    given, scores = {}, {}
    begins = [((), 1.0, None)]
    for _ in range(blocks):
        found = []
        for path, score, origin in begins:
            rows, above = (
                reference.first_block() if origin is None else reference.next_block(*origin)
            )
            chain, chain_score, ended = path, score, None
            for place, row in enumerate(rows):
                bucket = reference.read(row)[1]
                count = min(branching[bucket], width)
                if len(chain) == depth or count == 0:
                    break
                children = reference.best(row, count, limits.get("temperature", 1.0))
                for rank, (token, q) in enumerate(children):
                    given[*chain, token], scores[*chain, token] = q, chain_score * q
                    origin = (rows, above, place, token)
                    if rank and bucket in uncertain:
                        found.append(((*chain, token), chain_score * q, origin))
                token, q = children[0]
                chain, chain_score = (*chain, token), chain_score * q
                ended = (chain, chain_score, (rows, above, place, token))
            if ended is not None:
                found.append(ended)
        found = [start for start in found if len(start[0]) < depth]
        begins = sorted(found, key=lambda start: -start[1])[:starts]
    kept = sorted(given, key=lambda path: -scores[path])[:nodes]
    return {path: given[path] for path in kept}


def example_of(target, tokens, prompt_tokens, layers=(1, 3, 5)):
    """A text as `lab.training.features` reads it, by transformers' own forward."""
    states = plain_states(target, tokens)
    features = torch.cat([states[i] for i in layers], dim=-1)
    return Example(torch.tensor(tokens), prompt_tokens, features, states[-1])


def some_text(length=24, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def settings(**changed):
    return SpecBlockSettings(tokens=TOKENS, feature_layers=(1, 3, 5), **changed)


def specblock_objective(target, settings, generator):
    """The objective of a new drafter for this target; its first weights from the generator."""
    return SpecBlockObjective(target, settings, first_model(target, settings, generator))

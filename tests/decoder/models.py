"""Small random targets and drafters for tests."""

from contextlib import contextmanager

import numpy as np
import torch
import transformers as hf
from transformers import LlamaConfig, LlamaForCausalLM

from costmodel.architecture import ModelArchitecture
from decoder.acceptance.drawn import DrawnTree
from decoder.acceptance.rules import Accepted
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.engine import TreeDecoder
from decoder.model.loading import LoadedModel
from decoder.model.making import make_target
from decoder.model.target import Target
from decoder.statistics import Round
from decoder.tree.draft_tree import CandidateTree, DraftTree, Lattice, best_first, visibility
from decoder.tree.growth import TopPaths

PROMPT = [5, 17, 3, 88, 5, 17, 3, 41, 5, 17]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
KV1, KV2, KV4 = ({"num_key_value_heads": heads} for heads in (1, 2, 4))
TIED = {"tie_word_embeddings": True, "initializer_range": 0.5}  # smaller would repeat its input
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama-gqa": (LlamaForCausalLM, LlamaConfig, KV2),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, KV4),
    "llama-mha-tied": (LlamaForCausalLM, LlamaConfig, KV4 | TIED),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, KV1),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, KV2 | {"head_dim": 16}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, KV2 | {"sliding_window": None}),
    "gpt-neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {}),
    "qwen3-moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, KV2 | {"head_dim": 16} | EXPERTS),
}

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "full_attention_interval": 2}  # fmt: skip
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
HYBRIDS = {  # with recurrent states
    "qwen3.5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, KV2 | {"head_dim": 8} | LINEAR),
    "falcon-h1": (hf.FalconH1ForCausalLM, hf.FalconH1Config, KV2 | MAMBA),
}


def random_model(family, *, dtype=torch.float64, scale=6.0, seed=0, **sizes):
    """A random model whose logits are spread enough for a clear argmax and short repeats."""
    torch.manual_seed(seed)
    kind, config, own = (FAMILIES | HYBRIDS)[family]
    model = kind(config(**SIZES | own | sizes)).to(dtype).eval()
    if family == "qwen3-moe":
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    return model


def target_of(model, runtime="auto") -> Target:
    read = ModelArchitecture.from_hf_config(model.config, name="random", approximate=True)
    made = {"name": "random", "source": "", "weights": "random", "architecture": read}
    return make_target(LoadedModel(model=model, **made), runtime=runtime)


def decoder_of(model, policy, drafter="ngram", **options) -> TreeDecoder:
    return TreeDecoder(target_of(model), policy=policy, drafter=drafter, **options)


def greedy(model, prompt, tokens):
    """Plain greedy decoding, the whole text again for every token: nothing to go wrong."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(plain_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def generated(model, prompt, tokens, **options):
    """transformers' own greedy text."""
    ids = torch.tensor([prompt])
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False}
    return model.generate(ids, max_new_tokens=tokens, **options)[0, len(prompt) :].tolist()


@contextmanager
def by_transformers(model, attention="eager"):
    """transformers' own attention, also in a model that a decoder owns."""
    ours, model.config._attn_implementation = model.config._attn_implementation, attention
    try:
        with torch.inference_mode():
            yield
    finally:
        model.config._attn_implementation = ours


def plain_logits(model, ids, attention="eager"):
    """[tokens, vocab] by transformers' own attention."""
    with by_transformers(model, attention):
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def request(depth, width=16, growth=None, temperature=1.0, whole=False):
    options = {"growth": growth or TopPaths(), "temperature": temperature, "whole": whole}
    return DraftRequest(depth=depth, width=width, **options)


def round_of(tree, rows, context=0, drafted=True):
    """A round that accepted these rows of a tree, for a policy to observe."""
    tokens = [int(tree.tokens[row - 1]) for row in rows]
    return Round(tree=tree, accepted=Accepted(rows, tokens, 0), context=context, drafted=drafted)


class LatticeDrafter(Drafter, DraftSession):
    """Marginals that depend on the text so far but not on the target; `peak` sharpens them."""

    name = "lattice"
    architecture_hash = "lattice"

    def __init__(self, vocab, depth=4, width=3, seed=0):
        self.max_depth = depth
        self._vocab, self._width, self._seed = vocab, width, seed

    def start(self, prompt, features, logits=None):
        return self

    def draft(self, context, request):
        random = np.random.default_rng((self._seed, int(context[-1]), len(context)))
        depth = min(request.depth, self.max_depth)
        tokens = [random.permutation(self._vocab)[: self._width] for _ in range(depth)]
        weights = -np.sort(-random.dirichlet(np.ones(self._width + 1), depth), axis=1)
        return Lattice(np.array(tokens, dtype=np.int64), weights[:, : self._width])


class StairCost:
    """A cost model for the adaptive policies: a forward costs a step more every 8 rows."""

    def plain_s(self, context, batch=1):
        return 1.0

    def draft_s(self, context):
        return 0.05

    def sizes(self, most):
        return np.arange(most + 1)

    def cycle_s(self, nodes, context, batch=1):
        rows = batch * (np.asarray(nodes, dtype=np.float64) + 1)
        return 1.0 + 0.2 * (rows // 8) + 0.05 * batch


class WholeDrafter(LatticeDrafter):
    """The same with q over the whole vocabulary, so that trees can be drawn from it."""

    name = "whole"
    draws = "whole"

    def draft(self, context, request):
        seed = self._seed + 31 * int(context[-1]) + 1009 * len(context)
        generator = torch.Generator().manual_seed(seed)
        depth = min(request.depth, self.max_depth)
        logits = torch.randn(depth, self._vocab, generator=generator)
        whole = (1.5 * logits / request.temperature).softmax(-1)
        top = whole.topk(min(self._width, self._vocab))
        given = whole if request.whole else None
        return Lattice(top.indices.numpy(), top.values.double().numpy(), given)


class OracleDrafter(LatticeDrafter):
    """Knows the right continuation of a text, or of several, and hides it at one rank."""

    def __init__(self, truth, vocab, rank=1, depth=6, width=3):
        super().__init__(vocab, depth, width)
        self._texts = truth if isinstance(truth[0], list) else [list(truth)]
        self._rank = rank

    def draft(self, context, request):
        lattice, known = super().draft(context, request), context.tolist()
        truth = next((text for text in self._texts if text[: len(known)] == known), [])
        for row, token in zip(lattice.tokens, truth[len(known) :], strict=False):
            row[row == token] = (token + 1) % self._vocab
            row[self._rank] = token
        return lattice


def shaped(parents, tokens=None, scores=None, drawn=()):
    """A draft tree by the rows of its parents; with q and sources, a drawn one."""
    parents = np.array(parents, dtype=np.int64)
    tokens = np.zeros_like(parents) if tokens is None else np.array(tokens, dtype=np.int64)
    scores = np.ones(len(parents)) if scores is None else scores
    depths = visibility(parents).sum(1)[1:] - 1
    return (DrawnTree if drawn else DraftTree)(tokens, parents, depths, scores, *drawn)


def random_tree(rows, seed, vocab=97):
    random = np.random.default_rng(seed)
    parents = np.array([random.integers(0, node + 1) for node in range(rows - 1)], dtype=np.int64)
    tokens = random.integers(0, vocab, rows - 1)
    return best_first(CandidateTree(tokens, parents, random.uniform(0.1, 0.9, rows - 1)), rows - 1)


def random_candidates(rng, size):
    """A tree of any shape; siblings have distinct tokens, in no order of probability."""
    parents = np.array([rng.integers(0, node + 1) for node in range(size)], dtype=np.int64)
    probabilities = np.empty(size)
    for row in range(size + 1):
        below = np.flatnonzero(parents == row)
        probabilities[below] = rng.dirichlet(np.ones(len(below) + 1))[:-1]
    return CandidateTree(rng.permutation(size).astype(np.int64), parents, probabilities)


def row_paths(tree):
    """The tokens on the way to each row, the root's first; no path comes twice."""
    paths = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token))  # a parent comes before its child
    assert len(set(paths)) == len(paths)
    return paths


def as_paths(tree):
    """{path: probability given its parent} of a candidate tree."""
    return dict(zip(row_paths(tree)[1:], tree.probabilities.tolist(), strict=True))


def paths_of(tree):
    """The tokens on the way to each row of a draft tree, whose depths are theirs."""
    paths = row_paths(tree)
    assert [len(path) for path in paths[1:]] == tree.depths.tolist()
    return paths

"""Small random targets with drafters beside them, as checkpoint folders in the published form."""

import json
import math
from functools import partial

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder.drafters.factory import load_drafter
from decoder.model.target import Step
from tests.decoder.models import SIZES, by_transformers, shaped, target_of

VOCAB, HIDDEN, LAYERS = SIZES["vocab_size"], SIZES["hidden_size"], 6
PROMPT = [5, 17, 3, 88, 41, 2, 2, 60]
ACCEPTED = [3, 0, 1, 0, 0, 4, 2]  # 0: a plain round, or one where nothing was accepted
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
WINDOWED |= {"use_sliding_window": True}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "vocab_size": VOCAB,
}  # fmt: skip
DFLASH = COMMON | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 16, "attention_bias": False,
    "rope_theta": 10000, "rope_scaling": None, "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None, "use_sliding_window": False, "block_size": 5,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2, 4]},
}  # fmt: skip
CONDITIONAL = {
    "domino": {"projector_type": "domino", "shift_label": True, "emb_dim": 8, "gru_hidden_dim": 16,
               "pure_draft_prefix_len": 1},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8,
                "selector_top_k": 4},
    "dspark": {"projector_type": "dspark", "shift_label": True, "enable_confidence_head": True,
               "markov_rank": 8, "markov_head_type": "vanilla"},
}  # fmt: skip
EAGLE3 = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
    "rope_theta": 500000.0, "draft_vocab_size": VOCAB,
}  # fmt: skip


def draft_target(family="qwen3", dtype=torch.float32, seed=0, runtime="auto"):
    """A target of six layers with attention and logits that are spread enough to tell apart."""
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": LAYERS, "num_key_value_heads": 2}
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.dim() > 1 else 1.0)
    return target_of(model.to(dtype).eval(), runtime)


def plain_states(target, ids):
    """The target's hidden states [tokens, hidden], its embedding's first, without a cache."""
    with by_transformers(target.model):
        output = target.model(torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
    return [state[0] for state in output.hidden_states]


def layer_shapes(number, hidden, ffn, queries, keys):
    """Those of one layer without biases and norms of heads."""
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def dflash_shapes(config):
    """Names and shapes of a published DFlash state dict, written out from what is published."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries, keys = heads * width, config["num_key_value_heads"] * width
    ids = config["dflash_config"]["target_layer_ids"]
    shapes = {"fc.weight": (hidden, len(ids) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(i, hidden, ffn, queries, keys)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
        if config["attention_bias"]:
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = (size,)
    return shapes


def eagle3_shapes(config):
    """Names and shapes of a published EAGLE-3 state dict, without the vocabulary mapping."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    shapes = layer_shapes(0, hidden, ffn, queries, keys).items()
    layer = {name.replace("layers.0", "midlayer"): shape for name, shape in shapes}
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        layer[f"midlayer.self_attn.{name}_proj.weight"] = (size, 2 * hidden)
    return layer | {
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "midlayer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }  # fmt: skip


def rms(rows, weight, eps):
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(heads, positions, frequencies):
    """Rotary embedding of [rows, heads, width] as complex numbers; halves are the two parts."""
    angles = positions[:, None].double() * frequencies.double()
    real, imaginary = heads.double().chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1).to(heads.dtype)


def chances(logits, candidates, added, temperature):
    """Probabilities of the candidates: their share of the whole softmax, divided by the sum."""
    scores = [math.exp(float(logits[c]) / temperature) for c in candidates]
    share = sum(scores) / sum(math.exp(float(x) / temperature) for x in logits)
    both = zip(candidates, added, strict=True)
    moved = [math.exp((float(logits[c]) + a) / temperature) for c, a in both]
    return [share * one / sum(moved) for one in moved]


def random_tensors(shapes, seed=1):
    """Weights that keep the size of what passes, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        norm = name.endswith("norm.weight")
        tensors[name] = 1.0 + 0.2 * noise if norm else noise * 1.5 / shape[-1] ** 0.5
    return tensors


def mapping(config, seed=2):
    """d2t and t2d: which tokens the drafter knows, in increasing order."""
    vocab = config["vocab_size"]
    drafted = np.random.default_rng(seed).permutation(vocab)[: config["draft_vocab_size"]]
    tokens = torch.from_numpy(np.sort(drafted))
    known = torch.zeros(vocab, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def write_checkpoint(folder, config, tensors, shards=1):
    """config.json and safetensors, in several files with an index where asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    numbers = {name: i % shards + 1 for i, name in enumerate(names)}
    files = {name: f"model-{n:05}-of-{shards:05}.safetensors" for name, n in numbers.items()}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def dflash_folder(folder, seed=1, shards=1, **changed):
    """A random DFlash checkpoint; returns folder, config and tensors."""
    config = DFLASH | changed
    tensors = random_tensors(dflash_shapes(config), seed)
    return write_checkpoint(folder, config, tensors, shards), config, tensors


def markov_shapes(inner):
    """Names and shapes of a published DSpark drafter's heads."""
    rank, kind = inner["markov_rank"], inner["markov_head_type"]
    shapes = {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (VOCAB, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        joint = {"weight": (3 * rank, 2 * rank + HIDDEN), "bias": (3 * rank,)}
        shapes |= {f"joint_proj.{name}": shape for name, shape in joint.items()}
    shapes = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    confidence = {"weight": (1, HIDDEN + rank), "bias": (1,)}
    return shapes | {f"confidence_head.proj.{name}": shape for name, shape in confidence.items()}


def conditional_folder(folder, kind, seed=1, **changed):
    """A random Domino, DFlash 2 or DSpark checkpoint; `changed` goes into its dflash_config."""
    inner = DFLASH["dflash_config"] | CONDITIONAL[kind] | changed
    config = DFLASH | {"dflash_config": inner}
    shapes = dflash_shapes(config)
    if kind == "dspark":
        shapes |= markov_shapes(inner)
    elif kind == "domino":
        state, width = inner["gru_hidden_dim"], inner["emb_dim"]
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * state, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (width, HIDDEN + state),
            "embed_proj.2.weight": (VOCAB, width),
        }
    else:
        config["architectures"] = ["DFlash2DraftModel"]
        taps, rank = inner["conv_kernel_size"], inner["selector_rank"]
        kernels = 2 * taps * HIDDEN // inner["conv_group_size"]
        for name in (f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")):
            shapes[f"{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"{name}.kernel_projection.weight"] = (kernels, HIDDEN)
        shapes |= {
            "candidate_selector.predecessor_codebook": (VOCAB, rank),
            "candidate_selector.successor_codebook": (VOCAB, rank),
            "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
        }
    tensors = random_tensors(shapes, seed)
    return write_checkpoint(folder, config, tensors), config, tensors


def eagle3_folder(folder, seed=1, **changed):
    """A random EAGLE-3 checkpoint; returns folder, config and tensors."""
    config = EAGLE3 | changed
    tensors = random_tensors(eagle3_shapes(config), seed)
    if config["draft_vocab_size"] != VOCAB:
        tensors |= mapping(config)
    return write_checkpoint(folder, config, tensors), config, tensors


PUBLISHED = {
    "dflash": dflash_folder,
    "eagle3": eagle3_folder,
    **{kind: partial(conditional_folder, kind=kind) for kind in CONDITIONAL},
}


def published(kind, target, folder, **changed):
    """The drafter of a random checkpoint of this kind."""
    return load_drafter(str(PUBLISHED[kind](folder, **changed)[0]), target)


def rounds(target, drafter, prompt, accepted):
    """A session and the contexts at which it drafts, while so many tokens a round are committed.

    Features are the target's own, from its hooks and its cache. Tokens are drawn at random,
    as what is accepted does not matter to a drafter.
    """
    random = np.random.default_rng(5)
    target.reserve(1024)
    target.capture(drafter.feature_layers)
    target.prefill(torch.tensor(prompt))
    session = drafter.start(np.array(prompt), target.features())
    context = [*prompt, int(random.integers(VOCAB))]
    for count in accepted:
        yield session, np.array(context)
        forced = random.integers(VOCAB, size=count + 1)
        # Two siblings at every step, so that the accepted rows lie apart.
        tree = shaped(np.repeat(2 * np.arange(count), 2), np.repeat(forced[:count], 2))
        target.verify([Step(context[-1], tree)])
        kept = [0, *range(2, 2 * count + 1, 2)]
        target.commit(kept)
        features = target.features()
        session.observe(forced.tolist(), None if features is None else features[kept])
        context.extend(forced.tolist())
    yield session, np.array(context)


def sessions_of(drafter):
    """The drafter, and the list of the sessions that it gives from now on."""
    given, start = [], drafter.start

    def started(*arguments):
        given.append(start(*arguments))
        return given[-1]

    drafter.start = started
    return given

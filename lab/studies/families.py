"""Every causal LM of the installed transformers: exact under draft trees, or refused with a reason.

    python -m lab.studies.families [--sizes] [--only llama gemma2]

A tiny random model of each kind writes a text by transformers' own greedy decoding, and by this
decoder plainly and with trees, with a model of its own and with a borrowed one. The drafter knows
the text and hides it behind a wrong first candidate, so that every tree has accepted branches.
Each text is a chat of two turns, and trees come from the prompt as well. The model runs in
float64, and in float32 with its weights packed, as the decoder runs a CPU's.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from costmodel.architecture import ModelArchitecture
from costmodel.errors import InputError
from decoder.configs import config_of, first_reason, read_model, text_of
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.engine import TreeDecoder
from decoder.model.latents import follow_latents
from decoder.model.loading import borrow_model
from decoder.model.making import make_target
from decoder.model.structure import read_structure
from decoder.tree.draft_tree import Lattice
from lab.studies.common import environment, greedy, store

VOCAB, PROMPT_TOKENS, NEW_TOKENS = 97, 38, 26
WINDOW = 32  # of the kinds with sliding windows: shorter than the prompt
# Whether the decoder may change the model (fused layers, or weights packed), and the policy.
WAYS = {
    torch.float64: ((False, "plain"), (False, "fixed:12"), (True, "plain"), (True, "beam:3x4")),
    torch.float32: ((True, "plain"), (True, "beam:3x4")),
}
FLOAT32_ONLY = ("xglm", "xlnet")  # kinds whose masks transformers does not make in float64
MOST_PARAMETERS = 100_000_000  # the images' part of Gemma 3 has 93 million in any config
# fmt: off
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "sliding_window": WINDOW, "attention_chunk_size": WINDOW,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "is_decoder": True,
    "use_cache": True,
    # Mixtures of experts, under the names that kinds give them.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    # Latent attention.
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "index_topk": 16,
    # Recurrent layers.
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_chunk_size": 16,
    # Decoders of encoder-decoders.
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "d_model": 32,
    "add_cross_attention": False,
    # Images and sounds, which the texts have none of.
    "depth": 1, "num_heads": 4, "image_size": 32, "patch_size": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "backbone_hidden_size": 32,
}
# fmt: on
PER_LAYER_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    for kind in ("sliding_attention", "full_attention")
}
RECURRENT = {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
             "num_hidden_layers": 3}  # fmt: skip
CONVOLVED = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
# What single kinds need beside the sizes.
# fmt: off
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": PER_LAYER_ROPE},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
                            "hidden_size": 32},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "gptj": {"rotary_dim": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
                     "num_kv_shared_layers": 1, "laurel_rank": 8},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "lfm2": CONVOLVED,
    "lfm2_moe": CONVOLVED | {"num_dense_layers": 1},
    "longcat_flash": {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24,
                      "zero_expert_num": 2},
    "kimi_linear": RECURRENT | {"linear_num_heads": 4, "linear_head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
                   "layers_block_type": ["linear_attention", "mlp", "full_attention",
                                         "linear_attention"]},
    "olmo_hybrid": RECURRENT,
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_5_text": RECURRENT,
    "qwen3_next": RECURRENT,
    "qwen4_exp_text": {"layer_types": ["linear_attention", "qwen_sparse_attention"],
                       "hc_lowrank": 8, "ngram_vocab_size_base": 64, "split_ngram_parts": 1,
                       "ple_embed_dim": 32, "ple_layer_ids": [1], "heads_per_ngram": 2,
                       "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 128, "indexer_compress_ratio": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16],
                 "attn_layers": ["local", "lsh"], "attention_head_size": 8,
                 "feed_forward_size": 48, "num_buckets": 4},
    "xglm": {"ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
    "xlnet": {"n_head": 4, "d_head": 8, "d_inner": 48, "n_layer": 2},
    "xlstm": {"embedding_dim": 32, "num_heads": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3,
              "n_mamba_heads": 2, "attention_head_dim": 16, "use_mamba_kernels": False},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8,
               "num_hidden_layers": 4, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}
# fmt: on
# Composite kinds whose text part is not named by their config's class.
TEXT_PARTS = {
    "got_ocr2": "qwen2",
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
LATENT = {"num_key_value_heads": 4}  # of kinds that compress keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one kind of model.

    result  `exact`, `refused`, `wrong`, `raw` (an error that is none of rooftree's) or `not made`
    reason  of a refusal or an error
    """

    kind: str
    model: str
    result: str
    reason: str = ""


class HidingDrafter(Drafter, DraftSession):
    """Knows the text, and puts a wrong token before each right one."""

    name = "hiding"
    architecture_hash = "hiding"
    max_depth = 4

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)

    def start(self, *_: object) -> DraftSession:
        return self

    def draft(self, context: NDArray[np.int64], request: DraftRequest) -> Lattice:
        depth = min(request.depth, self.max_depth)
        rows = []
        for place in range(len(context), len(context) + depth):
            right = self._text[place] if place < len(self._text) else 0
            rows.append([(right + 1) % VOCAB, right, (right + 2) % VOCAB])
        return Lattice(np.array(rows, dtype=np.int64), np.tile([0.4, 0.35, 0.2], (depth, 1)))


def kinds() -> list[str]:
    """The kinds of config that have a causal LM."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(kind: str) -> Any:
    """A random model of a kind with clear choices of tokens. Raises what transformers raises."""
    config_class = CONFIG_MAPPING[kind]
    sizes = _sizes(config_class, kind)
    try:  # without an end token, so that texts are long
        config = config_class(**sizes)
    except StrictDataclassError:
        config = config_class(**(sizes | {"eos_token_id": VOCAB - 1}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if model_class.config_class is config_class.sub_configs.get("text_config"):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    with torch.device("meta"):
        shapes = model_class(copy.deepcopy(config))
    parameters = sum(weight.numel() for weight in shapes.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"the tiny config still has {parameters / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = model_class(config).to(widest(kind)).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(0.2 / weight.std().clamp_min(1e-6))
    return model


def widest(kind: str) -> torch.dtype:
    """The most exact dtype that a kind runs in."""
    return torch.float32 if kind in FLOAT32_ONLY else torch.float64


def _sizes(config_class: Any, kind: str) -> dict[str, Any]:
    """The sizes that a config takes, its parts' within it."""
    taken = set(inspect.signature(config_class.__init__).parameters)
    taken |= set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        taken |= set(vars(base).get("__annotations__", {}))
    sizes = {name: size for name, size in SIZES.items() if name in taken}
    for name, part in config_class.sub_configs.items():
        if part is AutoConfig:
            part = CONFIG_MAPPING[TEXT_PARTS[kind]] if kind in TEXT_PARTS else None
        if part is not None:
            sizes[name] = _sizes(part, part.model_type) | {"model_type": part.model_type}
    latent = LATENT if "kv_lora_rank" in taken else {}
    return sizes | latent | MORE.get(kind, {})


def try_kind(kind: str) -> Outcome:
    """What becomes of one kind; never raises for what its model does."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(kind)
            prompt = np.random.default_rng(0).integers(1, VOCAB, PROMPT_TOKENS).tolist()
            greedy(model, prompt, NEW_TOKENS, pad_token_id=0)
        except Exception as error:
            return Outcome(kind=kind, model=name, result="not made", reason=_line(error))
        try:
            result, reason = _compare(model, prompt)
        except Exception as error:
            result, reason = "raw", _line(error)
    return Outcome(kind=kind, model=name, result=result, reason=reason)


def _compare(model: Any, prompt: list[int]) -> tuple[str, str]:
    try:
        wrong = _differing(model, prompt, NEW_TOKENS)
    except InputError as error:
        reason = error.problem.partition("cannot be decoded by trees: ")[2]
        return "refused", reason or error.problem
    return ("wrong", wrong) if wrong else ("exact", "")


def _differing(model: Any, prompt: list[int], count: int) -> str:
    """The first way of decoding whose text is not the greedy one; empty if there is none."""
    double = model.dtype == torch.float64
    by_dtype = WAYS if double else {torch.float32: WAYS[torch.float64]}
    for dtype, ways in by_dtype.items():
        typed = copy.deepcopy(model).to(dtype)
        truth = greedy(typed, prompt, count, pad_token_id=0)
        turns, second = [(prompt, truth)], [*prompt, *truth, *prompt[:3]]
        for owned, policy in ways:
            own = copy.deepcopy(typed) if owned else typed
            target = make_target(borrow_model(own), owned=owned)
            if len(turns) == 1:  # a model that is not refused
                turns.append((second, greedy(typed, second, count // 3, pad_token_id=0)))
            hiding = HidingDrafter([*second, *turns[1][1]])
            for drafter in (hiding,) if policy == "plain" else (hiding, "ngram"):
                decoder = TreeDecoder(target, drafter=drafter, policy=policy)
                for turn, (start, wanted) in enumerate(turns, 1):
                    text = decoder.generate(start, max_new_tokens=len(wanted)).token_ids
                    if text != wanted:
                        owner = f"{'own' if owned else 'borrowed'} model"
                        return f"{policy}, {owner}, {target.runtime.kind} runtime, turn {turn}"
    return ""


def _line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:200]


def document_table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of kinds by result and reason."""
    order = ("exact", "refused", "not made", "wrong", "raw")
    groups: dict[tuple[int, str], list[str]] = {}
    for one in outcomes:
        reason = re.sub(r"[0-9.]+%", "a share", one.reason)
        reason = re.sub(r"^\d+ of its \d+ layers", "only some of its layers", reason)
        label = f"refused: {reason}" if one.result == "refused" else one.result
        groups.setdefault((order.index(one.result), label), []).append(one.kind)
    lines = ["| result | kinds | number |", "|---|---|---|"]
    for (_, label), names in sorted(groups.items()):
        text = label.replace("|", "/").replace("<", "&lt;")
        lines.append(f"| {text} | {', '.join(names)} | {len(names)} |")
    return "\n".join(lines)


def walk(only: Sequence[str] | None) -> None:
    """Try the kinds, print what becomes of each, and store the walk if it is whole."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as home:
        os.environ["ROOFTREE_HOME"] = home  # nothing is known from before
        outcomes = []
        for kind in only or kinds():
            outcomes.append(try_kind(kind))
            one = outcomes[-1]
            print(f"{one.kind:28} {one.result:9} {one.reason}", flush=True)
    counts = Counter(one.result for one in outcomes)
    print(dict(counts))
    if not only:
        result = {"environment": environment(), "counts": dict(counts)}
        store("families", result | {"families": [asdict(one) for one in outcomes]})


MOST_OFF = 1e-3  # of the parameters
# Buffers that a router adds to its scores, which checkpoints store: counted as parameters.
ROUTERS = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a kind is read: `accepted`, `refused`, `wrong` or `not made`.

    parameters  of the default config's model; `off`: the largest error of any reading, over them
    traced      whether caches and windows could be compared
    left_out    keys that were left out in turn; `refused_keys`: of them those refused by name
    """

    kind: str
    result: str
    reason: str = ""
    parameters: int = 0
    off: float = 0.0
    traced: bool = False
    left_out: int = 0
    refused_keys: tuple[str, ...] = ()


def built_parameters(config: Any) -> int:
    """Parameters of the text part and LM head of the model that transformers builds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    parts = [text_of(model), model.get_output_embeddings()]
    own = {id(p): p.numel() for part in parts if part is not None for p in part.parameters()}
    return sum(own.values()) + sum(
        bias.numel() for name, bias in parts[0].named_buffers() if name.endswith(ROUTERS)
    )


def read_kind(kind: str) -> Reading:
    """How one kind is read; never raises for what its model does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(kind)
        except Exception as error:
            return Reading(kind=kind, result="not made", reason=first_reason(error)[:200])
        fields, of = model.config.to_dict(), {"model_type": kind}
        try:
            built_parameters(config_of(of))
        except Exception:  # transformers cannot build what its own defaults say
            of = fields
        try:
            built, sizes = built_parameters(config_of(of)), read_model(of, kind)[1]
        except InputError as error:
            return Reading(kind=kind, result="refused", reason=error.problem)
        except Exception as error:
            return Reading(kind=kind, result="not made", reason=first_reason(error)[:200])
        errors = {"nothing": abs(sizes.parameters - built) / built}
        wrong, traced = _untraced(model, read_model(fields, kind, approximate=True)[1])
        keys, refused = [key for key in SIZES if key in fields], []
        for key in keys:
            try:
                rest = {name: fields[name] for name in fields if name != key}
                errors[key] = _off(rest)
            except InputError:
                refused.append(key)
        worst = max(errors, key=lambda key: errors[key])
        if errors[worst] > MOST_OFF and not wrong:
            wrong = f"the parameters are {errors[worst]:.2%} off, without {worst}"
    return Reading(
        kind=kind, result="wrong" if wrong else "accepted", reason=wrong, parameters=built,
        off=errors[worst], traced=traced, left_out=len(keys), refused_keys=tuple(refused),
    )  # fmt: skip


def _off(fields: Mapping[str, Any]) -> float:
    """The error of the parameters read, over those built; 0 where transformers builds nothing."""
    sizes = read_model(fields, "model")[1]
    try:
        built = built_parameters(config_of(fields))
    except Exception:
        return 0.0
    return abs(sizes.parameters - built) / built


def _untraced(model: Any, sizes: ModelArchitecture) -> tuple[str, bool]:
    """Where the trace of a model differs from its sizes, and whether there is one."""
    try:
        follow_latents(model)
        traced = read_structure(model)
    except Exception:
        return "", False
    if traced.latent == bool(sizes.latent_rank) and traced.token_values != sizes.token_values:
        return f"{sizes.token_values} values of a token, traced {traced.token_values}", True
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["sliding"]
    # Of a model without windows transformers may make a mask that no layer takes.
    if not sizes.chunked and traced.window is not None and "sliding" in str(types):
        # Some masks let a row see itself and `window` tokens before it.
        least = sizes.sliding_window or 0
        if traced.window not in (least, least + 1, least - 1):
            return f"a window of {sizes.sliding_window}, traced {traced.window}", True
    if traced.window is None and sizes.sliding_window:
        return f"a window of {sizes.sliding_window}, traced none", True
    return "", True


def walk_sizes(only: Sequence[str] | None) -> None:
    """Read the sizes of the kinds, print what becomes of each, and store the walk if it is whole.

    Of each kind's default config the parameters that a plan reads are held to the model that
    transformers builds (text part and LM head). A tiny model is traced: the values in its caches
    and its shortest window are held to those read. Then each key of the tiny config is left out in
    turn, as published configs do: what is still read is held to the model of the class's default.
    """
    transformers.logging.set_verbosity_error()
    readings = []
    for kind in only or kinds():
        readings.append(read_kind(kind))
        one = readings[-1]
        print(f"{kind:28} {one.result:9} {one.off:.4%} {one.reason}", flush=True)
    counts = dict(Counter(one.result for one in readings))
    print(counts)
    if not only:
        result = {"environment": environment(), "counts": counts}
        store("known_models", result | {"kinds": [asdict(one) for one in readings]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="kinds; the result is then not stored")
    parser.add_argument("--sizes", action="store_true", help="that plans read, in place of texts")
    chosen = parser.parse_args()
    (walk_sizes if chosen.sizes else walk)(chosen.only)


if __name__ == "__main__":
    main()

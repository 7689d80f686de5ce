"""Published models with windows, states and latents, beside numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from costmodel.architecture import ModelArchitecture
from costmodel.calibration.physical import work_terms
from costmodel.catalog import Peaks, find_target
from costmodel.planning.drafting import block_architecture
from costmodel.planning.engines import ValueBytes, cache_bytes_per_token, sequence_bytes
from costmodel.roofline import Roofline, paper_bytes, physical_bytes, physical_flops
from decoder.configs import read_model

# Sizes in each publisher's config.json, as quoted in public code under the name in the comment.
# Those of the other models are in the shipped targets.yaml.
CONFIGS = {
    "Kimi-Linear-48B-A3B": {  # moonshotai/Kimi-Linear-48B-A3B-Instruct
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216,
        "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
        "vocab_size": 163840, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [i for i in range(1, 27) if i % 4],
            "short_conv_kernel_size": 4,
        },
    },
    "DeepSeek-V3.2": {  # deepseek-ai/DeepSeek-V3.2: V3's sizes, and those of its indexer
        "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
    },
}  # fmt: skip


def architecture(name: str) -> ModelArchitecture:
    if name in CONFIGS:
        return read_model(CONFIGS[name], name)[1]
    return find_target(name).architecture


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByHand:
    """`used` and `unused`: weights that one token multiplies, and others but norms and the like.

    `small`: norms, biases, convolutions, decays. `cached`: values of all caches at 1,000 and at
    30,000 tokens. `state` bytes of a sequence. `attended`: FLOPs of a row on 1,000 cached tokens in
    attention, convolution and state.
    """

    used: int
    unused: int = 0
    small: int
    cached: tuple[int, int]
    state: int = 0
    attended: int


def gated_delta(hidden: int, heads: int) -> int:
    """qkv (16 key heads, twice), z, output, and two values a head."""
    return hidden * (2 * 2048 + 128 * heads) + 2 * hidden * 128 * heads + 2 * hidden * heads


def gated_attention(hidden: int, heads: int, kv_heads: int) -> int:
    """Queries and their gate, keys, values, output; heads of 256."""
    return hidden * 256 * (2 * heads + 2 * kv_heads + heads)


# Of a recurrent layer: convolution, two decays a head, norm of a head; of an attention: two norms.
def delta_small(heads: int) -> int:
    return 4 * (4096 + 128 * heads) + 2 * heads + 128


BY_HAND = {
    "Qwen/Qwen3.5-4B": ByHand(
        used=24 * gated_delta(2560, 32) + 8 * gated_attention(2560, 16, 4)
        + 32 * 3 * 2560 * 9216 + 248320 * 2560,
        small=24 * delta_small(32) + 8 * 2 * 256 + 32 * 2 * 2560 + 2560,
        cached=(8 * 2 * 4 * 256 * 1000, 8 * 2 * 4 * 256 * 30000),
        state=24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192),  # 48 and 1.1 MiB
        attended=8 * 4 * 16 * 256 * 1001 + 24 * (2 * 4 * 8192 + 8 * 32 * 128 * 128),
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ByHand(
        used=36 * gated_delta(2048, 32) + 12 * gated_attention(2048, 16, 2)
        + 48 * (512 * 2048 + (10 + 1) * 3 * 2048 * 512) + 151936 * 2048,
        unused=48 * (512 - 10) * 3 * 2048 * 512 + 151936 * 2048,
        small=36 * delta_small(32) + 12 * 2 * 256 + 48 * 3 * 2048 + 2048,  # with a shared gate
        cached=(12 * 2 * 2 * 256 * 1000, 12 * 2 * 2 * 256 * 30000),
        state=36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192),  # 72 and 1.7 MiB
        attended=12 * 4 * 16 * 256 * 1001 + 36 * (2 * 4 * 8192 + 8 * 32 * 128 * 128),
    ),
    "openai/gpt-oss-20b": ByHand(
        used=24 * (2880 * 64 * (64 + 8 + 8 + 64) + 32 * 2880 + 4 * 3 * 2880 * 2880)
        + 201088 * 2880,
        unused=24 * (32 - 4) * 3 * 2880 * 2880 + 201088 * 2880,
        # two norms, biases of q, k, v, output, router and experts, and a sink a head
        small=24 * (2 * 2880 + 64 * (64 + 8 + 8) + 2880 + 32 + 32 * (2 * 2880 + 2880) + 64) + 2880,
        cached=(2 * 8 * 64 * (12 * 1000 + 12 * 128), 2 * 8 * 64 * (12 * 30000 + 12 * 128)),
        attended=4 * 64 * 64 * (12 * 1001 + 12 * 128),
    ),
    "google/gemma-4-31B-it": ByHand(
        # 50 layers with a window: q, k, v, output; 10 without: one projection for k and v
        used=50 * 5376 * 256 * (32 + 16 + 16 + 32) + 10 * 5376 * 512 * (32 + 4 + 32)
        + 60 * 3 * 5376 * 21504 + 262144 * 5376,
        small=60 * 4 * 5376 + 50 * 2 * 256 + 10 * 2 * 512 + 5376,
        cached=(
            (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512) * 1000,
            50 * 2 * 16 * 256 * 1024 + 10 * 2 * 4 * 512 * 30000,
        ),
        attended=4 * 32 * (50 * 256 + 10 * 512) * 1001,
    ),
    "tiiuae/Falcon-H1-7B-Instruct": ByHand(
        # attention and mamba2 in every layer: z, x, B, C and a step for each of 24 heads
        used=44 * (3072 * 128 * (12 + 2 + 2 + 12) + 3072 * (2 * 3072 + 2 * 256 + 24) + 3072 * 3072)
        + 44 * 3 * 3072 * 12288 + 130048 * 3072,
        unused=130048 * 3072,
        small=44 * (2 * 3072 + (4 + 1) * (3072 + 2 * 256) + 3 * 24) + 3072,
        cached=(44 * 2 * 2 * 128 * 1000, 44 * 2 * 2 * 128 * 30000),
        state=44 * (4 * 24 * 128 * 256 + 2 * 3 * 3584),  # 132 and 0.9 MiB
        attended=44 * (4 * 12 * 128 * 1001 + 2 * 4 * 3584 + 6 * 24 * 128 * 256),
    ),
    "LiquidAI/LFM2-1.2B": ByHand(
        # an FFN of 2/3 x 12288; a convolution's input is three times the hidden width
        used=10 * 2048 * (3 + 1) * 2048 + 6 * 2048 * 64 * (32 + 8 + 8 + 32)
        + 16 * 3 * 2048 * 8192 + 65536 * 2048,
        small=10 * 3 * 2048 + 6 * 2 * 64 + 16 * 2 * 2048 + 2048,
        cached=(6 * 2 * 8 * 64 * 1000, 6 * 2 * 8 * 64 * 30000),
        state=10 * 2 * 2 * 2048,
        attended=6 * 4 * 32 * 64 * 1001 + 10 * 2 * 3 * 2048,
    ),
    "Kimi-Linear-48B-A3B": ByHand(
        # q, k, v; a decay and a gate of each channel by way of 128; a step size a head; output
        used=20 * (2304 * (3 * 4096 + 2 * 128 + 32) + 2 * 128 * 4096 + 4096 * 2304)
        + 7 * (2304 * 32 * 192 + 2304 * 576 + 512 * 32 * 256 + 32 * 128 * 2304)
        + 3 * 2304 * 9216 + 26 * (256 * 2304 + (8 + 1) * 3 * 2304 * 1024) + 163840 * 2304,
        unused=26 * (256 - 8) * 3 * 2304 * 1024 + 163840 * 2304,
        small=20 * (4 * 3 * 4096 + 4096 + 32 + 128) + 7 * 512 + 27 * 2 * 2304 + 26 * 256 + 2304,
        cached=(7 * 576 * 1000, 7 * 576 * 30000),
        state=20 * (4 * 32 * 128 * 128 + 2 * 3 * 12288),  # 40 and 1.4 MiB
        attended=7 * 2 * 32 * (576 + 512) * 1001 + 20 * (2 * 4 * 12288 + 8 * 32 * 128 * 128),
    ),
    "DeepSeek-V3.2": ByHand(
        used=61 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128**2 * 7168)
        + 61 * (1536 * 64 * 128 + 7168 * (128 + 64))  # the indexers: queries, keys, weights
        + 3 * 3 * 7168 * 18432 + 58 * (256 * 7168 + 9 * 3 * 7168 * 2048) + 129280 * 7168,
        unused=58 * 248 * 3 * 7168 * 2048 + 129280 * 7168,
        small=61 * (2 * 7168 + 1536 + 512 + 2 * 128) + 58 * 256 + 7168,
        cached=(61 * (576 + 128) * 1000, 61 * (576 + 128) * 30000),
        attended=61 * 2 * (128 * (576 + 512) + 64 * 128) * 1001,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_published_models_by_hand(name):
    a, hand = architecture(name), BY_HAND[name]
    assert a.parameters == hand.used + hand.unused + hand.small
    value = ValueBytes()
    for tokens, values in zip((1000, 30000), hand.cached, strict=True):
        assert sequence_bytes(a, tokens, value) == 2 * values + hand.state
    assert a.state_bytes() == hand.state
    assert physical_flops(a, 1, 1000).total == 2 * hand.used + hand.attended
    assert ModelArchitecture.from_dict(a.to_dict()) == a
    drafter = block_architecture(a)  # a plain transformer
    assert not drafter.state_bytes() and not drafter.index_values
    assert drafter.attention_layers == drafter.layers
    assert np.isfinite(physical_flops(drafter, 16, 100).total)


def test_a_verification_moves_states_and_stash_but_no_state_a_node():
    a = architecture("Qwen/Qwen3.5-4B")
    state, row = a.state_bytes(), 24 * (4 * (2048 + 4096) + 2 * 8192)
    assert physical_bytes(a, 1, 1000, 3).state == 3 * 2 * state
    assert physical_bytes(a, 16, 1000, 3).state == 3 * (2 * state + 2 * 16 * row)
    assert paper_bytes(a, 16, 1000, 3).state == 3 * (3 * state + 2 * 16 * row)
    few, many = physical_bytes(a, [2, 64], 1000).state
    assert many - few == 62 * 2 * row < 62 * state / 20
    peaks = Peaks(flops_per_s=1e15, bytes_per_s=1e12)
    *_, cache_s = work_terms(Roofline(architecture=a, peaks=peaks), 16, 1000, 3)
    assert cache_s == pytest.approx(3 * (8 * 2048 * 2 * 1000 + 2 * state + 32 * row) / 1e12)


def test_caches_count_each_layer_by_its_window_and_shape_and_split_it_by_its_heads():
    a = architecture("google/gemma-4-31B-it")
    moved = physical_bytes(a, 4, 5000)
    assert moved.kv_read == pytest.approx(
        2 * (50 * 2 * 16 * 256 * 1023 + 10 * 2 * 4 * 512 * 5000), rel=1e-12
    )
    assert moved.kv_write == 2 * 4 * (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512)
    terms = work_terms(Roofline(architecture=a, peaks=Peaks(flops_per_s=1, bytes_per_s=1)), 1, 5000)
    seen = 4 * 32 * (50 * 256 * (1023 + 1) + 10 * 512 * (5000 + 1))
    assert terms[3] == pytest.approx(seen)
    windowed, full = 50 * 2 * (16 // 8) * 256, 10 * 2 * 1 * 512
    assert cache_bytes_per_token(a, ValueBytes(), 8) == 2 * (windowed + full)
    assert sequence_bytes(a, 5000, ValueBytes(), 8) == 2 * (windowed * 1024 + full * 5000)


def test_indexers_single_layers_and_layers_that_share_keys():
    a = architecture("DeepSeek-V3.2")
    near, far = physical_flops(a, 1, 5000).total, physical_flops(a, 1, 9000).total
    assert far - near == 61 * 2 * 64 * 128 * 4000
    assert physical_bytes(a, 1, 5000).kv_read == 2 * 61 * (576 * 2048 + 128 * 5000)
    a = architecture("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B")
    assert (a.attention_layers, a.recurrent_layers, a.sparse_layers) == (6, 23, 23)
    assert a.token_values == 6 * 2 * 2 * 128
    assert a.state_bytes() == 23 * (4 * 64 * 64 * 128 + 2 * 3 * (64 * 64 + 2 * 8 * 128))
    own = find_target("google/gemma-4-31B-it")
    a = read_model(own.hf_config | {"num_kv_shared_layers": 12}, "test")[1]
    assert a.token_values == 40 * 2 * 16 * 256 + 8 * 2 * 4 * 512
    assert cache_bytes_per_token(a, ValueBytes()) == 2 * a.token_values
    own = own.architecture
    fewer = 10 * 5376 * 256 * 32 + 2 * 5376 * 512 * 4 + 10 * 256 + 2 * 512
    assert own.parameters - a.parameters == fewer
    assert physical_bytes(a, 1, 100).kv_read == physical_bytes(own, 1, 100).kv_read


def test_chunks_and_windows_by_counting():
    a = dataclasses.replace(
        architecture("openai/gpt-oss-20b"), full_layers=0, sliding_window=8, chunked=True
    )
    b = architecture("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert (b.sliding_window, b.full_layers, b.chunked) == (8192, 12, True)
    for rows, context in ((1, 0), (1, 7), (5, 6), (20, 13)):
        keys = sum((context + i) % 8 + 1 for i in range(rows))
        flops = physical_flops(a, rows, context)
        assert flops.scores + flops.values == pytest.approx(24 * 4 * 64 * 64 * keys)
        assert physical_bytes(a, rows, context).kv_read == 24 * 2 * 2 * 8 * 64 * (context % 8)

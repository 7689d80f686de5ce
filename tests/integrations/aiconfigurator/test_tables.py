"""Reading the published tables: a made-up package, and the real one where it is installed."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from costmodel.catalog import find_device, find_target
from costmodel.compose.attention import LatentTable, TileForm
from costmodel.compose.operators import ComposedForward
from costmodel.compose.profiles import CONTEXTS, ROWS, composed_profile, error_bar
from costmodel.errors import DeviceError, InputError
from costmodel.planning.forwards import TargetForward
from costmodel.roofline import distinct_experts
from integrations.aiconfigurator import experts
from integrations.aiconfigurator import tables as published
from integrations.aiconfigurator.experts import all_experts
from integrations.aiconfigurator.tables import load_published
from tests.costmodel.conftest import LLAMA, measured_forwards

MOE = find_target("Qwen/Qwen3-30B-A3B").architecture
H100 = find_device("h100-sxm")
PRO = find_device("rtx-pro-6000-server")


def needs_operators() -> None:
    for package in ("aiconfigurator_core", "pyarrow"):
        pytest.importorskip(package, reason="the extra 'operators' is not installed")


def forward_of(tables, architecture=LLAMA, **split) -> ComposedForward:
    return ComposedForward(architecture=architecture, tables=tables, **split)


def gemm_table():
    n, k, m = (x.ravel() for x in np.meshgrid([128, 4096, 65536], [2048, 16384], [1, 64, 1024]))
    seconds = np.maximum(2 * m * n * k / 9e14, 2.0 * n * k / 3e12) + 2e-6
    return {
        "gemm_dtype": np.array(["bfloat16"] * len(n) + ["fp8"]), "m": np.append(m, 1),
        "n": np.append(n, 128), "k": np.append(k, 2048), "latency": np.append(seconds * 1e3, 1e-9),
    }  # fmt: skip


def attention_table(kind):
    lines = []
    for heads, kv_heads in ((1, 1), (32, 8), (32, 4)):
        for tokens in (1, 32, 1024, 4096, 16384):
            context = kind == "context"
            work_s = heads * tokens**2 * 1e-13 if context else tokens * kv_heads * 2e-10
            lines.append((1, tokens if context else 1, 0 if context else tokens - 1,
                          heads, kv_heads, 1e3 * (9e-6 + work_s)))  # fmt: skip
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "latency")
    columns = zip(names, zip(*lines, strict=True), strict=True)
    table = {name: np.array(values) for name, values in columns}
    label = {"kernel_source": "vllm_flash_attn_fa2", "attn_dtype": "bfloat16"}
    label |= {"kv_cache_dtype": "bfloat16"}
    table |= {name: np.array([value] * len(lines)) for name, value in label.items()}
    return table | {"head_dim": np.full(len(lines), 128)}


def moe_table():
    """Microseconds of each expert read: 4 alone, 3 in halves on two devices, 2 by whole ones."""
    tokens = np.array([1, 2, 4, 8, 16, 64, 1024] * 3)
    tp, ep = np.repeat([1, 2, 1], 7), np.repeat([1, 1, 2], 7)
    count = len(tokens)
    sizes = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128}
    return {
        "moe_dtype": np.array(["bfloat16"] * count), "moe_tp_size": tp, "moe_ep_size": ep,
        "distribution": np.array(["balanced"] * count), "num_tokens": tokens,
        "latency": 1e-3 * (5 - tp - 2 * (ep - 1)) * np.minimum(8 * tokens, 128),
        **{name: np.full(count, size) for name, size in sizes.items()},
    }  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):

    def fake_table(path: Path, columns):
        kind = path.name.split("_")[0]
        made = {"gemm": gemm_table, "moe": moe_table, "gdn": gdn_table}
        table = made[kind]() if kind in made else attention_table(kind)
        return {name: table[name] for name in columns if name in table}

    for system, version in (("h100_sxm", "0.9.0"), ("h100_sxm", "0.24.0"),
                            ("rtx_pro_6000_server", "0.19.0")):  # fmt: skip
        for operator in ("gemm", "attention", "moe"):
            folder = tmp_path / system / operator / "vllm" / version
            folder.mkdir(parents=True)
            (folder / "moe_perf.parquet").touch()
    monkeypatch.setattr(published, "data_folder", lambda: tmp_path)
    for module in (published, experts):
        monkeypatch.setattr(module, "read_table", fake_table)
    return tmp_path


def test_the_newest_sound_version_is_read_and_named(package):
    tables = load_published(H100)
    assert tables.source.endswith("h100_sxm, vllm 0.24.0")
    assert tables.attention.form.tile_rows == 64
    assert tables.matmul.seconds([1], 128, 2048)[0] == pytest.approx(2e-6, rel=0.2)
    with pytest.raises(DeviceError, match="no sound vllm tables of rtx_pro_6000_server"):
        load_published(PRO)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="aiconfigurator-core and pyarrow is not installed") as bad:
        load_published(H100)
    assert "rooftree[operators]" in bad.value.hint


def test_a_forward_is_the_sum_of_its_operators_and_of_all_reduces(package):
    forward = forward_of(load_published(H100))
    total = forward.seconds([1, 64], [1024])
    rows = np.array([1.0, 64.0])
    parts = forward.linear_s(rows) + forward.lm_head_s(rows)
    attention = [forward.attention_s(int(s), np.array([1024]))[0] for s in rows]
    assert total[:, 0] == pytest.approx(parts + attention)
    assert forward.prefill_s([64])[0] < total[1, 0]
    assert forward.extrapolated() == ["LM head (n = 128256 above 65536)"]
    tables = load_published(H100)
    alone = forward_of(tables)
    silent = forward_of(tables, tensor_parallel=2)
    curve = (np.array([1.0, 1e9]), np.array([5e-6, 5e-6]))
    reducing = dataclasses.replace(tables, all_reduce={2: curve})
    talking = forward_of(reducing, tensor_parallel=2)
    one, two, paid = (forward.seconds([16], [1024])[0, 0] for forward in (alone, silent, talking))
    assert 0.5 * one < two < 0.7 * one
    assert paid - two == pytest.approx(2 * LLAMA.layers * 5e-6)


def test_experts_are_counted_as_the_expected_distinct_ones(package):
    tables = load_published(H100, experts=True)
    tokens = np.array([1.0, 4.0, 16.0, 64.0])
    seconds = tables.expert_table(MOE).seconds(MOE, tokens)
    assert seconds == pytest.approx(4e-6 * distinct_experts(MOE, tokens), rel=0.02)
    forward_of(tables, MOE).seconds([1], [256])


@pytest.mark.parametrize(("factors", "form", "us"), [
    ((1, 0.6, 0.5), "", 2.4), ((1, 2.4, 0.5), "fp8_block", 2.0), ((1, 2.4, 1.5), "bfloat16", 4.0),
    ((1, 2.4, 1.5, 0.6), "fp8 of sglang", 2.4), ((1, 0.01, 0.5), "fp8_block", 2.0),
])  # fmt: skip
def test_experts_that_no_gpu_times_so_are_taken_in_another_form(
    package, monkeypatch, factors, form, us
):
    """Slower than in bfloat16, or faster than the memory."""
    plain, names = moe_table(), ("bfloat16", "fp8", "fp8_block", "fp8")
    tables = [
        plain | {"moe_dtype": np.array([name] * 21), "latency": factor * plain["latency"]}
        for name, factor in zip(names, factors, strict=False)
    ]
    whole = {name: np.concatenate([one[name] for one in tables[:3]]) for name in plain}
    (package / "h100_sxm/moe/sglang/1").mkdir(parents=True)
    (package / "h100_sxm/moe/sglang/1/moe_perf.parquet").touch()
    by_engine = {"vllm": whole, "sglang": tables[-1]}
    monkeypatch.setattr(experts, "read_table", lambda path, _: by_engine[path.parts[-3]])
    tables = all_experts(package / "h100_sxm", H100, "vllm", "fp8")
    table = tables[2048, 768, 8, 128, 1, 1]
    assert table.form == form
    seconds = us * 1e-6 * distinct_experts(MOE, table.tokens)
    assert table.seconds(MOE, table.tokens) == pytest.approx(seconds, rel=0.02)


def test_4_bit_weights_meet_8_bit_inputs_where_the_device_multiplies_both(package, monkeypatch):
    """Whichever engine timed them; elsewhere its own in 16 bits. Skewed by half: the root of it."""
    plain, other = moe_table(), []
    for name, spread, factor in (("w4a16_mxfp4", "balanced", 1.0),
                                 ("w4a16_mxfp4", "power_law_1.01", 0.25),
                                 ("w4a8_mxfp4_mxfp8", "balanced", 0.6)):  # fmt: skip
        labels = {"moe_dtype": np.array([name] * 21), "distribution": np.array([spread] * 21)}
        other.append(plain | labels | {"latency": factor * plain["latency"]})
    whole = {name: np.concatenate([one[name] for one in other[:2]]) for name in plain}
    by_engine = {"vllm": whole, "sglang": other[2]}
    monkeypatch.setattr(experts, "read_table", lambda path, _: by_engine[path.parts[-3]])
    for system, us in (("h100_sxm", 2.0), ("b200_sxm", 2.4)):
        for engine in by_engine:
            folder = package / system / "moe" / engine / "1"
            folder.mkdir(parents=True)
            (folder / "moe_perf.parquet").touch()
        device = find_device(system.removesuffix("_sxm") + "-sxm" * (system[0] == "h"))
        table = all_experts(package / system, device, "vllm", "mxfp4")[2048, 768, 8, 128, 1, 1]
        tokens = np.array([64.0, 1024.0])
        assert table.seconds(MOE, tokens) == pytest.approx(
            us * 1e-6 * distinct_experts(MOE, tokens), rel=0.1
        )


@pytest.mark.parametrize(
    ("tp", "dp", "whole", "us"), [(2, 1, False, 3), (2, 1, True, 2), (1, 2, True, 2)]
)
def test_experts_on_several_devices_are_their_share(package, tp, dp, whole, us):
    tables = load_published(H100, experts=True)
    size = np.array([1.0, 1e9])
    tables = dataclasses.replace(tables, all_reduce={2: (size, np.array([0.0, 1.0]))})
    split = {"tensor_parallel": tp, "data_parallel": dp, "expert_parallel": whole}
    forward = forward_of(tables, MOE, **split)
    rows = np.array([16.0, 64.0])
    used = distinct_experts(MOE, dp * rows)
    experts = us * 1e-6 * (2 * forward._most_experts(used / 2) if whole else used)
    moved = forward._ffn_s(rows) - forward._products_s(rows, ("router",))
    assert moved == pytest.approx(MOE.layers * experts, rel=0.03)
    reduced = np.array([1e-9 * (tp == 2) + 1e-9 * dp]) * rows * MOE.hidden
    moved = forward._all_reduce_s(rows, tp) + forward._all_reduce_s(dp * rows, 2)
    assert moved == pytest.approx(reduced, rel=0.01)
    profile = composed_profile(forward, error_bar(forward))
    assert profile.target.architecture.experts == MOE.experts // dp
    assert TargetForward(profile).tensor_parallel == tp


@pytest.mark.parametrize(("devices", "rows"), [(2, 8), (4, 16), (8, 1), (8, 8), (8, 32)])
def test_all_devices_wait_for_the_one_that_uses_most_experts(package, devices, rows):
    """As drawn: each row takes 8 of 128 experts, of which each device has as many."""
    draws = np.random.default_rng(0).random((400, rows, 128)).argsort(axis=2)[:, :, :8]
    used = np.zeros((400, 128))
    np.put_along_axis(used, draws.reshape(400, -1), 1, axis=1)
    most = used.reshape(400, devices, -1).sum(axis=2).max(axis=1).mean()
    tables = load_published(H100, experts=True)
    forward = forward_of(tables, MOE, tensor_parallel=devices, expert_parallel=True)
    mean = distinct_experts(MOE, np.array([rows])) / devices
    assert forward._most_experts(mean) == pytest.approx(most, rel=0.1)
    seconds = forward.experts_s(np.arange(1.0, 300.0))
    assert np.all(np.diff(seconds) >= 0) and seconds[0] > 0


def test_what_cannot_be_split_so_and_other_bad_requests_are_refused(package):
    tables = load_published(H100, experts=True)
    with pytest.raises(InputError, match="data_parallel 3 does not divide 128 experts"):
        forward_of(tables, MOE, data_parallel=3)
    blocks = dataclasses.replace(tables, weights="fp8_block")
    with pytest.raises(InputError, match="do not divide the 192 columns of an expert") as refused:
        forward_of(blocks, MOE, tensor_parallel=4)
    assert "--enable-expert-parallel" in refused.value.hint
    forward_of(blocks, MOE, tensor_parallel=4, expert_parallel=True)
    with pytest.raises(InputError, match="has no experts to share"):
        forward_of(tables, data_parallel=2)
    with pytest.raises(InputError, match="no engine is called 'tgi'"):
        load_published(H100, "tgi")
    with pytest.raises(DeviceError, match="no published operator tables of NVIDIA L4") as missing:
        load_published(find_device("l4"))
    assert "`rooftree transfer` scales a profile, from" in missing.value.hint
    tables = load_published(H100)
    with pytest.raises(InputError, match="tensor_parallel 3 does not divide 32 heads"):
        forward_of(tables, tensor_parallel=3)
    small = find_target("Llama-3.2-1B-Instruct").architecture
    with pytest.raises(InputError, match="heads of size 128"):
        forward_of(tables, small)
    with pytest.raises(InputError, match="no heads of size 64"):
        load_published(H100, head_dim=64)


def test_windows_in_some_layers_are_the_sum_of_both_kinds_of_layer(package):
    tables = load_published(H100)
    windowed = dataclasses.replace(LLAMA, sliding_window=2048)
    mixed = dataclasses.replace(windowed, full_layers=8)
    forwards = [forward_of(tables, a) for a in (LLAMA, windowed, mixed)]
    context = np.array([128.0, 4096.0])
    full, narrow, both = (forward.attention_s(4, context) for forward in forwards)
    assert both == pytest.approx(full * 8 / 32 + narrow * 24 / 32)
    assert narrow[0] == full[0] and narrow[1] < full[1]
    full, narrow, both = (forward.prefill_s([256, 16384]) for forward in forwards)
    assert narrow[0] == pytest.approx(full[0]) and narrow[1] < both[1] < full[1]


def test_shared_experts_and_dense_layers_are_products_beside_the_experts(package):
    tables = load_published(H100, experts=True)
    rows = np.array([4.0])
    plain = forward_of(tables, MOE)
    shared = dataclasses.replace(MOE, shared_ffn=1024)
    extra = forward_of(tables, shared).linear_s(rows)
    product = tables.matmul.seconds(rows, 2 * 1024, MOE.hidden)
    product = product + tables.matmul.seconds(rows, MOE.hidden, 1024)
    product = product + tables.small.seconds("activation", rows, 1024)
    assert extra == pytest.approx(plain.linear_s(rows) + MOE.layers * product)
    dense = dataclasses.replace(shared, ffn=1024, dense_layers=MOE.layers - 1)
    dense = forward_of(tables, dense)
    # all but one layer have the dense FFN instead of router, experts and shared one
    layer = (plain.linear_s(rows) - dense.linear_s(rows)) / (MOE.layers - 1)
    expected = tables.expert_table(MOE).seconds(MOE, rows)
    expected = expected + tables.matmul.seconds(rows, MOE.experts, MOE.hidden)
    gained = product / (MOE.layers - 1)  # by the one sparse layer
    assert layer == pytest.approx(expected - product - gained, rel=0.05)


def gdn_table():
    """Microseconds: a convolution 2, one row 5 a sequence; a chunk of several rows 12."""
    lines = []
    for batch in (1, 4):
        for phase, rows, rule in (("generation", 1, 5 * batch), ("context", 1, 12),
                                  ("context", 64, 12), ("context", 1024, 192)):  # fmt: skip
            lines.append((phase, "causal_conv1d_fn", batch, rows, 2e-3))
            lines.append((phase, "chunk_gated_delta_rule", batch, rows, 1e-3 * rule))
    names = ("phase", "kernel_source", "batch_size", "seq_len", "latency")
    columns = zip(names, zip(*lines, strict=True), strict=True)
    table = {name: np.array(column) for name, column in columns}
    sizes = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
    return table | {name: np.full(len(lines), n) for name, n in (sizes | {"d_conv": 4}).items()}


HYBRID = dataclasses.replace(
    LLAMA, name="hybrid", recurrent="gated_delta", recurrent_layers=24, keyless_layers=24,
    state_heads=32, state_groups=16, state_key_dim=128, state_value_dim=128, conv_width=4,
)  # fmt: skip


@pytest.fixture
def hybrid(package):
    folder = package / "h100_sxm" / "linear_attention" / "vllm" / "0.24.0"
    folder.mkdir(parents=True)
    (folder / "gdn_perf.parquet").touch()
    return forward_of(load_published(H100), HYBRID)


def test_recurrent_layers_are_summed_beside_those_with_attention(hybrid):
    """24 of 32 layers: one row 24 x (2 + 5) us, up to 64 rows 24 x (2 + 12) us."""
    rows = np.array([1.0, 32.0, 128.0])
    assert hybrid.recurrent_s(rows) == pytest.approx([168e-6, 336e-6, 24 * 26e-6])
    assert hybrid.recurrent_s(rows[:1], 2)[0] == pytest.approx(24 * 12e-6)  # 7 and 22 us, a third
    assert hybrid.recurrent_s(rows[:1], 8)[0] == pytest.approx(24 * 44e-6)
    plain = forward_of(hybrid.tables)
    context = np.array([1024.0])
    assert hybrid.attention_s(8, context) == pytest.approx(plain.attention_s(8, context) / 4)
    matmul, small = hybrid.tables.matmul, hybrid.tables.small
    products = [matmul.seconds(rows, n, 4096) for n in (8192 + 4096, 64, 4096, 6144, 4096)]
    mixer = small.seconds("norm", rows, 4096) + sum(products[:3])
    attention = small.seconds("rotary", rows, 5120) + sum(products[3:])
    assert hybrid.linear_s(rows) == pytest.approx(plain.linear_s(rows) + 24 * (mixer - attention))
    total = hybrid.seconds(rows, context)[1, 0] - hybrid.attention_s(32, context)[0]
    parts = hybrid.linear_s(rows) + hybrid.lm_head_s(rows) + hybrid.recurrent_s(rows)
    assert total == pytest.approx(parts[1])


def by_hand(change, rows, context, batch):
    """Seconds of one layer's estimated part: launches, bytes and FLOPs."""
    if change == "latent":
        seen = batch * (context + rows / 2)
        moved, flops = 2 * seen * 4096, 2 * seen * rows * 32 * (4096 + 4032)
        return 15e-6 + moved / (0.9 * 3.35e12) + 0.5 * flops / 989.4e12
    state = 32 * 128 * 128
    flops = 6 * state + 2 * 4 * (2 * 16 * 128 + 32 * 128)
    return 10e-6 + 8 * state * batch / 3.35e12 + batch * rows * flops / (0.1 * 989.4e12)


LATENT = {"kv_heads": 32, "latent_rank": 4032, "rope_dim": 64, "value_dim": 128, "head_dim": 192}


def test_parts_without_tables_are_estimated_and_widen_the_bar(package, hybrid):
    tables = load_published(H100)
    tables = dataclasses.replace(tables, matmul=dataclasses.replace(tables.matmul))
    object.__setattr__(tables.matmul, "read_bytes_per_s", 3.35e12)
    latent = forward_of(tables, dataclasses.replace(LLAMA, **LATENT))
    mamba = forward_of(tables, dataclasses.replace(HYBRID, recurrent="mamba2"))
    context = np.array([4096.0])
    assert latent.attention_s(8, context, 4) == pytest.approx(32 * by_hand("latent", 8, 4096, 4))
    states_s = 24 * by_hand("states", 8, 0, 4)
    assert mamba.recurrent_s(np.array([8.0]), 4) == pytest.approx(states_s)
    assert dataclasses.replace(hybrid, tensor_parallel=2).estimated == ("recurrent layers",)
    coder = dataclasses.replace(MOE, expert_ffn=512)
    mixture = forward_of(tables, coder)
    moved, flops = 8 * 2 * 3 * 2048 * 512, 2 * 8 * 3 * 2048 * 512
    one_s = 20e-6 + moved / (0.6 * 3.35e12) + flops / (0.4 * 989.4e12)
    assert mixture.experts_s(np.ones(1)) == pytest.approx(48 * one_s)
    plain = error_bar(forward_of(tables))
    assert plain.estimated == 0
    for forward, part in ((latent, "latent attention"), (mamba, "recurrent layers"),
                          (mixture, "experts")):  # fmt: skip
        bar = error_bar(forward)
        assert 0 < bar.estimated < 0.4 and bar.total > bar.estimated
        note = composed_profile(forward, bar).provenance.note
        assert f"estimated from bytes and FLOPs: {part}" in note


def test_latent_attention_is_that_of_the_tables(package):
    """Of 8 heads, 20 us; or a whole layer of 90 us, which the products' time is taken off."""
    sizes = LATENT | {"latent_rank": 512, "query_rank": 1536}
    tables = load_published(H100)
    cells = {8: {(1, 1): 20e-6, (1, 8192): 20e-6, (64, 1): 40e-6, (64, 8192): 80e-6}}
    table = LatentTable(generation=cells, context=cells, projects=False, source="made up")
    latent = {(512, 64, 192, 128): table}
    with_latent = dataclasses.replace(tables, latent=lambda: latent)
    target, context = dataclasses.replace(LLAMA, **sizes), np.array([8191.5])
    forward = forward_of(with_latent, target, tensor_parallel=4)
    assert forward.attention_s(1, context, 64) == pytest.approx(32 * 80e-6)
    several = forward_of(tables, target, tensor_parallel=4)
    more = several.attention_s(8, context - 3.5, 64) - several.attention_s(1, context, 64)
    assert forward.attention_s(8, context - 3.5, 64) == pytest.approx(32 * 80e-6 + more)
    assert forward.estimated == () and several.estimated == ("latent attention",)
    note = composed_profile(forward, error_bar(forward)).provenance.note
    assert "latent attention: made up" in note
    chosen = dataclasses.replace(target, index_heads=64, index_dim=128, index_topk=2048,
                                 index_layers=32)  # fmt: skip
    whole = {8: {place: 70e-6 + s for place, s in cells[8].items()}}
    layer = LatentTable(generation=whole, context=whole, projects=True, source="a layer")
    latent[512, 64, 192, 128, 32, 2048] = layer
    measured = forward_of(with_latent, chosen, tensor_parallel=4)
    for batch, whole_s in ((1, 90e-6), (64, 150e-6)):
        made_s = measured._projections_s(np.array([float(batch)]))[0]
        expected = pytest.approx(32 * (whole_s - made_s))
        assert made_s > 5e-6 and measured.attention_s(1, context, batch)[0] == expected
    estimated = forward_of(tables, chosen, tensor_parallel=4)
    short_s, long_s = estimated.attention_s(1, np.array([2048.0, 65536.0]))
    unread_s = 32 * 63488 * (128 / (0.9 * 3.35e12) + 2 * 64 * 128 / 989.4e12)
    assert long_s - short_s == pytest.approx(unread_s, rel=1e-3)  # the indexer's alone


@pytest.mark.parametrize(("device", "cache", "most_us"), [("h200", "fp8", 40), ("b200", "fp8", 25)])
def test_published_latent_attention(device, cache, most_us):
    """A cache of 8 bits is no slower than of 16; layers with an indexer are SGLang's."""
    needs_operators()
    tables = load_published(find_device(device), "sglang", weights="fp8_block", cache=cache)
    kernel, layer = (tables.latent()[512, 64, *rest] for rest in ((192, 128), (256, 256, 64, 2048)))
    assert kernel.source == "sglang's kernels" and not kernel.projects
    assert kernel.one_row_s(16, np.array([1024.0]), 64)[0] < most_us * 1e-6
    assert layer.projects and max(batch for batch, _ in layer.generation[8]) in (256, 512)
    target = find_target("deepseek-ai/DeepSeek-V3").architecture
    assert forward_of(tables, target, tensor_parallel=8).latent is kernel


def test_other_sequences_pay_for_their_states(hybrid):
    profile = composed_profile(hybrid, error_bar(hybrid))
    note = "of trees up to 64 rows, beyond which the times are those of a chain"
    assert note in profile.provenance.note
    forward = TargetForward(profile, "rooftree")
    assert forward.most_tree_rows == 64
    verify, plain = profile.verify_calibration(), profile.stages.plain
    more_s = plain.seconds(64, 16) - float(verify.predict_s(16, 64))
    assert more_s > 24 * (88e-6 - 14e-6)  # 4 times 2 + 20 us in the table's form, one chunk less
    expected = float(verify.predict_s(64, 64)) + more_s
    assert forward.decode(16, 64, 4).products == pytest.approx(expected)


@pytest.mark.parametrize("splits", [False, True], ids=["fa2", "fa3"])
def test_half_of_what_split_keys_save_is_doubted(package, splits):
    """Of any kernel for prompts: that verifications split their keys was measured of none."""
    tables = load_published(H100)
    unsplit = TileForm(tile_rows=128)
    form = dataclasses.replace(unsplit, splits_keys=splits, packs_groups=splits)
    kernels = [dataclasses.replace(tables.attention, form=each) for each in (unsplit, form)]
    both = [dataclasses.replace(tables, attention=kernel) for kernel in kernels]
    walking, forward = (forward_of(one) for one in both)
    rows = [count for count in ROWS if 1 < count <= 256]
    saved = 1 - forward.verifying().seconds(rows, CONTEXTS) / walking.seconds(rows, CONTEXTS)
    bar = error_bar(forward)
    assert bar.attention == pytest.approx(np.mean(np.maximum(saved, 0)) / 2)
    assert bar.attention > 0.005
    assert bar.total == pytest.approx(np.hypot(np.hypot(0.025, bar.tables), bar.attention))
    stated = composed_profile(forward, bar).provenance
    assert stated.error_bar == pytest.approx(bar.total, abs=5e-4)
    assert f"{bar.attention:.1%} as splitting keys in a verification is unverified" in stated.note


def test_composed_against_measured(measured):
    """RTX PRO 6000 Server, Llama-3.1-8B, up to 256 rows on at most 4096 tokens."""
    needs_operators()
    forward = forward_of(load_published(PRO))
    shapes = zip(*measured_forwards(measured, "rtxpro6000-server_llama-3.1-8b_tp1"), strict=True)
    errors = [
        abs(forward.seconds([rows], [context])[0, 0] / seconds - 1)
        for rows, context, seconds in shapes
        if rows <= 256 and context <= 4096
    ]
    assert len(errors) > 100
    assert np.mean(errors) < 0.03
    assert np.max(errors) < 0.08


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm", "h200", "b200", "gb300", "l40s"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_rows_of_a_verification_cost_what_as_many_query_heads_do(device, engine):
    """16 rows of 4 query heads on one key-value head are one row of 64 heads: the same work."""
    needs_operators()
    attention = load_published(find_device(device), engine).attention.splitting_keys()
    assert proxy_error(attention, 16, 4, (1,)) < 0.1
    # 64 rows on a single key-value head take 4 us of 10 to 20 longer on B200 and GB300.
    alone = (device, engine) in (("b200", "vllm"), ("gb300", "vllm"), ("gb300", "sglang"))
    assert proxy_error(attention, 4, 16, (1,)) < (0.25 if alone else 0.15)


@pytest.mark.parametrize("device", ["h100-sxm", "b200", "gb300"])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
def test_so_do_those_of_many_sequences(device, cache):
    """Two and four rows of 32 heads' groups of 4, of 16 to 128 sequences at once."""
    needs_operators()
    attention = load_published(find_device(device), cache=cache).attention.splitting_keys()
    for heads, rows in ((16, 4), (16, 2), (32, 2)):
        assert proxy_error(attention, heads, rows, (16, 32, 64, 128)) < 0.1


def proxy_error(attention, heads, rows, batches):
    """Mean error against one row of `rows` x `heads` heads on as many key-value heads."""
    pair = rows * heads, heads // 4
    table = attention.generation[pair]
    errors = [
        attention.seconds(rows, [tokens], batch, heads, heads // 4)[0] / seconds - 1
        for (batch, tokens), seconds in table.items()
        if batch in batches and tokens >= 1000
    ]
    return np.mean(np.abs(errors))

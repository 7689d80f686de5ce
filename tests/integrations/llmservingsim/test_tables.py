"""Operator tables in a folder: both formats, and what is wrong with a bad one."""

import shutil

import numpy as np
import pytest

from costmodel.compose.operators import ComposedForward
from costmodel.errors import InputError
from integrations.llmservingsim.tables import folder_subject, load_folder
from tests.costmodel.conftest import LLAMA, measured_forwards

OPERATORS = "rtx-pro-6000-server_llama-3.1-8b_tp1"


def make_operators(folder):
    """Operator tables of a made-up speed, in the form of fused kernels."""
    place = folder / OPERATORS
    place.mkdir()
    sizes = [2**i for i in range(12)]
    layers = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embedding", "layernorm",
              "rotary_emb", "act_fn", "final_layernorm")  # fmt: skip
    dense = [f"{name},{n},{20 + i + 0.1 * n}" for i, name in enumerate(layers) for n in sizes]
    heads = [f"lm_head,{n},{700 + n}" for n in sizes[:8]]
    attention = [
        f"{rows},{cached},0,0,{5 + 0.02 * rows + 1e-5 * rows * (cached + rows)}"
        for rows in sizes[4:]
        for cached in (0, 512, 4096)
    ]
    attention += [
        f"0,0,{batch},{cached},{8 + 0.002 * batch * cached}"
        for batch in (1, 2, 4, 8)
        for cached in (16, 256, 1024, 4096, 16384)
    ]
    for name, head, rows in (
        ("dense.csv", "layer,tokens,time_us", dense),
        ("per_sequence.csv", "layer,sequences,time_us", heads),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention),
    ):
        (place / name).write_text("\n".join([head, *rows]) + "\n")


@pytest.mark.parametrize(("folder", "name", "limit"), [
    ("rtx-a6000_llama-3.1-8b_tp1", "rtx-a6000", 0.004),
    ("rtx-pro-6000-server_llama-3.1-8b_tp1", "rtxpro6000-server", 0.01),
])  # fmt: skip
def test_forwards_equal_their_published_sums(measured, folder, name, limit):
    forward = ComposedForward(
        architecture=LLAMA, tables=load_folder(measured / "operators" / folder)
    )
    rows, cached, seconds = measured_forwards(measured, f"{name}_llama-3.1-8b_tp1")
    if name == "rtx-a6000":
        cached = np.where(rows > 1, cached - rows, cached)
    here = cached <= 16384
    predicted = [
        forward.seconds([s], [c])[0, 0] for s, c in zip(rows[here], cached[here], strict=True)
    ]
    error = np.abs(np.array(predicted) / seconds[here] - 1)
    assert np.mean(error) < limit


def test_batches_on_one_cache_are_left_out_and_another_degree_refused(measured, tmp_path):
    tables = load_folder(measured / "operators" / "rtx-a6000_llama-3.1-8b_tp1")
    batches = {batch for batch, _ in tables.attention.generation[32, 8]}
    assert 1 in batches and not batches & {8, 64, 256}
    eight = tables.attention.seconds(1, [8192], 8, 32, 8)[0]
    assert eight > 8 * 8192 * 4096 / 768e9
    folder = tmp_path / "rtx-a6000_llama-3.1-8b_tp2"
    shutil.copytree(measured / "operators" / "rtx-a6000_llama-3.1-8b_tp1", folder)
    with pytest.raises(InputError, match="tensor_parallel 2, not 1"):
        ComposedForward(architecture=LLAMA, tables=load_folder(folder))


def test_the_folder_name_says_what_was_measured_and_bad_folders_are_refused(tmp_path):
    folder = tmp_path / "rtx-a6000_qwen3-8b_tp2"
    folder.mkdir()
    device, target, tensor_parallel = folder_subject(folder)
    assert (device.slug, target.name, tensor_parallel) == ("rtx-a6000", "Qwen/Qwen3-8B", 2)
    with pytest.raises(InputError, match="is not a folder"):
        load_folder(tmp_path / "nothing")
    nameless = tmp_path / "tables"
    nameless.mkdir()
    with pytest.raises(InputError, match="does not say what was measured"):
        load_folder(nameless)
    empty = tmp_path / "rtx-a6000_qwen3-8b_tp1"
    empty.mkdir()
    with pytest.raises(InputError, match=r"has no layers\.csv"):
        load_folder(empty)
    (empty / "layers.csv").write_text("layer_name,input\nq_proj,1\n")
    with pytest.raises(InputError, match=r"no column latency\(ns\)"):
        load_folder(empty)
    (empty / "layers.csv").write_text("layer_name,input,latency(ns)\nq_proj,1,fast\n")
    with pytest.raises(InputError, match="not a number"):
        load_folder(empty)


@pytest.mark.parametrize(("name", "before", "after", "message"), [
    ("per_sequence.csv", "lm_head,4,704", "lm_head,4,1e-320", "beyond all measure"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,,8.032", "a cell is empty"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,16,nan", "'nan' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,16,inf", "'inf' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,nan,8.032", "'nan' is negative or beyond"),
    ("per_sequence.csv", "lm_head,4,704", "lm_head,nan,704", "'nan' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,16", "a time that is empty"),
    ("attention.csv", "0,0,1,16,8.032", "0,0,1,16," + "9" * 200_000, "not a CSV file"),
])  # fmt: skip
def test_damaged_cells(tmp_path, name, before, after, message):
    make_operators(tmp_path)
    table = tmp_path / OPERATORS / name
    assert before in table.read_text()
    table.write_text(table.read_text().replace(before, after))
    with pytest.raises(InputError, match=message):
        load_folder(tmp_path / OPERATORS)

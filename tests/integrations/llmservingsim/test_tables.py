"""Operator tables in a folder: both formats, and what is wrong with a bad one."""

import shutil

import numpy as np
import pytest

from costmodel.compose.operators import ComposedForward
from costmodel.errors import InputError
from integrations.llmservingsim.tables import folder_subject, load_folder
from tests.conftest import DATA
from tests.costmodel.conftest import LLAMA, measured_forwards

OPERATORS = "rtx-pro-6000-server_llama-3.1-8b_tp1"


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
    ("per_sequence.csv", "lm_head,4,688.287", "lm_head,4,1e-320", "beyond all measure"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,,8.35233", "a cell is empty"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,16,nan", "'nan' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,16,inf", "'inf' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,nan,8.35233", "'nan' is negative or beyond"),
    ("per_sequence.csv", "lm_head,4,688.287", "lm_head,nan,688.287", "'nan' is negative or beyond"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,16", "a time that is empty"),
    ("attention.csv", "0,0,1,16,8.35233", "0,0,1,16," + "9" * 200_000, "not a CSV file"),
])  # fmt: skip
def test_damaged_cells(tmp_path, name, before, after, message):
    folder = shutil.copytree(DATA / "measured" / "operators" / OPERATORS, tmp_path / OPERATORS)
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))
    with pytest.raises(InputError, match=message):
        load_folder(folder)

"""Attention over cached tokens from tiles, waves and time a key."""

import dataclasses

import numpy as np
import pytest

from costmodel.compose.attention import Attention, TileForm, checked, measure_keys, rising
from costmodel.errors import InputError
from integrations.llmservingsim.tables import fit_tile_rows
from tests.costmodel.conftest import measured_forwards

KEY_S = 20e-9


def attention(form, *, sm_count=100, busy_key_s=KEY_S):
    pair = (32, 8)
    return Attention(
        generation={pair: {(1, 1): 9e-6, (1, 10001): 59e-6, (4, 1): 9e-6, (4, 10001): 209e-6}},
        context={pair: {(1, 1): 8e-6, (1, 64): 10e-6, (1, 512): 40e-6}},
        form=form, sm_count=sm_count, key_s=KEY_S, busy_key_s=busy_key_s,
    )  # fmt: skip


def test_one_row_is_the_generation_table_and_many_walk_in_waves_or_share_the_keys():
    made = attention(TileForm(tile_rows=64))
    assert made.seconds(1, [1, 5001, 20001], 1, 32, 8) == pytest.approx([9e-6, 34e-6, 109e-6])
    # Between the measured batches and beyond them.
    for batch, seconds in ((2, np.sqrt(59e-6 * 209e-6)), (8, 2 * 209e-6)):
        assert made.seconds(1, [10001], batch, 32, 8)[0] == pytest.approx(seconds)
    # 64 rows: 32 tiles, one wave of 100 processors; 512: 256 tiles, three waves.
    assert made.seconds(64, [10000], 1, 32, 8)[0] == pytest.approx(10e-6 + 10000 * KEY_S)
    assert made.seconds(512, [10000], 1, 32, 8)[0] == pytest.approx(40e-6 + 3 * 10000 * KEY_S)
    made = attention(TileForm(tile_rows=128, splits_keys=True, packs_groups=True))
    # 8 key-value heads x ceil(64 x 4 / 128) = 16 tiles among 100 processors.
    assert made.per_key_s(64, 1, 32, 8) == pytest.approx(0.16 * KEY_S)
    # 2 rows x 4 heads of a group fill one fragment of 64 rows, half a tile.
    assert made.per_key_s(2, 1, 32, 8) == pytest.approx(0.04 * KEY_S)


def test_a_verification_splits_the_keys_and_two_rows_cost_about_one():
    made = attention(TileForm(tile_rows=64))
    one = made.seconds(1, [10000], 1, 32, 8)[0]
    # Unsplit, two rows walk all keys at one multiprocessor a head.
    assert made.seconds(2, [10000], 1, 32, 8)[0] > 3 * one
    split = made.splitting_keys()
    assert split.seconds(1, [10000], 1, 32, 8)[0] == one
    assert split.seconds(2, [10000], 1, 32, 8)[0] <= 1.1 * one
    # 64 rows x 4 heads of a group are 4 tiles of each key-value head: 32 tiles, 100 processors.
    assert split.per_key_s(64, 1, 32, 8) == pytest.approx(0.32 * KEY_S)
    pair = (32, 8)
    walking = {(1, 1): 8e-6, (1, 10001): 8e-6 + 10000 * KEY_S}
    made = dataclasses.replace(attention(TileForm(tile_rows=64)), generation={pair: walking})
    assert made.seconds(1, [10001], 1, *pair)[0] == pytest.approx(208e-6)
    # 8 tiles share 100 multiprocessors.
    split_s = made.splitting_keys().seconds(1, [10001], 1, *pair)[0]
    assert split_s == pytest.approx(8e-6 + 10001 * KEY_S * 0.08, rel=1e-3)
    made = attention(TileForm(tile_rows=64, splits_keys=True), busy_key_s=1e-12)
    assert made.seconds(2, [10001], 1, 32, 8)[0] >= made.seconds(1, [10001], 1, 32, 8)[0]
    split = attention(TileForm(tile_rows=256), busy_key_s=KEY_S / 10).splitting_keys()
    for batch in (1, 4, 16, 64):
        one, two = (split.seconds(rows, [5000], batch, 32, 8)[0] for rows in (1, 2))
        assert one <= two <= 1.1 * one


def test_a_table_rises_and_a_time_far_above_that_of_its_half_is_not_believed():
    noisy = {(1, 1): 3.0, (1, 8): 2.0, (2, 1): 2.5, (2, 8): 6.0, (4, 8): 5.0}
    assert rising(noisy) == {(1, 1): 2.0, (1, 8): 2.0, (2, 1): 2.5, (2, 8): 5.0, (4, 8): 5.0}
    half = {(2, 100): 2e-6, (4, 100): 4e-6}
    whole = {(1, 100): 3.9e-6, (2, 100): 9e-6, (8, 100): 50e-6}
    tables = checked({(16, 8): half, (32, 16): whole, (15, 5): half})
    assert tables[32, 16] == whole | {(2, 100): 4e-6}
    assert tables[16, 8] == tables[15, 5] == half


def test_heads_that_were_not_measured_are_half_as_many_of_twice_the_sequences():
    made = attention(TileForm(tile_rows=64))
    double = made.seconds(1, [5001], 2, 64, 16)
    assert double == pytest.approx(made.seconds(1, [5001], 4, 32, 8))
    assert made.seconds(1, [5001], 1, 16, 8) == pytest.approx(made.seconds(1, [5001], 1, 32, 8))
    with pytest.raises(InputError, match="nothing as large as 60 heads"):
        made.seconds(1, [100], 1, 60, 12)


@pytest.mark.parametrize("true_rows", [64, 128])
def test_tile_rows_are_recovered_under_noise(true_rows):
    rng = np.random.default_rng(3)
    rows, cached = (x.ravel() for x in np.meshgrid([16, 128, 256, 512, 1024], [0, 512, 4096]))
    waves = np.ceil(32 * np.ceil(rows / true_rows) / 84)
    seconds = 5e-6 + 0.1e-6 * rows + KEY_S * waves * cached
    seconds *= rng.normal(1, 0.02, len(seconds))
    height, key_s, error = fit_tile_rows(rows, cached, seconds, heads=32, sm_count=84)
    assert height == true_rows
    assert key_s == pytest.approx(KEY_S, rel=0.05)
    assert error < 0.04
    with pytest.raises(InputError, match="two row counts"):
        fit_tile_rows([16, 16], [0, 64], [1e-6, 2e-6], heads=32, sm_count=84)


def test_time_a_key_is_read_off_few_heads_over_long_prompts():
    tiles = {}
    for heads in (1, 2, 32):
        for rows in (32, 1024, 4096, 16384):
            work = heads * rows * (rows + 64) / 2 / 64 * KEY_S / 188
            tiles.setdefault((heads, 1), {})[1, rows] = 8e-6 + max(rows * KEY_S, work)
            tiles[heads, 1][1, 32] = 8e-6
    key_s, busy_key_s = measure_keys(tiles, TileForm(tile_rows=64), 188, 128)
    assert key_s == pytest.approx(KEY_S, rel=1e-6)
    assert busy_key_s == pytest.approx(KEY_S, rel=1e-6)
    with pytest.raises(InputError, match="no long prompt"):
        measure_keys({(1, 1): {(1, 32): 1e-6}}, TileForm(tile_rows=64), 188, 128)


@pytest.mark.parametrize(("name", "sm_count", "tile_rows"), [
    ("rtx4090", 128, 64), ("rtxpro6000-server", 188, 64), ("rtx-a6000", 84, 128),
])  # fmt: skip
def test_the_form_holds_on_published_chunks(measured, name, sm_count, tile_rows):
    rows, cached, seconds = measured_forwards(measured, f"{name}_llama-3.1-8b_tp1", "attention_us")
    rows, cached, seconds = (column[rows > 1] for column in (rows, cached, seconds))
    if name == "rtx-a6000":
        cached = cached - rows
    seconds = seconds / 32
    found, _, error = fit_tile_rows(rows, cached, seconds, heads=32, sm_count=sm_count)
    assert found == tile_rows
    assert error < 0.035

"""Overheads: the formula by hand, and a known truth found again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from costmodel.planning.batching import Overheads, TokenWork, engine_overheads
from lab.studies.fit_overheads import MeasuredServer, fit_overheads

RESULT = Path(__file__).parents[3] / "lab" / "studies" / "results" / "capacity_accuracy.json"


def work(**changes) -> TokenWork:
    fields = {
        "products_s": 4e-3,
        "attention_s": 1e-3,
        "all_reduce_s": 0.5e-3,
        "prompts_s": 2e-3,
        "prompt_steps": 0.1,
        "layers": 32,
        "devices": 4,
        "running": 64,
        "waiting": 0,
    }
    return TokenWork(**(fields | changes))


def test_kernels_alone_are_their_sum():
    assert Overheads().time_per_token_s(work(), overlaps_host=False) == pytest.approx(7.5e-3)
    assert Overheads().time_per_token_s(work(), overlaps_host=True) == pytest.approx(7.5e-3)


def test_the_formula_by_hand():
    """Device 7.5 + 32 x (0.02 + 0.1 x 0.1) = 8.46 ms; host 1 + 64 x 0.05 + 2 x 0.4 = 5 ms."""
    overheads = Overheads(
        layer_s=20e-6, prompt_layer_s=100e-6, step_s=1e-3, sequence_s=50e-6, device_s=0.4e-3
    )
    assert overheads.time_per_token_s(work(), overlaps_host=False) == pytest.approx(13.46e-3)
    overlapped = overheads.time_per_token_s(work(), overlaps_host=True)
    assert overlapped == pytest.approx(np.sqrt(8.46**2 + 5.0**2) * 1e-3)


def invented(truth: dict[str, Overheads], count: int) -> list[MeasuredServer]:
    draw = np.random.default_rng(7)
    rows = []
    for i in range(count):
        engine = sorted(truth)[i % len(truth)]
        w = work(
            products_s=draw.uniform(1e-3, 20e-3),
            attention_s=draw.uniform(0.2e-3, 10e-3),
            all_reduce_s=draw.uniform(0, 3e-3),
            prompts_s=draw.uniform(0, 30e-3),
            prompt_steps=draw.uniform(0, 1),
            layers=int(draw.choice([32, 64, 80])),
            devices=int(draw.choice([1, 2, 4, 8])),
            running=float(draw.integers(4, 256)),
        )
        seconds = truth[engine].time_per_token_s(w, overlaps_host=engine == "one")
        seconds *= float(np.exp(draw.normal(0, 0.02)))
        if i % 25 == 0:
            seconds *= 3
        rows.append(
            MeasuredServer(engine=engine, overlaps_host=engine == "one", work=w, seconds=seconds)
        )
    return rows


def test_a_known_truth_is_found_despite_outliers():
    truth = {
        "one": Overheads(layer_s=20e-6, prompt_layer_s=50e-6, step_s=1e-3, sequence_s=30e-6),
        "two": Overheads(layer_s=30e-6, prompt_layer_s=50e-6, step_s=0.5e-3, sequence_s=40e-6),
    }
    found = fit_overheads(invented(truth, 400))
    fresh = [row for i, row in enumerate(invented(truth, 450)) if i > 400 and i % 25]
    for row in fresh:
        guess = found[row.engine].time_per_token_s(row.work, overlaps_host=row.overlaps_host)
        assert guess == pytest.approx(row.seconds, rel=0.1)
    assert found["two"].products == pytest.approx(1, abs=0.05)
    assert set(found) == {"one", "two", "shared"}
    assert found["one"].products == found["two"].products == found["shared"].products


def test_shipped_overheads_are_those_of_the_stored_result():
    stored = json.loads(RESULT.read_text(encoding="utf-8"))["overheads"]
    for engine, fields in stored.items():
        found = dataclasses.asdict(engine_overheads(engine))
        assert found == pytest.approx(fields, rel=1e-3), engine


def test_an_unknown_engine_gets_the_shared_ones():
    assert engine_overheads("lmdeploy") == engine_overheads("shared")

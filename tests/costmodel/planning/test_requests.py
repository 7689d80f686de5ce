"""Distributions by their moments, traces with everything that can be wrong in them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import InputError
from costmodel.planning.traffic import (
    FixedLength,
    LognormalLength,
    Trace,
    poisson_trace,
    read_trace,
)

HEADER = "arrival_s,prompt_tokens,output_tokens"


def made(arrival_s, prompt, output) -> Trace:
    return Trace(
        arrival_s=np.array(arrival_s, dtype=float),
        prompt_tokens=np.array(prompt),
        output_tokens=np.array(output),
    )


def test_poisson_arrivals_have_their_rate_and_exponential_gaps() -> None:
    found = poisson_trace(
        5.0, 50_000, FixedLength(tokens=7), FixedLength(tokens=3), np.random.default_rng(0)
    )
    gaps = np.diff(found.arrival_s)
    assert found.rate_per_s == pytest.approx(5.0, rel=0.02)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.02)
    assert np.mean(gaps > 0.4) == pytest.approx(math.exp(-2), rel=0.05)
    assert set(found.prompt_tokens) == {7}
    assert set(found.output_tokens) == {3}


def test_lognormal_lengths_have_their_mean_and_variation() -> None:
    drawn = LognormalLength(mean_tokens=800, variation=0.6).draw(200_000, np.random.default_rng(1))
    assert np.mean(drawn) == pytest.approx(800, rel=0.01)
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(0.6, rel=0.02)


def test_lognormal_lengths_stay_in_their_range() -> None:
    drawn = LognormalLength(mean_tokens=2, variation=3, most_tokens=9).draw(
        5000, np.random.default_rng(1)
    )
    assert (drawn.min(), drawn.max()) == (1, 9)
    exact = LognormalLength(mean_tokens=40, variation=0).draw(3, np.random.default_rng(1))
    assert list(exact) == [40, 40, 40]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made([], [], []), "at least one request"),
        (lambda: made([0, 1], [1], [1, 1]), "equally long"),
        (lambda: made([1, 0], [1, 1], [1, 1]), "must not fall"),
        (lambda: made([-1, 0], [1, 1], [1, 1]), "0 or later"),
        (lambda: made([0, math.nan], [1, 1], [1, 1]), "arrival times"),
        (lambda: made([0], [0], [1]), "prompt_tokens must be whole numbers from 1"),
        (lambda: made([0], [1], [1.5]), "output_tokens must be whole numbers"),
        (lambda: FixedLength(tokens=0), "tokens must be from 1"),
        (lambda: FixedLength(tokens=2.5), "tokens must be a whole number"),
        (lambda: LognormalLength(mean_tokens=math.nan, variation=1), "mean_tokens must be"),
        (lambda: LognormalLength(mean_tokens=5, variation=-1), "variation must be 0 or more"),
        (lambda: LognormalLength(mean_tokens=5, variation=1, most_tokens=4), "mean_tokens must be"),
        (lambda: LognormalLength(mean_tokens=5, variation=1, most_tokens=0), "most_tokens must"),
    ],
)
def test_bad_requests_are_named(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(("rate", "count"), [(0.0, 5), (-1.0, 5), (math.inf, 5), (1.0, 0)])
def test_bad_rates_and_counts_are_named(rate: float, count: int) -> None:
    one = FixedLength(tokens=1)
    with pytest.raises(InputError, match=r"the rate must be|the number of requests"):
        poisson_trace(rate, count, one, one, np.random.default_rng(0))


def test_a_trace_is_read_whatever_the_order_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "output_tokens, model ,arrival_s,prompt_tokens\n9,x,0.5,100\n8,y,0.5,1e2\n7,,2,300.0\n",
        encoding="utf-8-sig",
    )
    found = read_trace(path)
    assert list(found.arrival_s) == [0.5, 0.5, 2.0]
    assert list(found.prompt_tokens) == [100, 100, 300]
    assert list(found.output_tokens) == [9, 8, 7]
    assert found.prompt_tokens.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the column\(s\) arrival_s, prompt_tokens, output_tokens are missing"),
        ("arrival_s,prompt\n0,1\n", r"column\(s\) prompt_tokens, output_tokens are missing"),
        (f"{HEADER}\n", "there are no requests below the header"),
        (f"{HEADER}\n0,1,1\n1,,1\n", "line 3: prompt_tokens is empty"),
        (f"{HEADER}\n0,1\n", "line 2: output_tokens is empty"),
        (f"{HEADER}\n0,many,1\n", "line 2: prompt_tokens must be a number .is 'many'"),
        (f"{HEADER}\n-1,1,1\n", "line 2: arrival_s must be 0 or later .is -1"),
        (f"{HEADER}\nnan,1,1\n", "line 2: arrival_s must be 0 or later"),
        (f"{HEADER}\ninf,1,1\n", "line 2: arrival_s must be 0 or later"),
        (f"{HEADER}\n0,-5,1\n", "line 2: prompt_tokens must be a whole number from 1"),
        (f"{HEADER}\n0,1,0\n", "line 2: output_tokens must be a whole number from 1"),
        (f"{HEADER}\n0,1,2.5\n", "line 2: output_tokens must be a whole number"),
        (f"{HEADER}\n0,1,nan\n", "line 2: output_tokens must be a whole number"),
        (f"{HEADER}\n0,1,1e30\n", "line 2: output_tokens must be a whole number"),
        (f"{HEADER}\n3,1,1\n2,1,1\n", "line 3: arrival_s falls from 3 to 2. Sort the lines"),
    ],
)
def test_a_bad_trace_is_one_line_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    binary = tmp_path / "trace.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01" * 50)
    with pytest.raises(InputError, match=r"not a CSV file in UTF-8 \("):
        read_trace(binary)
    with pytest.raises(InputError, match="there is no such file"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(InputError, match="it is not a regular file"):
        read_trace(tmp_path)

"""The machine's pace: found in made sweeps whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.measure.pace import paces

POINTS, PASSES = 40, 10


def mixed_order(random: np.random.Generator) -> np.ndarray:
    """Each pass samples every point once, in a fresh order."""
    return np.concatenate([random.permutation(POINTS) for _ in range(PASSES)])


def medians(seconds: np.ndarray, order: np.ndarray) -> np.ndarray:
    return np.array([np.median(seconds[order == point]) for point in range(POINTS)])


def away(found: np.ndarray, true_s: np.ndarray) -> np.ndarray:
    """Relative errors, a common factor left out."""
    ratio = np.log(found / true_s)
    return np.abs(ratio - np.median(ratio))


def test_a_steady_machine_is_left_alone_to_the_last_digit() -> None:
    order = mixed_order(np.random.default_rng(0))
    seconds = (0.01 + 0.003 * np.arange(POINTS))[order]
    assert np.array_equal(paces(seconds, order), np.ones(len(order)))


@pytest.mark.parametrize("seed", range(5))
def test_slow_spells_are_taken_out(seed: int) -> None:
    """Two fifths of the time, 20 samples on end, something slows the machine by a half or so."""
    random = np.random.default_rng(seed)
    order = mixed_order(random)
    true_s = np.exp(random.uniform(-4.0, -2.0, POINTS))
    spells = np.repeat(random.permutation(len(order) // 20) < 8, 20)
    slow = np.where(spells, np.repeat(random.uniform(1.33, 1.67, len(order) // 20), 20), 1.0)
    seconds = true_s[order] * slow * np.exp(random.normal(0.0, 0.02, len(order)))
    corrected = seconds / paces(seconds, order)
    before, after = (away(medians(given, order), true_s) for given in (seconds, corrected))
    assert before.mean() > 0.03 and before.max() > 0.1
    assert after.max() < 0.05 and after.mean() < before.mean() / 3


def test_noise_without_spells_is_hardly_raised() -> None:
    random = np.random.default_rng(1)
    order = mixed_order(random)
    true_s = np.exp(random.uniform(-4.0, -2.0, POINTS))
    seconds = true_s[order] * np.exp(random.normal(0.0, 0.02, len(order)))
    corrected = seconds / paces(seconds, order)
    before, after = (away(medians(given, order), true_s) for given in (seconds, corrected))
    assert after.mean() < 1.3 * before.mean()


def test_one_wild_sample_has_no_say_in_any_pace() -> None:
    order = mixed_order(np.random.default_rng(2))
    seconds = (0.01 + 0.001 * np.arange(POINTS))[order]
    wild = seconds.copy()
    wild[123] *= 7.0
    assert np.array_equal(paces(wild, order), np.ones(len(order)))


def test_the_unit_of_time_does_not_matter() -> None:
    random = np.random.default_rng(3)
    order = mixed_order(random)
    seconds = random.uniform(0.01, 0.02, len(order))
    np.testing.assert_allclose(paces(1000.0 * seconds, order), paces(seconds, order), rtol=1e-9)
    assert np.median(paces(seconds, order)) == pytest.approx(1.0)


@pytest.mark.parametrize("points", [[], [0], [0, 1], [0, 0, 1, 1, 2]])
def test_too_few_samples_say_nothing(points: list[int]) -> None:
    seconds = 0.01 * (1.0 + np.arange(len(points)))
    assert np.array_equal(paces(seconds, points), np.ones(len(points)))

"""Expected length, speedup, choice of N and regret, by hand and by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.calibration.choices import regret_at_contexts, standard_curves
from costmodel.calibration.points import Points


def test_curves_are_what_they_say():
    curves = standard_curves()
    assert len(set(curves)) == len(curves) == 18
    for curve in curves:
        assert curve.committed(0) == 1
        assert curve.committed(curve.half_nodes) == pytest.approx((1 + curve.saturation) / 2)
        assert curve.committed(1e12) == pytest.approx(curve.saturation)
        gains = np.diff(curve.committed(np.arange(1025)))
        assert np.all(gains > 0) and np.all(np.diff(gains) < 0)
    saturations = {curve.saturation for curve in curves}
    assert (min(saturations), max(saturations)) == (1.3, 10)


def regret_of(predicted_s, true_s, nodes):
    context, rows = np.meshgrid(np.arange(len(true_s)), np.add(nodes, 1), indexing="ij")
    points = Points(rows=rows.ravel(), context=context.ravel(), seconds=np.ravel(true_s))
    return regret_at_contexts(points, np.ravel(predicted_s))


def test_regret_by_hand_and_zero_for_the_truth_and_any_multiple_of_it():
    # At N = 2 the prediction is 0.01, so every curve takes it; the truth is 1, 1 and 100 there.
    regret = regret_of([[1, 2, 0.01]], [[1, 1, 100]], [0, 1, 2])
    lost = [1 - curve.committed(2) / 100 / curve.committed(1) for curve in standard_curves()]
    assert regret.worst == pytest.approx(max(lost))
    assert regret.mean == pytest.approx(np.mean(lost))
    both = regret_of([[1, 2, 0.01], [1, 1, 100]], [[1, 1, 100], [1, 1, 100]], [0, 1, 2])
    assert both.worst == regret.worst
    assert both.mean == pytest.approx(regret.mean / 2)
    nodes = np.array([1, 3, 7, 15, 31, 63])
    true_s = np.array([[5, 5.1, 5.3, 6, 8, 13], [6, 6.1, 6.2, 7, 10, 16]]) * 1e-3
    for factor in (1, 0.5, 3):
        regret = regret_of(factor * true_s, true_s, nodes)
        assert (regret.mean, regret.worst) == (0, 0)


@given(data=st.data(), size=st.integers(2, 20))
def test_regret_is_a_share(data, size):
    times = st.lists(st.floats(1e-6, 100), min_size=size, max_size=size)
    regret = regret_of([data.draw(times)], [data.draw(times)], np.arange(size))
    assert 0 <= regret.mean <= regret.worst < 1

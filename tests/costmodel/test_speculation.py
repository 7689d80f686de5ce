"""Expected length, speedup, choice of N and regret, by hand and by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.speculation import AcceptanceCurve, decision_regret, standard_curves


def test_curves_are_what_they_say():
    curves = standard_curves()
    assert len({curve.label for curve in curves}) == len(curves) == 18
    for curve in curves:
        assert curve.committed(0) == 1
        assert curve.committed(curve.half_nodes) == pytest.approx((1 + curve.saturation) / 2)
        assert curve.committed(1e12) == pytest.approx(curve.saturation)
        gains = np.diff(curve.committed(np.arange(1025)))
        assert np.all(gains > 0) and np.all(np.diff(gains) < 0)
    saturations = {curve.saturation for curve in curves}
    assert (min(saturations), max(saturations)) == (1.3, 10)


def test_regret_by_hand():
    curve = AcceptanceCurve(label="", saturation=3, half_nodes=1)  # A = 1, 2, 2.333
    nodes = [0, 1, 2]
    # truth: rates 1, 2, 1.1667; the prediction takes N = 2: loses 1 - 1.1667 / 2
    regret = decision_regret([1, 2, 0.5], [1, 1, 2], nodes, [curve])
    assert regret.worst == pytest.approx(1 - (7 / 3 / 2) / 2)
    assert regret.mean == regret.worst and regret.decisions == 1
    both = decision_regret([[1, 2, 0.5], [1, 1, 2]], [[1, 1, 2], [1, 1, 2]], nodes, [curve])
    assert both.worst == regret.worst
    assert both.mean == pytest.approx(regret.worst / 2)
    assert both.decisions == 2


def test_regret_is_zero_for_the_truth_and_for_any_multiple_of_it():
    nodes = np.array([1, 3, 7, 15, 31, 63])
    true_s = np.array([[5, 5.1, 5.3, 6, 8, 13], [6, 6.1, 6.2, 7, 10, 16]]) * 1e-3
    for factor in (1, 0.5, 3):
        regret = decision_regret(factor * true_s, true_s, nodes)
        assert (regret.mean, regret.worst) == (0, 0)
    assert decision_regret(true_s, true_s, nodes).decisions == 2 * 18


@given(data=st.data(), size=st.integers(1, 20))
def test_regret_is_a_share(data, size):
    times = st.lists(st.floats(1e-6, 100), min_size=size, max_size=size)
    regret = decision_regret(data.draw(times), data.draw(times), np.arange(size))
    assert 0 <= regret.mean <= regret.worst < 1

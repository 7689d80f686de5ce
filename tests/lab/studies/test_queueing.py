"""Closed forms against other closed forms, alternating sums and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from costmodel.errors import InputError
from lab.studies import queueing


def test_one_server_by_hand() -> None:
    """Half busy with 2 s a request: M/M/1 waits one service, M/D/1 half of one."""
    assert queueing.utilisation(0.25, 2.0) == 0.5
    assert queueing.mm1_waiting_s(0.25, 2.0) == 2.0
    assert queueing.md1_waiting_s(0.25, 2.0) == 1.0
    assert queueing.mg1_waiting_s(0.25, 2.0, 3.0) == 4.0


@pytest.mark.parametrize("servers", [1, 2, 5, 30])
@pytest.mark.parametrize("busy", [0.1, 0.7, 0.95])
def test_erlang_c_is_erlangs_quotient(servers: int, busy: float) -> None:
    load = servers * busy
    tail = load**servers / math.factorial(servers) / (1 - busy)
    head = sum(load**k / math.factorial(k) for k in range(servers))
    found = queueing.erlang_c(load / 3.0, 3.0, servers)
    assert found == pytest.approx(tail / (head + tail), rel=1e-12)


def test_many_servers_do_not_overflow() -> None:
    assert 0 < queueing.erlang_c(1990.0, 1.0, 2000) < 1


def test_one_server_of_mmc_is_mm1() -> None:
    assert queueing.mmc_waiting_s(0.4, 2.0, 1) == pytest.approx(queueing.mm1_waiting_s(0.4, 2.0))


def test_mmc_percentiles_integrate_to_the_mean() -> None:
    mean, _ = quad(lambda share: queueing.mmc_waiting_quantile_s(3.4, 1.0, 4, share), 0, 1)
    assert mean == pytest.approx(queueing.mmc_waiting_s(3.4, 1.0, 4), rel=1e-4)


@pytest.mark.parametrize("busy", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("services", [0.0, 0.5, 1.0, 1.0001, 4.7, 8.0])
def test_md1_distribution_is_erlangs_alternating_sum(busy: float, services: float) -> None:
    """Erlang (1909), exact in double precision while the waiting is short."""
    terms = (busy * (k - services) for k in range(int(services) + 1))
    erlang = sum(x**k / math.factorial(k) * math.exp(-x) for k, x in enumerate(terms))
    found = queueing.md1_waiting_probability(busy / 2.0, 2.0, 2.0 * services)
    assert found == pytest.approx((1 - busy) * erlang, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0.2, 0.8, 0.97])
def test_md1_distribution_has_the_mean_of_pollaczek_and_khinchine(busy: float) -> None:
    times = np.linspace(0, 400, 80_001)
    above = [1 - queueing.md1_waiting_probability(busy, 1.0, t) for t in times[::40]]
    mean = np.trapezoid(above, times[::40])
    assert mean == pytest.approx(queueing.md1_waiting_s(busy, 1.0), rel=2e-3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99, 0.99999])
def test_md1_percentiles_invert_the_distribution(share: float) -> None:
    waiting_s = queueing.md1_waiting_quantile_s(0.4, 2.0, share)
    if share <= 0.2:  # a fifth never waits
        assert waiting_s == 0
    else:
        found = queueing.md1_waiting_probability(0.4, 2.0, waiting_s)
        assert found == pytest.approx(share, abs=1e-9)


def test_before_its_arrival_nobody_has_waited() -> None:
    assert queueing.md1_waiting_probability(0.4, 2.0, -1e-9) == 0


def test_a_load_that_is_too_high_names_the_servers_it_needs() -> None:
    with pytest.raises(InputError, match=r"busy 1\.25 times over.*at least 6 servers"):
        queueing.erlang_c(5.0, 1.0, 4)
    with pytest.raises(InputError, match="at least 2 servers"):
        queueing.md1_waiting_s(1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: queueing.utilisation(0.0, 1.0), "rate_per_s must be a number above 0"),
        (lambda: queueing.utilisation(math.nan, 1.0), "rate_per_s must be"),
        (lambda: queueing.mm1_waiting_s(1.0, -1.0), "service_s must be"),
        (lambda: queueing.md1_waiting_s(1.0, math.inf), "service_s must be"),
        (lambda: queueing.erlang_c(1.0, 1.0, 0), "servers must be a whole number"),
        (lambda: queueing.erlang_c(1.0, 1.0, 2.5), "servers must be a whole number"),
        (lambda: queueing.mg1_waiting_s(0.1, 1.0, -0.1), "squared_variation must be 0 or more"),
        (lambda: queueing.md1_waiting_quantile_s(0.5, 1.0, 1.0), "share must be between 0 and 1"),
        (lambda: queueing.mmc_waiting_quantile_s(0.5, 1.0, 1, 0.0), "share must be between"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()

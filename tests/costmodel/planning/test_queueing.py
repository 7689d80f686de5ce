"""The closed forms of queues against other closed forms."""

from __future__ import annotations

import math

import pytest

from tests.costmodel.planning import queueing


@pytest.mark.parametrize("servers", [1, 2, 30])
@pytest.mark.parametrize("busy", [0.1, 0.95])
def test_many_servers_wait_as_erlangs_quotient_says(servers: int, busy: float) -> None:
    load = servers * busy
    tail = load**servers / math.factorial(servers) / (1 - busy)
    head = sum(load**k / math.factorial(k) for k in range(servers))
    exact_s = tail / (head + tail) * 3.0 / (servers * (1 - busy))
    assert queueing.mmc_waiting_s(load / 3.0, 3.0, servers) == pytest.approx(exact_s, rel=1e-12)


def test_one_server_by_hand() -> None:
    assert queueing.md1_waiting_s(0.25, 2.0) == 1.0
    assert queueing.mg1_waiting_s(0.25, 2.0, 3.0) == 4.0


@pytest.mark.parametrize("busy", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("services", [0.0, 0.5, 1.0, 1.0001, 4.7, 8.0])
def test_md1_distribution_is_erlangs_alternating_sum(busy: float, services: float) -> None:
    """Erlang (1909), exact in double precision while the waiting is short."""
    terms = (busy * (k - services) for k in range(int(services) + 1))
    erlang = sum(x**k / math.factorial(k) * math.exp(-x) for k, x in enumerate(terms))
    probability = queueing.md1_waiting_probability(busy / 2.0, 2.0, 2.0 * services)
    assert probability == pytest.approx((1 - busy) * erlang, abs=1e-10)
    waiting_s = queueing.md1_waiting_quantile_s(busy / 2.0, 2.0, probability)
    assert waiting_s == pytest.approx(2.0 * services, abs=1e-6)

"""Closed forms of queues in steady state: what a simulation must agree with.

Arrivals are Poisson at `rate_per_s`, the queue is first come, first served and never full. Waiting
is from arrival to start of service; sojourn adds the service. Every function raises InputError for
a load that the servers cannot carry, as there is no steady state then.

Sources: L. Kleinrock, Queueing Systems, vol. 1 (1975): M/M/1 and M/M/m chapter 3, M/G/1 chapter 5;
A. K. Erlang (1917) for the delay probability; V. Ramaswami, Stochastic Models 4 (1988), for the
stable recursion of M/G/1 states; G. J. Franx, Operations Research Letters 29 (2001), for the
waiting time of M/D/c as a sum of positive terms.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import poisson

from costmodel.errors import InputError

Array = NDArray[np.float64]

# States of the M/D/1 queue are followed until so little probability is left above them.
_LEFT_OUT = 1e-13


def utilisation(rate_per_s: float, service_s: float, servers: int = 1) -> float:
    """Share of the time that a server is busy. Raises InputError for 1 or more."""
    _check_positive(rate_per_s=rate_per_s, service_s=service_s)
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise InputError(f"servers must be a whole number of at least 1 (is {servers!r})")
    busy = rate_per_s * service_s / servers
    if busy >= 1:
        raise InputError(
            f"{rate_per_s:g} requests/s of {service_s:g} s each keep {servers} server(s) busy"
            f" {busy:.2f} times over: the queue would grow without end",
            hint=f"Use at least {math.floor(busy * servers) + 1} servers, or fewer requests",
        )
    return busy


def mg1_waiting_s(rate_per_s: float, service_s: float, squared_variation: float) -> float:
    """Mean waiting of M/G/1 (Pollaczek and Khinchine).

    `squared_variation`: variance of the service time over its squared mean.
    """
    if not 0 <= squared_variation < math.inf:
        raise InputError(f"squared_variation must be 0 or more (is {squared_variation!r})")
    busy = utilisation(rate_per_s, service_s)
    return busy / (1 - busy) * service_s * (1 + squared_variation) / 2


def mm1_waiting_s(rate_per_s: float, service_s: float) -> float:
    """Mean waiting of M/M/1: exponential service times."""
    return mg1_waiting_s(rate_per_s, service_s, 1.0)


def md1_waiting_s(rate_per_s: float, service_s: float) -> float:
    """Mean waiting of M/D/1: constant service times."""
    return mg1_waiting_s(rate_per_s, service_s, 0.0)


def erlang_c(rate_per_s: float, service_s: float, servers: int) -> float:
    """Probability that an arrival to M/M/c waits, by the stable recursion over Erlang's B."""
    busy = utilisation(rate_per_s, service_s, servers)
    load = rate_per_s * service_s
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - busy * (1 - blocked))


def mmc_waiting_s(rate_per_s: float, service_s: float, servers: int) -> float:
    """Mean waiting of M/M/c."""
    free = servers * (1 - utilisation(rate_per_s, service_s, servers))
    return erlang_c(rate_per_s, service_s, servers) * service_s / free


def mmc_waiting_quantile_s(
    rate_per_s: float, service_s: float, servers: int, share: float
) -> float:
    """The waiting that a share of arrivals to M/M/c does not exceed; waiting is exponential."""
    _check_share(share)
    waits = erlang_c(rate_per_s, service_s, servers)
    if share <= 1 - waits:
        return 0.0
    free = servers * (1 - utilisation(rate_per_s, service_s, servers))
    return service_s / free * math.log(waits / (1 - share))


def md1_waiting_probability(rate_per_s: float, service_s: float, waiting_s: float) -> float:
    """Probability that an arrival to M/D/1 waits at most `waiting_s`."""
    busy = utilisation(rate_per_s, service_s)
    if not waiting_s >= 0:
        return 0.0
    return _waits_at_most(_md1_states(busy), busy, waiting_s / service_s)


def md1_waiting_quantile_s(rate_per_s: float, service_s: float, share: float) -> float:
    """The waiting that a share of arrivals to M/D/1 does not exceed."""
    _check_share(share)
    busy = utilisation(rate_per_s, service_s)
    if share <= 1 - busy:
        return 0.0
    states = _md1_states(busy)
    most = 1.0
    while _waits_at_most(states, busy, most) < share:
        most *= 2
    found = brentq(lambda x: _waits_at_most(states, busy, x) - share, 0.0, most, xtol=1e-12)
    return float(found) * service_s


def _md1_states(busy: float) -> Array:
    """Probabilities of 0, 1, 2, ... requests in an M/D/1 system (Ramaswami's recursion).

    All terms are positive, so nothing cancels at a high load.
    """
    arrivals_above = 1 - poisson.cdf(np.arange(-1, 64), busy)  # P(at least k in one service)
    arrivals_above = arrivals_above[arrivals_above > 0]
    states = [1 - busy]
    left = busy
    while left > _LEFT_OUT:
        i = len(states)
        own = arrivals_above[i] if i < len(arrivals_above) else 0.0
        reach = np.array(states[max(1, i + 2 - len(arrivals_above)) :][::-1])
        value = states[0] * own + float(reach @ arrivals_above[2 : 2 + len(reach)])
        states.append(value / (1 - arrivals_above[1]))
        if states[-1] < _LEFT_OUT * (1 - busy):
            break
        left -= states[-1]
    return np.array(states)


def _waits_at_most(states: Array, busy: float, services: float) -> float:
    """Franx's sum for one server; `services` is the waiting in service times."""
    whole = math.floor(services) + 1
    # at_most[j]: at most j requests wait beside the one that is served.
    at_most = np.cumsum(states)[np.minimum(np.arange(1, whole + 1), len(states) - 1)]
    terms = poisson.pmf(np.arange(whole), busy * (whole - services))
    return min(float(at_most[::-1] @ terms), 1.0)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} must be a number above 0 (is {value!r})")


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise InputError(f"a share must be between 0 and 1 (is {share!r})")

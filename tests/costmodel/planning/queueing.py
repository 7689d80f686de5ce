"""Closed forms of queues in steady state, which the simulation must agree with.

Poisson arrivals at `rate_per_s`, first come, first served; waiting is from arrival to start of
service. Sources: L. Kleinrock, Queueing Systems, vol. 1 (1975): M/M/m chapter 3, M/G/1 chapter 5;
V. Ramaswami, Stochastic Models 4 (1988), for the recursion of M/G/1 states; G. J. Franx,
Operations Research Letters 29 (2001), for the waiting time of M/D/c as a sum of positive terms.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import poisson

_LEFT_OUT = 1e-13  # probability of the states of M/D/1 that are left out


def mg1_waiting_s(rate_per_s: float, service_s: float, squared_variation: float) -> float:
    """Mean waiting of M/G/1 (Pollaczek and Khinchine); variance of service over squared mean."""
    busy = rate_per_s * service_s
    return busy / (1 - busy) * service_s * (1 + squared_variation) / 2


def md1_waiting_s(rate_per_s: float, service_s: float) -> float:
    """Mean waiting of M/D/1: constant service times."""
    return mg1_waiting_s(rate_per_s, service_s, 0.0)


def mmc_waiting_s(rate_per_s: float, service_s: float, servers: int) -> float:
    """Mean waiting of M/M/c, by the recursion over Erlang's B."""
    load = rate_per_s * service_s
    busy = load / servers
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = load * blocked / (server + load * blocked)
    return blocked / (1 - busy * (1 - blocked)) * service_s / (servers * (1 - busy))


def md1_waiting_probability(rate_per_s: float, service_s: float, waiting_s: float) -> float:
    """Probability that an arrival to M/D/1 waits at most `waiting_s`."""
    busy = rate_per_s * service_s
    return _waits_at_most(_md1_states(busy), busy, waiting_s / service_s)


def md1_waiting_quantile_s(rate_per_s: float, service_s: float, share: float) -> float:
    """The waiting that a share of arrivals to M/D/1 does not exceed."""
    busy = rate_per_s * service_s
    if share <= 1 - busy:
        return 0.0
    states = _md1_states(busy)
    most = 1.0
    while _waits_at_most(states, busy, most) < share:
        most *= 2
    services = brentq(lambda x: _waits_at_most(states, busy, x) - share, 0.0, most, xtol=1e-12)
    return float(services) * service_s


def _md1_states(busy: float) -> np.ndarray:
    """Probabilities of 0, 1, 2, ... requests in an M/D/1 system (Ramaswami's recursion)."""
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


def _waits_at_most(states: np.ndarray, busy: float, services: float) -> float:
    """Franx's sum for one server; `services` is the waiting in service times."""
    whole = math.floor(services) + 1
    # at_most[j]: at most j requests wait beside the one that is served.
    at_most = np.cumsum(states)[np.minimum(np.arange(1, whole + 1), len(states) - 1)]
    terms = poisson.pmf(np.arange(whole), busy * (whole - services))
    return min(float(at_most[::-1] @ terms), 1.0)

"""The waiting time of M/D/1, which the simulation must agree with.

Poisson arrivals at `rate_per_s`, first come, first served; waiting is from arrival to start of
service. Source: A. K. Erlang (1909); his alternating sum is exact while the waiting is short.
"""

import math

from scipy.optimize import brentq


def md1_waiting_quantile_s(rate_per_s: float, service_s: float, share: float) -> float:
    """The waiting that a share of arrivals does not exceed; up to some 20 services."""
    busy = rate_per_s * service_s

    def waits_at_most(services: float) -> float:
        ahead = enumerate(busy * (k - services) for k in range(int(services) + 1))
        return (1 - busy) * sum(x**k / math.factorial(k) * math.exp(-x) for k, x in ahead)

    if share <= 1 - busy:
        return 0.0
    return float(brentq(lambda x: waits_at_most(x) - share, 0.0, 20.0)) * service_s

"""Errors of transfers between devices, as a study of all device pairs at hand measured them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np

from costmodel.catalog import load_devices
from costmodel.io import read_yaml, shipped_directory

# Least error of a transfer: the clocks under another power limit are not in a data sheet.
LEAST_ERROR = 0.05
# Least ratio of the 16-bit rates of devices of one chip that are taken as alike: an L40S scaled to
# an RTX 4090, at 0.46 of its rate, is 18 % off.
_EQUAL_RATES = 0.7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferErrors:
    """Mean relative errors of forwards scaled from one device to another.

    pairs              {(source, device): error}, by slug
    deviations         {slug: how far its times are from what its data sheet says of others'}
    chips              {slug: (generation with its vendor, chip)}
    fixed_s_per_layer  seconds of a layer that no peak shortens: launches, ramps, waits
    """

    pairs: Mapping[tuple[str, str], float]
    deviations: Mapping[str, float]
    chips: Mapping[str, tuple[str, str]]
    fixed_s_per_layer: float

    def expected(self, source: str, device: str) -> tuple[float, str]:
        """The expected error of a transfer, at least LEAST_ERROR, and what it rests on.

        A pair of the study has its own error, and devices of one chip at about the same rate have
        the mean of such pairs. Other devices of one vendor have both deviations, added in squares;
        that of a device that the study does not know is the largest of all. Between vendors it is
        the largest error.
        """
        relation = self._relation(source, device)
        if (source, device) in self.pairs:
            errors, basis = [self.pairs[source, device]], "measured for this pair"
        elif relation == "chip":
            chips: dict[str, list[float]] = {}
            for (one, other), error in self.pairs.items():
                if self._relation(one, other) == "chip":
                    chips.setdefault(self.chips[other][1], []).append(error)
            errors = [float(np.mean(of_chip)) for of_chip in chips.values()]
            errors = errors or list(self.pairs.values())
            basis = f"the mean over pairs within {len(errors)} chips"
        elif relation == "vendor":
            largest = max(self.deviations.values())
            first, second = (self.deviations.get(slug, largest) for slug in (source, device))
            errors = [float(np.hypot(first, second))]
            basis = "from how far devices are from data sheets"
        else:
            errors, basis = [max(self.pairs.values())], "the largest of all pairs"
        return max(LEAST_ERROR, float(np.mean(errors))), basis

    def text(self, source: str, device: str) -> str:
        """What a transfer crosses, its expected error and the basis of that, for people."""
        error, basis = self.expected(source, device)
        (old, chip), (new, other) = (
            self.chips.get(slug, ("an unknown generation", slug)) for slug in (source, device)
        )
        if chip == other:
            crossing = f"one chip, {chip}"
            crossing += "" if _equal_rates(source, device) else " at another 16-bit rate"
        elif old == new:
            crossing = f"within {old}, {chip} to {other}"
        else:
            crossing = f"across generations, {old} to {new}"
            if old.split()[0] != new.split()[0]:
                crossing = f"across vendors, {old} to {new}, which nobody measured"
        return f"{crossing}; error of such transfers {error:.1%}, {basis}"

    def _relation(self, source: str, device: str) -> str:
        first, second = self.chips.get(source), self.chips.get(device)
        if first is None or second is None:
            return "unknown"
        if first[1] == second[1] and _equal_rates(source, device):
            return "chip"
        return "vendor" if first[0].split()[0] == second[0].split()[0] else "unknown"


def _equal_rates(source: str, device: str) -> bool:
    """Whether the 16-bit rates differ by less than 30 %, or either is not known."""
    first, second = (load_devices().get(slug) for slug in (source, device))
    if first is None or second is None:
        return True
    rates = sorted((first.peak_flops_per_s, second.peak_flops_per_s))
    return rates[0] > _EQUAL_RATES * rates[1]


@cache
def transfer_errors() -> TransferErrors:
    """The shipped study."""
    table = read_yaml(shipped_directory() / "transfers.yaml")
    return TransferErrors(
        pairs={
            (source, device): float(error)
            for source, errors in table["errors"].items()
            for device, error in errors.items()
        },
        deviations={slug: float(deviation) for slug, deviation in table["deviations"].items()},
        chips={
            slug: (generation, chip)
            for generation, chips in table["generations"].items()
            for chip, slugs in chips.items()
            for slug in slugs
        },
        fixed_s_per_layer=float(table["fixed_us_per_layer"]) * 1e-6,
    )

"""A result and the figures derived from it, each computed once for the page and its pictures."""

from __future__ import annotations

from functools import cached_property

from profiler.bench.figures import ArmFigures, arm_figures
from profiler.bench.hindsight import Hindsight, hindsight
from profiler.bench.record import PLAIN, Arm, Result
from profiler.bench.series import RoundTable, round_table


class View:
    """Looks at one result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._figures: dict[tuple[str, str | None], ArmFigures] = {}
        self._tables: dict[str, RoundTable | None] = {}

    def figures(self, arm: str, prompt_set: str | None = None) -> ArmFigures:
        key = (arm, prompt_set)
        if key not in self._figures:
            self._figures[key] = arm_figures(self.result, arm, prompt_set)
        return self._figures[key]

    def rounds(self, arm: str) -> RoundTable | None:
        if arm not in self._tables:
            self._tables[arm] = round_table(self.result, arm)
        return self._tables[arm]

    @cached_property
    def hindsight(self) -> dict[str, Hindsight]:
        """By drafter, of those whose tree sizes were swept."""
        found = {one.name: hindsight(self.result, one.name) for one in self.result.drafters}
        return {name: own for name, own in found.items() if own is not None}

    @cached_property
    def speculating(self) -> list[Arm]:
        """Our arms that draft and told of their rounds."""
        return [
            arm
            for arm in self.result.arms
            if arm.kind == "policy" and arm.policy != PLAIN and self.rounds(arm.name) is not None
        ]

    def named(self, policy: str) -> list[Arm]:
        """The arms of one policy with its defaults, a drafter each."""
        return [arm for arm in self.speculating if arm.policy == policy and not arm.variant]

    def with_drafter(self, drafter: str) -> list[Arm]:
        """Our arms with one drafter, in the order of the run."""
        return [arm for arm in self.speculating if arm.drafter == drafter]

    @cached_property
    def main(self) -> list[Arm]:
        """Our arms less those that only study one part: fixed sizes and variants."""
        chosen = [arm for arm in self.speculating if arm.nodes is None and not arm.variant]
        return chosen or self.speculating

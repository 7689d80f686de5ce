"""The table of a paper that a run by its protocol fills, the paper's figures beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from lab.bench.analysis.papers import call_s_per_token, mean_tpot_s, paper_figures
from lab.bench.analysis.ratios import responses_of
from lab.bench.record import PLAIN, ProtocolUse, Response, Result
from lab.bench.report.tables import Row, Table, number_text
from lab.papers.protocols import find_protocol

SPEEDUP, AVERAGE, PLAIN_ROW = "speedup", "average", "AR"
TWO_DIGITS = (SPEEDUP, "tau", "tokens/round", "path length")
Seconds = Callable[[Sequence[Response]], float | None]
# Seconds a token, whose ratio is a paper's speed-up.
SPEEDUPS: Mapping[str, Seconds] = {
    "tpot": mean_tpot_s,
    "wall": call_s_per_token,
    "throughput": lambda every: 1 / fmean(one.new_tokens / one.total_s for one in every),
}


def paper_table(result: Result) -> Table | None:
    """The paper's table: a row a set and method; None for a run without a protocol.

    Figures are by the paper's definitions. The speed-up stands over transformers' plain decoding,
    as in the papers, and over this project's.
    """
    if result.protocol is None:
        return None
    filled = _Filled(result, result.protocol)
    columns = ["set", "method"]
    for name in filled.figures:
        columns += ["over transformers", "over plain here"] if name == SPEEDUP else [name]
        columns += [f"paper: {name}"]
    sets = [*result.sets, *([AVERAGE] if len(result.sets) > 1 else [])]
    return Table(
        title=f"{result.protocol.name} of {result.protocol.row}, filled by {result.target.name}",
        columns=columns,
        rows=[filled.row(one, method) for one in sets for method in filled.methods],
    )


class _Filled:
    """The figures of a run and of the paper, by set and method."""

    def __init__(self, result: Result, use: ProtocolUse) -> None:
        self._result, self._arms = result, use.arms
        self._protocol = find_protocol(use.name)
        self._published = {
            (method, figure): values
            for (place, method, figure), values in self._protocol.published().items()
            if place == f"{use.row} {result.settings.temperature:g}"
        }
        figures = [figure for _, figure in self._published] or [SPEEDUP, "tau"]
        self.figures = list(dict.fromkeys(figures))
        ours = (method.name for method in self._protocol.methods)
        self.methods = list(dict.fromkeys([*(name for name, _ in self._published), *ours]))
        peers = (arm for arm in result.arms if arm.kind == "peer" and arm.policy == PLAIN)
        self._bases = [arm.name for arm in peers]

    def row(self, one: str, method: str) -> Row:
        cells: list[str | None] = [one, method]
        for name in self.figures:
            paper = self._paper(one, self._published.get((method, name), {}))
            form = ".2f" if name in TWO_DIGITS else ".1f"
            cells += [number_text(value, form) for value in (*self._run(one, method, name), paper)]
        return cells

    def _paper(self, one: str, values: Mapping[str, float]) -> float | None:
        """The printed figure; the average of some sets alone is their mean."""
        run = [values[name] for name in self._result.sets if name in values]
        whole = len(self._result.sets) == len(self._protocol.sets) and AVERAGE in values
        return values.get(one) if one != AVERAGE or whole else fmean(run) if run else None

    def _run(self, one: str, method: str, name: str) -> list[float | None]:
        """The figure of a set, or the mean of those of all sets; two for the speed-up."""
        if one == AVERAGE:
            every = zip(*(self._run(each, method, name) for each in self._result.sets), strict=True)
            means = [[value for value in column if value is not None] for column in every]
            return [fmean(column) if column else None for column in means]
        arm, base = self._fastest(self._of(method, one), one), self._fastest(self._bases, one)
        if name == SPEEDUP:
            return [self._speedup(arm, base, one), self._speedup(arm, PLAIN, one)]
        return [None if arm is None else self._figure(arm, one, name)]

    def _of(self, method: str, one: str) -> list[str]:
        """The arms of a method for a set."""
        if method == PLAIN_ROW:
            return self._bases
        of_set = {each.name: each.of_set.get(one) for each in self._protocol.methods}.get(method)
        names = (arm.name for arm in self._result.arms if of_set in (None, arm.policy))
        return [name for name in names if name in self._arms.get(method, ())]

    def _fastest(self, arms: Sequence[str], one: str) -> str | None:
        costs_s = {arm: self._seconds(arm, one) for arm in arms}
        told = {arm: cost_s for arm, cost_s in costs_s.items() if cost_s}
        return min(told, key=lambda arm: told[arm]) if told else None

    def _speedup(self, arm: str | None, base: str | None, one: str) -> float | None:
        own_s, base_s = (each and self._seconds(each, one) for each in (arm, base))
        return base_s / own_s if isinstance(base_s, float) and isinstance(own_s, float) else None

    def _seconds(self, arm: str, one: str) -> float | None:
        return SPEEDUPS[self._protocol.speedup](responses_of(self._result, arm, one))

    def _figure(self, arm: str, one: str, name: str) -> float | None:
        responses = responses_of(self._result, arm, one)
        counts = [each.rounds.count for each in responses if each.rounds is not None]
        tokens, rounds = fmean(each.new_tokens for each in responses), fmean(counts or [0])
        tpot_s = mean_tpot_s(responses)
        figures = paper_figures(self._result, arm, one)
        kind, _, length = self._result.arm(arm).policy.partition("x")
        acceptance = figures.depth_share
        if kind == "beam:1" and figures.tau is not None:  # DynaTree's chain of K, over K
            acceptance = figures.tau / int(length)
        values = {
            "tau": figures.tau if self._protocol.tau == "pooled" else figures.tau_of_texts,
            "path length": figures.tau,
            "acceptance %": acceptance,
            "draft share %": figures.draft_share,
            "tokens/s": figures.tokens_per_s,
            "first token ms": 1e3 * fmean(each.first_token_s for each in responses),
            "per token ms": None if tpot_s is None else 1e3 * tpot_s,
            "rounds": rounds or None,
            "tokens/round": tokens / rounds if rounds else None,
        }
        value = values[name]
        return value if value is None or not name.endswith("%") else 100 * value

"""Expected committed tokens per cycle by tree size: published, measured, or from one rate."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from costmodel.acceptance import (
    BLOCK_GAMMA,
    TAIL,
    AcceptanceProcess,
    PublishedRow,
    process_of,
    published_rows,
    recorded,
)
from costmodel.errors import InputError
from costmodel.io import MAX_JSON_BYTES, read_bytes, read_json
from costmodel.plugins import READERS, load_plugins
from costmodel.statistics import Array

Shape = Literal["plain", "chain", "tree"]

MOST_NODES = 511
MOST_CURVE_NODES = 65_536  # of a curve in a file
MOST_PLANNED_DEPTH = 256
# Least relative error of A - 1 for a workload like a data set that was measured.
LEAST_SPREAD = 0.05
# Relative error of A - 1 for a bare rate, and for acceptance published for another target.
RATE_SPREAD, OTHER_TARGET_SPREAD = 0.1, 0.15
_BLOCKS = 256
_OVERALL = "all"
# Table whose trees at temperature 1 accept by the argmax, which is not lossless.
_GREEDY_ONLY = "bastion"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSource:
    """The target, drafter and policy whose rounds acceptance comes from; None where it is not said.

    `target_hash` and `drafter_hash` are those of the architectures, as profiles use them;
    `drafter_kind` is that of a benchmark's result, such as `ngram` or `dflash`.
    """

    target: str | None = None
    target_hash: str | None = None
    drafter: str | None = None
    drafter_hash: str | None = None
    drafter_kind: str | None = None
    policy: str | None = None


_SAID = tuple(field.name for field in dataclasses.fields(AcceptanceSource))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """A(N), expected tokens per cycle with the bonus token, for chains and best-first trees.

    `chain` [gamma + 1] and `tree` [nodes + 1] are indexed by nodes and start at A(0) = 1. `spread`
    is the expected relative error of A(N) - 1 for a workload of this kind. `drafted_share` is the
    share of rounds that have a draft at all; the curves are means over all rounds. `measured` says
    what the curves belong to, `doubts` why they may not hold for the plan.
    """

    label: str
    kind: Literal["published", "recorded", "given"]
    chain: Array
    tree: Array
    spread: float
    drafted_share: float = 1.0
    measured: AcceptanceSource = dataclasses.field(default_factory=AcceptanceSource)
    doubts: tuple[str, ...] = ()

    def committed(self, shape: Shape, nodes: int) -> float:
        """Expected tokens per cycle. Raises InputError for more nodes than the curve has."""
        if shape == "plain" or nodes == 0:
            return 1.0
        curve = self.chain if shape == "chain" else self.tree
        if nodes >= len(curve):
            raise InputError(f"acceptance is known to {len(curve) - 1} nodes (asked for {nodes})")
        return float(curve[nodes])

    def relative_error(self, committed: float) -> float:
        return self.spread * (committed - 1.0) / committed


def find_acceptance(text: str, target: str, temperature: int = 0) -> Acceptance:
    """Acceptance from a file, the name of a published data set, or a rate between 0 and 1.

    `FILE#ARM` selects one arm of a benchmark's result. Raises InputError with the possible names.
    """
    with contextlib.suppress(ValueError):  # no number
        return from_rate(float(text))
    name, _, arm = text.partition("#")
    if Path(name).is_file():
        return from_file(Path(name), arm)
    if text in _datasets() or text == _OVERALL:
        return from_published(text, target, temperature)
    if "/" in text or "." in text:
        raise InputError(f"there is no file of acceptance data {text}")
    names = ", ".join((*_datasets(), _OVERALL))
    raise InputError(
        f"no acceptance data is called '{text}'",
        hint=f"Name a JSON file of measured acceptance, a rate such as 0.8, or one of: {names}",
    )


def from_rate(rate: float) -> Acceptance:
    """Acceptance of a drafter whose first choice is right with probability `rate` at every depth.

    The lower ranks are those of a typical published drafter (`TAIL`). Raises InputError.
    """
    if not 0 < rate < 1:
        raise InputError(
            f"an acceptance rate must lie between 0 and 1 (is {rate:g})",
            hint="A committed length of several tokens is not a rate; give a file or a data set",
        )
    process = AcceptanceProcess(
        label=f"rate {rate:g}", kind="given", rank1=(rate,) * BLOCK_GAMMA, tail=TAIL
    )
    return _acceptance(process, RATE_SPREAD)


def from_published(dataset: str, target: str, temperature: int = 0) -> Acceptance:
    """Mean over the papers' tables for one data set (or `all`) and this target.

    For a target without tables: the mean over all targets. Raises InputError.
    """
    rows = [
        row
        for row in published_rows()
        if row.temperature == temperature
        and dataset in (row.dataset, _OVERALL)
        and not (temperature and row.table == _GREEDY_ONLY)
    ]
    if not rows:
        raise InputError(f"no acceptance of {dataset} was published at temperature {temperature}")
    targets = sorted({row.target for row in rows})
    of_target = _of_target(rows, target)
    used = of_target or rows
    curves = [_published_curves(row) for row in used]
    chain, tree = (np.mean([pair[i] for pair in curves], axis=0) for i in (0, 1))
    gains = np.array([row.tree - 1 for row in used])
    spread = max(float(np.std(gains) / np.mean(gains)), LEAST_SPREAD)
    tables = sorted({f"{row.table} table 1, {row.target}" for row in used})
    listed = "; ".join(tables) if len(tables) <= 3 else f"{len(used)} lines"
    label = f"published for {dataset}, T = {temperature} ({listed})"
    if not of_target:
        spread = max(spread, OTHER_TARGET_SPREAD)
        label += f", of {', '.join(targets)}: none for this target"
    return Acceptance(
        label=label,
        kind="published",
        chain=chain,
        tree=tree,
        spread=spread,
        measured=AcceptanceSource(drafter="dflash", drafter_kind="dflash"),
    )


def published_extremes(target: str) -> tuple[str, str]:
    """The data sets whose chains commit the fewest and the most tokens, as `from_published`."""
    greedy = [row for row in published_rows() if row.temperature == 0]
    used = _of_target(greedy, target) or greedy

    def committed(dataset: str) -> float:
        return float(np.mean([row.chain for row in used if row.dataset == dataset]))

    names = sorted({row.dataset for row in used}, key=committed)
    return names[0], names[-1]


def _of_target(rows: Sequence[PublishedRow], target: str) -> list[PublishedRow]:
    name = target.lower().rpartition("/")[2].removesuffix("-instruct")
    return [row for row in rows if row.target == name]


def from_file(path: Path, arm: str = "") -> Acceptance:
    """Acceptance from a JSON file.

    The data is at the top, under `acceptance`, or, with `arm`, under `acceptance_by_arm` and the
    arm's name. Beside it stand the fields of `AcceptanceSource`, and `doubts`. Its forms:

    - `by_depth`: rates of the drafter's first choice at depth 1, 2, ... given that all before it
      were accepted; `rounds`: the verifications behind them; `drafted_share`: share of all rounds
      that had a draft (default 1; n-grams often find none);
    - `nodes` and `committed`: A(N) of best-first trees, optionally with `spread`;
    - `accepted_depths` and `tree_nodes` of each round of a run with chains.

    Files of other tools are read by the entry points of `rooftree.readers`. Raises InputError with
    the field that is missing or wrong.
    """
    text = read_bytes(path, InputError, most_bytes=MAX_JSON_BYTES).decode(errors="replace")
    data: Any = None
    for name, reader in load_plugins(READERS, "acceptance."):
        try:
            data = data or reader(text)
        except (InputError, TypeError, ValueError, LookupError) as failure:
            raise InputError(f"{path}: this file of {name} cannot be read ({failure})") from None
    data = data or read_json(path)
    if arm:
        by_arm = data.get("acceptance_by_arm") if isinstance(data, Mapping) else None
        arms = by_arm if isinstance(by_arm, Mapping) else {}
        if arm not in arms:
            raise InputError(
                f"{path} has no acceptance of '{arm}'",
                hint=f"It has that of {', '.join(arms) or 'no arm'}",
            )
        data = arms[arm]
    elif isinstance(data, Mapping) and isinstance(data.get("acceptance"), Mapping):
        data = data["acceptance"]
    if isinstance(data, Mapping):
        for field, read in _FORMS.items():
            if field in data:
                try:
                    return dataclasses.replace(
                        read(data, path.name),
                        measured=_measured(data, field),
                        doubts=tuple(data.get("doubts", ())),
                    )
                except (TypeError, ValueError, LookupError, ArithmeticError) as failure:
                    raise InputError(f"{path}: {field} cannot be used ({failure})") from None
                except InputError as failure:
                    raise InputError(f"{path}: {field}: {failure.problem}") from None
    raise InputError(
        f"{path} has no acceptance data", hint=f"It needs one of these fields: {', '.join(_FORMS)}"
    )


def _measured(data: Mapping[str, Any], form: str) -> AcceptanceSource:
    """What the file says of its rounds; rates by depth and single rounds come from chains."""
    said = {name: data[name] for name in _SAID if data.get(name) is not None}
    for name, value in said.items():
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} must be a text (is {value!r})")
    return AcceptanceSource(**{"policy": "fixed" if form == "committed" else "chain"} | said)


def _from_chains(data: Mapping[str, Any], label: str) -> Acceptance:
    """From rates by depth, or from rounds; where a round has no draft it commits one token."""
    if "by_depth" in data:
        rates = tuple(float(rate) for rate in data["by_depth"])
        while rates and rates[-1] == 0.0:  # positions that a server never accepted
            rates = rates[:-1]
        if not rates or not all(0.0 < rate <= 1.0 for rate in rates):
            raise InputError(f"must be one or more rates above 0, at most 1: {rates}")
        process = AcceptanceProcess(label=label, kind="recorded", rank1=rates)
        rounds, share = data.get("rounds"), float(data.get("drafted_share", 1.0))
    else:
        accepted, drafted = (
            [int(n) for n in data[name]] for name in ("accepted_depths", "tree_nodes")
        )
        process = recorded(accepted, drafted, label=label)
        rounds = sum(1 for nodes in drafted if nodes)
        share = rounds / len(drafted)
    # Accepted lengths vary by about their mean.
    spread = RATE_SPREAD if rounds is None else float(max(int(rounds), 1) ** -0.5)
    acceptance = _acceptance(process, max(LEAST_SPREAD, spread))
    if not 0 < share <= 1:
        raise InputError(f"the share of rounds with a draft must be above 0, at most 1 ({share})")
    chain, tree = (1.0 + share * (curve - 1.0) for curve in (acceptance.chain, acceptance.tree))
    return dataclasses.replace(acceptance, chain=chain, tree=tree, drafted_share=share)


def _from_curve(data: Mapping[str, Any], label: str) -> Acceptance:
    nodes = np.array([float(n) for n in data["nodes"]])
    committed = np.array([float(a) for a in data["committed"]])
    if nodes.shape != committed.shape or nodes[0] != 0 or np.any(np.diff(nodes) <= 0):
        raise InputError("nodes must ascend from 0, with one committed length each")
    if nodes[-1] > MOST_CURVE_NODES:
        raise InputError(f"a curve has at most {MOST_CURVE_NODES} nodes (is {nodes[-1]:g})")
    if committed[0] != 1 or np.any(np.diff(committed) < 0):
        raise InputError("committed lengths must start at 1 and never fall")
    tree = np.interp(np.arange(int(nodes[-1]) + 1), nodes, committed)
    spread = max(float(data.get("spread", LEAST_SPREAD)), 0.0)
    # Such a file has no data on chains, so no chain is planned from it.
    return Acceptance(label=label, kind="recorded", chain=np.ones(1), tree=tree, spread=spread)


_FORMS: dict[str, Callable[[Mapping[str, Any], str], Acceptance]] = {
    "by_depth": _from_chains,
    "committed": _from_curve,
    "accepted_depths": _from_chains,
}


def _acceptance(process: AcceptanceProcess, spread: float) -> Acceptance:
    return Acceptance(
        label=process.label,
        kind=process.kind,
        chain=chain_curve(process),
        tree=tree_curve(process),
        spread=spread,
    )


def chain_curve(process: AcceptanceProcess) -> Array:
    return np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(process.rank1))])


def tree_curve(process: AcceptanceProcess, nodes: int = MOST_NODES) -> Array:
    """A(N) of best-first trees of 0 .. `nodes` nodes: 1 plus the sum of the N best path scores.

    It is a mean over blocks with drawn confidences (fixed seed). The committed length of the same
    blocks' chains, whose mean is known exactly, serves as a control variate. Raises InputError
    for drafts of more than `MOST_PLANNED_DEPTH` positions.
    """
    if process.gamma > MOST_PLANNED_DEPTH:
        raise InputError(
            f"trees are planned for drafts of at most {MOST_PLANNED_DEPTH} positions, not"
            f" {process.gamma}"
        )
    random = np.random.default_rng(0)
    table = process.rank_table(nodes)  # [gamma, quantiles, ranks]
    picked = random.integers(0, table.shape[1], (_BLOCKS, process.gamma))
    depths = np.arange(process.gamma)
    # Pairs (parent, rank) that can be among the best children of descending parents.
    pairs = [(i, j) for i in range(nodes) for j in range(nodes // (i + 1))]
    parents, ranks = np.array(pairs).T
    curves, chains = np.empty((_BLOCKS, nodes)), np.empty(_BLOCKS)
    for i in range(_BLOCKS):
        block = table[depths, picked[i]]  # [gamma, ranks]
        level = np.zeros(nodes)
        level[0], levels = 1.0, []  # the root, where paths start
        for probabilities in block:
            level = -np.sort(-level[parents] * probabilities[ranks])[:nodes]
            levels.append(level)
        curves[i] = np.cumsum(-np.sort(-np.concatenate(levels))[:nodes])
        chains[i] = np.cumprod(block[:, 0]).sum()
    exact = float(np.cumprod(process.rank1).sum())
    deviation = chains - chains.mean()
    slope = deviation @ curves / max(float(deviation @ deviation), 1e-12)
    mean = curves.mean(axis=0) - slope * (chains.mean() - exact)
    return np.maximum.accumulate(np.concatenate([[1.0], 1.0 + mean]))


@cache
def _published_curves(row: PublishedRow) -> tuple[Array, Array]:
    process = process_of(row)
    return chain_curve(process), tree_curve(process)


@cache
def _datasets() -> tuple[str, ...]:
    return tuple(sorted({row.dataset for row in published_rows()}))

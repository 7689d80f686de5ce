"""Expected committed tokens a cycle by tree size, as data: published, measured or one rate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from costmodel.acceptance_process import TAIL, AcceptanceProcess, recorded
from costmodel.errors import InputError
from costmodel.published_acceptance import PublishedRow, process_of, published_rows

Array = NDArray[np.float64]
Shape = Literal["plain", "chain", "tree"]

MOST_NODES = 511
BLOCK_GAMMA = 15
# Least expected error of A - 1 where a workload is said to be like a data set that was measured.
LEAST_SPREAD = 0.05
# ... of a bare rate, which nobody measured, and of another target's published acceptance.
RATE_SPREAD, OTHER_TARGET_SPREAD = 0.1, 0.15
_BLOCKS = 256
_OVERALL = "all"
# Published trees at temperature 1 of this paper accept by the argmax, which is not lossless.
_GREEDY_ONLY = "bastion"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """A(N), the bonus token included, for chains and for best-first trees of N nodes.

    `chain` [gamma + 1] and `tree` [nodes + 1] start at A(0) = 1. `spread`: expected relative
    error of A(N) - 1 for a workload that is said to be of this kind.
    """

    label: str
    kind: Literal["published", "recorded", "given"]
    chain: Array
    tree: Array
    spread: float

    def __post_init__(self) -> None:
        for name, curve in (("chain", self.chain), ("tree", self.tree)):
            if curve.ndim != 1 or not len(curve) or curve[0] != 1 or np.any(np.diff(curve) < 0):
                raise InputError(f"acceptance of the {name} must start at 1 and never fall")

    def committed(self, shape: Shape, nodes: int) -> float:
        """Expected tokens a cycle. Raises InputError for more nodes than are known."""
        if shape == "plain" or nodes == 0:
            return 1.0
        curve = self.chain if shape == "chain" else self.tree
        if nodes >= len(curve):
            raise InputError(f"acceptance is known to {len(curve) - 1} nodes (asked for {nodes})")
        return float(curve[nodes])

    def relative_error(self, committed: float) -> float:
        """Expected relative error of a committed length."""
        return self.spread * (committed - 1.0) / committed


def find_acceptance(text: str, target: str, temperature: int = 0) -> Acceptance:
    """From a file, the name of a published data set, or a rate between 0 and 1.

    `FILE#ARM` takes one arm of a benchmark's result. Raises InputError that lists what there is.
    """
    rate = _number(text)
    if rate is not None:
        return from_rate(rate)
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
    """The drafter's first token is right with this probability at every depth.

    What lies at the lower ranks is that of a typical published drafter (`TAIL`).
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
    """Mean of the papers' tables for one data set, or `all` of them, and this target.

    For a target that is not in them the mean over those that are. Raises InputError.
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
    known = sorted({row.target for row in rows})
    name = target.lower().rpartition("/")[2].removesuffix("-instruct")
    own = [row for row in rows if row.target == name]
    used = own or rows
    curves = [_published_curves(row) for row in used]
    chain, tree = (np.mean([pair[i] for pair in curves], axis=0) for i in (0, 1))
    gains = np.array([row.tree - 1 for row in used])
    spread = max(float(np.std(gains) / np.mean(gains)), LEAST_SPREAD)
    label = f"published for {dataset}, T = {temperature} ({_tables(used)})"
    if not own:
        spread = max(spread, OTHER_TARGET_SPREAD)
        label += f", of {', '.join(known)}: none for this target"
    return Acceptance(label=label, kind="published", chain=chain, tree=tree, spread=spread)


def from_file(path: Path, arm: str = "") -> Acceptance:
    """A JSON result with one of these under `acceptance`, under `acceptance_by_arm` and the
    name of the `arm` where one is given, or at its top:

    - `by_depth`: rates of the drafter's first choice at depth 1, 2, ... given all before it,
      and `rounds`, the verifications that they were counted in;
    - `nodes` and `committed`: A(N) of best-first trees, with `spread` where it is known;
    - `accepted_depths` and `tree_nodes` of each round of a run of chains.

    Raises InputError naming what is missing or wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"{path} cannot be read as JSON ({failure})") from None
    if arm:
        data = _of_arm(data, arm, path)
    elif isinstance(data, Mapping) and isinstance(data.get("acceptance"), Mapping):
        data = data["acceptance"]
    if isinstance(data, Mapping):
        for field, read in _FORMS.items():
            if field in data:
                try:
                    return read(data, path.name)
                except (TypeError, ValueError, KeyError) as failure:
                    raise InputError(f"{path}: {field} cannot be used ({failure})") from None
                except InputError as failure:
                    raise InputError(f"{path}: {field}: {failure.problem}") from None
    raise InputError(
        f"{path} has no acceptance data",
        hint=f"It needs one of these fields: {', '.join(_FORMS)}",
    )


def _of_arm(data: Any, arm: str, path: Path) -> Any:
    """What a benchmark's result says of one arm."""
    arms = data.get("acceptance_by_arm") if isinstance(data, Mapping) else None
    known = arms if isinstance(arms, Mapping) else {}
    if arm not in known:
        raise InputError(
            f"{path} has no acceptance of '{arm}'",
            hint=f"It has that of {', '.join(known) or 'no arm'}",
        )
    return known[arm]


def _from_depths(data: Mapping[str, Any], label: str) -> Acceptance:
    rates = tuple(float(rate) for rate in data["by_depth"])
    process = AcceptanceProcess(label=label, kind="recorded", rank1=rates)
    return _acceptance(process, _counted(data.get("rounds")))


def _from_curve(data: Mapping[str, Any], label: str) -> Acceptance:
    nodes = np.array([float(n) for n in data["nodes"]])
    committed = np.array([float(a) for a in data["committed"]])
    if nodes.shape != committed.shape or nodes[0] != 0 or np.any(np.diff(nodes) <= 0):
        raise InputError("nodes must ascend from 0, with one committed length each")
    if committed[0] != 1:
        raise InputError(f"0 nodes commit 1 token (is {committed[0]:g})")
    tree = np.interp(np.arange(int(nodes[-1]) + 1), nodes, committed)
    spread = max(float(data.get("spread", LEAST_SPREAD)), 0.0)
    # What chains commit is not in such a file: no chain is planned from it.
    return Acceptance(label=label, kind="recorded", chain=np.ones(1), tree=tree, spread=spread)


def _from_rounds(data: Mapping[str, Any], label: str) -> Acceptance:
    accepted, drafted = ([int(n) for n in data[name]] for name in ("accepted_depths", "tree_nodes"))
    process = recorded(accepted, drafted, label=label)
    return _acceptance(process, _counted(sum(1 for nodes in drafted if nodes)))


_FORMS: dict[str, Callable[[Mapping[str, Any], str], Acceptance]] = {
    "by_depth": _from_depths,
    "committed": _from_curve,
    "accepted_depths": _from_rounds,
}


def _counted(rounds: Any) -> float:
    """Accepted lengths differ from round to round by about their mean."""
    if rounds is None:
        return RATE_SPREAD
    return max(LEAST_SPREAD, float(max(int(rounds), 1) ** -0.5))


def _acceptance(process: AcceptanceProcess, spread: float) -> Acceptance:
    kind = process.kind
    return Acceptance(
        label=process.label,
        kind=kind,
        chain=chain_curve(process),
        tree=tree_curve(process),
        spread=spread,
    )


def chain_curve(process: AcceptanceProcess) -> Array:
    """A(N) of chains of 0 .. gamma nodes."""
    return np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(process.rank1))])


def tree_curve(process: AcceptanceProcess, nodes: int = MOST_NODES) -> Array:
    """A(N) of best-first trees of 0 .. `nodes` nodes: the N best path scores of a block.

    The mean over blocks whose confidences are drawn (fixed seed); what the same blocks' chains
    commit, which is known exactly, takes most of the noise away.
    """
    random = np.random.default_rng(0)
    table = process.rank_table(nodes)  # [gamma, quantiles, ranks]
    picked = random.integers(0, table.shape[1], (_BLOCKS, process.gamma))
    depths = np.arange(process.gamma)
    parents, ranks = _pairs(nodes)
    curves, chains = np.empty((_BLOCKS, nodes)), np.empty(_BLOCKS)
    for i in range(_BLOCKS):
        block = table[depths, picked[i]]  # [gamma, ranks]
        curves[i] = np.cumsum(_best_scores(block, parents, ranks))
        chains[i] = np.cumprod(block[:, 0]).sum()
    exact = float(np.cumprod(process.rank1).sum())
    known = chains - chains.mean()
    slope = known @ curves / max(float(known @ known), 1e-12)
    mean = curves.mean(axis=0) - slope * (chains.mean() - exact)
    return np.maximum.accumulate(np.concatenate([[1.0], 1.0 + mean]))


def _pairs(nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(parent, rank) that can be among the best `nodes` children of descending parents."""
    pairs = [(i, j) for i in range(nodes) for j in range(nodes // (i + 1))]
    parents, ranks = np.array(pairs).T
    return parents, ranks


def _best_scores(block: Array, parents: NDArray[np.int64], ranks: NDArray[np.int64]) -> Array:
    """The best path scores of one block, descending; as many as there are ranks."""
    nodes = block.shape[1]
    level = np.zeros(nodes)
    level[0] = 1.0  # the root, where paths start
    found = []
    for probabilities in block:
        scores = level[parents] * probabilities[ranks]
        level = -np.sort(-scores)[:nodes]
        found.append(level)
    return np.asarray(-np.sort(-np.concatenate(found))[:nodes])


@cache
def _published_curves(row: PublishedRow) -> tuple[Array, Array]:
    process = process_of(row)
    return chain_curve(process), tree_curve(process)


@cache
def _datasets() -> tuple[str, ...]:
    return tuple(sorted({row.dataset for row in published_rows()}))


def _tables(rows: Sequence[PublishedRow]) -> str:
    names = sorted({f"{row.table} table 1, {row.target}" for row in rows})
    return "; ".join(names) if len(names) <= 3 else f"{len(rows)} lines"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

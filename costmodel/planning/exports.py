"""Speculative settings of serving engines, from a plan, as text to type in.

A form of settings is an entry point in `rooftree.settings`: a name, and a `SettingsWriter`. Here is
what the writers of several engines share. Settings are of chains but for this project's decoder. A
plan is exported to the engine that it was made for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from costmodel.catalog import find_target, resolve_target
from costmodel.errors import InputError
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.batching import Cycle, cycle_work
from costmodel.planning.drafting import BLOCK_KINDS, CHECKPOINTS, drafter_kind
from costmodel.planning.request import PlanRequest
from costmodel.planning.result import Plan, PlanOption
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.traffic import Traffic
from costmodel.plugins import SETTINGS, load_plugin

NO_DIFFERENCE = 0.01  # a shorter draft within this share of the highest rate is taken instead
_MOST_LOSS = 0.05  # of a schedule, where acceptance is less certain than that


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a writer makes settings of: a plan, and its best option."""

    plan: Plan
    best: PlanOption

    @property
    def request(self) -> PlanRequest:
        return self.plan.request

    @property
    def target(self) -> str:
        return served_name(self.request.target)

    @property
    def table(self) -> list[list[int]]:
        """Rows of [first batch, last batch, drafted tokens]; neighbours of equal size are joined.

        A size holds up to the batch before the next point.
        """
        ordered = sorted(self.best.points, key=lambda point: point.running)
        firsts = [1, *(point.running for point in ordered[1:])]
        sizes = [point.nodes for point in ordered]
        return [[*span, size] for span, size in joined(firsts, ordered[-1].running, sizes)]

    @property
    def at_load(self) -> OperatingPoint:
        return self.best.sizing.at_load if self.best.sizing else self.best.points[0]

    @property
    def drafter(self) -> str:
        return self.best.drafter.name if self.best.drafter else "dflash"

    @property
    def checkpoint(self) -> str:
        """The drafter's checkpoint, or a gap where it is not known."""
        return checkpoint_of(self.drafter, self.target)

    @property
    def precision_options(self) -> list[str]:
        """vLLM's and SGLang's options for quantised weights and cache; stored scales need none."""
        precision = self.request.precision
        options = ["--quantization fp8"] if precision.weights == "fp8_dynamic" else []
        return options + (["--kv-cache-dtype fp8"] if precision.cache == "fp8" else [])

    @property
    def why_plain(self) -> str:
        if self.request.policy.kind == "plain":
            return "the policy is plain"
        if self.request.acceptance is None:
            return "there is no acceptance data"
        return "the plan drafts nothing at this load"

    def kind(self, engine: str, known: Sequence[str]) -> str:
        """The planned drafter's kind. Raises InputError for one that the engine does not run."""
        name = self.drafter
        kind = drafter_kind(name)
        if kind not in known or "@" in name:
            raise InputError(
                f"{engine} cannot run the chains that were planned with the drafter {name}",
                hint=f"It runs {', '.join(known)}: plan with one by --drafter, or with --engine"
                " rooftree --export transformers",
            )
        return kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsWriter:
    """One form of an engine's settings.

    engine    the engine that a plan must be made for; None: acceptance alone, of any plan
    write     the lines for an export. Raises InputError for what the engine cannot run
    version   the first version that takes the settings; `versions`: a later one, by the kind of
              drafter that needs it
    by_batch  whether its draft lengths may fall with requests at once, for a kind of drafter
    """

    engine: str | None
    write: Callable[[Export], list[str]]
    version: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_batch: Callable[[str], bool] = lambda kind: False


def settings_writer(name: str) -> SettingsWriter:
    writer: SettingsWriter = load_plugin(SETTINGS, name)
    return writer


def export_plan(plan: Plan, name: str) -> str:
    """Settings in this form for the plan's best option.

    Raises InputError where there is none, and where the engine cannot run what was planned.
    """
    writer = settings_writer(name)
    if writer.engine is None:
        return "\n".join(writer.write(Export(plan=plan, best=plan.options[0]))) + "\n"
    if plan.request.engine != writer.engine:
        raise InputError(
            f"the plan is for {plan.request.engine}, whose times and sizes are not those of {name}",
            hint=f"Plan with --engine {writer.engine}",
        )
    best = plan.best
    if best is None or best.sizing is None:
        raise InputError(
            "there is nothing to export: no option holds the goals",
            hint="; ".join(option.describe_problem() for option in plan.options),
        )
    kind = drafter_kind(best.drafter.name) if best.drafter else ""
    place = f"{best.gpu} tp {best.tensor_parallel}"
    others = [f"{o.gpu} tp {o.tensor_parallel}" for o in plan.options if o is not best]
    place += f", the best; not for {', '.join(others)}" if others else ""
    context = plan.request.traffic.prompt_tokens + plan.request.traffic.output_tokens / 2
    place += f"; at about {context:.0f} cached tokens a request"
    version = writer.versions.get(kind, writer.version)
    lines = [f"# {version} and later; planned for {place}"]
    if plan.acceptance is not None and best.choices and writer.by_batch(kind):
        best, losses = steady(best, plan.acceptance)
        lines += losses
    if plan.request.precision.weights not in (None, "bfloat16", "fp8_dynamic"):
        lines.append(f"# serve a checkpoint whose weights are {plan.request.precision.weights}")
    lines += writer.write(Export(plan=plan, best=best))
    return "\n".join(lines) + "\n"


def steady(best: PlanOption, acceptance: Acceptance) -> tuple[PlanOption, list[str]]:
    """The option with lengths that fall with the batch, and their loss in words.

    Inside the error is what acceptance does not tell apart; that of times is common to all lengths.
    Of all falling schedules whose losses are inside it, or inside the least error that one keeps
    to, that of the fewest steps, then of the smallest losses beyond 1 % and the shortest lengths.
    """
    error = max(acceptance.relative_error(choice.best.committed) for choice in best.choices)
    error = min(error, _MOST_LOSS)
    lost = []  # by length: its time per token over that of the best, less 1; none below plain steps
    for choice in best.choices:
        least_s, plain_s = min(choice.chains_s.values()), choice.chains_s[0]
        lost.append({n: s / least_s - 1 for n, s in choice.chains_s.items() if s <= plain_s})
    limit = max(error, NO_DIFFERENCE)
    while (lengths := _falling(lost, limit)) is None:
        limit *= 1.1
    losses = [of[length] for of, length in zip(lost, lengths, strict=True)]
    points = [
        dataclasses.replace(point, nodes=nodes, shape="chain" if nodes else "plain")
        for point, nodes in zip(best.points, lengths, strict=True)
    ]
    loss = (
        f"# lengths fall with requests at once in the fewest steps: a token takes"
        f" {sum(losses) / len(losses):.1%} longer than with the best of each, at most"
        f" {max(losses):.1%} (acceptance is known to {error:.1%})"
    )
    return dataclasses.replace(best, points=tuple(points)), [loss] if any(lengths) else []


def served_name(target: str) -> str:
    """The hub id of a target that is named in part or by a folder; else the name as it is.

    A folder is known by its name and the sizes of its model. A fine-tune keeps its path.
    """
    try:
        known = find_target(target.rstrip("/").rpartition("/")[2])
        same = resolve_target(target).architecture.hash == known.architecture.hash
    except InputError:
        return target
    return known.name if same else target


def checkpoint_of(drafter: str, target: str) -> str:
    """The checkpoint of a drafter: a kind is the published one of this target, else a gap."""
    kind, at, option = drafter.partition("@")
    if kind not in BLOCK_KINDS:
        return drafter
    published = CHECKPOINTS.get(target.lower().rpartition("/")[2]) if kind == "dflash" else None
    return (published or f"PATH_OF_A_{kind.upper()}_DRAFTER") + at + option


def written_file(name: str, *lines: str) -> list[str]:
    return [f"cat > {name} <<'END'", *lines, "END"]


def one_option_a_line(options: Sequence[str]) -> list[str]:
    """One option a line, each but the last continued."""
    return [
        ("  " if i else "") + option + (" \\" if i + 1 < len(options) else "")
        for i, option in enumerate(options)
    ]


def step_s(
    server: Server, traffic: Traffic, running: int, rows: int, *, drafts: bool = True
) -> float:
    """Seconds of one step of `running` requests with `rows` rows each, without prompts.

    drafts  whether the step makes a draft: DSpark decides after it how much to verify
    """
    cycle, drafter = Cycle(), server.drafter if drafts else None
    if drafter is not None:
        context = traffic.prompt_tokens + traffic.output_tokens / 2
        cycle = Cycle(
            draft=drafter.draft_s(server.forward, running, context, rows - 1),
            draft_layers=drafter.layers,
            draft_host_s=running * drafter.host_s,
        )
    cycle = dataclasses.replace(
        cycle, nodes=rows - 1, tree_host_s=running * server.tree_s("chain", rows - 1)
    )
    work = cycle_work(server.forward, server.rules, traffic, running, cycle)
    work = dataclasses.replace(work, prompts_s=0.0, prompt_steps=0.0)
    return server.overheads.time_per_token_s(work, overlaps_host=server.rules.overlaps_host)


def _falling(losses: Sequence[Mapping[int, float]], error: float) -> list[int] | None:
    """The best schedule inside the error by dynamic programming; None where there is none."""
    ends: dict[int, tuple[int, float, list[int]]] = {}  # by last length: steps, losses, lengths
    for count, of in enumerate(losses):
        longer = {}
        for length, loss in of.items():
            before = [
                (steps + (last != length), total, path)
                for last, (steps, total, path) in ends.items()
                if last >= length
            ]
            before = before if count else [(0, 0.0, [])]
            if loss <= error and before:
                steps, total, path = min(before)
                beyond = round(max(loss - NO_DIFFERENCE, 0.0), 6)
                longer[length] = steps, total + beyond, [*path, length]
        ends = longer
    return min(ends.values())[2] if ends else None


def joined(
    firsts: Sequence[int], last: int, values: Sequence[Any]
) -> Iterator[tuple[tuple[int, int], Any]]:
    """Ranges (first, last) with their value; neighbours of equal value are one.

    A value holds from its first number to the one before the next first number.
    """
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        end = last if after is None else firsts[after] - 1
        yield (firsts[start], end), values[start]

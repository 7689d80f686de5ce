"""One server by requests at once, with the best tree size of each, and the servers for a rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from costmodel.errors import InputError
from costmodel.planning.acceptance import Acceptance, Shape
from costmodel.planning.accuracy import INTERVAL
from costmodel.planning.batching import (
    Cycle,
    Overheads,
    TokenWork,
    cycle_parts,
    cycle_work,
    prompt_share,
    prompt_work,
    slowest_count,
)
from costmodel.planning.drafting import DraftCost
from costmodel.planning.engines import (
    EngineRules,
    cache_bytes_per_token,
    sequence_bytes,
    weight_bytes,
)
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import Goals, PlanRequest, ServingPolicy
from costmodel.planning.traffic import Traffic

# Requests at once and tree sizes to try; they include the full buckets of graph runtimes.
CONCURRENCIES = (
    1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512,
    640, 768, 1024, 1280, 1536, 2048, 3072, 4096,
)  # fmt: skip
TREES = (2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255, 383, 511)
# Seconds on the host to build and walk a tree: building takes 8 us for 256 nodes and 23 us for
# 1024 (lab/studies/results/startup.json), the walk about as much.
_TREE_S, _NODE_S = 5e-6, 5e-8
# A smaller tree within this share of the shortest time per token is taken instead of the best.
_NO_DIFFERENCE = 0.01
# A tree grows with the batch only where that saves more than this share of the time per token.
_WORTH_GROWING = 0.02
# With more requests at once trees give way to chains, and chains to plain steps.
_RANKS: dict[Shape, int] = {"plain": 0, "chain": 1, "tree": 2}
# Largest share of a step's rows that verifications may take.
_STEP_SHARE = 0.5
_TOKENS = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One server that always has `running` requests at once.

    `shape` and `nodes`: the best draft tree; `committed`: tokens a cycle; `parts`: its seconds by
    cause (None where no server computed the point). `tpot_s`: mean time per output token after the
    first; `ttft_s`: mean time to the first, of which `prefill_s` is the request's own prompt.
    `power_share`: mean power of a device over its limit or TDP.
    """

    running: int
    shape: Shape
    nodes: int
    committed: float
    cycle_s: float
    tpot_s: float
    prefill_s: float
    ttft_s: float
    requests_per_s: float
    power_share: float = 1.0
    parts: Mapping[str, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftComparison:
    """The plain step, best chain and best tree at one number of requests; `best` is that to run.

    `chain` and `tree` are None where policy, engine or step size allow none. `chains_s`: time per
    token by the length of the chain, 0 for the plain step.
    """

    running: int
    best: OperatingPoint
    plain: OperatingPoint
    chain: OperatingPoint | None = None
    tree: OperatingPoint | None = None
    chains_s: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def speedup(self, point: OperatingPoint) -> float:
        """Time per token of plain decoding over that of `point`."""
        return self.plain.tpot_s / point.tpot_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server:
    """A target on a group of devices, served by an engine with a draft policy."""

    forward: TargetForward
    rules: EngineRules
    overheads: Overheads
    policy: ServingPolicy
    acceptance: Acceptance | None = None
    drafter: DraftCost | None = None

    def cache_tokens(self, degree: int | None = None) -> float:
        """Tokens that the cache holds at a tensor-parallel degree (None: the server's own)."""
        f, tp = self.forward, degree or self.forward.tensor_parallel
        weights = weight_bytes(f.architecture, f.value_bytes, tp)
        token = cache_bytes_per_token(f.architecture, f.value_bytes, tp)
        if self.drafter is not None:
            weights += self.drafter.weight_bytes(f.architecture) / tp
            token += self.drafter.cache_bytes_per_token(f.architecture) / tp
        memory, size = self.rules.memory, f.device.memory_bytes
        weights += memory.activation_bytes(f.architecture, self.rules.step_tokens, tp)
        return max(memory.free_bytes(size, weights), 0.0) / token

    def held_tokens(self, tokens: float) -> float:
        """Tokens of `cache_tokens` that a sequence takes: fewer under windows, more with states."""
        f, tp = self.forward, self.forward.tensor_parallel
        a, drops = f.architecture, self.rules.memory.drops
        if not a.recurrent_layers and (a.sliding_window is None or not drops):
            return tokens
        drafted = self.drafter.cache_bytes_per_token(a) / tp if self.drafter else 0.0
        held = sequence_bytes(a, tokens, f.value_bytes, tp, drops=drops) + drafted * tokens
        return held / (cache_bytes_per_token(a, f.value_bytes, tp) + drafted)

    def most_running(self, traffic: Traffic) -> int:
        """Requests whose cache fits at once; 0 where not even one fits."""
        tokens_held = self.rules.memory.tokens_held(traffic.prompt_tokens, traffic.output_tokens)
        tokens = self.cache_tokens()
        fits = tokens >= self.held_tokens(traffic.total_tokens)
        return int(tokens / self.held_tokens(tokens_held)) if fits else 0

    def points(self, traffic: Traffic, most: int | None = None) -> list[OperatingPoint]:
        """The best point at each number of requests that fits, the largest included."""
        return [choice.best for choice in self.choices(traffic, most)]

    def choices(self, traffic: Traffic, most: int | None = None) -> list[DraftComparison]:
        """The choice at each number of requests that fits, the largest included.

        A tree is never larger than that of fewer requests at once unless it saves over 2 %.
        """
        limit = self.most_running(traffic)
        limit = limit if most is None else min(limit, most)
        if limit and self.policy.nodes is not None:
            limit = max(1, min(limit, self.most_rows // (self.policy.nodes + 1)))
        tried = [b for b in CONCURRENCIES if b <= limit]
        if limit and limit < CONCURRENCIES[-1] and limit not in tried:
            tried.append(limit)
        choices: list[DraftComparison] = []
        for running in tried:
            choices.append(self._compare(traffic, running, choices[-1] if choices else None))
        return choices

    def best(self, traffic: Traffic, running: int) -> OperatingPoint:
        """The smallest tree whose time per token is within 1 % of the shortest."""
        return self._compare(traffic, running, None).best

    def _compare(
        self, traffic: Traffic, running: int, fewer: DraftComparison | None
    ) -> DraftComparison:

        def timed(cycle: Cycle) -> _TimedCycle:
            work = cycle_work(self.forward, self.rules, traffic, running, cycle)
            return _TimedCycle(self._seconds(work) / cycle.committed, cycle)

        cycles = [timed(cycle) for cycle in self._cycles(traffic, running)]
        plain = timed(Cycle())
        best = _smallest(cycles, fewer.best if fewer else None)
        point = self._point(traffic, running, best)

        def beside(shape: Shape) -> OperatingPoint | None:
            of = [one for one in cycles if one.cycle.shape == shape]
            if best.cycle.shape == shape or not of:
                return point if of else None
            return self._point(traffic, running, _smallest(of, getattr(fewer, shape, None)))

        chains = [one for one in (*cycles, plain) if one.cycle.shape != "tree"]
        return DraftComparison(
            running=running,
            best=point,
            plain=self._point(traffic, running, plain),
            chain=beside("chain"),
            tree=beside("tree"),
            chains_s={one.cycle.nodes: one.tpot_s for one in chains},
        )

    @property
    def most_rows(self) -> int:
        return int(_STEP_SHARE * self.rules.step_tokens)

    def _cycles(self, traffic: Traffic, running: int) -> Iterator[Cycle]:
        """Cycles of the drafts that policy, engine and step size allow, the plain step first."""
        policy, acceptance = self.policy, self.acceptance
        most = self.forward.most_tree_rows or math.inf
        sizes: list[tuple[Shape, int]] = [("plain", 0)]
        if policy.nodes is not None:
            sizes = [("chain" if policy.kind == "chain" else "tree", policy.nodes)]
        elif acceptance is not None and policy.kind != "plain":
            sizes += [("chain", n) for n in range(1, len(acceptance.chain))]
            if policy.kind == "auto" and self.rules.verifies_trees:
                sizes += [("tree", n) for n in TREES if n < len(acceptance.tree)]
        for shape, nodes in sizes:
            untimed = shape == "tree" and nodes >= most
            if policy.nodes is not None and untimed:
                raise InputError(
                    f"trees of {nodes} nodes have no times: the operator tables of recurrent"
                    f" layers hold trees of up to {most:.0f} rows, {most - 1:.0f} nodes"
                )
            fits = running * (nodes + 1) <= self.most_rows
            if policy.nodes is not None or not nodes or (fits and not untimed):
                context = traffic.prompt_tokens + traffic.output_tokens / 2
                yield self.cycle(shape, nodes, running, context)

    def cycle(self, shape: Shape, nodes: int, running: int, context: float) -> Cycle:
        """A round of requests with drafts of a shape and size, and so many cached tokens each."""
        acceptance, drafter = self.acceptance, self.drafter
        if not nodes or acceptance is None or drafter is None:
            return Cycle()
        return Cycle(
            shape=shape,
            nodes=nodes,
            committed=acceptance.committed(shape, nodes),
            drafted_share=acceptance.drafted_share,
            draft=drafter.draft_s(self.forward, running, context, nodes),
            draft_layers=drafter.layers,
            draft_host_s=running * drafter.host_s,
            tree_host_s=running * self.tree_s(shape, nodes),
        )

    def tree_s(self, shape: Shape, nodes: int) -> float:
        """Host seconds to build, accept and commit one tree; measured ones where there are any."""
        stages = self.forward.profile.stages
        parts = [s for s in (stages.build, stages.accept) if s is not None]
        if parts:
            total = sum(float(part.seconds(nodes)) for part in parts)
            return total + (float(stages.commit.seconds(4)) if stages.commit else 0.0)
        return _TREE_S + _NODE_S * nodes if shape == "tree" else 0.0

    def _seconds(self, work: TokenWork) -> float:
        return self.overheads.time_per_token_s(work, overlaps_host=self.rules.overlaps_host)

    def _point(self, traffic: Traffic, running: int, timed: _TimedCycle) -> OperatingPoint:
        tpot_s, cycle = timed
        prefill_s = self._prefill_s(traffic, running, cycle)
        residence_s = prefill_s + (traffic.output_tokens - 1) * tpot_s
        requests_per_s = running / residence_s
        # Share of time taken by prompts; a new prompt waits for them as in an M/D/1 queue.
        prompts = prompt_share(self.rules, running, traffic.output_tokens)
        waits = slowest_count(prompts, self.forward.ranks) / prompts if prompts else 1.0
        busy = min(requests_per_s * waits * self._prefill_s(traffic, 1, Cycle()), 0.95)
        wait_s = busy / (2 * (1 - busy)) * prefill_s if running > 1 else 0.0
        cycle_s = tpot_s * cycle.committed
        half_s = cycle_s / 2 if running > 1 else 0.0
        work = cycle_work(self.forward, self.rules, traffic, running, cycle)
        rows = cycle.drafted_share * cycle.nodes + 1
        computed = (1 - self.rules.prefix_hits) * traffic.prompt_tokens
        rows += cycle.committed * computed / traffic.output_tokens
        rows_per_s = running * rows / cycle_s
        return OperatingPoint(
            running=running,
            shape=cycle.shape,
            nodes=cycle.nodes,
            committed=cycle.committed,
            cycle_s=cycle_s,
            tpot_s=tpot_s,
            prefill_s=prefill_s,
            ttft_s=self.overheads.front_s + prefill_s + wait_s + half_s,
            requests_per_s=requests_per_s,
            power_share=self.forward.power_share(rows_per_s),
            parts=cycle_parts(self.overheads, work, cycle, cycle_s),
        )

    def _prefill_s(self, traffic: Traffic, running: int, cycle: Cycle) -> float:
        """Seconds of a request's own prompt, with other requests decoding in the same steps."""
        beside = running * (cycle.nodes + 1) if self.rules.mixes_prompts and running > 1 else 0
        prompt_s, chunks = prompt_work(self.forward, self.rules, traffic.prompt_tokens, beside)
        work = cycle_work(self.forward, self.rules, traffic, max(running, 1), cycle)
        if not beside:
            work = dataclasses.replace(
                work, products_s=0.0, attention_s=0.0, all_reduce_s=0.0, host_s=0.0, logits_s=0.0
            )
        chunk = dataclasses.replace(work, prompts_s=prompt_s / chunks, prompt_steps=1.0)
        return chunks * self._seconds(chunk)


class _TimedCycle(NamedTuple):
    tpot_s: float
    cycle: Cycle


def _smallest(cycles: Sequence[_TimedCycle], before: OperatingPoint | None) -> _TimedCycle:
    """The smallest draft within 1 % of the best.

    More nodes than `before`, the choice of fewer requests, or a return from chains to trees must
    save over 2 %.
    """

    def near(of: Sequence[_TimedCycle]) -> _TimedCycle:
        shortest_s = min(one.tpot_s for one in of)
        close = [one for one in of if one.tpot_s <= shortest_s * (1 + _NO_DIFFERENCE)]
        return min(close, key=lambda one: (one.cycle.nodes, one.tpot_s))

    chosen = near(cycles)
    if before is None:
        return chosen
    limit_s = chosen.tpot_s * (1 + _WORTH_GROWING)
    not_larger = [one for one in cycles if one.cycle.nodes <= before.nodes]
    no_return = [one for one in not_larger if _RANKS[one.cycle.shape] <= _RANKS[before.shape]]
    for preferred in (no_return, not_larger):
        if preferred and min(one.tpot_s for one in preferred) <= limit_s:
            return near(preferred)
    return chosen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 80 % interval; `high` is None where the goals are missed at that end."""

    value: float
    low: float
    high: float | None

    def scaled(self, factor: float) -> Interval:
        high = None if self.high is None else factor * self.high
        return Interval(value=factor * self.value, low=factor * self.low, high=high)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The GPUs for the request's rate, and their latency, cost and power at it.

    `at_most`: a server at the most requests at once that hold the goals; `at_load`: a server at
    its share of the rate, or at the most where it gets more. `load` is the rate over what the
    servers complete: above 1 the queue grows. `cost_per_million` is per million output tokens;
    `watts` are of all GPUs.
    """

    at_most: OperatingPoint
    at_load: OperatingPoint
    gpus: Interval
    tpot_s: Interval
    ttft_s: Interval
    cost_per_hour: Interval | None
    cost_per_million: Interval | None
    watts: Interval | None
    joules_per_token: Interval | None
    load: float = 0.0


def size(
    request: PlanRequest,
    gpu: str,
    forward: TargetForward,
    points: Sequence[OperatingPoint],
    error: float,
    slower: float = 0.0,
) -> Sizing | None:
    """The sizing for the request's rate; None where no point holds the goals.

    A server has `forward`'s devices for each of its data-parallel groups, and each group has the
    point's requests. `error` is the expected relative error of all times, `slower` a larger one of
    times that are longer than planned. For the intervals the choice is repeated with all times
    shorter and longer. A given number of servers is taken as it is.
    """
    at_most = choose(points, request.goals)
    if at_most is None:
        return None
    ranks, power_w = request.data_parallel, forward.device.power_limit_w
    devices = forward.tensor_parallel * ranks
    ends = 1 / math.exp(INTERVAL * error), math.exp(INTERVAL * max(error, slower))

    def gpus_for(point: OperatingPoint, factor: float) -> int:
        if request.servers is not None:
            return request.servers * devices
        per_server = ranks * point.requests_per_s / factor
        return replicas_for(request.rate, per_server, request.utilisation) * devices

    count = gpus_for(at_most, 1.0)
    quick, slow = (choose(points, request.goals, factor) for factor in ends)
    low = count if quick is None else min(gpus_for(quick, ends[0]), count)
    high = None if slow is None else max(gpus_for(slow, ends[1]), count)
    gpus = Interval(value=count, low=low, high=high)
    groups = count / devices * ranks
    load = request.rate / (at_most.requests_per_s * groups)
    each = request.rate / groups
    at_load = next((point for point in points if point.requests_per_s >= each), at_most)
    price = request.prices.get(gpu)
    per_hour = None if price is None else gpus.scaled(price)
    tokens_per_s = request.rate / max(load, 1.0) * request.traffic.output_tokens
    watts = None
    if power_w is not None:
        most_w, wide = power_w * count, math.exp(INTERVAL * forward.power_error)
        mean_w = most_w * at_load.power_share
        watts = Interval(value=mean_w, low=mean_w / wide, high=min(mean_w * wide, most_w))

    def around(value: float) -> Interval:
        return Interval(value=value, low=value * ends[0], high=value * ends[1])

    return Sizing(
        at_most=at_most,
        at_load=at_load,
        gpus=gpus,
        tpot_s=around(at_load.tpot_s),
        ttft_s=around(at_load.ttft_s),
        cost_per_hour=per_hour,
        cost_per_million=per_hour and per_hour.scaled(_TOKENS / (3600 * tokens_per_s)),
        watts=watts,
        joules_per_token=watts and watts.scaled(1 / tokens_per_s),
        load=load,
    )


def choose(
    points: Sequence[OperatingPoint], goals: Goals, factor: float = 1.0
) -> OperatingPoint | None:
    """The point of most throughput that holds the goals, with all times multiplied by `factor`."""
    holding = [point for point in points if excess(point, goals, factor) <= 1]
    return max(holding, key=lambda point: point.requests_per_s, default=None)


def nearest(points: Sequence[OperatingPoint], goals: Goals) -> OperatingPoint:
    """The point that misses the goals by the smallest factor."""
    return min(points, key=lambda point: excess(point, goals))


def excess(point: OperatingPoint, goals: Goals, factor: float = 1.0) -> float:
    """The larger of the two ratios to the goals; 0 without goals."""
    ratios = [0.0]
    if goals.tpot_s is not None:
        ratios.append(factor * point.tpot_s / goals.tpot_s)
    if goals.ttft_s is not None:
        ratios.append(factor * point.ttft_s / goals.ttft_s)
    return max(ratios)


def replicas_for(rate: float, requests_per_s: float, utilisation: float) -> int:
    """Servers for a rate, each loaded to `utilisation` of its throughput; at least 1."""
    return max(1, math.ceil(rate / (utilisation * requests_per_s) - 1e-9))

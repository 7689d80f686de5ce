"""How one server does at each number of running requests, with the best tree size for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from costmodel.capacity.acceptance_data import Acceptance, Shape
from costmodel.capacity.drafting import Drafter
from costmodel.capacity.engines import EngineRules
from costmodel.capacity.memory import cache_bytes_per_token, weight_bytes
from costmodel.capacity.overheads import Overheads
from costmodel.capacity.steady import (
    Cycle,
    TokenWork,
    Workload,
    chunks_of,
    cycle_work,
)
from costmodel.capacity.steps import ProfileForward, StepModel
from costmodel.errors import InputError

# Concurrencies and tree sizes that are tried; full buckets of graph runtimes are among them.
CONCURRENCIES = (
    1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512,
)  # fmt: skip
TREES = (2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255, 383, 511)
# Building and walking one tree on the host: 8 us for 256 nodes, 23 us for 1024
# (benchmarks/results/startup.json), and about as much for the walk.
_TREE_S, _NODE_S = 5e-6, 5e-8
# Times per token that differ by less are as good as equal: no profile tells them apart.
_NO_DIFFERENCE = 0.02
# A verification may take up at most this share of the rows that an engine runs in one step.
_STEP_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which trees may be drafted: `auto` tries all, `fixed` has `nodes`."""

    kind: str = "auto"
    nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Policy:
        """auto, plain, chain or fixed:N. Raises InputError."""
        kind, _, count = text.strip().lower().partition(":")
        if kind in ("auto", "plain", "chain") and not count:
            return cls(kind=kind)
        if kind == "fixed" and count.isdecimal() and int(count) >= 1:
            return cls(kind=kind, nodes=int(count))
        raise InputError(
            f"no policy is called '{text}'",
            hint="Use auto, plain, chain or fixed:N with N drafted tokens, such as fixed:32",
        )

    def sizes(self, acceptance: Acceptance | None) -> Iterator[tuple[Shape, int]]:
        """Shapes and nodes to try, the plain step where it is allowed."""
        if self.kind in ("auto", "plain", "chain"):
            yield "plain", 0
        if acceptance is None or self.kind == "plain":
            return
        if self.kind in ("auto", "chain"):
            yield from (("chain", n) for n in range(1, len(acceptance.chain)))
        if self.kind == "auto":
            yield from (("tree", n) for n in TREES if n < len(acceptance.tree))
        if self.nodes is not None:
            yield "tree", self.nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Mean tokens of a request."""

    prompt_tokens: float
    output_tokens: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One server with `running` requests at once, all the time.

    `tpot_s`: time per output token after the first; `ttft_s`: time to the first token, mean;
    `prefill_s`: of a request's own prompt; `requests_per_s`: what the server completes.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server:
    """A target on a group of devices, an engine, and how it speculates."""

    forward: StepModel
    rules: EngineRules
    overheads: Overheads
    policy: Policy
    acceptance: Acceptance | None = None
    drafter: Drafter | None = None

    def room(self, degree: int | None = None) -> float:
        """Tokens that the cache holds, at this tensor-parallel degree or another; 0 for none."""
        f, tp = self.forward, degree or self.forward.tensor_parallel
        weights = weight_bytes(f.architecture, f.precision, tp)
        token = cache_bytes_per_token(f.architecture, f.precision, tp)
        if self.drafter is not None:
            weights += self.drafter.weight_bytes(f.architecture) / tp
            token += self.drafter.cache_bytes_per_token(f.architecture) / tp
        return max(self.rules.memory.free_bytes(f.card.memory_bytes, weights), 0.0) / token

    def most_running(self, traffic: Traffic) -> int:
        """Requests whose cache fits at once; 0 where not one does."""
        held = self.rules.memory.tokens_held(traffic.prompt_tokens, traffic.output_tokens)
        tokens = self.room()
        return int(tokens / held) if tokens >= traffic.prompt_tokens + traffic.output_tokens else 0

    def points(self, traffic: Traffic, most: int | None = None) -> list[OperatingPoint]:
        """The best point at each concurrency that fits, and at the largest one that does."""
        limit = self.most_running(traffic)
        limit = limit if most is None else min(limit, most)
        if limit and self.policy.nodes is not None:
            limit = max(1, min(limit, self._most_rows // (self.policy.nodes + 1)))
        tried = [b for b in CONCURRENCIES if b <= limit]
        if limit and limit < CONCURRENCIES[-1] and limit not in tried:
            tried.append(limit)
        return [self.best(traffic, running) for running in tried]

    def best(self, traffic: Traffic, running: int) -> OperatingPoint:
        """The smallest size with (nearly) the shortest time per token at one concurrency."""
        options = [
            (self._cycle_s(traffic, running, cycle) / cycle.committed, shape, cycle)
            for shape, cycle in self._cycles(traffic, running)
        ]
        shortest_s = min(tpot_s for tpot_s, _, _ in options)
        close = [option for option in options if option[0] <= shortest_s * (1 + _NO_DIFFERENCE)]
        tpot_s, shape, cycle = min(close, key=lambda option: (option[2].nodes, option[0]))
        return self._point(traffic, running, shape, cycle, tpot_s)

    @property
    def _most_rows(self) -> int:
        """Rows that verifications of one step may take up together."""
        return int(_STEP_SHARE * self.rules.step_tokens)

    def _cycles(self, traffic: Traffic, running: int) -> Iterator[tuple[Shape, Cycle]]:
        context = traffic.prompt_tokens + traffic.output_tokens / 2
        sizes = list(self.policy.sizes(self.acceptance))
        drafter, draft_s = self.drafter, None
        if drafter is not None and any(nodes for _, nodes in sizes):
            draft_s = drafter.draft_s(self.forward, running, context)
        fixed = self.policy.kind == "fixed"
        for shape, nodes in sizes:
            if nodes == 0 or self.acceptance is None or drafter is None or draft_s is None:
                yield shape, Cycle()
                continue
            if not fixed and running * (nodes + 1) > self._most_rows:
                continue
            yield (
                shape,
                Cycle(
                    nodes=nodes,
                    committed=self.acceptance.committed(shape, nodes),
                    draft=draft_s,
                    draft_layers=drafter.layers,
                    host_s=running * self.tree_s(shape, nodes),
                ),
            )

    def tree_s(self, shape: Shape, nodes: int) -> float:
        """Building, accepting and committing one sequence's tree, as measured where it was."""
        if isinstance(self.forward, ProfileForward):
            stages = self.forward.profile.stages
            parts = [s for s in (stages.build, stages.accept) if s is not None]
            if parts:
                total = sum(float(part.seconds(nodes)) for part in parts)
                return total + (float(stages.commit.seconds(4)) if stages.commit else 0.0)
        return _TREE_S + _NODE_S * nodes if shape == "tree" else 0.0

    def _cycle_s(self, traffic: Traffic, running: int, cycle: Cycle) -> float:
        work = cycle_work(self.forward, self.rules, _workload(traffic, running), cycle)
        return self._seconds(work)

    def _seconds(self, work: TokenWork) -> float:
        return self.overheads.time_per_token_s(work, overlaps_host=self.rules.overlaps_host)

    def _point(
        self, traffic: Traffic, running: int, shape: Shape, cycle: Cycle, tpot_s: float
    ) -> OperatingPoint:
        prefill_s = self._prefill_s(traffic, running, cycle)
        residence_s = prefill_s + (traffic.output_tokens - 1) * tpot_s
        requests_per_s = running / residence_s
        # Prompts of other requests come first with this probability: an M/D/1 queue of prompts.
        busy = min(requests_per_s * self._prefill_s(traffic, 1, Cycle()), 0.95)
        wait_s = busy / (2 * (1 - busy)) * prefill_s if running > 1 else 0.0
        cycle_s = tpot_s * cycle.committed
        half_s = cycle_s / 2 if running > 1 else 0.0
        return OperatingPoint(
            running=running,
            shape=shape if cycle.nodes else "plain",
            nodes=cycle.nodes,
            committed=cycle.committed,
            cycle_s=cycle_s,
            tpot_s=tpot_s,
            prefill_s=prefill_s,
            ttft_s=prefill_s + wait_s + half_s,
            requests_per_s=requests_per_s,
        )

    def _prefill_s(self, traffic: Traffic, running: int, cycle: Cycle) -> float:
        """Seconds of a request's own prompt, which the others decode beside where they may."""
        beside = running * (cycle.nodes + 1) if self.rules.mixes_prompts and running > 1 else 0
        chunks = chunks_of(self.rules, traffic.prompt_tokens, beside)
        prompt = self.forward.prompt(traffic.prompt_tokens, beside, chunks)
        work = cycle_work(self.forward, self.rules, _workload(traffic, max(running, 1)), cycle)
        alone = not beside
        chunk = dataclasses.replace(
            work,
            products_s=0.0 if alone else work.products_s,
            attention_s=0.0 if alone else work.attention_s,
            all_reduce_s=0.0 if alone else work.all_reduce_s,
            prompts_s=prompt.total / chunks,
            prompt_steps=1.0,
            host_s=0.0 if alone else work.host_s,
        )
        return chunks * self._seconds(chunk)


def _workload(traffic: Traffic, running: float) -> Workload:
    return Workload(
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        concurrency=running,
    )


def best_at(points: Sequence[OperatingPoint], requests_per_s: float) -> OperatingPoint | None:
    """The first point that completes so many requests a second; None where none does."""
    return next((p for p in points if p.requests_per_s >= requests_per_s), None)


def replicas_for(rate: float, requests_per_s: float, utilisation: float) -> int:
    """Servers for a rate, each loaded to `utilisation` of what it completes; at least 1."""
    return max(1, math.ceil(rate / (utilisation * requests_per_s) - 1e-9))

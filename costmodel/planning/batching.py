"""Time per token under continuous batching: kernel work of a cycle plus an engine's overheads.

A server keeps B requests running, each of p prompt and o answer tokens. While one request decodes
its o tokens, each of the other B - 1 is replaced once, so every token waits for (B - 1) / o
prompts. Engines that never mix prompts and decoding keep equal requests in step: all B prompts are
prefilled before any request decodes on, so a request waits, after its own first token, for half of
them on average. (With unequal lengths it would wait for all of them.)

Data-parallel ranks that share experts meet in every layer, so that a prompt of any rank delays all
of them. Overheads (calibrations/engines.yaml) were fitted on measured servers.

    device = products + attention + all-reduces + prompts, each x a factor near 1,
             + layers x (layer + prompt steps x prompt layer) + logits x one read of them
    host   = step + running x sequence + log2(devices) x device + plan x sequences planned for
    time per token = sqrt(device^2 + host^2) where the engine prepares a step while the device
                     runs the one before it (a smooth maximum), else device + host

`layer`: gaps between kernels, negative for an engine that fuses operators whose times the profile
adds up; `prompt layer`: those of steps with a prompt, outside of a captured graph; `logits`: how
often sampling reads the logits of all sequences, which engines sort for top-p; `plan`: FlashInfer's
plan of every step, on B200.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from scipy.special import pdtr

from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.acceptance import Shape
from costmodel.planning.engines import EngineRules, planned_version
from costmodel.planning.forwards import ForwardSeconds, TargetForward
from costmodel.planning.traffic import Traffic
from costmodel.statistics import Array

# Share of the other requests' prompts that come after a request's own, while all are in step.
IN_STEP_SHARE = 0.5
FACTORS = ("products", "attention", "all_reduce", "prompts")
OVERHEADS = ("layer_s", "prompt_layer_s", "step_s", "sequence_s", "device_s", "logits")
SERVED = ("plan_s",)
COEFFICIENTS = (*FACTORS, *OVERHEADS, *SERVED)
# Sequences at once from which the host's plans of attention take no longer.
PLANNED_SEQUENCES = 40
# Overheads of an engine that has none of its own in the file.
SHARED = "shared"
_LEAST_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Work of one token of an answer: kernel seconds by kind, and the counts overheads scale with.

    `running`: requests that run at once; `prompt_steps`: steps with a prompt, per token; `host_s`:
    work of the host beside the engine's own; `logits_s`: one read of the logits; `planned`: share
    of PLANNED_SEQUENCES whose attention the host plans. Under speculation everything is per cycle,
    which commits several tokens.
    """

    products_s: float
    attention_s: float
    all_reduce_s: float
    prompts_s: float
    prompt_steps: float
    layers: int
    devices: int
    running: float
    host_s: float = 0.0
    logits_s: float = 0.0
    planned: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One round of every running request: nodes verified, tokens committed, cost of the draft.

    `drafted_share` of the requests have a draft to verify, the others run a plain step.
    `draft_host_s` are seconds on the host of all drafts, `tree_host_s` those of building, accepting
    and committing all trees. The default is a plain step: one row verified, one token committed.
    """

    shape: Shape = "plain"
    nodes: int = 0
    committed: float = 1.0
    drafted_share: float = 1.0
    draft: ForwardSeconds = dataclasses.field(default_factory=ForwardSeconds)
    draft_layers: int = 0
    draft_host_s: float = 0.0
    tree_host_s: float = 0.0


def prompt_share(rules: EngineRules, running: float, output_tokens: float) -> float:
    """Prompts of other requests that one token waits for."""
    share = 1.0 if rules.mixes_prompts else IN_STEP_SHARE
    return share * max(running - 1.0, 0.0) / output_tokens


def slowest_count(mean: float, ranks: int) -> float:
    """The mean of the largest of `ranks` independent Poisson counts of this mean."""
    if ranks == 1 or mean <= 0.0:
        return mean
    counts = np.arange(math.ceil(mean + 12 * math.sqrt(mean)) + 12)
    return float(np.sum(1.0 - pdtr(counts, mean) ** ranks))


def chunks_of(rules: EngineRules, prompt_tokens: float, rows: float) -> int:
    """Steps that a prompt is cut into; `rows` decoded in each step leave less room for it."""
    room = rules.step_tokens - (rows if rules.mixes_prompts else 0.0)
    return max(1, math.ceil((1 - rules.prefix_hits) * prompt_tokens / max(room, 1.0)))


def prompt_work(
    forward: TargetForward, rules: EngineRules, prompt_tokens: float, rows: float
) -> tuple[float, int]:
    """Seconds that a prompt adds, without what is cached of it, and the steps it is cut into."""
    cached, chunks = rules.prefix_hits * prompt_tokens, chunks_of(rules, prompt_tokens, rows)
    beside = rows if rules.mixes_prompts else 0.0
    return forward.prompt(prompt_tokens - cached, beside, chunks, cached).total, chunks


def cycle_work(
    forward: TargetForward, rules: EngineRules, traffic: Traffic, running: float, cycle: Cycle
) -> TokenWork:
    """Work of one cycle in steady state with `running` requests at once."""
    rows = running * (cycle.drafted_share * cycle.nodes + 1)
    prompt_s, chunks = prompt_work(forward, rules, traffic.prompt_tokens, rows)
    context = traffic.prompt_tokens + traffic.output_tokens / 2
    ranks = forward.ranks
    # Requests go to the rank of the fewest: the fullest one has on average so many more.
    shape = running + (ranks - 1) / (2 * ranks), context
    verify = verification_s(forward, shape, cycle.nodes + 1, cycle.drafted_share)
    arriving = cycle.committed * prompt_share(rules, running, traffic.output_tokens)
    share = slowest_count(arriving * chunks, ranks) / chunks
    # Prompts that come at random share steps where the engine mixes them.
    mixed_steps = -math.expm1(-arriving * chunks * ranks)
    steps = mixed_steps if rules.mixes_prompts else share * chunks
    return step_work(forward, running, verify, cycle, (share * prompt_s, steps))


def step_work(
    forward: TargetForward,
    running: float,
    verify: ForwardSeconds,
    cycle: Cycle,
    prompts: tuple[float, float],
) -> TokenWork:
    """Work of a step: verification, drafts of the cycle, and prompts (seconds, steps with one)."""
    kernels = verify + cycle.draft
    return TokenWork(
        products_s=kernels.products,
        attention_s=kernels.attention,
        all_reduce_s=kernels.all_reduce,
        prompts_s=prompts[0],
        prompt_steps=prompts[1],
        layers=forward.architecture.layers + cycle.draft_layers,
        devices=forward.tensor_parallel,
        running=running,
        host_s=cycle.draft_host_s + cycle.tree_host_s,
        logits_s=forward.logits_s(max(running, 1)),
        planned=min(running / PLANNED_SEQUENCES, 1.0) if forward.plans_on_host else 0.0,
    )


def verification_s(
    forward: TargetForward, shape: tuple[float, float], rows: int, drafted_share: float
) -> ForwardSeconds:
    """Seconds of a verification of `shape` (batch, context) where a share of the batch has drafts.

    Between a plain step and one in which all have drafts, time is taken as linear in the rows.
    """
    full = forward.decode(*shape, rows)
    if rows == 1 or drafted_share == 1.0:
        return full
    plain = forward.decode(*shape, 1)
    return plain + (full + plain.scaled(-1.0)).scaled(drafted_share)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Coefficients of one engine; the defaults add nothing to the kernel times.

    front_s  seconds of a request outside of the steps before its first token: HTTP, tokenising, and
             the ways to the engine's process and back
    """

    products: float = 1.0
    attention: float = 1.0
    all_reduce: float = 1.0
    prompts: float = 1.0
    layer_s: float = 0.0
    prompt_layer_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    device_s: float = 0.0
    logits: float = 0.0
    plan_s: float = 0.0
    front_s: float = 0.0

    def time_per_token_s(self, work: TokenWork, *, overlaps_host: bool) -> float:
        """Seconds between two tokens of one answer in steady state."""
        values = np.array([getattr(self, name) for name in COEFFICIENTS])
        return float(seconds_per_token(work_columns([work]), values, np.array([overlaps_host]))[0])


def cycle_parts(
    overheads: Overheads, work: TokenWork, cycle: Cycle, cycle_s: float
) -> dict[str, float]:
    """Seconds by cause of a cycle of `cycle_s`, which `overheads` gave for `work`; they add up.

    Of the verification: its products, attention and all-reduces; drafts; trees built, accepted and
    committed; prompts of other requests that the cycle waits for; gaps between kernels and the
    engine's host work. What overlaps the device counts only as far as it makes the cycle longer.
    """
    c, draft = overheads, cycle.draft
    target_layers = work.layers - cycle.draft_layers
    parts = {
        "weights_s": c.products * (work.products_s - draft.products)
        + target_layers * min(c.layer_s, 0.0),
        "attention_s": c.attention * (work.attention_s - draft.attention),
        "communication_s": c.all_reduce * (work.all_reduce_s - draft.all_reduce),
        "draft_s": c.products * draft.products
        + c.attention * draft.attention
        + c.all_reduce * draft.all_reduce
        + cycle.draft_layers * c.layer_s,
        "acceptance_s": 0.0,
        "prompts_s": c.prompts * work.prompts_s
        + work.layers * work.prompt_steps * c.prompt_layer_s,
        "engine_s": target_layers * max(c.layer_s, 0.0) + c.logits * work.logits_s,
    }
    engine_s = c.step_s + work.running * c.sequence_s + math.log2(work.devices) * c.device_s
    engine_s += c.plan_s * work.planned
    waited_s = cycle_s - sum(parts.values())
    share = waited_s / host_s if (host_s := engine_s + work.host_s) else 0.0
    parts["draft_s"] += share * cycle.draft_host_s
    parts["acceptance_s"] = share * cycle.tree_host_s
    parts["engine_s"] += waited_s - share * (cycle.draft_host_s + cycle.tree_host_s)
    return parts


def work_columns(work: Sequence[TokenWork]) -> dict[str, Array]:
    fields = [field.name for field in dataclasses.fields(TokenWork)]
    return {name: np.array([float(getattr(row, name)) for row in work]) for name in fields}


def seconds_per_token(work: Mapping[str, Array], coefficients: Array, overlaps: Array) -> Array:
    """Seconds per token [rows] from `coefficients` [rows or 1, COEFFICIENTS]."""
    c = {name: coefficients[..., i] for i, name in enumerate(COEFFICIENTS)}
    device = (
        c["products"] * work["products_s"]
        + c["attention"] * work["attention_s"]
        + c["all_reduce"] * work["all_reduce_s"]
        + c["prompts"] * work["prompts_s"]
        + work["layers"] * (c["layer_s"] + work["prompt_steps"] * c["prompt_layer_s"])
        + c["logits"] * work["logits_s"]
    )
    host = (
        c["step_s"]
        + work["running"] * c["sequence_s"]
        + np.log2(work["devices"]) * c["device_s"]
        + c["plan_s"] * work["planned"]
        + work["host_s"]
    )
    device, host = np.maximum(device, _LEAST_S), np.maximum(host, 0.0)
    return np.where(overlaps, np.hypot(device, host), device + host)


def engine_overheads(engine: str, version: str = "") -> Overheads:
    """Shipped overheads of an engine and version; the shared ones for an engine without its own."""
    table, planned = _shipped_overheads(), planned_version(engine, version)
    own = table.get(engine, table[SHARED])
    return Overheads(**own | (table[f"{engine}@{planned.planned_as}"] if planned else {}))


@cache
def _shipped_overheads() -> dict[str, dict[str, float]]:
    table = read_yaml(shipped_directory() / "engines.yaml")
    return {
        engine: {name: float(value) for name, value in row.items()} for engine, row in table.items()
    }

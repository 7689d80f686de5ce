"""Speculative settings of serving engines, from a plan, as text to type in.

Names of options are those of the engines' own pages:

- vLLM: `--speculative-config` with `method`, `model`, `num_speculative_tokens` and
  `num_speculative_tokens_per_batch_size`, a list of [first batch, last batch, tokens]
  (docs.vllm.ai, v0.25.0, features/speculative_decoding/dynamic_speculative_decoding; tested there
  with Eagle, Eagle-3 and DFlash; not with data parallelism). N-grams: `method` ngram and
  `prompt_lookup_max` (features/speculative_decoding/n_gram), one size for all batches.
- SGLang: `--speculative-algorithm DFLASH`, `--speculative-draft-model-path` and
  `--speculative-num-draft-tokens`, the rows of a verification: drafted tokens + 1
  (docs.sglang.io, 0.5.11, and the drafters' model cards). One size for all batches.
- transformers: this project's decoder, which chooses the tree at each step from a profile.

The first two verify chains only. A plan is exported to the engine that it was made for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from costmodel.compose.serving_tables import Precision
from costmodel.errors import InputError
from costmodel.planning.drafting import CHECKPOINTS, drafter_kind
from costmodel.planning.request import PlanRequest, ServingPolicy
from costmodel.planning.result import Option, Plan
from costmodel.planning.servers import OperatingPoint

# The engine that a plan must be made for, by the name of its export.
PLANNED_FOR = {"vllm": "vllm", "sglang": "sglang", "transformers": "rooftree"}
VERSIONS = {"vllm": "vLLM 0.25", "sglang": "SGLang 0.5.11", "transformers": "rooftree 0.1"}
_NO_DRAFTER = "PATH_OF_A_DFLASH_DRAFTER"
# Longest n-gram that is looked up, as in vLLM's own example.
_NGRAM = 4


def export_plan(plan: Plan, engine: str) -> str:
    """Settings of an engine for the plan's best option.

    Raises InputError where there is none, and where the engine cannot run what was planned.
    """
    if engine not in PLANNED_FOR:
        raise InputError(
            f"no export is for '{engine}'", hint=f"Use one of: {', '.join(PLANNED_FOR)}"
        )
    if plan.request.engine != PLANNED_FOR[engine]:
        raise InputError(
            f"the plan is for {plan.request.engine}, whose times and sizes are not those of"
            f" {engine}",
            hint=f"Plan with --engine {PLANNED_FOR[engine]}",
        )
    best = plan.best
    if best is None or best.sizing is None:
        raise InputError(
            "there is nothing to export: no option holds the goals",
            hint="; ".join(option.describe_problem() for option in plan.options),
        )
    lines = [f"# {VERSIONS[engine]} and later; planned for {_place(plan, best)}"]
    if plan.request.precision.weights not in ("bfloat16", "fp8_dynamic"):
        lines.append(f"# serve a checkpoint whose weights are {plan.request.precision.weights}")
    write = {"vllm": _vllm, "sglang": _sglang, "transformers": _transformers}[engine]
    return "\n".join([*lines, *write(plan.request, best)]) + "\n"


def _place(plan: Plan, best: Option) -> str:
    """The GPUs that the settings are for, and those that they are not for."""
    others = [f"{o.gpu} tp {o.tensor_parallel}" for o in plan.options if o is not best]
    place = f"{best.gpu} tp {best.tensor_parallel}"
    return place + (f", the best; not for {', '.join(others)}" if others else "")


def batch_table(points: Sequence[OperatingPoint]) -> list[list[int]]:
    """Rows of [first batch, last batch, drafted tokens]; neighbours of equal size are joined.

    A size holds up to the batch before the next point.
    """
    ordered = sorted(points, key=lambda point: point.running)
    table: list[list[int]] = []
    for i, point in enumerate(ordered):
        last = ordered[i + 1].running - 1 if i + 1 < len(ordered) else point.running
        if table and table[-1][2] == point.nodes:
            table[-1][1] = last
        else:
            table.append([point.running if table else 1, last, point.nodes])
    return table


def checkpoint_of(drafter: str, target: str) -> str:
    """The checkpoint of a DFlash drafter's name: the published one of this target, else a gap."""
    if "/" in drafter:
        return drafter
    published = CHECKPOINTS.get(target.lower().rpartition("/")[2], _NO_DRAFTER)
    return published + drafter.partition("dflash")[2]


def _vllm(request: PlanRequest, best: Option) -> list[str]:
    table = batch_table(best.points)
    options = [
        f"vllm serve {request.target}",
        f"--tensor-parallel-size {best.tensor_parallel}",
        f"--max-num-seqs {table[-1][1]}",
        *_precision(request.precision),
    ]
    config = _vllm_config(request, best, table)
    if not config["num_speculative_tokens"]:
        return [*_joined(options), f"# no --speculative-config: {_nothing(request)}"]
    return _joined([*options, f"--speculative-config '{json.dumps(config)}'"])


def _vllm_config(request: PlanRequest, best: Option, table: list[list[int]]) -> dict[str, object]:
    """The speculative configuration. Raises InputError for a drafter that vLLM does not run."""
    most = max(tokens for _, _, tokens in table)
    name = best.drafter.name if best.drafter else "dflash"
    if name == "ngram":
        size = _at_load(best).nodes
        return {"method": "ngram", "prompt_lookup_max": _NGRAM, "num_speculative_tokens": size}
    if drafter_kind(name) != "dflash" or "@" in name:
        raise _unknown_drafter(name, "vLLM")
    return {
        "method": "dflash",
        "model": checkpoint_of(name, request.target),
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": table,
    }


def _sglang(request: PlanRequest, best: Option) -> list[str]:
    load = _at_load(best)
    options = [
        "python -m sglang.launch_server",
        f"--model-path {request.target}",
        f"--tp-size {best.tensor_parallel}",
        f"--max-running-requests {max(point.running for point in best.points)}",
        *_precision(request.precision),
    ]
    if not load.nodes:
        return [*_joined(options), f"# no --speculative-algorithm: {_nothing(request)}"]
    drafter = best.drafter.name if best.drafter else ""
    if drafter_kind(drafter) != "dflash" or "@" in drafter:
        raise _unknown_drafter(drafter, "SGLang")
    options += [
        "--speculative-algorithm DFLASH",
        f"--speculative-draft-model-path {checkpoint_of(drafter, request.target)}",
        f"--speculative-num-draft-tokens {load.nodes + 1}",
    ]
    return [
        f"# one size for all batches, that of {load.running} requests at once",
        *_joined(options),
    ]


def _transformers(request: PlanRequest, best: Option) -> list[str]:
    if request.precision != Precision():
        raise InputError(
            f"this decoder cannot be told to use {request.precision.weights} weights and a"
            f" {request.precision.cache} cache",
            hint="Leave out --weights and --cache, and name a quantised checkpoint as --target",
        )
    if best.tensor_parallel > 1:
        raise InputError(
            f"settings of {best.tensor_parallel} devices a target are not exported: each of this"
            " decoder's processes needs its `ranks` (decoder/target/ranks.py)",
            hint="Plan with --tp 1, or export to vllm or sglang",
        )
    load, policy = _at_load(best), _decoder_policy(request.policy)
    if best.drafter is None:
        policy = "plain"
    arguments = [f'"{request.target}"']
    if policy != "plain" and best.drafter is not None:
        arguments.append(f'drafter="{_decoder_drafter(best.drafter.name, request.target)}"')
    arguments.append(f'policy="{policy}"')
    if policy == "chain" and load.nodes:
        arguments.append(f"max_nodes={load.nodes}")
    shape = f"{load.shape} of {load.nodes} tokens" if load.nodes else "plain step"
    return [
        f"# the plan's best with {load.running} at once is a {shape}",
        "from rooftree import TreeDecoder",
        "",
        f"decoder = TreeDecoder.from_pretrained({', '.join(arguments)})",
    ]


def _decoder_policy(policy: ServingPolicy) -> str:
    """This decoder's policy for the plan's: `auto` chooses the size at each step."""
    return {"auto": "bastion", "fixed": f"fixed:{policy.nodes}"}.get(policy.kind, policy.kind)


def _decoder_drafter(name: str, target: str) -> str:
    """The name that this decoder loads; a part `dflash` stands for the target's checkpoint."""
    parts = [
        checkpoint_of(part, target) if part.startswith("dflash") else part
        for part in name.split("+")
    ]
    return "+".join(parts)


def _at_load(best: Option) -> OperatingPoint:
    return best.sizing.at_load if best.sizing else best.points[0]


def _precision(precision: Precision) -> list[str]:
    """Options of both engines for quantised weights and cache; stored scales need no option."""
    options = ["--quantization fp8"] if precision.weights == "fp8_dynamic" else []
    return options + (["--kv-cache-dtype fp8"] if precision.cache == "fp8" else [])


def _joined(options: Sequence[str]) -> list[str]:
    """One option a line, each but the last continued."""
    return [
        ("  " if i else "") + option + (" \\" if i + 1 < len(options) else "")
        for i, option in enumerate(options)
    ]


def _nothing(request: PlanRequest) -> str:
    if request.policy.kind == "plain":
        return "the policy is plain"
    if request.acceptance is None:
        return "there is no acceptance data"
    return "the plan drafts nothing at this load"


def _unknown_drafter(drafter: str, engine: str) -> InputError:
    return InputError(
        f"{engine} cannot run the chains that were planned with the drafter {drafter}",
        hint="Plan with --drafter dflash, or with --engine rooftree --export transformers",
    )

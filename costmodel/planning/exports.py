"""Speculative settings of serving engines, from a plan, as text to type in.

Names of options are those of the engines' own sources: vLLM 0.32
(v1/spec_decode/dynamic/utils.py), SGLang 0.5.23 (speculative/adaptive_spec_params.py,
dspark_components/dspark_sps.py, ragged_verify.py) and TensorRT-LLM 1.2, and 1.3.0rc27 for DFlash,
MTP and PARD (llmapi/llm_args.py). Settings are of chains but for this project's decoder. A plan is
exported to the engine that it was made for.

In TensorRT-LLM 1.2 a length holds from its batch on, and up to its batch in later sources; both
ends of each range are written, so that both readings are the same.

vLLM 0.32 takes draft lengths by batch only. A table by batch and context has the form of its open
pull request 48944; `integrations.vllm.CostScheduler` reads it until vLLM does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.acceptance import BLOCK_GAMMA
from costmodel.catalog import find_target, resolve_target
from costmodel.errors import InputError
from costmodel.planning.acceptance import Acceptance
from costmodel.planning.drafting import BLOCK_KINDS, CHECKPOINTS, drafter_kind
from costmodel.planning.forwards import TargetForward
from costmodel.planning.request import PlanRequest, Precision
from costmodel.planning.result import Plan, PlanOption
from costmodel.planning.search import make_server
from costmodel.planning.servers import OperatingPoint, Server
from costmodel.planning.sources import forward_for
from costmodel.planning.tables import (
    StepTable,
    context_table,
    joined,
    steady_lengths,
    steps_table,
    sum_table,
)
from costmodel.profile.store import ProfileStore

# The engine that a plan must be made for, by the name of its export.
PLANNED_FOR = {
    "vllm": "vllm",
    "vllm-contexts": "vllm",
    "vllm-synthetic": "vllm",
    "sglang": "sglang",
    "sglang-dspark": "sglang",
    "sglang-dspark-steps": "sglang",
    "tensorrt-llm": "trtllm",
    "transformers": "rooftree",
}
VERSIONS = {
    "vllm": "vLLM 0.32",
    "sglang": "SGLang 0.5.23",
    "trtllm": "TensorRT-LLM 1.2",
    "rooftree": "rooftree 0.1",
}
# Longest n-gram that is looked up, as in vLLM's own example.
_NGRAM = 4
_MOST_LOSS = 0.05  # of a schedule, where acceptance is less certain than that
_VLLM = ("dflash", "dspark", "eagle3", "mtp", "ngram")  # kinds of drafters, as its methods
# TensorRT-LLM's names of drafters, and the first version whose schedule holds for them.
_TENSORRT_LLM = {
    "ngram": ("NGram", "1.2"),
    "eagle3": ("Eagle3", "1.2"),
    "dflash": ("DFlash", "1.3.0rc27"),
    "mtp": ("MTP", "1.3.0rc27"),
    "pard": ("PARD", "1.3.0rc27"),
}


def export_plan(plan: Plan, engine: str, forward: TargetForward | None = None) -> str:
    """Settings of an engine for the plan's best option.

    forward  the best option's times, of which tables of costs are made [default: looked up again]
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
    version = VERSIONS[PLANNED_FOR[engine]]  # the first that takes the settings
    if engine == "tensorrt-llm" and best.drafter is not None:
        version = _TENSORRT_LLM.get(drafter_kind(best.drafter.name), ("", "1.2"))[1]
        version = f"TensorRT-LLM {version}"
    place = f"{best.gpu} tp {best.tensor_parallel}"
    others = [f"{o.gpu} tp {o.tensor_parallel}" for o in plan.options if o is not best]
    place += f", the best; not for {', '.join(others)}" if others else ""
    context = plan.request.traffic.prompt_tokens + plan.request.traffic.output_tokens / 2
    place += f"; at about {context:.0f} cached tokens a request"
    lines = [f"# {version} and later; planned for {place}"]
    by_batch = engine.startswith("vllm") or engine == "tensorrt-llm"
    by_batch |= engine == "sglang" and drafter_kind(_drafter(best)) == "eagle3"
    if plan.acceptance is not None and best.choices and by_batch:
        best, losses = steady(best, plan.acceptance)
        lines += losses
    if plan.request.precision.weights not in (None, "bfloat16", "fp8_dynamic"):
        lines.append(f"# serve a checkpoint whose weights are {plan.request.precision.weights}")
    if engine.startswith("sglang-dspark") or engine == "vllm-contexts":
        if forward is None:
            target = resolve_target(plan.request.target, hub=True)
            choice = best.gpu, best.tensor_parallel
            forward = forward_for(plan.request, target, choice, ProfileStore())
        server = make_server(plan.request, forward, plan.acceptance)
        lines += (
            _vllm(plan.request, best, server)
            if engine == "vllm-contexts"
            else _dspark(plan, server, steps=engine.endswith("steps"))
        )
    else:
        write = {
            "vllm": _vllm,
            "vllm-synthetic": lambda asked, of: _vllm(asked, of, synthetic=plan.acceptance),
            "sglang": _sglang,
            "tensorrt-llm": _tensorrt_llm,
            "transformers": _transformers,
        }[engine]
        lines += write(plan.request, best)
    return "\n".join(lines) + "\n"


def steady(best: PlanOption, acceptance: Acceptance) -> tuple[PlanOption, list[str]]:
    """The option with lengths that fall with the batch, and their loss in words.

    Inside the error is what acceptance does not tell apart; that of times is common to all lengths.
    """
    error = max(acceptance.relative_error(choice.best.committed) for choice in best.choices)
    error = min(error, _MOST_LOSS)
    lengths, losses = steady_lengths(best.choices, error)
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


def batch_table(points: Sequence[OperatingPoint]) -> list[list[int]]:
    """Rows of [first batch, last batch, drafted tokens]; neighbours of equal size are joined.

    A size holds up to the batch before the next point.
    """
    ordered = sorted(points, key=lambda point: point.running)
    firsts = [1, *(point.running for point in ordered[1:])]
    sizes = [point.nodes for point in ordered]
    return [[*span, size] for span, size in joined(firsts, ordered[-1].running, sizes)]


def checkpoint_of(drafter: str, target: str) -> str:
    """The checkpoint of a drafter: a kind is the published one of this target, else a gap."""
    kind, at, option = drafter.partition("@")
    if kind not in BLOCK_KINDS:
        return drafter
    published = CHECKPOINTS.get(target.lower().rpartition("/")[2]) if kind == "dflash" else None
    return (published or f"PATH_OF_A_{kind.upper()}_DRAFTER") + at + option


def _vllm(
    request: PlanRequest,
    best: PlanOption,
    server: Server | None = None,
    synthetic: Acceptance | None = None,
) -> list[str]:
    """The command; with a server, for its draft lengths by batch and context.

    synthetic  accepts drafts by chance, as this acceptance has it, whatever they are: for tests
    """
    table = batch_table(best.points)
    target = served_name(request.target)
    options = [
        f"vllm serve {target}",
        f"--tensor-parallel-size {best.tensor_parallel}",
        *([f"--data-parallel-size {request.data_parallel}"] if request.data_parallel > 1 else ()),
        *(["--enable-expert-parallel"] if request.expert_parallel else ()),
        f"--max-num-seqs {table[-1][1]}",
        *_precision(request.precision),
    ]
    most = max(tokens for _, _, tokens in table)
    if not most:
        return [*_joined(options), f"# no --speculative-config: {_nothing(request)}"]
    config: dict[str, Any] = {"method": _kind(best, "vLLM", _VLLM)}
    if config["method"] == "ngram":
        config["prompt_lookup_max"] = _NGRAM
    elif config["method"] != "mtp":
        config["model"] = checkpoint_of(_drafter(best), target)
    config["num_speculative_tokens"] = most
    config["num_speculative_tokens_per_batch_size"] = table
    if synthetic is not None:
        config["rejection_sample_method"] = "synthetic"
        rates = np.diff(synthetic.chain)[:most]
        config["synthetic_acceptance_rates"] = [round(float(rate), 6) for rate in rates]
    options.append(f"--speculative-config '{json.dumps(config)}'")
    if server is None:
        return _joined(options)
    # vLLM prepares the lengths that the table by batch alone names, and no others.
    lengths = {0, *(tokens for _, _, tokens in table)}
    schedule = context_table(server, sorted(lengths), most_running=table[-1][1])
    options += [
        "--scheduler-cls integrations.vllm.CostScheduler",
        f"--additional-config '{json.dumps({'rooftree_schedule': schedule})}'",
    ]
    return [
        "# rooftree_schedule: [first batch, last batch, first context, last context, tokens], the",
        "# form of vLLM's open #48944, whose vLLM takes it in place of the table by batch alone",
        *_joined(options),
    ]


def _sglang(request: PlanRequest, best: PlanOption) -> list[str]:
    load, target = _at_load(best), served_name(request.target)
    options = _sglang_server(request, best)
    table = batch_table(best.points)
    most = max(tokens for _, _, tokens in table)
    if not most:
        return [*_joined(options), f"# no --speculative-algorithm: {_nothing(request)}"]
    kind = _kind(best, "SGLang", ("dflash", "eagle3"))
    drafter = f"--speculative-draft-model-path {checkpoint_of(_drafter(best), target)}"
    if kind == "eagle3":
        # One size from each batch on: among several, SGLang chooses by acceptance, not by cost.
        config = {str(first): {"candidate_steps": [tokens]} for first, _, tokens in table}
        options += [
            drafter,
            "--speculative-algorithm EAGLE3",
            f"--speculative-num-steps {most}",
            "--speculative-eagle-topk 1",
            f"--speculative-num-draft-tokens {most + 1}",
            "--speculative-adaptive",
            "--speculative-adaptive-config adaptive.json",
        ]
        return [*_file("adaptive.json", json.dumps(config)), *_joined(options)]
    if not load.nodes:
        return [*_joined(options), f"# no --speculative-algorithm: {_nothing(request)}"]
    options += [
        "--speculative-algorithm DFLASH",
        drafter,
        f"--speculative-num-draft-tokens {load.nodes + 1}",
    ]
    return [
        f"# one size for all batches, that of {load.running} requests at once",
        *_joined(options),
    ]


def _sglang_server(request: PlanRequest, best: PlanOption) -> list[str]:
    return [
        "python -m sglang.launch_server",
        f"--model-path {served_name(request.target)}",
        f"--tp-size {best.tensor_parallel}",
        f"--max-running-requests {max(point.running for point in best.points)}",
        *_precision(request.precision),
    ]


def _dspark(plan: Plan, server: Server, *, steps: bool) -> list[str]:
    """A table of costs, and the options that take it. The DSpark drafter is the user's."""
    request, best = plan.request, plan.options[0]
    drafted = len(server.acceptance.chain) - 1 if server.acceptance else BLOCK_GAMMA
    make = steps_table if steps else sum_table
    most = max(point.running for point in best.points)
    table: StepTable = make(server, request.traffic, most_running=most, drafted=drafted)
    label = server.drafter.label if server.drafter else "none"
    start, *others = _sglang_server(request, best)
    options = [
        f"SGLANG_RAGGED_VERIFY_MODE=compact {start}",
        *others,
        "--speculative-algorithm DSPARK",
        "--speculative-draft-model-path PATH_OF_A_DSPARK_DRAFTER",
        "--speculative-dspark-sps-table-path dspark.json",
    ]
    return [
        f"# seconds of a step with up to {drafted} drafted tokens a request; drafts: {label}",
        *([f"# the sum is within {table.worst_error:.1%} of every step"] if not steps else []),
        "# only the mode compact verifies fewer rows: static verifies all, and cap-accept verifies",
        "# all and then accepts fewer",
        *_file("dspark.json", json.dumps(table.values)),
        *_joined(options),
    ]


def _tensorrt_llm(request: PlanRequest, best: PlanOption) -> list[str]:
    table, target = batch_table(best.points), served_name(request.target)
    options = [
        f"trtllm-serve {target}",
        f"--tp_size {best.tensor_parallel}",
        f"--max_batch_size {table[-1][1]}",
    ]
    config = ["kv_cache_config:", "  dtype: fp8"] if request.precision.cache == "fp8" else []
    notes, most = [], table[0][2]
    if most:
        kind = _kind(best, "TensorRT-LLM", tuple(_TENSORRT_LLM))
        config += ["speculative_config:", f"  decoding_type: {_TENSORRT_LLM[kind][0]}"]
        if kind == "ngram":
            config.append(f"  max_matching_ngram_size: {_NGRAM}")
        elif kind != "mtp":
            config.append(f"  speculative_model: {checkpoint_of(_drafter(best), target)}")
        ends = {batch: size for first, last, size in table for batch in (first, last)}
        schedule = ", ".join(f"{batch}: {size}" for batch, size in ends.items())
        config += [f"  max_draft_len: {most}", f"  draft_len_schedule: {{{schedule}}}"]
    else:
        notes = [f"# no speculative_config: {_nothing(request)}"]
    if not config:
        return [*_joined(options), *notes]
    options.append("--extra_llm_api_options options.yaml")
    return [*_file("options.yaml", *config), *_joined(options), *notes]


def _transformers(request: PlanRequest, best: PlanOption) -> list[str]:
    if request.precision not in (Precision(), Precision(weights="bfloat16")):
        raise InputError(
            f"this decoder cannot be told to use {request.precision.weights} weights and a"
            f" {request.precision.cache} cache",
            hint="Leave out --weights and --cache, and name a quantised checkpoint as --target",
        )
    if best.tensor_parallel > 1:
        raise InputError(
            f"settings of {best.tensor_parallel} devices a target are not exported: this decoder"
            " runs on one",
            hint="Plan with --tp 1, or export to vllm or sglang",
        )
    load, planned, target = _at_load(best), request.policy, served_name(request.target)
    arguments, policy = [f'"{target}"'], "plain"
    if best.drafter is not None:
        names = {"auto": "bastion", "fixed": f"fixed:{planned.nodes}"}
        policy = names.get(planned.kind, planned.kind)
    if policy != "plain" and best.drafter is not None:
        drafter = "+".join(checkpoint_of(part, target) for part in best.drafter.name.split("+"))
        arguments.append(f'drafter="{drafter}"')
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


def _drafter(best: PlanOption) -> str:
    return best.drafter.name if best.drafter else "dflash"


def _kind(best: PlanOption, engine: str, known: Sequence[str]) -> str:
    """The planned drafter's kind. Raises InputError for one that the engine does not run."""
    name = _drafter(best)
    kind = drafter_kind(name)
    if kind not in known or "@" in name:
        raise InputError(
            f"{engine} cannot run the chains that were planned with the drafter {name}",
            hint=f"It runs {', '.join(known)}: plan with one by --drafter, or with --engine"
            " rooftree --export transformers",
        )
    return kind


def _file(name: str, *lines: str) -> list[str]:
    """Shell lines that write a file."""
    return [f"cat > {name} <<'END'", *lines, "END"]


def _at_load(best: PlanOption) -> OperatingPoint:
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

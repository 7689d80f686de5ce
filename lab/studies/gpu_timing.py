"""The timed parts of the GPU suite: calibrations, forwards, decoding and drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from costmodel.calibration.choices import regret_at_contexts
from costmodel.calibration.points import ErrorSummary
from costmodel.profile.profile import Profile
from costmodel.profile.schema import ELEMENT_BYTES
from costmodel.roofline import Roofline, physical_bytes
from decoder.device import dtype_name, synchronise
from decoder.drafters.base import Drafter
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Model
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.target import Target
from decoder.profiling.measured_profile import peaks_of
from decoder.profiling.probe import time_drafter
from decoder.profiling.startup import ProfileChoice
from lab.bench.arms.given_text import GivenTextTarget
from lab.bench.simulated import SimulatedDrafter, Truth, published
from lab.studies.common import environment, pooled_ratio
from lab.studies.gpu_parts import (
    SEED,
    Part,
    Scale,
    dtype_of,
    open_target,
    profile_path,
    random_texts,
)
from lab.training.dflash import DFlashTraining, fresh_config
from profiler.calibrate.decoder import Workload
from profiler.calibrate.points import DecoderPoints
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.sections import points_of
from profiler.calibrate.source import CalibrationSettings
from profiler.calibrate.sweep import SweepControl, Task, run_sweep
from profiler.measure.instruments import Instruments, instruments, take_sample
from profiler.measure.journal import Journal
from profiler.measure.samples import PointAccumulator, PointSamples

PROFILED_ROUNDS = 30  # or fewer, where drafts are accepted


def run_calibration(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """`rooftree calibrate` as a user runs it, with the seconds of the whole command."""
    settings = CalibrationSettings(
        target=part.target,
        weights="random",
        device=scale.device,
        dtype=dtype_of(part, scale),
        runtime=part.runtime,
        contexts=scale.contexts,
        max_nodes=scale.max_nodes,
        batches=scale.batches,
        time_budget_s=scale.budget_s,
        output=folder / "profile.yaml",
    )
    start_s = perf_counter()
    result = calibrate(settings, CalibrationListener(say=lambda text: print(text, flush=True)))
    return {
        "command_s": round(perf_counter() - start_s, 2),
        "sweep_s": result.profile.provenance.duration_s,
        "points": result.profile.provenance.points,
        "resumed_samples": result.resumed_samples,
        "warnings": list(result.warnings),
        "skipped": {str(task.key()): reason for task, reason in result.skipped.items()},
        "unmeasured": [task.key() for task in result.unmeasured],
        "held_out": result.profile.as_dict().get("held_out", {}).get("error"),
        "regret": result.profile.as_dict().get("regret"),
    }


def run_forwards(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Plain steps as a share of the measured read bandwidth; verification over the roofline."""
    target = open_target(part, scale)
    peaks = peaks_of(target.device, target.dtype)
    measured = Roofline(
        architecture=target.architecture,
        peaks=replace(
            peaks.peaks(),
            flops_per_s=peaks.measured_flops_per_s,
            bytes_per_s=peaks.measured_bytes_per_s,
        ),
        element_bytes=ELEMENT_BYTES[dtype_name(target.dtype)],
        count="physical",
    )
    capacity = max(*scale.plain_contexts, scale.verify_context) + max(scale.verify_rows)
    workload = Workload(target, NgramDrafter(), capacity=capacity)
    shapes = [(1, context) for context in scale.plain_contexts]
    shapes += [(rows, scale.verify_context) for rows in scale.verify_rows]
    return {
        "peaks": peaks.model_dump(),
        "forwards": [
            forward_row(workload, measured, rows, context)
            for rows, context in dict.fromkeys(shapes)
        ],
        "warnings": list(target.runtime.warnings),
    }


def forward_row(
    workload: Workload, measured: Roofline, rows: int, context: int
) -> dict[str, float]:
    """One forward, compared with the peaks measured on the same device."""
    task = Task(kind="verify", size=rows, context=context)
    reason = workload.shortfall(task)
    if reason:
        return {"rows": rows, "context": context, "skipped": reason}
    call, tools = workload.call(task), instruments(workload.device)
    for _ in range(3):
        call()
    samples = timed(call, tools)
    moved_bytes = float(
        physical_bytes(
            measured.architecture, rows, context, 1, measured.element_bytes, measured.read_bytes
        ).total
    )
    return {
        "rows": rows, "context": context, "median_s": samples.typical_s, "n": samples.n,
        "rejected": len(samples.rejected),
        "over_physical_roofline": samples.typical_s / float(measured.seconds(rows, context)),
        "share_of_measured_read": moved_bytes / samples.typical_s / measured.peaks.bytes_per_s,
        "rows_per_s": rows / samples.typical_s,
    }  # fmt: skip


def timed(call: Callable[[], object], tools: Instruments) -> PointSamples:
    """The samples of a call until the rule stops."""
    point = PointAccumulator(tools.rule)
    while not point.done:
        seconds, disturbance = take_sample(call, tools)
        point.add(seconds, ok=not disturbance)
    return point.samples


def run_held_out(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The stored profile's error in a fresh process, at contexts and buckets not calibrated."""
    profile = Profile.from_yaml(profile_path(part, folder))
    target = open_target(part, scale)
    plan = DecoderPoints(
        contexts=scale.contexts, max_nodes=scale.max_nodes, held_out_contexts=4, held_out_rows=8,
        seed=SEED, buckets=target.runtime.buckets,
    )  # fmt: skip
    tasks = plan.held_out(plan.max_nodes + 1)
    # A batch size between two calibrated ones, which no calibration has measured.
    between = (min(scale.batches) + max(scale.batches)) // 2 + 1
    if between not in scale.batches:
        tasks += [replace(task, batch=between) for task in tasks[::3]]
    workload = Workload(target, NgramDrafter(), capacity=plan.capacity, seed=SEED)
    (folder / "held_out.jsonl").unlink(missing_ok=True)
    with Journal(folder / "held_out.jsonl", {"seed": SEED}) as journal:
        swept = run_sweep(
            tasks, workload, instruments(workload.device), journal,
            SweepControl(limit_s=scale.held_out_s),
        )  # fmt: skip
    return errors_at(profile, points_of(swept, "held_out")) | {
        "skipped": {str(task.key()): reason for task, reason in swept.skipped.items()}
    }


def errors_at(profile: Any, points: Any) -> dict[str, Any]:
    """Errors and regret of the selected and of the linear calibration."""
    linear = profile.calibration.linear
    result: dict[str, Any] = {
        "environment": environment(), "profile": profile.as_dict()["provenance"],
        "selected": profile.calibration.selected,
        "repeat_noise": float(np.median(points.median_error)),
        "linear_rmse_reduction": 1 - linear.rmse_after_s / linear.rmse_before_s,
    }  # fmt: skip
    predicted = {
        name: calibration.predict_s(points.rows, points.context, points.batch)
        for name, calibration in (
            ("linear", profile.linear_calibration()), ("selected", profile.verify_calibration()),
        )
    }  # fmt: skip
    for name, predicted_s in predicted.items():
        error = ErrorSummary.of(predicted_s, points.seconds)
        regret = regret_at_contexts(points, predicted_s)
        result[f"{name}_calibration"] = {
            "median_error": error.median, "mean_error": error.mape, "worst_error": error.worst,
            "regret_mean": regret.mean, "regret_worst": regret.worst,
        }  # fmt: skip
    columns = {"rows": points.rows.astype(int), "context": points.context.astype(int)}
    columns |= {"batch": points.batch.astype(int), "measured_s": points.seconds}
    columns |= {"predicted_s": predicted["selected"]}
    table = zip(*(column.tolist() for column in columns.values()), strict=True)
    return result | {"points": [dict(zip(columns, row, strict=True)) for row in table]}


def run_replay(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """All policies on the same texts, with a drafter of published acceptance."""
    target = GivenTextTarget(open_target(part, scale))
    texts = random_texts(target.architecture.vocab, scale)
    truth, process = Truth(texts), published("bastion", "gsm8k")
    choice = ProfileChoice(path=profile_path(part, folder))

    def decoder_of(policy: str, stage_times: bool = False) -> TreeDecoder:
        return TreeDecoder(
            target,
            drafter=SimulatedDrafter(truth, process, vocab=target.architecture.vocab),
            policy=policy,
            max_nodes=max(scale.fixed),
            profile=choice,
            stage_times=stage_times,
        )

    policies = ("plain", "bastion", "chain", *(f"fixed:{n}" for n in scale.fixed))
    decoders = {policy: decoder_of(policy) for policy in policies}
    rows: dict[str, list[tuple[float, float]]] = {policy: [] for policy in decoders}
    for index, text in enumerate([texts[0], *texts]):  # the first once more, to warm up
        turn = index % len(decoders)
        names = list(decoders)
        for policy in names[turn:] + names[:turn]:
            target.follow(text)
            stats = (
                decoders[policy]
                .generate(text[: scale.prompt_tokens], max_new_tokens=scale.new_tokens)
                .stats
            )
            if index:
                rows[policy].append((stats.new_tokens - 1, stats.decode_s))
    # Stage times need a synchronisation after each stage, so they are taken apart from the rates.
    staged = decoder_of("bastion", stage_times=True)
    target.follow(texts[0])
    stats = staged.generate(texts[0][: scale.prompt_tokens], max_new_tokens=scale.new_tokens).stats
    return replay_result(rows, asdict(stats.stages)) | {
        "acceptance": f"simulated: {process.label}",
        "warnings": list(target.runtime.warnings),
    }


def replay_result(
    rows: dict[str, list[tuple[float, float]]], stages: dict[str, float]
) -> dict[str, Any]:
    """Rates of each policy, `bastion` over the others, and the stage times of its cycles."""
    rates = {
        policy: sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)
        for policy, pairs in rows.items()
    }
    best = max((name for name in rates if name.startswith("fixed:")), key=rates.__getitem__)
    forwards_s = stages["draft_s"] + stages["verify_s"]
    return {
        "tokens_per_s": rates,
        "best_fixed": best,
        "bastion_over": {
            name: pooled_ratio(rows["bastion"], rows[name]) for name in (best, "plain", "chain")
        },
        "bastion_stages_s": stages,
        "share_outside_forwards": 1.0 - forwards_s / sum(stages.values()),
        "rows": rows,
    }


def run_launches(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The kernels of one replayed step and verification: their counts and seconds.

    The seconds of all kernels beside the forward's own show the gaps between them.
    """
    target = open_target(part, scale)
    capacity = scale.verify_context + max(scale.verify_rows)
    workload = Workload(target, NgramDrafter(), capacity=capacity)
    tools, tables = instruments(workload.device), {}
    for rows in sorted({1, *scale.verify_rows}):
        call = workload.call(Task(kind="verify", size=rows, context=scale.verify_context))
        for _ in range(3):
            call()
        samples = timed(call, tools)
        with torch.profiler.profile() as record:
            call()
            synchronise(target.device)
        tables[str(rows)] = device_table(record) | {"forward_s": samples.typical_s}
    decoder = TreeDecoder(target, drafter=NgramDrafter(), policy="fixed:15", max_nodes=15)
    prompt = random_texts(target.architecture.vocab, scale)[0][: scale.prompt_tokens // 2] * 2
    decoder.generate(prompt, max_new_tokens=PROFILED_ROUNDS)  # captures
    with torch.profiler.profile() as record:
        stats = decoder.generate(prompt, max_new_tokens=PROFILED_ROUNDS).stats
    rounds = device_table(record) | {"rounds": stats.rounds, "decode_s": stats.decode_s}
    return {"rows": tables, "layers": target.architecture.layers, "of_a_text": rounds}


def device_table(record: torch.profiler.profile) -> dict[str, Any]:
    """The kernels of a recorded piece of work, the longest first."""
    events = [event for event in record.key_averages() if _event_s(event) > 0.0]
    events.sort(key=_event_s, reverse=True)
    return {
        "kernels_s": sum(map(_event_s, events)),
        "launches": sum(event.count for event in events),
        "kernels": [
            {"name": event.key[:120], "calls": event.count, "total_s": _event_s(event)}
            for event in events[:40]
        ],
    }


def _event_s(event: Any) -> float:
    """Seconds on the device; those of the operator itself where nothing ran on a device."""
    if torch.cuda.is_available():
        on_device = str(event.device_type).endswith("CUDA")  # else its launch, on the host
        return float(event.self_device_time_total) * 1e-6 if on_device else 0.0
    return float(event.self_cpu_time_total) * 1e-6


def run_drafters(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Drafts and rounds of DFlash and EAGLE-3 drafters of published shapes, random weights.

    None of their tokens is accepted, so that the rounds' times count and not their tokens.
    """
    target = open_target(part, scale)
    prompt = random_texts(target.architecture.vocab, scale)[0][: scale.prompt_tokens]
    found = {}
    for drafter in (dflash_drafter(target), eagle3_drafter(target)):
        cost = time_drafter(drafter, target)
        decoder = TreeDecoder(
            target, drafter=drafter, policy=f"fixed:{max(scale.fixed[:4])}", stage_times=True
        )
        for _ in range(2):  # the first captures
            stats = decoder.generate(prompt, max_new_tokens=scale.new_tokens // 4).stats
        times = {"draft_s": cost.median_s, "context": cost.context, "rounds": stats.rounds}
        found[drafter.name] = times | {"stages_s": asdict(stats.stages)}
    return {"drafters": found, "warnings": list(target.runtime.warnings)}


def dflash_drafter(target: Target) -> Drafter:
    """Five layers, blocks of 16 and five of the target's layers as features, as published."""
    layers, mask = target.architecture.layers, target.architecture.vocab - 1
    features = tuple(sorted({1 + i * (layers - 4) // 4 for i in range(5)}))
    wanted = DFlashTraining(layers=5, block_size=16, target_layers=features)
    with torch.device(target.device):
        model = DFlashModel(DFlashConfig.parse(fresh_config(target.loaded, wanted, mask)))
    return DFlashDrafter(target, model.to(target.dtype).eval().requires_grad_(False))


def eagle3_drafter(target: Target) -> Drafter:
    """One layer and a head over 32,000 tokens, as published."""
    sizes = target.architecture
    fields = {
        "hidden_size": sizes.hidden, "intermediate_size": sizes.ffn, "vocab_size": sizes.vocab,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "num_hidden_layers": 1,
        "draft_vocab_size": min(32_000, sizes.vocab),
    }  # fmt: skip
    with torch.device(target.device):
        model = Eagle3Model(Eagle3Config.parse(fields))
    return Eagle3Drafter(target, model.to(target.dtype).eval().requires_grad_(False))

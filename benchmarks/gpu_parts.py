"""What each part of the GPU suite measures; see benchmarks/gpu_suite.py.

A part takes the suite's scale, its own subject and a folder for its files, and returns a
result of JSON values. Weights are random: they take the same time, and need no download.
Acceptance is simulated at published rates, and labelled so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import environment
from benchmarks.gpu_scale import Part, Scale
from benchmarks.held_out import summary
from costmodel.errors import RooftreeError
from costmodel.profile import Profile
from costmodel.published_acceptance import published
from costmodel.roofline import Roofline, physical_bytes
from costmodel.schema import ELEMENT_BYTES
from decoder import TreeDecoder
from decoder.device import dtype_name, parse_dtype, select_device
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.replay import ReplayDrafter, Truth
from decoder.loading import load_model
from decoder.profiles import find_peaks
from decoder.startup import ProfileChoice
from decoder.target import Target
from profiler.bench.forced import ForcedTarget
from profiler.calibrate import CalibrationSettings, Listener, calibrate
from profiler.instruments import instruments
from profiler.journal import Journal
from profiler.plan import SweepPlan
from profiler.rounds import paired_ratio
from profiler.sections import points_of
from profiler.sweep import Steering, run_sweep
from profiler.timing import measure
from profiler.workload import Task, Workload

SEED = 20262  # of held-out points and texts; the calibration uses another


def run_part(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Measure one part; its files go into `folder`/<name of the part>."""
    own = folder / part.name
    own.mkdir(parents=True, exist_ok=True)
    start_s = perf_counter()
    found = KINDS[part.kind](part, scale, own)
    return {
        "part": asdict(part),
        "scale": asdict(scale),
        "environment": environment(scale.device),
        "wall_s": round(perf_counter() - start_s, 2),
        "result": found,
    }


def run_tests(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The tests that are marked `gpu`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    (folder / "pytest.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    last = done.stdout.strip().splitlines()[-1:] or [""]
    return {"exit_code": done.returncode, "summary": last[0]}


def run_calibration(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """`rooftree calibrate` as a user runs it, and how long it takes from the command on."""
    settings = CalibrationSettings(
        target=part.target,
        weights="random",
        device=scale.device,
        dtype=scale.dtype,
        runtime=part.runtime,  # type: ignore[arg-type]
        contexts=scale.contexts,
        max_nodes=scale.max_nodes,
        batches=scale.batches,
        time_budget_s=scale.budget_s,
        output=folder / "profile.yaml",
    )
    start_s = perf_counter()
    result = calibrate(settings, Listener(say=lambda text: print(text, flush=True)))
    return {
        "command_s": round(perf_counter() - start_s, 2),
        "sweep_s": result.profile.provenance.duration_s,
        "points": result.profile.provenance.points,
        "warnings": list(result.warnings),
        "skipped": {str(task.key()): reason for task, reason in result.skipped.items()},
        "unmeasured": [task.key() for task in result.unmeasured],
        "held_out": result.profile.as_dict().get("held_out", {}).get("error"),
        "regret": result.profile.as_dict().get("regret"),
    }


def run_forwards(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Plain steps as a share of the measured read bandwidth; verification over the roofline."""
    target = open_target(part, scale)
    peaks = find_peaks(target)
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
    """One forward against the peaks that were measured on this very device."""
    task = Task(kind="verify", size=rows, context=context)
    reason = workload.shortfall(task)
    if reason:
        return {"rows": rows, "context": context, "skipped": reason}
    call, tools = workload.call(task), instruments(workload.device)
    for _ in range(3):
        call()
    samples = measure(call, timer=tools.timer, rule=tools.rule, guard=tools.guard)
    moved_bytes = float(
        physical_bytes(
            measured.architecture, rows, context, element_bytes=measured.element_bytes
        ).total
    )
    return {
        "rows": rows,
        "context": context,
        "median_s": samples.median_s,
        "n": samples.n,
        "rejected": len(samples.rejected),
        "over_physical_roofline": samples.median_s / float(measured.seconds(rows, context)),
        "share_of_measured_read": moved_bytes / samples.median_s / measured.peaks.bytes_per_s,
        "rows_per_s": rows / samples.median_s,
    }


def run_held_out(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The stored profile in a fresh process, at contexts and buckets never measured."""
    profile = Profile.from_yaml(profile_path(part, folder))
    target = open_target(part, scale)
    plan = SweepPlan(
        contexts=scale.contexts,
        max_nodes=scale.max_nodes,
        held_out_contexts=4,
        held_out_rows=8,
        seed=SEED,
        buckets=target.runtime.buckets,
    )
    tasks = plan.held_out()
    # A whole batch size that no calibration has measured, between two that one has.
    between = (min(scale.batches) + max(scale.batches)) // 2 + 1
    if between not in scale.batches:
        tasks += [replace(task, batch=between) for task in tasks[::3]]
    workload = Workload(target, NgramDrafter(), capacity=plan.capacity, seed=SEED)
    with Journal(folder / "held_out.jsonl", {"seed": SEED}, fresh=True) as journal:
        swept = run_sweep(
            tasks,
            workload,
            instruments(workload.device),
            journal,
            Steering(budget_s=2 * scale.budget_s),
        )
    return summary(profile, points_of(swept, "held_out")) | {
        "skipped": {str(task.key()): reason for task, reason in swept.skipped.items()}
    }


def run_replay(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """All policies on the same texts with a drafter of published acceptance, arm by arm."""
    target = ForcedTarget(open_target(part, scale))
    texts = random_texts(target.architecture.vocab, scale)
    truth, process = Truth(texts), published("bastion", "gsm8k")
    choice = ProfileChoice(path=profile_path(part, folder))
    decoders = {
        policy: TreeDecoder(
            target,  # type: ignore[arg-type]
            drafter=ReplayDrafter(truth, process, vocab=target.architecture.vocab),
            policy=policy,
            max_nodes=max(scale.fixed),
            profile=choice,
            stage_times=policy == "bastion",
        )
        for policy in ("plain", "bastion", "chain", *(f"fixed:{n}" for n in scale.fixed))
    }
    rows: dict[str, list[tuple[float, float]]] = {policy: [] for policy in decoders}
    stages: dict[str, float] = {}
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
            if index and policy == "bastion":
                for name, seconds in asdict(stats.stages).items():
                    stages[name] = stages.get(name, 0.0) + seconds
    return replay_result(rows, stages) | {"acceptance": f"simulated: {process.label}"}


def replay_result(
    rows: dict[str, list[tuple[float, float]]], stages: dict[str, float]
) -> dict[str, Any]:
    """Rates of each policy, `bastion` against the others, and what its cycles spend."""
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
            name: paired_ratio(rows["bastion"], rows[name]) for name in (best, "plain", "chain")
        },
        "bastion_stages_s": stages,
        "share_outside_forwards": 1.0 - forwards_s / sum(stages.values()),
        "rows": rows,
    }


def open_target(part: Part, scale: Scale) -> Target:
    device = select_device(scale.device)
    loaded = load_model(
        part.target, weights="random", dtype=parse_dtype(scale.dtype, device), device=device
    )
    return Target(loaded, runtime=part.runtime)  # type: ignore[arg-type]


def random_texts(vocab: int, scale: Scale) -> list[list[int]]:
    """Texts of random tokens, prompt and continuation."""
    random = np.random.default_rng(SEED)
    length = scale.prompt_tokens + scale.new_tokens
    return [random.integers(0, vocab, length).tolist() for _ in range(scale.texts)]


def profile_path(part: Part, folder: Path) -> Path:
    """The profile that the calibration of the same target and runtime has written."""
    path = folder.parent / replace(part, kind="calibrate").name / "profile.yaml"
    if not path.is_file():
        raise RooftreeError(
            f"there is no profile for {part.name}", hint="Run the calibration's part first."
        )
    return path


KINDS: dict[str, Callable[[Part, Scale, Path], dict[str, Any]]] = {
    "tests": run_tests,
    "calibrate": run_calibration,
    "forwards": run_forwards,
    "held-out": run_held_out,
    "replay": run_replay,
}

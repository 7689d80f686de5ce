"""The parts of the GPU suite (benchmarks/gpu_suite.py): their sizes and measurements.

A part gets the suite's scale, its target and runtime, and a folder for its files, and returns
a result of JSON values. Weights are random, which takes the same time and needs no download.
Acceptance is simulated at published rates, and labelled so.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import environment
from benchmarks.held_out import summary
from benchmarks.rounds import pooled_ratio
from costmodel.acceptance import published
from costmodel.errors import RooftreeError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import ELEMENT_BYTES
from costmodel.roofline import Roofline, physical_bytes
from decoder.device import dtype_name, parse_dtype, select_device, synchronise
from decoder.drafters.ngram import NgramDrafter
from decoder.drafters.simulated import SimulatedDrafter, Truth
from decoder.engine import TreeDecoder
from decoder.profiling.measured_profile import find_peaks
from decoder.profiling.startup import ProfileChoice
from decoder.target.loading import load_model
from decoder.target.target import Step, Target
from decoder.tree.draft_tree import DraftTree
from profiler.bench.arms.given_text import GivenTextTarget
from profiler.calibrate.calibrate import CalibrationListener, CalibrationSettings, calibrate
from profiler.calibrate.instruments import instruments
from profiler.calibrate.sections import points_of
from profiler.calibrate.sweep import Steering, run_sweep
from profiler.calibrate.sweep_plan import SweepPlan
from profiler.calibrate.workload import Task, Workload
from profiler.measure.journal import Journal
from profiler.measure.samples import measure

SEED = 20262  # of weights, held-out points and texts; the calibration uses another
# Largest difference of logits over their standard deviation; bfloat16 keeps 8 bits a number, and
# differences of the layers add up.
LOGIT_TOLERANCES = {"bfloat16": 0.15, "float16": 0.03, "float32": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of all measurements; the defaults are those of a GPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    targets: tuple[str, ...] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
    runtimes: tuple[str, ...] = ("graphs", "eager")
    contexts: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    max_nodes: int = 1024
    batches: tuple[int, ...] = (1, 4, 16)
    budget_s: float = 30.0
    plain_contexts: tuple[int, ...] = (64, 1024, 4096, 16384)
    verify_rows: tuple[int, ...] = (1, 16, 64, 128, 256)
    verify_context: int = 1024
    prompt_tokens: int = 1024
    new_tokens: int = 256
    texts: int = 4
    fixed: tuple[int, ...] = (1, 3, 7, 15, 31, 63, 127, 255)


TINY = Scale(
    device="cpu",
    dtype="float32",
    targets=(),
    runtimes=("eager",),
    contexts=(16, 64),
    max_nodes=15,
    batches=(1, 2),
    budget_s=2.0,
    plain_contexts=(16, 64),
    verify_rows=(1, 8),
    verify_context=32,
    prompt_tokens=12,
    new_tokens=24,
    texts=2,
    fixed=(3, 7),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement: a kind (of `KINDS`), a target and a runtime."""

    kind: str
    target: str = ""
    runtime: str = ""

    @property
    def name(self) -> str:
        label = self.target.rstrip("/").rpartition("/")[2].lower()
        return ".".join(part for part in (self.kind, label, self.runtime) if part)


def all_parts(scale: Scale) -> list[Part]:
    """All parts in order of value: the first target and runtime whole, then the others.

    Correct logits come first, and calibrations before what reads their profile. A machine that
    is given back early has then measured what is needed most.
    """
    parts = []
    for index, target in enumerate(scale.targets):
        for runtime in scale.runtimes:
            parts += [
                Part("logits", target, runtime),
                Part("calibrate", target, runtime),
                Part("forwards", target, runtime),
                Part("held-out", target, runtime),
                Part("replay", target, runtime),
            ]
            if runtime == scale.runtimes[0]:
                parts += [Part("launches", target, runtime), Part("peers", target, "")]
        if index == 0:
            parts.append(Part("tests"))
    return parts


def run_part(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Measure one part; its files go into `folder`/<name of the part>."""
    part_folder = folder / part.name
    part_folder.mkdir(parents=True, exist_ok=True)
    start_s = perf_counter()
    result = KINDS[part.kind](part, scale, part_folder)
    return {
        "part": asdict(part),
        "scale": asdict(scale),
        "environment": environment(scale.device),
        "wall_s": round(perf_counter() - start_s, 2),
        "result": result,
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
    if done.returncode != 0:
        raise RooftreeError(f"tests fail: {last[0]}", hint=f"{folder / 'pytest.txt'} says why.")
    return {"summary": last[0]}


def run_calibration(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """`rooftree calibrate` as a user runs it, with the seconds of the whole command."""
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
    result = calibrate(settings, CalibrationListener(say=lambda text: print(text, flush=True)))
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
    """One forward, compared with the peaks measured on the same device."""
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
    """The stored profile's error in a fresh process, at contexts and buckets not calibrated."""
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
    # A batch size between two calibrated ones, which no calibration has measured.
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
    """All policies on the same texts, with a drafter of published acceptance."""
    target = GivenTextTarget(open_target(part, scale))
    texts = random_texts(target.architecture.vocab, scale)
    truth, process = Truth(texts), published("bastion", "gsm8k")
    choice = ProfileChoice(path=profile_path(part, folder))
    decoders = {
        policy: TreeDecoder(
            target,  # type: ignore[arg-type]
            drafter=SimulatedDrafter(truth, process, vocab=target.architecture.vocab),
            policy=policy,
            max_nodes=max(scale.fixed),
            profile=choice,
        )
        for policy in ("plain", "bastion", "chain", *(f"fixed:{n}" for n in scale.fixed))
    }
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
    staged = TreeDecoder(
        target,  # type: ignore[arg-type]
        drafter=SimulatedDrafter(truth, process, vocab=target.architecture.vocab),
        policy="bastion",
        max_nodes=max(scale.fixed),
        profile=choice,
        stage_times=True,
    )
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


def run_logits(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Logits of the runtime against transformers' own, for a prompt, steps and trees.

    The tree of each size is a chain, whose rows transformers computes as a continued prompt.
    Raises RooftreeError where they differ by more than rounding.
    """
    target = open_target(part, scale)
    tokens = np.random.default_rng(SEED).integers(
        0, target.architecture.vocab, scale.verify_context + max(scale.verify_rows)
    )
    context, compared = scale.verify_context, []
    truth = transformers_logits(part, scale, tokens)
    start_s = perf_counter()
    target.reserve(len(tokens) + max(scale.verify_rows))
    target.prefill(torch.from_numpy(tokens[:context]))
    target.prepare(max(scale.verify_rows))
    prepare_s = perf_counter() - start_s
    for rows in scale.verify_rows:
        drafted = tokens[context + 1 : context + rows]
        places = np.arange(len(drafted), dtype=np.int64)
        tree = DraftTree(drafted, places, places + 1, np.full(len(drafted), 0.5))
        [logits] = target.verify([Step(int(tokens[context]), tree)])
        compared.append(
            {"rows": rows, **difference(logits.float().cpu(), truth[context : context + rows])}
        )
        target.commit([])
    allowed = LOGIT_TOLERANCES[scale.dtype]
    wrong = [row["rows"] for row in compared if row["relative_error"] > allowed]
    (folder / "logits.json").write_text(json.dumps(compared), encoding="utf-8")
    if wrong:
        raise RooftreeError(
            f"logits of {wrong} rows differ from transformers' by more than {allowed:.1%}",
            hint=f"{folder / 'logits.json'} has the differences.",
        )
    capture = target.runtime.capture
    return {
        "compared": compared,
        "allowed_relative_error": allowed,
        "prepare_s": prepare_s,
        "capture_bytes": capture.memory_bytes if capture else 0,
        "warnings": list(target.runtime.warnings),
    }


def transformers_logits(part: Part, scale: Scale, tokens: NDArray[np.int64]) -> torch.Tensor:
    """Logits [tokens, vocab] of a fresh copy of the target by transformers' own forward."""
    device = select_device(scale.device)
    torch.manual_seed(SEED)
    loaded = load_model(
        part.target, weights="random", dtype=parse_dtype(scale.dtype, device), device=device
    )
    with torch.inference_mode():
        output = loaded.model(torch.from_numpy(tokens)[None].to(device), use_cache=False)
        logits: torch.Tensor = output.logits[0].float().cpu()
    return logits


def difference(logits: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Largest difference over the spread of the logits, and the share of equal first choices."""
    return {
        "relative_error": float((logits - truth).abs().max() / truth.std()),
        "same_argmax": float((logits.argmax(-1) == truth.argmax(-1)).double().mean()),
    }


def run_launches(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """The kernels of one plain step and one verification, with their counts and seconds."""
    target = open_target(part, scale)
    workload = Workload(
        target, NgramDrafter(), capacity=scale.verify_context + max(scale.verify_rows)
    )
    tables = {}
    for rows in (1, max(scale.verify_rows)):
        call = workload.call(Task(kind="verify", size=rows, context=scale.verify_context))
        for _ in range(3):
            call()
        with torch.profiler.profile() as record:
            call()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
        events = sorted(record.key_averages(), key=_event_s, reverse=True)
        tables[str(rows)] = [
            {"name": event.key[:120], "calls": event.count, "total_s": _event_s(event)}
            for event in events[:40]
        ]
    return {"rows": tables, "layers": target.architecture.layers}


def _event_s(event: Any) -> float:
    """Seconds on the device, on a CPU those of the operator itself."""
    return float(event.self_device_time_total or event.self_cpu_time_total) * 1e-6


def run_peers(part: Part, scale: Scale, folder: Path) -> dict[str, Any]:
    """Tokens per second of transformers' plain decoding, eager and with a static cache.

    The static cache is compiled by transformers with CUDA graphs (`reduce-overhead`).
    """
    device = select_device(scale.device)
    loaded = load_model(
        part.target, weights="random", dtype=parse_dtype(scale.dtype, device), device=device
    )
    text = random_texts(loaded.architecture.vocab, scale)[0]
    prompt = torch.tensor([text[: scale.prompt_tokens]], device=device)
    modes: dict[str, dict[str, Any]] = {"eager": {}}
    if device.type == "cuda":
        modes["static cache, compiled"] = {"cache_implementation": "static"}
    rates = {}
    for name, options in modes.items():
        decode = functools.partial(
            loaded.model.generate, prompt, do_sample=False, eos_token_id=None, **options
        )
        decode(min_new_tokens=scale.new_tokens, max_new_tokens=scale.new_tokens)  # compiles
        seconds = {}
        for tokens in (1, scale.new_tokens):  # the first token's time is the prompt's
            start_s = perf_counter()
            decode(min_new_tokens=tokens, max_new_tokens=tokens)
            synchronise(device)
            seconds[tokens] = perf_counter() - start_s
        rates[name] = (scale.new_tokens - 1) / (seconds[scale.new_tokens] - seconds[1])
    return {"tokens_per_s": rates, "prompt_tokens": scale.prompt_tokens}


def open_target(part: Part, scale: Scale) -> Target:
    device = select_device(scale.device)
    torch.manual_seed(SEED)
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
    """The profile written by the calibration of the same target and runtime."""
    path = folder.parent / replace(part, kind="calibrate").name / "profile.yaml"
    if not path.is_file():
        raise RooftreeError(
            f"there is no profile for {part.name}", hint="Run the calibration's part first."
        )
    return path


KINDS: dict[str, Callable[[Part, Scale, Path], dict[str, Any]]] = {
    "tests": run_tests,
    "logits": run_logits,
    "launches": run_launches,
    "peers": run_peers,
    "calibrate": run_calibration,
    "forwards": run_forwards,
    "held-out": run_held_out,
    "replay": run_replay,
}

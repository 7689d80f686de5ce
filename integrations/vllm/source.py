"""vLLM's own steps in this process as the source of a calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from platform import python_version
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from costmodel.errors import InputError
from costmodel.profile.schema import EngineDrafterSection, RuntimeSection
from costmodel.weights import label_bytes
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.drafters.factory import DEMO_DRAFTER
from decoder.model.loading import default_target
from decoder.profiling.measured_profile import MeasuredSubject, peaks_of
from integrations.vllm.configuration import (
    architecture_of,
    drafter_key,
    engine_section,
    installed_version,
    quantization_of,
    speculative_options,
)
from integrations.vllm.engine import PROMPT_TOKENS, SteppedEngine, spare_tokens
from profiler.calibrate.decoder import CPU_CONTEXTS
from profiler.calibrate.files import device_label
from profiler.calibrate.points import draw_rows, verify_grid
from profiler.calibrate.sections import columns_of
from profiler.calibrate.source import Additions, CalibrationSettings, PreparedSource
from profiler.calibrate.sweep import SweepResult, Task
from profiler.measure.instruments import MIN_SAMPLES, CpuGuard, Instruments, ReportTimer, gpu_guard
from profiler.measure.samples import NoiseRule

BATCHES = (1, 2, 4, 8)
GPU_CONTEXTS = (64, 512, 2048, 8192)
MAX_NODES = 15
LIMIT_S = 60.0
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # few: each comes at every batch and context
PROMPTS = (32, 64, 128, 256, 512, 1024)  # each in one step
HELD_OUT_SHAPES = 4  # (context, batch) pairs
HELD_OUT_ROWS = 6


class VllmSource:
    """vLLM with one target, its scheduler in this process.

    Of the settings, `drafter` is none, ngram, mtp, demo or a folder. Weights, runtime and
    quantization are arguments of the engine.
    """

    def __init__(
        self, settings: CalibrationSettings, *, options: Mapping[str, Any] | None = None
    ) -> None:
        """options: further arguments of `vllm.LLM`. Raises InputError or DeviceError."""
        installed_version()
        self._settings, self._device = settings, select_device(settings.device)
        self._options = dict(options or {})
        on_gpu = self._device.type == "cuda"
        contexts = settings.contexts or (GPU_CONTEXTS if on_gpu else CPU_CONTEXTS)
        if min(contexts) <= PROMPT_TOKENS:
            raise InputError(
                f"contexts in an engine begin at {PROMPT_TOKENS + 1} tokens, got {min(contexts)}"
            )
        drafter = str(DEMO_DRAFTER) if settings.drafter == "demo" else settings.drafter
        self._speculative = speculative_options(drafter, settings.max_nodes or MAX_NODES)
        self._plan = EngineTasks(
            contexts=contexts,
            batches=settings.batches or BATCHES,
            most_rows=self._speculative["num_speculative_tokens"] + 1,
            drafts=drafter != "none",
            seed=settings.seed,
        )
        self.cuda_index = self._device.index or 0 if on_gpu else None
        self.lock = f"{fingerprint(self._device).name} {device_label(self._device)}"

    def prepare(self, say: Callable[[str], None]) -> PreparedSource:
        plan, device, target = self._plan, self._device, self._settings.target
        options = {
            "model": default_target(device) if target is None else target,
            "max_num_seqs": max(plan.batches),
            "max_model_len": max(plan.contexts) + spare_tokens(plan.most_rows - 1),
            "speculative_config": self._speculative,
            "dtype": dtype_name(parse_dtype(self._settings.dtype, device)),
        }
        engine = SteppedEngine(options | self._options)
        loaded_s = time.perf_counter()
        if engine.device.type != device.type:
            raise InputError(
                f"this vLLM runs on {engine.device.type}, not on {device.type}",
                hint="Install a vLLM for the other.",
            )
        self._engine, self._workload = engine, EngineWorkload(engine)
        config, label = engine.config, quantization_of(engine.config)
        self._subject = MeasuredSubject(
            device=engine.in_worker(fingerprint, device),
            architecture=architecture_of(config),
            runtime=RuntimeSection(
                kind="vllm",
                dtype=dtype_name(config.model_config.dtype),
                quantization=label,
                weight_bytes=None if label is None else label_bytes(label),
                attention=engine.attention,
                tensor_parallel=config.parallel_config.tensor_parallel_size,
                torch=torch.__version__,
                transformers=transformers.__version__,
                python=python_version(),
                engine=engine_section(config),
            ),
            note=f"vLLM's own steps, drafter {self._settings.drafter}",
        )
        say(f"{self._subject.architecture.name} in vLLM on {self._subject.device.name}")
        guard = CpuGuard() if device.type == "cpu" else gpu_guard(device.index or 0)
        return PreparedSource(
            subject=self._subject,
            peaks=engine.in_worker(peaks_of, device, config.model_config.dtype),
            grid=plan.grid(),
            fixed=[
                *plan.held_out(),
                *plan.draft_tasks(),
                # Prompts that the contexts have room for, each in one step.
                *(Task(kind="prefill", size=n) for n in PROMPTS if n <= max(plan.contexts)),
            ],
            workload=self._workload,
            instruments=Instruments(
                timer=ReportTimer(), guard=guard, rule=NoiseRule(min_samples=MIN_SAMPLES)
            ),
            journal={
                "drafter": drafter_key(config),
                "contexts": list(plan.contexts),
                "batches": list(plan.batches),
                "most_rows": plan.most_rows,
                "seed": plan.seed,
            },
            limit_s=LIMIT_S,
            loaded_s=loaded_s,
        )

    def additions(self, swept: SweepResult) -> Additions:
        subject = self._subject
        if subject.device.kind == "cuda":
            engine = engine_section(self._engine.config)
            timed = engine.model_copy(update={"host_s": median(self._workload.host_s)})
            subject = replace(subject, runtime=subject.runtime.model_copy(update={"engine": timed}))
        # The drafter's cost, where one was named and all its points were measured.
        tasks, drafters = set(self._plan.draft_tasks()), {}
        axes = {"batch": "batch", "tokens": "size", "context": "context"}
        columns = columns_of(swept, tasks.__contains__, **axes)
        if columns is not None and tasks <= swept.samples.keys():
            drafters[drafter_key(self._engine.config)] = EngineDrafterSection.model_validate(
                {"name": self._settings.drafter} | columns
            )
        return Additions(subject=subject, sections={"engine_drafters": drafters})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTasks:
    """The points that an engine's calibration may measure."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most_rows: int
    drafts: bool
    seed: int = 0

    def grid(self) -> list[Task]:
        rows = sorted({rows for rows in ROWS if rows < self.most_rows} | {self.most_rows})
        return verify_grid(rows, self.contexts, self.batches)

    def held_out(self) -> list[Task]:
        """Points that no fit uses, drawn from the seed before anything is measured.

        Contexts and batches are log-uniform, a third of the batches as in the grid; row counts
        are stratified and include the plain step.
        """
        random = np.random.default_rng((self.seed, 7919))
        low, high = np.log(min(self.contexts)), np.log(max(self.contexts))
        tasks = set()
        for context in np.exp(random.uniform(low, high, HELD_OUT_SHAPES)):
            batch = round(np.exp(random.uniform(0, np.log(max(self.batches)))))
            for rows in {1, *draw_rows(random, self.most_rows, HELD_OUT_ROWS)}:
                tasks.add(Task(kind="held_out", size=rows, context=round(context), batch=batch))
        return sorted(tasks)

    def draft_tasks(self) -> list[Task]:
        """A full grid of draft lengths; empty where no drafter was named."""
        if not self.drafts:
            return []
        longest = self.most_rows - 1
        lengths = sorted({0, 1, max(longest // 2, 1), longest})
        contexts = sorted({min(self.contexts), max(self.contexts)})
        batches = sorted({min(self.batches), max(self.batches)})
        return [
            Task(kind="draft", size=tokens, context=context, batch=batch)
            for batch in batches
            for tokens in lengths
            for context in contexts
        ]


class EngineWorkload:
    """Turns tasks into steps of an engine; each call returns the seconds that count."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self.host_s: list[float] = []

    def call(self, task: Task) -> Callable[[], float]:
        if task.kind == "prefill":
            return lambda: self._engine.prefill(task.size).verify_s
        drafts = task.kind == "draft"

        def run() -> float:
            time = self._engine.step(
                rows=task.size + 1 if drafts else task.size,
                context=task.context,
                batch=task.batch,
                draft_tokens=task.size if drafts else 0,
            )
            self.host_s.append(time.host_s)
            return time.draft_s if drafts else time.verify_s

        return run

    def shortfall(self, task: Task) -> str:
        """The reason why the engine cannot take the task; empty where it can."""
        engine = self._engine
        if task.kind == "prefill" and task.size > engine.longest_prompt:
            return f"the engine takes prompts of {engine.longest_prompt} tokens in one step"
        if task.context > engine.longest_context:
            return f"the engine's max_model_len leaves room for {engine.longest_context} tokens"
        if task.batch > engine.most_requests:
            return f"the engine runs {engine.most_requests} sequences at once"
        return ""

"""A server as the source of a calibration: it is measured from outside, by its answers' times."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from costmodel.catalog import TargetEntry, find_device, resolve_target
from costmodel.errors import InputError, shown
from costmodel.profile.schema import RuntimeSection
from costmodel.weights import layer_bytes
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.profiling.measured_profile import MeasuredSubject, peaks_of
from integrations.openai_server.client import Address, ServedModel, ServerClient
from integrations.openai_server.requests import (
    ArrivalGuard,
    ServedWorkload,
    ServerTasks,
    draw_contexts,
    forward_times,
)
from profiler.calibrate.decoder import CPU_CONTEXTS
from profiler.calibrate.imported import listed_device
from profiler.calibrate.source import Additions, CalibrationSettings, PreparedSource
from profiler.calibrate.sweep import SweepResult
from profiler.measure.instruments import Instruments, ReportTimer
from profiler.measure.samples import NoiseRule

BATCHES = (1, 2, 4, 8)
GPU_CONTEXTS = (128, 512, 2048, 8192)
MAX_NODES = 15
LIMIT_S = 90.0
MIN_SAMPLES = 6  # fewer than in this process: a sample of a plain step is of several steps
LOCAL_DEVICES = ("auto", "cpu", "cuda")
API_KEY = "ROOFTREE_API_KEY"  # environment variable


class UrlSource:
    """An OpenAI-compatible server with a prefix cache and without other work.

    Of the settings, `device` is where the server runs: a device of this machine, or the name of a
    known one. The drafter, weights, runtime and quantization are the server's own.
    """

    def __init__(
        self, settings: CalibrationSettings, url: str, *, tensor_parallel: int = 1
    ) -> None:
        """
        url              http://HOST:PORT
        tensor_parallel  devices that share the target there

        Raises InputError or DeviceError.
        """
        self._settings, self._degree = settings, tensor_parallel
        self._address = Address.parse(url)
        self._device, name = None, settings.device or "auto"  # None: a known one elsewhere
        if name.partition(":")[0] not in LOCAL_DEVICES:
            find_device(name)
        elif self._address.local:
            self._device = select_device(settings.device)
        else:
            raise InputError(
                f"{self._address} is not this machine, and its device cannot be seen from here",
                hint="Name it, as --device h100-sxm; `rooftree devices` lists all.",
            )
        on_gpu = self._device is not None and self._device.type == "cuda"
        self.cuda_index = self._device.index or 0 if self._device and on_gpu else None
        self.lock = str(self._address)
        if self._device is not None:
            self.lock = f"{fingerprint(self._device).name} {self._device}"

    def prepare(self, say: Callable[[str], None]) -> PreparedSource:
        """Ask the server what it serves and caches, measure the peaks, and plan the points."""
        settings, address = self._settings, self._address
        server = ServerClient(address, api_key=os.environ.get(API_KEY, "").strip() or None)
        models, version = server.models()
        model = _choose(models, settings.target, address)
        server.model = model.name
        target = _target(settings.target, model, address)
        architecture = target.architecture
        dtype = torch.bfloat16  # what servers take; this CPU's own says nothing of a GPU
        if self._device is not None or settings.dtype is not None:
            dtype = parse_dtype(settings.dtype, self._device or torch.device("cpu"))
        quantization = None if target.weights == "bfloat16" else target.weights
        if self._device is not None:
            device, peaks = fingerprint(self._device), peaks_of(self._device, dtype)
        else:
            device, peaks = listed_device(find_device(str(settings.device)))
        self._subject = MeasuredSubject(
            device=device,
            architecture=architecture,
            runtime=RuntimeSection(
                kind="url",
                dtype=dtype_name(dtype),
                attention=version,
                tensor_parallel=self._degree,
                quantization=quantization,
                weight_bytes=layer_bytes(architecture, quantization) if quantization else None,
            ),
        )
        self._roofline, self._say = self._subject.roofline(peaks), say
        stored = quantization or dtype_name(dtype)
        say(f"{architecture.name} ({stored}) at {address} ({version}) on {device.name}")
        if self._device is not None:
            say(f"{address} is taken for a server of this machine; if not, name its --device")
        workload = ServedWorkload(
            server, vocab=architecture.vocab, seed=settings.seed, most_tokens=model.most_tokens
        )
        plan, remarks = self._plan(workload, on_cpu=device.kind == "cpu")
        for remark in remarks:
            say(remark)
        return PreparedSource(
            subject=self._subject,
            peaks=peaks,
            grid=plan.grid(),
            fixed=plan.plain() + plan.held_out(),
            workload=workload,
            instruments=Instruments(
                timer=ReportTimer(),
                guard=ArrivalGuard(workload),
                rule=NoiseRule(min_samples=MIN_SAMPLES),
            ),
            journal={
                "contexts": list(plan.contexts),
                "batches": list(plan.batches),
                "most_rows": plan.most_rows,
                "seed": plan.seed,
            },
            limit_s=LIMIT_S,
            loaded_s=time.perf_counter(),
            forwards=lambda swept: forward_times(swept, self._roofline).swept,
            warnings=remarks,
        )

    def additions(self, swept: SweepResult) -> Additions:
        """What was taken out and added, and the error bar that follows from it."""
        times = forward_times(swept, self._roofline)
        floor = times.floor
        notes = (
            f"taken out of each request: {floor.base_s * 1e3:.2f} ms and {floor.token_s * 1e9:.0f} "
            f"ns a token of context, known to {floor.error_s * 1e3:.2f} ms",
            "added from the roofline: the LM head of all rows, where the server computes one, up "
            f"to {times.lm_head_share:.1%} of a time",
            "several rows were timed for one sequence, several sequences in plain steps: anything "
            "beyond is extrapolated",
            "rows are a prompt's: an engine may run those of a draft by other kernels or graphs",
            "error bar: that of held-out points, of the floor and all of the LM head's share",
        )
        for note in notes:
            self._say(note)
        subject = replace(self._subject, note="; ".join(notes))
        origin = f"HTTP, {self._address}, {subject.runtime.attention}"
        return Additions(subject=subject, provenance={"source": origin}, error_bar=times.error_bar)

    def _plan(
        self, workload: ServedWorkload, *, on_cpu: bool
    ) -> tuple[ServerTasks, tuple[str, ...]]:
        """The points that the server can take, and remarks on what it cannot. Raises InputError."""
        settings = self._settings
        wanted = settings.contexts or (CPU_CONTEXTS if on_cpu else GPU_CONTEXTS)
        most_rows = (settings.max_nodes or MAX_NODES) + 1
        room = workload.most_context(most_rows)
        fitting = tuple(context for context in wanted if room is None or context <= room)
        if not fitting:
            raise InputError(
                f"the server takes {room} cached tokens before {most_rows} new ones",
                hint="Choose smaller --contexts.",
            )
        contexts, told = workload.aligned(fitting)
        if len(set(contexts)) < 2:
            raise InputError(
                "a calibration needs two contexts or more, in whole blocks of the prefix cache",
                hint="As 256,1024.",
            )
        if not told:
            workload.check_cache(sorted(contexts)[len(contexts) // 2])
        held_out, _ = workload.aligned(draw_contexts(contexts, settings.seed))
        batches = settings.batches or BATCHES
        together = workload.find_most_together(batches)
        remarks = []
        if contexts != tuple(sorted(wanted)):
            blocks = "as the server tells" if told else "of 128 tokens"
            listed = ", ".join(map(str, contexts))
            remarks.append(f"contexts in whole blocks of its cache ({blocks}): {listed}")
        if together < max(batches):
            remarks.append(f"it runs {together} requests at once: larger batches are left out")
        plan = ServerTasks(
            contexts=contexts,
            batches=tuple(batch for batch in batches if batch <= together),
            most_rows=most_rows,
            held_out_contexts=held_out,
            seed=settings.seed,
        )
        return plan, tuple(remarks)


def _choose(models: list[ServedModel], name: str | None, address: Address) -> ServedModel:
    """The model of this name or root, or the only one, whatever names it has beside.

    Raises InputError that lists those served.
    """
    for model in models:
        if name in (model.name, model.root):
            return model
    if len(models) == 1 or len({model.root or model.name for model in models}) == 1:
        return models[0]
    listed = ", ".join(shown(model.name) for model in models[:8]) or "none"
    wanted = f"no model {shown(name)}" if name else f"{len(models)} models"
    raise InputError(f"{address} serves {wanted}", hint=f"Give --target, one of: {listed}")


def _target(target: str | None, model: ServedModel, address: Address) -> TargetEntry:
    """The sizes and weights, from --target, or from the server's name for it, or its root.

    A name that came from a server is never looked up on the hub, and as a folder only where the
    server is this machine.
    """
    if target is not None:
        return resolve_target(target, hub=True)
    for name in (model.name, model.root):
        if address.local or not os.path.exists(name):
            with contextlib.suppress(InputError):
                return resolve_target(name)
    raise InputError(
        f"{address} calls its model {shown(model.name)}, which is no known target",
        hint="Give its folder or hub id with --target.",
    )

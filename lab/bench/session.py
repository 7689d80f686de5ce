"""One benchmark run: from its options to its result and the file it is stored in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from costmodel.errors import InputError
from costmodel.io import check_output
from decoder.acceptance.sampling import Sampling
from decoder.arguments import chat_options
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.model.loading import default_target, load_model
from decoder.model.making import Quantization, quantised
from lab.bench.analysis.summary import derived
from lab.bench.analysis.warnings import result_warnings
from lab.bench.arms.builder import ArmBuilder, DecodingOptions
from lab.bench.arms.choice import ArmNames, drafter_labels, plan_arms
from lab.bench.engines.arm import check_engines, engine_info, engine_runners
from lab.bench.engines.requested import RequestedEngine
from lab.bench.environment import bandwidth_limit, describe_profile, machine, stored_profile
from lab.bench.prompts import PromptText, encode_texts, read_files
from lab.bench.protocols import ProtocolRun
from lab.bench.record import BenchSettings, PromptFile, Result, write_result
from lab.bench.schedule import Listener, Schedule, run_schedule
from profiler.calibrate.files import device_label
from profiler.demo import PROMPTS
from profiler.measure.lock import device_lock

Say = Callable[[str], None]
# Options that the settings of a result have too.
SAME = ("new_tokens", "temperature", "repeats", "seed", "same_text", "by_round", "ignore_eos")
BUILT_IN = "built-in"  # name of the prompt set that is used without a file


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(DecodingOptions):
    """The options of a run. None takes the default of the device, target or tokenizer.

    engines   other engines as peers
    template  options of the chat template, which is used where the tokenizer has one; None: nowhere
    output    path of the result
    protocol  of a paper, whose prompts take the place of `files`
    """

    target: str | None = None
    arms: ArmNames = field(default_factory=ArmNames)
    engines: Sequence[RequestedEngine] = ()
    files: Sequence[Path] = ()
    template: Mapping[str, Any] | None = field(default_factory=dict)
    new_tokens: int = 128
    repeats: int = 1
    device: str | None = None
    dtype: str | None = None
    quantization: Quantization | None = None
    output: Path | None = None
    protocol: ProtocolRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Callbacks for messages and progress; both do nothing by default."""

    say: Say = lambda text: None
    progress: Listener = lambda done, of: None


def bench(options: BenchOptions, listeners: Listeners = Listeners()) -> Result:
    """Run the benchmark, and write the result to `options.output` if that is set."""
    device = select_device(options.device)
    dtype = parse_dtype(options.dtype, device)
    Sampling(temperature=options.temperature)
    if options.same_text and options.temperature:
        raise InputError(
            "the text of plain decoding is the same for all arms at temperature 0 only",
            hint="Leave out --same-text or --temperature.",
        )
    texts, files = _texts(options)
    if options.protocol is not None and options.protocol.lacks:
        listeners.say(f"{options.protocol.protocol.name}: {options.protocol.lacks}")
    labels = drafter_labels(options.arms.drafters)
    plan_arms(options.arms, causal_drafters=labels.values())
    if options.output is not None:
        check_output(options.output)
    name = default_target(device) if options.target is None else options.target
    engines = check_engines(
        options.engines,
        name,
        greedy=not options.temperature,
        pretrained=options.quantization is None,
        device=device.type,
    )
    with device_lock(f"{fingerprint(device).name} {device_label(device)}", listeners.say):
        environment, machine_warnings = machine(device)
        loaded = load_model(name, weights="pretrained", dtype=dtype, device=device, download=True)
        loaded = quantised(loaded, options.quantization)
        builder = ArmBuilder(loaded, labels, options)
        if options.protocol is not None and options.template:  # papers give some that are not there
            text = str(getattr(builder.encoder.tokenizer, "chat_template", None))
            known = {name: value for name, value in options.template.items() if name in text}
            options = replace(options, template=known)
        chat = chat_options(builder.encoder.tokenizer, options.template)
        sampling = {"temperature": options.temperature, "seed": options.seed}
        prompts = encode_texts(texts, builder.encoder, options.new_tokens, chat, sampling)
        arms = plan_arms(options.arms, causal_drafters=builder.causal_drafters)
        for warning in machine_warnings:
            listeners.say(f"warning: {warning}")
        with engine_runners(engines, builder.target, builder.ends, listeners.say) as others:
            runners = [*builder.runners(arms), *others]
            located = builder.profile or stored_profile(builder.target)
            schedule = Schedule(
                prompts=prompts,
                new_tokens=options.new_tokens,
                repeats=options.repeats,
                ends=builder.ends,
                seed=options.seed,
                by_round=options.by_round,
                limit_s=bandwidth_limit(None if located is None else located[0]),
            )
            responses, failed_arms = run_schedule(runners, schedule, listeners.progress)
    settings = _settings(options, builder, files, chat=chat["chat"])
    failed = {one.name for one in failed_arms}
    result = Result(
        environment=environment,
        settings=settings,
        target=builder.described,
        drafters=builder.drafters(),
        profile=None if located is None else describe_profile(*located),
        arms=tuple(runner.arm for runner in runners if runner.arm.name not in failed),
        prompts=tuple(encoded.prompt for encoded in prompts),
        responses=responses,
        engines=tuple(engine_info(one, settings.dtype) for one in engines),
        failed=failed_arms,
        protocol=None if options.protocol is None else options.protocol.use(labels),
    )
    warnings = (*machine_warnings, *builder.warnings, *result_warnings(result))
    result = replace(result, warnings=warnings)
    if options.output is not None:
        write_result(result, options.output, **derived(result))
    return result


def _texts(options: BenchOptions) -> tuple[list[PromptText], tuple[PromptFile, ...]]:
    """The prompts of the files, or the demo's where no file is set."""
    if options.protocol is not None:
        return options.protocol.prompts()
    if options.files:
        return read_files(options.files)
    texts = [
        PromptText(id=name, set=BUILT_IN, category=name, prompt=prompt)
        for name, prompt in PROMPTS.items()
    ]
    digest = hashlib.sha256("".join(PROMPTS.values()).encode()).hexdigest()
    return texts, (PromptFile(name=BUILT_IN, sha256=digest, prompts=len(PROMPTS)),)


def _settings(
    options: BenchOptions, builder: ArmBuilder, files: tuple[PromptFile, ...], *, chat: bool
) -> BenchSettings:
    target = builder.target
    return BenchSettings(
        chat=chat,
        files=files,
        dtype=dtype_name(target.dtype),
        runtime=target.runtime.kind,
        device=target.device.type,
        quantization=target.loaded.quantization,
        template=dict(options.template or {}),
        **{name: getattr(options, name) for name in SAME},
    )

"""From the options of a benchmark to its result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from costmodel.errors import InputError
from decoder.acceptance.sampling import Sampling
from decoder.device import dtype_name, fingerprint, parse_dtype, select_device
from decoder.loading import Weights, default_target, load_model
from decoder.runtime.select import runtime_kind
from profiler.bench.arms import ArmChoice, plan_arms
from profiler.bench.contender import Contender
from profiler.bench.drafters import drafter_labels
from profiler.bench.environment import (
    bandwidth_limit,
    describe_profile,
    identity,
    machine,
    stored_profile,
)
from profiler.bench.lineup import DecoderChoice, Lineup
from profiler.bench.prompts import Encoded, Text, encode_texts, hash_tokens, read_files
from profiler.bench.record import (
    Environment,
    ProfileInfo,
    PromptFile,
    Response,
    Result,
    Settings,
)
from profiler.bench.run import (
    Listener,
    Schedule,
    Tools,
    open_journal,
    recorded_environment,
    run_schedule,
)
from profiler.bench.stopwatch import memory_gauge
from profiler.bench.store import write_result
from profiler.bench.summary import derived
from profiler.bench.warnings import result_warnings
from profiler.calibrate import device_label
from profiler.demo import PROMPTS
from profiler.journal import Journal
from profiler.lock import device_lock

Say = Callable[[str], None]
BUILT_IN = "built-in"  # the set of prompts where no file is given


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run. None takes what suits the device, target or tokenizer.

    chat    wrap prompts in the chat template; None: where the tokenizer has one
    output  where the result will lie; the journal of an unfinished run lies beside it
    fresh   drop what an unfinished run has measured
    """

    target: str | None = None
    arms: ArmChoice = field(default_factory=ArmChoice)
    decoder: DecoderChoice = field(default_factory=DecoderChoice)
    files: Sequence[Path] = ()
    per_file: int | None = None
    seed: int = 0
    chat: bool | None = None
    new_tokens: int = 128
    repeats: int = 1
    device: str | None = None
    dtype: str | None = None
    weights: Weights = "pretrained"
    output: Path | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Told about the run; both do nothing by default."""

    say: Say = lambda text: None
    progress: Listener = lambda progress: None


def bench(options: BenchOptions, listeners: Listeners = Listeners()) -> Result:
    """Run the benchmark; the result, which is also written where `output` says.

    An interrupted run goes on when it is called with the same options. Raises InputError,
    DeviceError, ProfileError or MeasurementError.
    """
    device = select_device(options.device)
    dtype = parse_dtype(options.dtype, device)
    runtime_kind(options.decoder.runtime, device)  # errors before a model is loaded
    Sampling(temperature=options.decoder.temperature)
    if options.decoder.same_text and options.decoder.temperature:
        raise InputError(
            "the text of plain decoding is the same for all arms at temperature 0 only",
            hint="Leave out --same-text or --temperature.",
        )
    texts, files = _texts(options)
    labels = drafter_labels(options.arms.drafters)
    plan_arms(options.arms, causal_drafters=labels.values())
    _check_output(options.output)
    with device_lock(f"{fingerprint(device).name} {device_label(device)}"):
        environment, spoiling = machine(device)
        name = default_target(device) if options.target is None else options.target
        loaded = load_model(
            name, weights=options.weights, dtype=dtype, device=device, download=True
        )
        lineup = Lineup(loaded, labels, options.decoder, options.seed)
        chat = _chat(options.chat, lineup)
        prompts = encode_texts(texts, lineup.encoder, chat=chat, new_tokens=options.new_tokens)
        arms = plan_arms(options.arms, causal_drafters=lineup.causal_drafters)
        contenders = lineup.contenders(arms)
        run = Run(
            options=options,
            lineup=lineup,
            contenders=contenders,
            prompts=prompts,
            settings=_settings(options, lineup, files, chat),
            warnings=(*spoiling, *lineup.warnings),
        )
        return run.finish(environment, listeners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything loaded and ready; `finish` decodes and writes."""

    options: BenchOptions
    lineup: Lineup
    contenders: Sequence[Contender]
    prompts: Sequence[Encoded]
    settings: Settings
    warnings: tuple[str, ...]

    def finish(self, environment: Environment, listeners: Listeners) -> Result:
        """Make the responses that are not in the journal yet; the result of all."""
        known = self.lineup.profile
        if known is None:
            known = stored_profile(self.lineup.target, self.options.decoder.profile.path)
        profile = None if known is None else describe_profile(*known)
        schedule = Schedule(
            prompts=self.prompts,
            new_tokens=self.settings.new_tokens,
            repeats=self.settings.repeats,
            ends=self.lineup.ends,
            seed=self.settings.seed,
            by_round=self.settings.by_round,
        )
        tools = Tools(
            memory=memory_gauge(self.lineup.target.device),
            limit_s=bandwidth_limit(None if known is None else known[0]),
        )
        with self._journal(environment, profile) as journal:
            if journal is not None:
                environment = recorded_environment(journal, environment)
                if journal.resumed:
                    listeners.say(f"going on with the unfinished run in {journal.path}")
            responses = run_schedule(self.contenders, schedule, journal, tools, listeners.progress)
            result = self._result(environment, profile, responses)
            if journal is not None and self.options.output is not None:
                write_result(result, self.options.output, **derived(result))
                journal.delete()
        return result

    def _result(
        self,
        environment: Environment,
        profile: ProfileInfo | None,
        responses: tuple[Response, ...],
    ) -> Result:
        result = Result(
            environment=environment,
            settings=self.settings,
            target=self.lineup.described,
            drafters=self.lineup.drafters(),
            profile=profile,
            arms=tuple(contender.arm for contender in self.contenders),
            prompts=tuple(encoded.prompt for encoded in self.prompts),
            responses=responses,
        )
        return replace(result, warnings=(*self.warnings, *result_warnings(result)))

    def _journal(
        self, environment: Environment, profile: ProfileInfo | None
    ) -> AbstractContextManager[Journal | None]:
        output = self.options.output
        if output is None:
            return nullcontext()
        header = {
            **identity(environment),
            "target": f"{self.lineup.described.name} {self.lineup.described.hash}",
            "drafters": ", ".join(f"{d.name} {d.hash}" for d in self.lineup.drafters()),
            "profile": None if profile is None else profile.sha256,
            "arms": ", ".join(contender.arm.name for contender in self.contenders),
            "prompts": hash_tokens([token for one in self.prompts for token in one.ids]),
            **{f"setting {key}": value for key, value in asdict(self.settings).items()},
        }
        return open_journal(output, header, fresh=self.options.fresh)


def _texts(options: BenchOptions) -> tuple[list[Text], tuple[PromptFile, ...]]:
    """The prompts of the files, or the few of the demo where none is given."""
    if options.files:
        return read_files(options.files, options.per_file, options.seed)
    texts = [
        Text(id=name, set=BUILT_IN, category=name, prompt=prompt)
        for name, prompt in PROMPTS.items()
    ][: options.per_file]
    digest = hashlib.sha256("".join(PROMPTS.values()).encode()).hexdigest()
    return texts, (PromptFile(name=BUILT_IN, sha256=digest, prompts=len(PROMPTS)),)


def _chat(asked: bool | None, lineup: Lineup) -> bool:
    """Whether to use the chat template: as asked, else where there is one."""
    if asked is not None:
        return asked
    return bool(getattr(lineup.encoder.tokenizer, "chat_template", None))


def _settings(
    options: BenchOptions, lineup: Lineup, files: tuple[PromptFile, ...], chat: bool
) -> Settings:
    target, decoder = lineup.target, options.decoder
    return Settings(
        new_tokens=options.new_tokens,
        temperature=decoder.temperature,
        repeats=options.repeats,
        chat=chat,
        seed=options.seed,
        per_file=options.per_file,
        files=files,
        dtype=dtype_name(target.dtype),
        runtime=target.runtime.kind,
        device=target.device.type,
        max_nodes=decoder.max_nodes,
        acceptance=decoder.acceptance,
        stage_times=decoder.stage_times,
        same_text=decoder.same_text,
        by_round=decoder.by_round,
    )


def _check_output(output: Path | None) -> None:
    """Raise InputError before anything is decoded where the result could not be written."""
    if output is None:
        return
    if output.is_dir():
        raise InputError(f"{output} is a folder", hint="Give --json a file name.")
    if not os.access(output.absolute().parent, os.W_OK):
        raise InputError(
            f"cannot write to {output.absolute().parent}",
            hint="Choose another place for --json, in a folder that exists.",
        )

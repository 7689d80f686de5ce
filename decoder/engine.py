"""The public decoder: a target, a drafter, a policy, and the profile that prices its rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch

from costmodel.errors import InputError, shown
from costmodel.online import OnlineEstimator
from decoder import arguments
from decoder.acceptance.rules import RuleName, parse_rule
from decoder.arguments import ChatOptions, Turn
from decoder.decode_loop import LoopParts
from decoder.device import parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.isolation import IsolatedDrafter
from decoder.generation import DecodeRun, run_together
from decoder.model.loading import LoadedModel, Weights, borrow_model, default_target, load_model
from decoder.model.making import Quantization, make_target, quantised, runtime_kind
from decoder.model.runtime.eager import RuntimeChoice
from decoder.model.target import Target
from decoder.policies.base import DEFAULT_MAX_NODES, GRAPHS_MAX_NODES, Fit, Policy
from decoder.policies.bastion import parse_policy
from decoder.profiling.startup import CostSource, ProfileChoice, find_cost
from decoder.statistics import Round, RoundTrace, Statistics, forward_timer
from decoder.text import StopStrings, TextRequest, TextStream, checkpoint_settings, end_tokens


class SamplingOptions(TypedDict, total=False):
    """How the target picks tokens; defaults and meaning as in `Sampling`."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class TextOptions(SamplingOptions, ChatOptions, total=False):
    """Options of one text; see `TreeDecoder.generate`."""

    max_new_tokens: int
    stop: Sequence[str]
    ignore_eos: bool


Prompt = str | Sequence[int] | Sequence[Turn]


class DecoderOptions(TypedDict, total=False):
    """Options of a `TreeDecoder`; defaults and meaning as in its constructor."""

    drafter: Drafter | str
    policy: Policy | str
    max_nodes: int | None
    acceptance: str | None
    profile: ProfileChoice | None
    trace: Path | None
    stage_times: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished text.

    token_ids  the new tokens, the end token included if one was reached
    text       without special tokens, cut before a stop string; None without a tokenizer
    """

    token_ids: list[int]
    text: str | None
    stats: Statistics


class TreeDecoder:
    """Decodes with a target, a drafter and a budget policy; the output is that of plain decoding.

    Threads may share a decoder: `generate` and `generate_batch` wait for each other. A stream does
    not, since its loop may be left: a text that another thread begins ends it with an InputError.

    on_round  called with every sequence's part of every round, if it is set
    """

    def __init__(  # noqa: PLR0913 - keyword-only options, each with a default
        self,
        target: Target,
        *,
        drafter: Drafter | str = "ngram",
        policy: Policy | str = "bastion",
        max_nodes: int | None = None,
        acceptance: str | None = None,
        profile: ProfileChoice | None = None,
        trace: Path | None = None,
        stage_times: bool = False,
    ) -> None:
        """
        drafter      an object, or a value of `--drafter` (decoder/drafters/factory.py)
        policy       an object, or a value of `--policy` (decoder/policies/bastion.py)
        acceptance   walk, recursive, traversal or auto (decoder/acceptance/rules.py); None: the
                     policy's
        max_nodes    bounds the adaptive trees and chains
        trace        a JSONL file to which every round is written (decoder/statistics.py)
        stage_times  end every stage with a synchronisation, as a trace does, so that its time is
                     its own on an accelerator too
        Raises InputError or ProfileError.
        """
        self.target = target
        self.drafter = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
        if not isinstance(self.drafter, Drafter):
            raise InputError(f"drafter must be a name or a Drafter, got {shown(drafter)}")
        self._isolated = IsolatedDrafter(self.drafter, target.architecture.vocab)
        self._acceptance = None if acceptance is None else self._rule(acceptance)
        self.cost_source: CostSource | None = None
        self.trace = None if trace is None else RoundTrace(arguments.path_of("trace", trace))
        self.stage_times = stage_times or trace is not None
        self.on_round: Callable[[Round], None] | None = None
        self.timer = forward_timer(target.device)
        self._text_numbers = count()
        if profile is not None and not isinstance(profile, ProfileChoice):
            raise InputError(
                f"profile must be a ProfileChoice, got {shown(profile)}",
                hint="A file is ProfileChoice(path=...), from decoder.profiling.startup.",
            )
        self._profile_choice = profile or ProfileChoice()
        target.capture(self.drafter.feature_layers)
        usual = GRAPHS_MAX_NODES if target.runtime.kind == "graphs" else DEFAULT_MAX_NODES
        most = min(usual, target.max_context - 1)
        if max_nodes is not None:
            most = arguments.whole("max_nodes", max_nodes)
        self._check_size(most)  # before a probe that it would waste
        self.policy: Policy = (
            parse_policy(policy, self._find_cost, most) if isinstance(policy, str) else policy
        )
        if not isinstance(self.policy, Policy):
            raise InputError(f"policy must be a name or a Policy, got {shown(policy)}")
        self._check_size(self.policy.max_nodes)
        self._tokenizer: Any = None

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | Any | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        weights: Weights = "pretrained",
        runtime: RuntimeChoice = "auto",
        quantization: Quantization | None = None,
        **options: Unpack[DecoderOptions],
    ) -> TreeDecoder:
        """A decoder for a folder, a hub id, a known target, or a transformers model.

        runtime  `packed` (weights reordered once, CPU only), `graphs` (captured forwards, CUDA
                 only), `eager`, or `auto`: packed or graphs for a model that is not borrowed
        quantization  `int8` rounds the weights to int8, one scale an output (packed runtime)
        options  of the constructor
        Raises InputError or ProfileError.
        """
        arguments.refuse_unknown(options, DecoderOptions.__annotations__)
        if target is not None and not isinstance(target, (str, Path)):
            borrowed = borrow_model(target)
            return cls(make_target(borrowed, owned=False, runtime=runtime), **options)
        placed = select_device(device)
        runtime_kind(runtime, placed)  # an error before the target is loaded
        name = default_target(placed) if target is None else str(target)
        loaded: LoadedModel = load_model(
            name, weights=weights, dtype=parse_dtype(dtype, placed), device=placed, download=True
        )
        return cls(make_target(quantised(loaded, quantization), runtime=runtime), **options)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises InputError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = self.target.loaded.tokenizer()
        return self._tokenizer

    @property
    def profile_line(self) -> str:
        """One line: which cost model chooses the tree sizes."""
        if self.cost_source is None:
            return f"policy {self.policy.name} needs no profile"
        return self.cost_source.line

    def generate(self, prompt: Prompt, **options: Unpack[TextOptions]) -> Generation:
        """Decode up to `max_new_tokens` (128) tokens after the prompt.

        prompt   text, token ids, or turns of a chat as {"role": "user", "content": "..."}
        options  `stop`: strings that end the text (they are not part of it); `chat`, `system` and
                 `template` of `ChatOptions`; `temperature`, `top_p`, `top_k` and `seed` of
                 `Sampling`; `ignore_eos`: whether end tokens end no text
        What else the checkpoint's generation config asks for, as a repetition penalty, is
        respected exactly, or is an InputError.
        Raises InputError for an empty prompt or one that does not fit the model.
        """
        with self.target.lock:
            run = self.stream(prompt, **options)
            text = "".join(run)
        return Generation(run.token_ids, text if run.has_text else None, run.stats)

    def stream(self, prompt: Prompt, **options: Unpack[TextOptions]) -> DecodeRun:
        """The same as `generate`, as an iterator of text pieces with `token_ids` and `stats`."""
        with self.target.lock:  # tokenizers are not made for several threads either
            return DecodeRun(self.parts, self._request(prompt, options))

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Unpack[TextOptions]
    ) -> list[Generation]:
        """Decode several prompts in common forwards, with one budget; options as in `generate`.

        Text i draws with seed + i. At T = 0 each result is the one that its prompt gives alone.
        Raises InputError naming the prompt that is wrong.
        """
        prompts = arguments.listed("prompts", prompts, "one or more prompts")
        if not prompts:
            raise InputError("there is no prompt: prompts must be a list of one or more")
        with self.target.lock:
            requests = []
            for index, prompt in enumerate(prompts):
                try:
                    requests.append(self._request(prompt, options, index))
                except InputError as error:
                    raise InputError(
                        f"prompt {index + 1} of {len(prompts)}: {error.problem}", hint=error.hint
                    ) from error
            finished = run_together(self.parts, requests)
        return [
            Generation(sequence.token_ids, text if request.stream else None, sequence.stats)
            for request, (sequence, text) in zip(requests, finished, strict=True)
        ]

    def encode(self, prompt: str | Sequence[Turn], **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a text, or of turns of a chat; options as in `ChatOptions`."""
        if not isinstance(prompt, str) or arguments.is_chat(prompt, options):
            return arguments.chat_ids(self.tokenizer, prompt, options)
        tokenizer = self.tokenizer
        try:
            return list(tokenizer(prompt)["input_ids"])
        except Exception as error:  # a damaged tokenizer.json may load and then fail anyhow
            raise InputError(
                f"the tokenizer of {self.target.loaded.name} fails: {error}",
                hint="Fetch or copy its files again, or give token ids.",
            ) from error

    @property
    def parts(self) -> LoopParts:
        """The parts of this decoder as they stand, for texts that begin now."""
        cost = None if self.cost_source is None else self.cost_source.cost
        observers = [] if self.on_round is None else [self.on_round]
        if self.trace is not None:
            observers.append(partial(self.trace.write, cost=cost))
        return LoopParts(
            target=self.target,
            drafter=self._isolated,
            policy=self.policy,
            cost=cost,
            timer=self.timer,
            acceptance=self._acceptance or self._rule(self.policy.acceptance),
            profile_line=self.profile_line,
            text_numbers=self._text_numbers,
            synchronise=self.stage_times,
            observers=tuple(observers),
        )

    def check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise InputError unless the target can write so many tokens after this prompt."""
        if not ids:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        arguments.whole("max_new_tokens", max_new_tokens)
        vocab = self.target.architecture.vocab
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"token id {outside} lies outside the vocabulary of {vocab}")
        longest = self.target.max_context
        if len(ids) + max_new_tokens > longest:
            raise InputError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the "
                f"{longest} positions of {self.target.loaded.name}",
                hint=f"Shorten the prompt, or ask for at most {max(longest - len(ids), 0)} tokens.",
            )
        self.target.check_length(len(ids), max_new_tokens)

    def _request(self, prompt: Prompt, options: TextOptions, seed_offset: int = 0) -> TextRequest:
        arguments.refuse_unknown(options, TextOptions.__annotations__)
        given: dict[str, Any] = dict(options)
        drawing = SamplingOptions.__annotations__.keys() & given.keys()
        sampling = arguments.sampling_from({name: given[name] for name in drawing})
        chat: Any = {name: given[name] for name in ChatOptions.__annotations__ if name in given}
        max_new_tokens = arguments.whole("max_new_tokens", options.get("max_new_tokens", 128))
        stop = arguments.stop_strings(options.get("stop", ()))
        is_text = isinstance(prompt, str) or arguments.is_chat(prompt, {})
        if isinstance(prompt, str):
            ids = self.encode(arguments.text_of(prompt), **chat)
        elif is_text:
            ids = self.encode(cast(Sequence[Turn], prompt), **chat)
        elif arguments.is_chat((), chat):
            raise InputError(
                "token ids are not put into a chat template", hint="Give a text, or turns."
            )
        else:
            ids = arguments.token_ids(prompt)
        self.check(ids, max_new_tokens)
        process, stops = checkpoint_settings(self.target.model, ids, max_new_tokens, sampling)
        stream = None
        try:
            stream = TextStream(self.tokenizer)
        except InputError:
            if is_text or stop or stops:
                raise
        return TextRequest(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            sampling=replace(sampling, seed=sampling.seed + seed_offset),
            stream=stream,
            stops=StopStrings([*stop, *stops]),
            ends=frozenset() if options.get("ignore_eos") else end_tokens(self.target.model),
            process=process,
        )

    def _rule(self, name: str) -> RuleName:
        return parse_rule(name, self.drafter.name, draws=self.drafter.draws != "never")

    def _check_size(self, nodes: int) -> None:
        if nodes >= self.target.max_context:
            raise InputError(
                f"a tree of {nodes} nodes does not fit the {self.target.max_context} positions "
                f"of {self.target.loaded.name}",
                hint="Use a smaller tree.",
            )

    def _find_cost(self, fit: Fit | None = None) -> OnlineEstimator:
        self.cost_source = find_cost(self.target, self.drafter, self._profile_choice, fit)
        return self.cost_source.cost

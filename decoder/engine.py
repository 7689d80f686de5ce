"""The decoder: a target, a drafter, a policy and the profile it starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from decoder.acceptance.choice import RuleName, parse_rule
from decoder.acceptance.sampling import Sampling
from decoder.device import parse_dtype
from decoder.drafters.base import Drafter
from decoder.drafters.factory import load_drafter
from decoder.loading import LoadedModel, Weights, borrow_model, default_target, load_model
from decoder.parallel import ALONE, Ranks, rank_device
from decoder.policies import DEFAULT_MAX_NODES, Policy, parse_policy
from decoder.policies.base import CostKind
from decoder.run import DecodeRun, run_together
from decoder.runtime.base import RuntimeChoice
from decoder.runtime.select import runtime_kind
from decoder.runtime.stopwatch import stopwatch_for
from decoder.sequence import TextRequest, end_tokens
from decoder.startup import CostSource, ProfileChoice, find_cost
from decoder.statistics import Statistics
from decoder.target import Target
from decoder.text import StopStrings, TextStream
from decoder.trace import RoundFacts, RoundTrace


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call produced.

    token_ids  the new tokens, the end token included where one was reached
    text       their text, without special tokens and from a stop string on; None
               where the target has no tokenizer
    """

    token_ids: list[int]
    text: str | None
    stats: Statistics


class TreeDecoder:
    """Decodes with a target, a drafter and a budget policy; same output as plain decoding."""

    def __init__(  # noqa: PLR0913 - keyword-only options, each with a default
        self,
        target: Target,
        *,
        drafter: Drafter | str = "ngram",
        policy: str = "bastion",
        max_nodes: int | None = None,
        acceptance: str = "auto",
        profile: ProfileChoice | None = None,
        trace: Path | None = None,
        stage_times: bool = False,
    ) -> None:
        """
        drafter      an object, or what `--drafter` takes (decoder/drafters/factory.py)
        acceptance   walk, recursive, traversal or auto (decoder/acceptance/choice.py)
        max_nodes    bounds the adaptive trees and chains
        trace        a JSONL file to which every round is written (decoder/trace.py)
        stage_times  end every stage with a synchronisation, so that its time is its own
                     on an accelerator too; a trace does so in any case
        """
        self.target = target
        self.drafter = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
        self.acceptance: RuleName = parse_rule(acceptance, self.drafter)
        self.cost_source: CostSource | None = None
        self.trace = None if trace is None else RoundTrace(trace)
        self.stage_times = stage_times or trace is not None
        self.on_round: Callable[[RoundFacts], None] | None = None  # told of every round
        self.stopwatch = stopwatch_for(target.device)
        self._texts = count()
        self._profile_choice = profile or ProfileChoice()
        target.capture(self.drafter.feature_layers)
        most = min(DEFAULT_MAX_NODES, target.max_context - 1) if max_nodes is None else max_nodes
        self._check_size(most)  # before a probe that it would waste
        self.policy: Policy = parse_policy(policy, self._find_cost, most)
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
        ranks: Ranks = ALONE,
        **options: Any,
    ) -> TreeDecoder:
        """A decoder for a folder, a hub id, a known target, or a transformers model.

        runtime  `graphs` (captured forwards, CUDA only), `eager`, or `auto`: graphs where
                 they can be had for a model that is not borrowed
        ranks    the processes that share the target (decoder/parallel.py); each decodes the
                 same texts
        options  as the constructor takes them
        Raises InputError or ProfileError with what was wrong and what to do.
        """
        if target is not None and not isinstance(target, (str, Path)):
            borrowed = borrow_model(target)
            return cls(Target(borrowed, owned=False, runtime=runtime), **options)
        where = rank_device(device, ranks)
        runtime_kind(runtime, where)  # an error before the target is loaded
        number = dtype if isinstance(dtype, torch.dtype) else parse_dtype(dtype, where)
        name = default_target(where) if target is None else str(target)
        loaded: LoadedModel = load_model(
            name, weights=weights, dtype=number, device=where, download=True, ranks=ranks
        )
        return cls(Target(loaded, runtime=runtime), **options)

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self.target.loaded.tokenizer()
        return self._tokenizer

    @property
    def profile_line(self) -> str:
        """One line: which cost model chooses the tree sizes."""
        if self.cost_source is None:
            return f"policy {self.policy.name} needs no profile"
        return self.cost_source.line

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Generation:
        """Decode up to `max_new_tokens` tokens after the prompt.

        prompt    text, or token ids
        chat      wrap the text in the tokenizer's chat template
        stop      strings that end the text (they are not part of it)
        sampling  `temperature`, `top_p`, `top_k`, `seed`
        Raises InputError for an empty prompt or one that does not fit the model.
        """
        run = self.stream(prompt, max_new_tokens=max_new_tokens, chat=chat, stop=stop, **sampling)
        text = "".join(run)
        return Generation(run.token_ids, text if run.has_text else None, run.stats)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> DecodeRun:
        """The same as `generate`, as an iterator of text pieces with `token_ids` and `stats`."""
        wanted = Sampling(**sampling)
        return DecodeRun(self, self._request(prompt, max_new_tokens, chat, stop, wanted))

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int = 128,
        chat: bool = False,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[Generation]:
        """Decode several prompts of any lengths in common forwards, with one node budget.

        Options as in `generate`; text i draws with seed + i. At T = 0 each result is the
        one that its prompt gives alone. Raises InputError naming the prompt that is wrong.
        """
        if not prompts:
            raise InputError("there is no prompt", hint="Give at least one.")
        wanted = Sampling(**sampling)
        requests = []
        for index, prompt in enumerate(prompts):
            own = replace(wanted, seed=wanted.seed + index)
            try:
                requests.append(self._request(prompt, max_new_tokens, chat, stop, own))
            except InputError as error:
                raise InputError(
                    f"prompt {index + 1} of {len(prompts)}: {error.problem}", hint=error.hint
                ) from error
        return [
            Generation(sequence.token_ids, text if request.stream else None, sequence.stats)
            for request, (sequence, text) in zip(
                requests, run_together(self, requests), strict=True
            )
        ]

    def encode(self, prompt: str, chat: bool = False) -> list[int]:
        """Token ids of a text, wrapped in the chat template where asked for."""
        if not chat:
            return list(self.tokenizer(prompt)["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("the tokenizer has no chat template", hint="Leave --chat out.")
        messages = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def number_text(self) -> int:
        """The number of the next text, for the trace."""
        return next(self._texts)

    def check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        """Raise InputError unless the target can write so many tokens after this prompt."""
        if not ids:
            raise InputError("the prompt is empty", hint="Give at least one token.")
        if max_new_tokens < 1:
            raise InputError(f"max new tokens must be 1 or more, got {max_new_tokens}")
        vocab = self.target.architecture.vocab
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"token id {outside} lies outside the vocabulary of {vocab}")
        longest = self.target.max_context
        if len(ids) + max_new_tokens > longest:
            slides = self.target.architecture.sliding_window == longest
            limit = f"sliding window of {longest} tokens" if slides else f"{longest} positions"
            raise InputError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the "
                f"{limit} of {self.target.loaded.name}",
                hint=f"Shorten the prompt, or ask for at most {max(longest - len(ids), 0)} tokens.",
            )

    def _request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        chat: bool,
        stop: Sequence[str],
        sampling: Sampling,
    ) -> TextRequest:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("the prompt is empty", hint="Give some text.")
            ids = self.encode(prompt, chat)
        else:
            ids = [int(token) for token in prompt]
        self.check(ids, max_new_tokens)
        return TextRequest(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stream=self._text_stream(needed=isinstance(prompt, str) or bool(stop)),
            stops=StopStrings(stop),
            ends=end_tokens(self.target.model),
        )

    def _text_stream(self, needed: bool) -> TextStream | None:
        """None where the target has no tokenizer and only token ids are asked for."""
        try:
            return TextStream(self.tokenizer)
        except InputError:
            if needed:
                raise
            return None

    def _check_size(self, nodes: int) -> None:
        if nodes >= self.target.max_context:
            raise InputError(
                f"a tree of {nodes} nodes does not fit the {self.target.max_context} positions "
                f"of {self.target.loaded.name}",
                hint="Use a smaller tree.",
            )

    def _find_cost(self, kind: CostKind) -> Any:
        self.cost_source = find_cost(self.target, self.drafter, self._profile_choice, kind)
        return self.cost_source.cost

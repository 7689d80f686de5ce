"""The decoder: a target, a drafter, a policy and the profile it starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from costmodel.errors import InputError
from decoder.device import parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.loading import LoadedModel, Weights, borrow_model, default_target, load_model
from decoder.policies import DEFAULT_MAX_NODES, Policy, parse_policy
from decoder.run import DecodeRun
from decoder.sampling import Sampling
from decoder.startup import CostSource, ProfileChoice, find_cost
from decoder.statistics import Statistics
from decoder.target import Target
from decoder.text import StopStrings, TextStream


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

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        policy: str = "bastion",
        max_nodes: int | None = None,
        profile: ProfileChoice | None = None,
    ) -> None:
        self.target = target
        self.drafter = NgramDrafter() if drafter is None else drafter
        self.cost_source: CostSource | None = None
        self._profile_choice = profile or ProfileChoice()
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
        **options: Any,
    ) -> TreeDecoder:
        """A decoder for a folder, a hub id, a known target, or a transformers model.

        options  `drafter`, `policy`, `max_nodes` and `profile`, as the constructor takes them
        Raises InputError or ProfileError with what was wrong and what to do.
        """
        if target is not None and not isinstance(target, (str, Path)):
            return cls(Target(borrow_model(target), owned=False), **options)
        where = select_device(device)
        number = dtype if isinstance(dtype, torch.dtype) else parse_dtype(dtype, where)
        name = default_target(where) if target is None else str(target)
        loaded: LoadedModel = load_model(
            name, weights=weights, dtype=number, device=where, download=True
        )
        return cls(Target(loaded), **options)

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
        run = self._start(prompt, max_new_tokens, chat, stop, Sampling(**sampling))
        pieces = list(run)
        text = "".join(pieces) if run.has_text else None
        return Generation(run.token_ids, text, run.stats)

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
        return self._start(prompt, max_new_tokens, chat, stop, Sampling(**sampling))

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

    def _start(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        chat: bool,
        stop: Sequence[str],
        sampling: Sampling,
    ) -> DecodeRun:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("the prompt is empty", hint="Give some text.")
            ids = self.encode(prompt, chat)
        else:
            ids = [int(token) for token in prompt]
        self._check(ids, max_new_tokens)
        stream = self._text_stream(needed=isinstance(prompt, str) or bool(stop))
        return DecodeRun(self, ids, max_new_tokens, sampling, (stream, StopStrings(stop)))

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

    def _check(self, ids: list[int], max_new_tokens: int) -> None:
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
            raise InputError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the "
                f"{longest} positions of {self.target.loaded.name}",
                hint=f"Shorten the prompt, or ask for at most {max(longest - len(ids), 0)} tokens.",
            )

    def _find_cost(self) -> Any:
        self.cost_source = find_cost(self.target, self.drafter, self._profile_choice)
        return self.cost_source.cost

"""The decode loop: draft, build, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from decoder.acceptance import walk
from decoder.device import parse_dtype, select_device
from decoder.drafters.base import Drafter
from decoder.drafters.ngram import NgramDrafter
from decoder.loading import LoadedModel, Weights, borrow_model, default_target, load_model
from decoder.policies import Limits, Policy, parse_policy
from decoder.sampling import Picker, Sampling
from decoder.startup import CostSource, ProfileChoice, find_cost
from decoder.statistics import Statistics
from decoder.target import Target
from decoder.text import StopStrings, TextStream
from decoder.tree import EMPTY


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
        self.policy: Policy = parse_policy(policy, self._find_cost, max_nodes)
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
        stream = None
        if stop or isinstance(prompt, str) or self.target.loaded.source:
            stream = TextStream(self.tokenizer)
        return DecodeRun(self, ids, max_new_tokens, sampling, (stream, StopStrings(stop)))

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


class DecodeRun:
    """One generation in progress; iterate over it for text pieces."""

    def __init__(
        self,
        decoder: TreeDecoder,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        text: tuple[TextStream | None, StopStrings],
    ) -> None:
        self.token_ids: list[int] = []
        self.stats = Statistics(policy=decoder.policy.name, profile=decoder.profile_line)
        self._decoder = decoder
        self._prompt = prompt
        self._wanted = max_new_tokens
        self._pick = Picker(sampling, decoder.target.device)
        self._stream, self._stops = text
        self._ends = end_tokens(decoder.target.model)

    @property
    def has_text(self) -> bool:
        return self._stream is not None

    def __iter__(self) -> Iterator[str]:
        for token in self._tokens():
            self.token_ids.append(token)
            ended = self._ended(token)
            if self._stream is not None:
                piece = self._stops.add(self._stream.add(token))
                if self._stops.hit:
                    self.stats.finish = ended = "stop"
                if piece:
                    yield piece
            if ended:
                break
        self.stats.new_tokens = len(self.token_ids)
        if self._stream is not None and not self._stops.hit:
            rest = self._stops.add(self._stream.finish()) + self._stops.finish()
            if rest:
                yield rest

    def _ended(self, token: int) -> str:
        if token in self._ends:
            self.stats.finish = "eos"
        elif len(self.token_ids) >= self._wanted:
            self.stats.finish = "length"
        return self.stats.finish

    def _tokens(self) -> Iterator[int]:
        """Every emitted token in order; the caller stops when it has enough."""
        decoder, stats = self._decoder, self.stats
        target, drafter = decoder.target, decoder.drafter
        room = min(len(self._prompt) + self._wanted + decoder.policy.max_nodes + 1, self._room())
        target.reserve(room)
        context = np.empty(len(self._prompt) + self._wanted + 1, dtype=np.int64)
        context[: len(self._prompt)] = self._prompt
        length = len(self._prompt)
        started = perf_counter()
        logits = target.prefill(torch.tensor([self._prompt], device=target.device))
        bonus = self._pick(logits[0])
        stats.prompt_tokens = length
        stats.prefill_s = perf_counter() - started
        drafter.start(context[:length])
        while True:
            context[length] = bonus
            length += 1
            yield bonus
            started = perf_counter()
            emitted = self._round(context[:length])
            bonus = emitted.pop()
            stats.decode_s += perf_counter() - started
            for token in emitted:
                context[length] = token
                length += 1
                yield token

    def _room(self) -> int:
        return self._decoder.target.max_context + self._decoder.policy.max_nodes + 1

    def _round(self, context: NDArray[np.int64]) -> list[int]:
        """One cycle after `context`, whose last token is the bonus: accepted tokens and the next."""
        decoder, stats = self._decoder, self.stats
        target, policy = decoder.target, decoder.policy
        left = self._wanted - len(self.token_ids)
        cached = len(context) - 1
        tree = EMPTY
        start = perf_counter()
        drafted = built = start
        if left > 1 and policy.wants_draft(cached):
            depth = min(decoder.drafter.max_depth, left - 1)
            candidates = decoder.drafter.draft(context, depth)
            drafted = perf_counter()
            room = target.cache.capacity - cached - 1 if target.cache else 0
            tree = policy.choose(candidates, cached, Limits(nodes=room, depth=depth))
            built = perf_counter()
        logits = target.verify(int(context[-1]), tree)
        if decoder.cost_source is not None and decoder.cost_source.online:
            verified = _synchronised(target)
            decoder.cost_source.cost.observe(tree.rows, cached, verified - built)
        else:
            verified = perf_counter()
        outcome = walk(tree, logits[0], self._pick)
        accepted = perf_counter()
        target.commit(outcome.rows)
        emitted = [*outcome.tokens, outcome.bonus]
        policy.observe(tree, outcome.rows, cached)
        decoder.drafter.observe(emitted)
        ended = perf_counter()
        stages = stats.stages
        stages.draft_s += drafted - start
        stages.build_s += built - drafted
        stages.verify_s += verified - built
        stages.accept_s += accepted - verified
        stages.commit_s += ended - accepted
        stats.rounds += 1
        stats.drafted_rounds += tree.nodes > 0
        stats.drafted_tokens += tree.nodes
        stats.accepted_tokens += len(outcome.rows)
        stats.tree_nodes.append(tree.nodes)
        stats.accepted_depths.append(len(outcome.rows))
        return emitted


def _synchronised(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return perf_counter()


def end_tokens(model: Any) -> frozenset[int]:
    """The ids that end a text: the generation config's, else the config's."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()

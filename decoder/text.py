"""The request of one text: its logits processors, its ends, and its tokens turned into text.

A processor sees the text and the path to a row of the draft tree, as it would in plain decoding. So
a penalty or a ban changes a tree's text exactly as it changes plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import compress
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, generation
from transformers.generation.configuration_utils import GenerationMode

from costmodel.errors import InputError, reason_of, shown
from costmodel.statistics import Ints
from decoder.acceptance.sampling import Sampling
from decoder.model.structure import device_of
from decoder.tree.draft_tree import DraftTree

# From the tokens of a text and the logits [vocab] of the next one to the processed logits.
Process = Callable[[Ints, torch.Tensor], torch.Tensor]

# Those that are functions of the tokens and the logits alone. Others may remember their calls,
# which a tree makes in another order, or run the model.
EXACT = (
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
)
# Settings of a checkpoint that cut the distribution in ways that `Sampling` does not have.
CUTS = {"min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
TEXT_MODES = (
    GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION,
)  # fmt: skip


def process_of(processors: Sequence[Any], padding: Sequence[int] = ()) -> Process | None:
    """The processors in their order; None without any.

    padding  tokens before the text that transformers' processors would see
    Raises InputError for a processor that is not among `EXACT`.
    """
    for processor in processors:
        if type(processor) not in EXACT:
            raise InputError(
                f"the logits processor {type(processor).__name__} is not applied by the tree "
                "decoder",
                hint="Leave it out, or decode with transformers' own generate.",
            )
    if not processors:
        return None
    before, every = np.array(padding, dtype=np.int64), LogitsProcessorList(processors)

    def process(tokens: Ints, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate((before, tokens)))[None]
        # transformers processes a float32 copy.
        scores = logits.to(torch.float32, copy=True)[None]
        return every(cast(torch.LongTensor, ids.to(logits.device)), scores)[0]

    return process


class ProcessedRows:
    """The logits [rows, vocab] of a verification, each row processed as it is read."""

    def __init__(self, process: Process, text: Ints, tree: DraftTree, logits: torch.Tensor) -> None:
        """text: up to and with the root of the tree"""
        self._process, self._text = process, text
        self._tree, self._logits = tree, logits

    def __getitem__(self, row: int) -> torch.Tensor:
        path: list[int] = []
        above = row
        while above:
            path.append(int(self._tree.tokens[above - 1]))
            above = int(self._tree.parents[above - 1])
        tokens = np.concatenate((self._text, np.array(path[::-1], dtype=np.int64)))
        return self._process(tokens, self._logits[row])


def checkpoint_settings(
    model: Any, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling
) -> tuple[Process | None, tuple[str, ...]]:
    """The processors, made by transformers itself, and stop strings of a generation config.

    Temperature, top-k and top-p are the decoder's own arguments, and the number of new tokens is
    given. Raises InputError for a setting that cannot be respected exactly.
    """
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    if config is None:
        return None, ()
    config = deepcopy(config)
    config.max_length = len(prompt) + max_new_tokens
    if config.pad_token_id is None:
        config.pad_token_id = 0  # or transformers speaks of it at every text
    ids = torch.tensor([list(prompt)], device=device_of(model))
    try:
        for name in ("temperature", "top_p", "top_k"):  # the decoder's own arguments in its place
            value = getattr(config, name, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ValueError(f"{name} must be a number (is {shown(value)})")
        mode = config.get_generation_mode()
        wanted = [] if mode in TEXT_MODES else [mode.value.replace("_", " ")]
        wanted += [name for name in ("token_healing", "max_time") if getattr(config, name, None)]
        if sampling.temperature > 0.0 and config.do_sample:
            cuts = ((name, getattr(config, name, None), off) for name, off in CUTS.items())
            wanted += [name for name, value, off in cuts if value not in (None, off)]
        if wanted:
            raise InputError(
                f"the checkpoint's generation config asks for {wanted[0]}, which the tree decoder "
                "does not do",
                hint="Change model.generation_config, or the checkpoint's generation_config.json.",
            )
        config.do_sample = False  # no warpers
        model._prepare_special_tokens(config, True, device=ids.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=ids,
            logits_processor=LogitsProcessorList(),
            device=ids.device,
            model_kwargs={},
        )
        stops = config.stop_strings or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) for stop in stops):
            raise TypeError(f"stop_strings must be texts (is {shown(stops)})")
    except (TypeError, ValueError, RuntimeError) as error:  # fields of wrong types
        raise InputError(
            f"the target's generation_config.json cannot be used: {reason_of(error)}",
            hint="Correct it beside the weights.",
        ) from error
    return process_of(processors), stops


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """The prompt of one text, and its ends.

    ends     tokens that end it
    stream   turns tokens into text; None if only token ids are wanted
    stops    strings that end it
    until    whether it ends after some new tokens, called after each; None: never
    process  changes the logits of every token before it is picked; None: as they are
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    ends: frozenset[int]
    stream: TextStream | None = None
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))
    until: Callable[[Sequence[int]], bool] | None = None
    process: Process | None = None


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens that end a text, of the generation config, else the config. Raises InputError."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is None:
            continue
        listed = ids if isinstance(ids, (list, tuple)) else (ids,)
        if not all(type(token) is int and token >= 0 for token in listed):
            raise InputError(
                f"eos_token_id of the target must be one or more token ids (is {shown(ids)})",
                hint="Correct it in generation_config.json or config.json.",
            )
        return frozenset(listed)
    return frozenset()


class TextStream:
    """Decodes tokens one by one, and holds back incomplete UTF-8 sequences.

    It starts a few tokens before the new ones: tokenizers decode the first of a text differently.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # tokens that are decoded again as context
        self._held: list[int] = []  # tokens whose text is not yet complete

    def add(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._held.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._held = self._held, []
        return text

    def hidden(self, token: int) -> str:
        """The text of a special token, which is not shown; empty for all others."""
        if self._decode([token]):
            return ""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def finish(self) -> str:
        """The text still held back, after the last token."""
        text = self._new_text()
        self._before, self._held = [], []
        return text

    def _new_text(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class StopStrings:
    """Cuts a text, given in pieces, before the first of some strings that is complete.

    hit  whether a stop string was found
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._visible: list[bool] = []  # of each held character
        self.hit = False

    def add(self, piece: str, hidden: str = "") -> str:
        """Add a piece; returns the text that is certainly before any stop string.

        hidden  text behind the piece that counts for stop strings, but is not part of the text
        """
        self._held += piece + hidden
        self._visible += [True] * len(piece) + [False] * len(hidden)
        starts = {stop: self._held.find(stop) for stop in self._stops}
        hits = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        if hits:
            self.hit = True
            return self._take(min(hits)[1])
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return self._take(len(self._held) - length)  # a stop string may start there
        return self._take(len(self._held))

    def finish(self) -> str:
        """The text held back as a possible start of a stop string."""
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        text = "".join(compress(self._held[:end], self._visible))
        self._held, self._visible = self._held[end:], self._visible[end:]
        return text

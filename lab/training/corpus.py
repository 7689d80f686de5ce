"""The training corpus: texts that the target itself wrote after training prompts.

Texts are collected in numbered batches, one file each. A run that was stopped continues with the
first missing batch, and every run with the same seed writes the same texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from costmodel.errors import InputError
from costmodel.io import MAX_JSON_BYTES, json_lines, read_bytes, read_json, write_atomic
from decoder.arguments import apply_chat_template, chat_ids
from decoder.model.loading import LoadedModel
from decoder.model.structure import UnsupportedModelError, read_structure
from decoder.text import end_tokens
from lab.training.prompts import Kinds, Opening, is_evaluation, make_opening, refuse

VALIDATION_SHARE = 32  # one text in so many is held out
SHORTEST = 4  # tokens of a continuation; shorter ones are dropped
SETTINGS = "corpus.json"  # of a folder's texts
COLLECT_AGAIN = "Remove the file; collecting writes the same texts again."
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """The settings of a collection.

    batches         files of `batch_texts` texts each
    prompt_tokens   most tokens that the target adds to an open prompt
    answer_tokens   most tokens of a continuation
    temperature     of prompts that the target completes
    answer_temperature  of continuations; at 0 they are greedy
    openings        of prompts: templates alone, or as many free ones as well
    template        options of the chat template, as {"enable_thinking": false}
    """

    batches: int = 64
    batch_texts: PositiveInt = 64
    prompt_tokens: PositiveInt = 64
    answer_tokens: Annotated[int, Field(ge=SHORTEST)] = 160
    temperature: PositiveFloat = 0.8
    answer_temperature: NonNegativeFloat = 0.0
    openings: Kinds = "free"
    seed: NonNegativeInt = 0
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A prompt, chat template included, with the target's continuation after it."""

    tokens: tuple[int, ...]
    prompt_tokens: int


def collect(
    loaded: LoadedModel,
    folder: Path,
    wanted: Collecting,
    prompts: Sequence[str] = (),
    say: Say = lambda line: None,
) -> None:
    """Write the batches that `folder` does not have yet.

    prompts  the user's; none for generated ones (lab/training/prompts.py)
    Raises InputError if a prompt belongs to an evaluation set, or if the folder holds texts
    that were collected with other settings.
    """
    refuse((f"training prompt {number}", text) for number, text in enumerate(prompts, 1))
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, loaded, wanted, prompts)
    writer = Writer(loaded, wanted)
    for number in range(wanted.batches):
        place = folder / f"texts-{number:05d}.jsonl"
        if place.exists():
            continue
        say(f"batch {number + 1} of {wanted.batches}: the target writes {wanted.batch_texts} texts")
        texts = writer.texts(_openings(number, wanted, prompts), seed=wanted.seed + number)
        lines = "".join(json.dumps(asdict(text)) + "\n" for text in texts)
        write_atomic(place, lines, InputError)  # all texts or no file
        say(f"batch {number + 1} of {wanted.batches}: {sum(len(t.tokens) for t in texts)} tokens")


def read_corpus(folder: Path, vocab: int, temperature: float | None = None) -> list[TrainingText]:
    """All texts of a folder, in the order they were collected.

    vocab        of the target that wrote them
    temperature  that the continuations must have; None for any
    Raises InputError if there are none, if a file is damaged, or at another temperature.
    """
    if temperature is not None:
        stored = read_json(folder / SETTINGS, hint=COLLECT_AGAIN)
        actual = stored.get("answer_temperature", 0.0) if isinstance(stored, dict) else None
        if actual != temperature:
            raise InputError(
                f"the texts in {folder} were written at temperature {actual}, not {temperature:g}",
                hint="Give other texts, or let the target write new ones.",
            )
    texts = [
        _text(place, number, data, vocab)
        for place in sorted(folder.glob("texts-*.jsonl"))
        for number, data in json_lines(
            place, read_bytes(place, InputError, most_bytes=MAX_JSON_BYTES), hint=COLLECT_AGAIN
        )
    ]
    if not texts:
        raise InputError(f"{folder} holds no collected texts", hint="Collect them first.")
    return texts


def _text(place: Path, number: int, data: Any, vocab: int) -> TrainingText:
    """A text from its line. Raises InputError."""
    tokens = data.get("tokens") if isinstance(data, dict) else None
    prompt = data.get("prompt_tokens") if isinstance(data, dict) else None
    whole = isinstance(tokens, list) and all(type(t) is int and 0 <= t < vocab for t in tokens)
    if not whole or type(prompt) is not int or not 0 < prompt < len(tokens) - 1:
        raise InputError(
            f"{place}, line {number} is not a text of this target's tokens", hint=COLLECT_AGAIN
        )
    return TrainingText(tuple(tokens), prompt)


def split(texts: Iterable[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Training and held-out texts, by a hash of the prompt; equal prompts stay together."""
    train: list[TrainingText] = []
    held_out: list[TrainingText] = []
    for text in texts:
        prompt = json.dumps(text.tokens[: text.prompt_tokens]).encode()
        number = int(hashlib.sha256(prompt).hexdigest()[:8], 16)
        (train if number % VALIDATION_SHARE else held_out).append(text)
    return train, held_out


class Writer:
    """Lets the target complete prompts and answer them, a batch at a time."""

    def __init__(self, loaded: LoadedModel, wanted: Collecting) -> None:
        self._model, self._wanted = loaded.model, wanted
        self._model.set_attn_implementation(_fitting_attention(self._model))
        self._tokenizer = loaded.tokenizer()
        self._ends = end_tokens(self._model)

    def texts(self, openings: Sequence[Opening], seed: int) -> list[TrainingText]:
        """The target's text after each opening; evaluation prompts are left out."""
        wanted = self._wanted
        open_turns = [self._open_turn(opening) for opening in openings if opening.open]
        torch.manual_seed(seed)  # transformers' sampling has no generator of its own
        sampling = {"do_sample": True, "temperature": wanted.temperature, "top_p": 0.95}
        ends = iter(self._continue(open_turns, wanted.prompt_tokens, **sampling))
        prompts = []
        for opening in openings:
            if not opening.chat:
                prompts.append(self._tokenizer(opening.text)["input_ids"])
                continue
            text = opening.text
            if opening.open:
                text += self._tokenizer.decode(next(ends), skip_special_tokens=True)
            if text.strip() and not is_evaluation(text):
                prompts.append(self._turn(text))
        warmth = wanted.answer_temperature
        sampled = {"temperature": warmth, "top_k": 0, "top_p": 1.0} if warmth else {}
        answers = self._continue(prompts, wanted.answer_tokens, do_sample=warmth > 0, **sampled)
        return [
            TrainingText((*prompt, *answer), len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) >= SHORTEST
        ]

    def _turn(self, text: str) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(text)["input_ids"])
        return chat_ids(self._tokenizer, text, {"template": self._wanted.template})

    def _open_turn(self, opening: Opening) -> list[int]:
        """The chat so far, up to the end of the opening, for the target to continue."""
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(opening.text)["input_ids"])
        mark = "\u2047"  # in place of the text, to find the template before it
        messages = [{"role": "user", "content": mark}]
        whole = apply_chat_template(
            self._tokenizer, messages, tokenize=False, **self._wanted.template
        )
        return list(self._tokenizer(whole.split(mark)[0] + opening.text)["input_ids"])

    @torch.inference_mode()
    def _continue(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """The target's tokens after each prompt, up to its end token if there is one."""
        if not prompts:
            return []
        longest, end = max(map(len, prompts)), min(self._ends, default=0)
        rows = [[end] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        output = self._model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(seen, device=device),
            max_new_tokens=new_tokens,
            pad_token_id=end,
            **options,
        )
        return [self._until_end(row) for row in output[:, longest:].tolist()]

    def _until_end(self, row: list[int]) -> list[int]:
        stop = next((i for i, token in enumerate(row) if token in self._ends), len(row) - 1)
        return row[: stop + 1]


def _openings(number: int, wanted: Collecting, prompts: Sequence[str]) -> list[Opening]:
    if prompts:
        chosen = prompts[number * wanted.batch_texts : (number + 1) * wanted.batch_texts]
        return [Opening("own", text, open=False) for text in chosen]
    random = Random(f"{wanted.seed}/{number}")
    return [make_opening(random, wanted.openings) for _ in range(wanted.batch_texts)]


def _claim(folder: Path, loaded: LoadedModel, wanted: Collecting, prompts: Sequence[str]) -> None:
    """Write the settings into the folder; InputError if it has others."""
    digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:12]
    settings = asdict(wanted) | {"target": loaded.name, "prompts": digest if prompts else "made"}
    del settings["batches"]  # more batches make the same corpus larger
    place = folder / SETTINGS
    if not any(folder.glob("texts-*.jsonl")):  # whatever the file says, it describes nothing
        write_atomic(place, json.dumps(settings, indent=1) + "\n", InputError)
        return
    stored = read_json(
        place, hint=f"The texts beside it may be of any kind; remove {folder} to collect again."
    )
    if stored != settings:
        raise InputError(
            f"{folder} holds texts that were collected in another way ({place.name} says how)",
            hint="Choose another folder, or the same target, seed and lengths.",
        )


GROUPED = "rooftree-grouped"


def _fitting_attention(model: Any) -> str:
    """The name of the fastest attention that leaves out nothing of a model's."""
    try:
        if read_structure(model).uneven:
            return "eager"
    except UnsupportedModelError:
        return "eager"
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    return GROUPED


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which the query heads of a group read their keys once.

    transformers repeats keys and values for every query head wherever there is a mask, which
    takes most of a batched step on a CPU.
    query  [batch, heads, rows, head_dim]
    Returns [batch, rows, heads, head_dim].
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    attend = partial(scaled_dot_product_attention, attn_mask=attention_mask, scale=scaling)
    if rows > 1 or attention_mask is None:
        causal = attention_mask is None and rows > 1
        mixed = attend(query, key, value, is_causal=causal, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous(), None
    # One row each: the heads of a group take the place of rows.
    mixed = attend(query.reshape(batch, kv_heads, heads // kv_heads, width), key, value)
    return mixed.reshape(batch, 1, heads, width), None

"""What a drafter learns from: texts that the target itself wrote after training prompts.

Collected in numbered batches, a file each, so that a run that was stopped goes on with the
first batch that is missing, and any run with the same seed writes the same texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from costmodel.errors import InputError
from costmodel.files import replacing
from decoder.loading import LoadedModel
from decoder.sequence import end_tokens
from decoder.training.grouped import register_grouped
from decoder.training.prompts import Kinds, Opening, make_opening
from decoder.training.refused import is_evaluation, refuse

VALIDATION_SHARE = 32  # one text in so many is held out
SHORTEST = 4  # tokens of a continuation that is worth keeping
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """How texts are collected.

    batches         files of `batch` texts each
    prompt_tokens   longest end of an opened prompt that the target writes
    answer_tokens   longest continuation
    temperature     of the prompts that the target writes; continuations are greedy
    openings        of the prompts: from templates alone, or as many free ones too
    """

    batches: int = 64
    batch: int = 64
    prompt_tokens: int = 64
    answer_tokens: int = 160
    temperature: float = 0.8
    openings: Kinds = "free"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, chat template included, with the target's continuation behind it."""

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

    prompts  the user's own, in place of the ones made here (decoder/training/prompts.py)
    Raises InputError where a prompt belongs to an evaluation set, or where the folder
    holds texts that were collected in another way.
    """
    refuse((f"training prompt {number}", text) for number, text in enumerate(prompts, 1))
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, loaded, wanted, prompts)
    writer = Writer(loaded, wanted)
    for number in range(wanted.batches):
        place = _batch_file(folder, number)
        if place.exists():
            continue
        texts = writer.texts(_openings(number, wanted, prompts), seed=wanted.seed + number)
        _write(place, texts)
        say(f"batch {number + 1} of {wanted.batches}: {sum(len(t.tokens) for t in texts)} tokens")


def read_corpus(folder: Path) -> list[Text]:
    """All texts of a folder, in the order they were collected.

    Raises InputError where there are none, and where a file is damaged.
    """
    texts: list[Text] = []
    for place in sorted(folder.glob("texts-*.jsonl")):
        try:
            for line in place.read_text(encoding="utf-8").splitlines():
                data = json.loads(line)
                texts.append(Text(tuple(data["tokens"]), data["prompt_tokens"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"cannot read the texts in {place}: {error!r}",
                hint="Remove the file; collecting writes the same texts again.",
            ) from error
    if not texts:
        raise InputError(f"{folder} holds no collected texts", hint="Collect them first.")
    return texts


def split(texts: Iterable[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and texts held out; by a hash, so that equal prompts stay together."""
    train: list[Text] = []
    held_out: list[Text] = []
    for text in texts:
        prompt = json.dumps(text.tokens[: text.prompt_tokens]).encode()
        number = int(hashlib.sha256(prompt).hexdigest()[:8], 16)
        (train if number % VALIDATION_SHARE else held_out).append(text)
    return train, held_out


class Writer:
    """Lets the target finish prompts and answer them, a batch at a time."""

    def __init__(self, loaded: LoadedModel, wanted: Collecting) -> None:
        self._model, self._wanted = loaded.model, wanted
        self._model.set_attn_implementation(register_grouped())
        self._tokenizer = loaded.tokenizer()
        self._ends = end_tokens(self._model)

    def texts(self, openings: Sequence[Opening], seed: int) -> list[Text]:
        """The target's text after each opening; those of evaluation prompts are left out."""
        wanted = self._wanted
        open_turns = [self._open_turn(opening) for opening in openings if opening.open]
        torch.manual_seed(seed)  # transformers' sampling has no generator of its own
        ends = iter(
            self._continue(
                open_turns,
                wanted.prompt_tokens,
                do_sample=True,
                temperature=wanted.temperature,
                top_p=0.95,
            )
        )
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
        answers = self._continue(prompts, wanted.answer_tokens, do_sample=False)
        return [
            Text((*prompt, *answer), len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) >= SHORTEST
        ]

    def _turn(self, text: str) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(text)["input_ids"])
        encoded = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def _open_turn(self, opening: Opening) -> list[int]:
        """A user's turn up to where the opening ends, for the target to go on with."""
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer(opening.text)["input_ids"])
        mark = "\u2047"  # stands for the text, so that what surrounds it can be seen
        whole = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer(whole.split(mark)[0] + opening.text)["input_ids"])

    @torch.inference_mode()
    def _continue(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """What the target writes after each prompt, its end token included where it came."""
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
        chosen = prompts[number * wanted.batch : (number + 1) * wanted.batch]
        return [Opening("own", text, open=False) for text in chosen]
    random = Random(f"{wanted.seed}/{number}")
    return [make_opening(random, wanted.openings) for _ in range(wanted.batch)]


def _claim(folder: Path, loaded: LoadedModel, wanted: Collecting, prompts: Sequence[str]) -> None:
    """Note how the folder's texts come about; refuse to mix two ways."""
    marks = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:12]
    ways = asdict(wanted) | {"target": loaded.name, "prompts": marks if prompts else "made"}
    del ways["batches"]  # more of them is the same corpus, only larger
    place = folder / "corpus.json"
    if not place.exists():
        place.write_text(json.dumps(ways, indent=1) + "\n", encoding="utf-8")
        return
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{place} cannot be read: {error}",
            hint="It is damaged, so the texts beside it may be of any kind; choose another folder.",
        ) from error
    if known != ways:
        raise InputError(
            f"{folder} holds texts that were collected in another way ({place.name} says how)",
            hint="Choose another folder, or the same target, seed and lengths.",
        )


def _batch_file(folder: Path, number: int) -> Path:
    return folder / f"texts-{number:05d}.jsonl"


def _write(place: Path, texts: Sequence[Text]) -> None:
    """All texts or no file."""
    with replacing(place) as part, part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(text)) + "\n" for text in texts)

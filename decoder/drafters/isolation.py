"""Isolation of a drafter's failures: where it fails, its text goes on without drafts.

A drafter may be somebody else's code, or damaged. Whatever it does, the decoded text is the
target's: candidates are checked here, arguments are read-only, and after an exception a drafter
drafts no more in that text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

import torch

from costmodel.errors import DeviceError, DrafterError, reason_of, shown
from costmodel.statistics import Ints
from decoder.acceptance.drawn import DrawnTree
from decoder.drafters.base import Drafter, DraftRequest, DraftSession
from decoder.tree.draft_tree import (
    EMPTY,
    NO_CANDIDATES,
    Candidates,
    DraftTree,
    Lattice,
    checked_arrays,
    checked_parents,
)

Result = TypeVar("Result")


class IsolatedDrafter:
    """A drafter whose failures are logged once. Raises DrafterError for what is no drafter."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self.drafter, self.vocab = drafter, vocab
        self.said = False  # the first failure is logged
        checks: dict[str, Callable[[Any], object]] = {
            "name": lambda value: isinstance(value, str) and value,
            "max_depth": _is_count,
            "feature_layers": lambda value: (
                isinstance(value, (tuple, list)) and all(map(_is_count, value))
            ),
            "draws": ("never", "whole", "levels").__contains__,
        }
        for name, fits in checks.items():
            try:
                value = getattr(drafter, name)
                wrong = "" if fits(value) else f"is {shown(value)}"
            except Exception as error:
                wrong = f"fails with {reason_of(error)}"
            if wrong:
                raise DrafterError(
                    f"the drafter {type(drafter).__name__} is not usable: its {name} {wrong}",
                    hint="decoder/drafters/base.py says what each attribute is.",
                )

    def start(
        self, prompt: Ints, features: torch.Tensor | None, logits: torch.Tensor | None
    ) -> IsolatedSession:
        """The session of a new text; one that has failed already where `start` fails."""
        return IsolatedSession(
            self, partial(self.drafter.start, read_only(prompt), features, logits)
        )


class IsolatedSession:
    """The drafting of one text; `failure` is why it has ended before the text, or None."""

    def __init__(self, owner: IsolatedDrafter, start: Callable[[], DraftSession]) -> None:
        self.failure: DrafterError | None = None
        self._owner = owner
        self._session: Any = None
        self._session = self._run("start", start, None)

    def draft(self, context: Ints, request: DraftRequest) -> Candidates:
        """The session's sound candidates; none where it has failed."""

        def checked() -> Candidates:
            drafted = self._session.draft(read_only(context), request)
            if not isinstance(drafted, Lattice if request.whole else Candidates):
                others = "" if request.whole else ", a CandidateTree or other Candidates"
                raise ValueError(f"it must give a Lattice{others}, not a {type(drafted).__name__}")
            if isinstance(drafted, Lattice) and request.whole:
                depth, shape = len(drafted.tokens), tuple(getattr(drafted.whole, "shape", ()))
                fits = len(shape) == 2 and shape[0] == depth and 0 < shape[1] <= self._owner.vocab
                if depth and not fits:
                    raise ValueError(f"whole must be a tensor [{depth}, {self._owner.vocab}]")
            return drafted.sound(self._owner.vocab)

        nothing: Candidates = NO_CANDIDATES
        return self._run("draft", checked, nothing)

    def draw(
        self, context: Ints, shape: DraftTree, temperature: float, generator: torch.Generator
    ) -> DraftTree:
        """The session's drawn tree; an empty one where it has failed."""

        def checked() -> DraftTree:
            drawn = self._session.draw(read_only(context), shape, temperature, generator)
            if not isinstance(drawn, DrawnTree) and drawn is not EMPTY:
                raise ValueError(f"it must give a DrawnTree, not a {type(drawn).__name__}")
            if drawn.nodes > shape.nodes:
                raise ValueError(f"a tree of {drawn.nodes} nodes for a shape of {shape.nodes}")
            tokens, _ = checked_arrays(drawn.tokens, drawn.scores, 1)
            checked_parents(drawn.parents, len(tokens))
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._owner.vocab:
                raise ValueError("a drawn token lies outside the vocabulary")
            return drawn

        return self._run("draw", checked, EMPTY)

    def read_logits(self, logits: torch.Tensor) -> None:
        self._run("read_logits", lambda: self._session.read_logits(logits), None)

    def observe(self, emitted: Sequence[int], features: torch.Tensor | None) -> None:
        self._run("observe", lambda: self._session.observe(list(emitted), features), None)

    def _run(self, what: str, call: Callable[[], Result], otherwise: Result) -> Result:
        if self.failure is not None:
            return otherwise
        try:
            return call()
        except DeviceError:  # of the device, not of the drafter
            raise
        except (Exception, SystemExit) as error:
            problem = f"the drafter {self._owner.drafter.name} fails in {what}: {reason_of(error)}"
            self.failure = DrafterError(problem, hint="The text goes on without drafts.")
            if not self._owner.said:
                self._owner.said = True
                logging.getLogger(__name__).warning(str(self.failure))
            return otherwise


def read_only(array: Ints) -> Ints:
    """A copy of the array that cannot be written to: torch shares the memory of the array."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 0

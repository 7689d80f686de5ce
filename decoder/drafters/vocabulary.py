"""Whether a drafter's token ids mean to the target what they mean to the drafter."""

from __future__ import annotations

from costmodel.errors import InputError
from decoder.loading import LoadedModel


def check_vocabulary(drafter: LoadedModel, target: LoadedModel) -> None:
    """Raise InputError unless both models number the same tokens in the same way.

    Where both have a tokenizer, its vocabulary decides, since models of one family
    pad their embeddings to different sizes; where one has none, the sizes must agree.
    """
    ours, theirs = _token_ids(drafter), _token_ids(target)
    if ours is None or theirs is None:
        if drafter.architecture.vocab != target.architecture.vocab:
            raise InputError(
                f"the drafter {drafter.name} has a vocabulary of {drafter.architecture.vocab} "
                f"tokens and the target {target.name} one of {target.architecture.vocab}",
                hint="Use a smaller model of the target's own family.",
            )
        return
    different = len(ours.items() ^ theirs.items())
    if different:
        token = min(ours.keys() | theirs.keys(), key=lambda t: (ours.get(t) == theirs.get(t), t))
        raise InputError(
            f"tokenizer mismatch between the drafter {drafter.name} and the target "
            f"{target.name}: {different} entries differ, such as {token!r}, which is "
            f"{_id(ours, token)} for the drafter and {_id(theirs, token)} for the target",
            hint="Use a smaller model of the target's own family.",
        )


def _token_ids(loaded: LoadedModel) -> dict[str, int] | None:
    """The tokenizer's vocabulary; None for a model without a tokenizer."""
    try:
        return dict(loaded.tokenizer().get_vocab())
    except InputError:
        return None


def _id(token_ids: dict[str, int], token: str) -> str:
    return f"id {token_ids[token]}" if token in token_ids else "no token"

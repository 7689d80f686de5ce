"""The weights of a DSpark drafter: DFlash's, and its heads (Cheng et al., 2026).

U_k are the logits of row k, h_k its hidden state, a the token before. The corrected logits are

    vanilla  U_k + W2 W1[a]
    gated    U_k + W2 (g W1[a]),  g = sigmoid(G [h_k; W1[a]])
    rnn      U_k + W2 tanh(o),    [g; c; o] = J [s; W1[a]; h_k], s = 0 before the bonus token,
             and then s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from costmodel.errors import InputError
from decoder.device import to_device
from decoder.drafters.checkpoint import Weights, load_weights
from decoder.drafters.dflash.model import DFlashModel
from decoder.drafters.dspark.config import DSparkConfig
from decoder.drafters.vocabulary import read_tokens
from decoder.model.target import Target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # copies of the target's, mostly
COMPARED = 16  # rows of them that are compared with the target's
OFFSETS, MEMBERS = "d2t", "t2d"  # of a reduced vocabulary


class MarkovHead(nn.Module):
    """The correction of a row's logits by the tokens before it."""

    def __init__(self, config: DSparkConfig, size: int) -> None:
        """size: the number of tokens that are drafted"""
        super().__init__()
        rank, hidden = config.rank, config.shape.hidden
        self.markov_w1 = nn.Embedding(config.vocab or size, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        self._gated, self._rank = config.correction == "gated", rank
        if self._gated:
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.correction == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def vectors(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What W2 multiplies, [rows, K, r], of hidden states [rows, H] behind tokens [rows, K]."""
        before = self.markov_w1(tokens)
        if not self._gated:
            return before
        width, gate = hidden.shape[-1], self.gate_proj
        of_rows = functional.linear(hidden, gate.weight[:, :width], gate.bias)[:, None]
        return before * (of_rows + functional.linear(before, gate.weight[:, width:])).sigmoid()

    def parts(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part [rows, 3 * r] of J's product that hidden states [rows, H] give."""
        joint = self.joint_proj
        return functional.linear(hidden, joint.weight[:, 2 * self._rank :], joint.bias).float()

    def path_weight(self) -> torch.Tensor:
        """J's part for states and tokens, in float32: so small products are the faster in it."""
        return self.joint_proj.weight[:, : 2 * self._rank].float()

    def step(
        self, part: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [F, r] behind tokens [F], and what W2 multiplies [F, r], in a row of this part.

        weight  `path_weight()`
        """
        paths = torch.cat((states, self.markov_w1(tokens).float()), dim=-1)
        mixed = part + functional.linear(paths, weight)
        gate, content, output = mixed.chunk(3, dim=-1)
        return torch.lerp(content.tanh(), states, gate.sigmoid()), output.tanh()


class ConfidenceHead(nn.Module):
    """The rate at which a row's drafted token is accepted: sigmoid(proj [h_k; W1[a]]).

    Its weights are kept with the others; no tree is built by it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class DSparkModel(DFlashModel):
    """The weights under DeepSpec's names; ModelOpt's have no `markov_head.` before them.

    own_embedding, own_head  the checkpoint's, where they differ from the target's (`settle`)
    """

    config_type: ClassVar[type[DSparkConfig]] = DSparkConfig
    config: DSparkConfig
    own_embedding: torch.Tensor | None = None
    own_head: torch.Tensor | None = None
    _tables: Weights | None = None  # where its embedding and head are, until they are settled

    def __init__(self, config: DSparkConfig, head: int | None = None) -> None:
        super().__init__(config, head)
        size = head or config.draft_vocab or config.vocab
        if config.rank and size:
            self.markov_head = MarkovHead(config, size)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config.confidence)

    @classmethod
    def load(cls, folder: Path, published: Mapping[str, Any], like: torch.Tensor) -> Self:
        config = cls.config_type.parse(published, f"{folder / 'config.json'}")
        weights, tokens = Weights(folder), read_tokens(folder)
        with torch.device("meta"):
            model = cls(config, None if tokens is None else len(tokens))
        bare = not any(name.startswith("markov_head.") for name in weights.shapes)
        stored = {name: _bare(name) if bare else name for name in model.state_dict()}
        shapes = {stored[name]: tuple(t.shape) for name, t in model.state_dict().items()}
        weights.check(*_with_tables(shapes, config))
        tensors = weights.read(shapes, like.device)
        load_weights(model, {name: tensors[place] for name, place in stored.items()}, like.dtype)
        model._tables = weights
        model.head_tokens = tokens if config.draft_vocab is None else _tokens(weights, config)
        return model

    def settle(self, target: Target) -> None:
        """Read the checkpoint's embedding and head unless some of their rows equal the target's.

        Most checkpoints hold frozen copies. A head that is more than one matrix stays the target's.
        """
        weights, self._tables = self._tables, None
        if weights is None:
            return
        every = np.arange(target.architecture.vocab)
        tokens = every if self.head_tokens is None else self.head_tokens
        for name, ids, rows_of in (
            (EMBEDDING, every, lambda ids: target.embed(to_device(ids, target.device))),
            (HEAD, tokens, target.head_rows),
        ):
            stored = weights.shapes.get(name)
            if stored is None:
                continue
            rows = np.unique(np.linspace(0, stored[0] - 1, COMPARED).astype(np.int64))
            theirs = rows_of(ids[rows])
            if theirs is None or alike(weights.rows(name, rows), theirs):
                continue
            table = weights.read({name: stored}, target.device)[name].to(target.dtype)
            self.own_embedding, self.own_head = (
                (table, self.own_head) if name == EMBEDDING else (self.own_embedding, table)
            )


def alike(rows: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether rows are equal but for what a narrow dtype loses."""
    rows, others = rows.double().cpu(), others.double().cpu()
    return bool((rows - others).abs().max() <= others.abs().max() / 64)


def _bare(name: str) -> str:
    """ModelOpt's name of a tensor."""
    return name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")


def _with_tables(
    shapes: Mapping[str, tuple[int, ...]], config: DSparkConfig
) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """All tensors that may be stored, and those of them that need not be."""
    vocab, hidden = config.vocab or 0, config.shape.hidden
    drafted = config.draft_vocab or vocab
    optional = {EMBEDDING: (vocab, hidden), HEAD: (drafted, hidden), MEMBERS: (vocab,)}
    needed = {} if config.draft_vocab is None else {OFFSETS: (drafted,)}
    return {**shapes, **optional, **needed}, frozenset(optional)


def _tokens(weights: Weights, config: DSparkConfig) -> Any:
    """The tokens of a reduced vocabulary, int64 [draft_vocab]."""
    offsets = weights.read({OFFSETS: ()}, torch.device("cpu"))[OFFSETS]
    tokens = offsets + torch.arange(len(offsets))
    if offsets.is_floating_point() or not 0 <= int(tokens.min()) <= int(tokens.max()) < (
        config.vocab or 0
    ):
        raise InputError(
            f"{OFFSETS} in {weights.folder} does not map to tokens below {config.vocab}",
            hint="The checkpoint is damaged, or its vocab_size is wrong.",
        )
    return tokens.numpy()

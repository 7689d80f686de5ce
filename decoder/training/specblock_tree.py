"""How far a SpecBlock drafter's trees reach into held-out texts, by drafting as in decoding."""

from __future__ import annotations

from collections.abc import Sequence

from decoder.drafters.base import DraftRequest
from decoder.drafters.specblock import SpecBlockDrafter
from decoder.drafters.specblock_model import SpecBlockModel
from decoder.growth import TopPaths
from decoder.loading import LoadedModel
from decoder.target import Target
from decoder.training.features import Example
from decoder.tree import DraftTree, best_first

STRIDE = 16  # tokens from one draft to the next


def tree_tokens(
    loaded: LoadedModel, model: SpecBlockModel, examples: Sequence[Example]
) -> float | None:
    """Tokens a verification of the whole tree, the bonus token included; None without a draft.

    The text stands for the target: of a greedy text the figure is that of decoding.
    """
    drafter = SpecBlockDrafter(Target(loaded, owned=False), model)
    nodes, width = drafter.growth.nodes, loaded.architecture.vocab
    request = DraftRequest(depth=drafter.max_depth, width=width, growth=TopPaths())
    accepted = drafts = 0
    for example in examples:
        tokens, at = example.tokens.cpu().numpy(), example.prompt_tokens
        session = drafter.session()
        session.start(tokens[:at], example.features[:at])
        while at < len(tokens) - 1:
            tree = best_first(session.draft(tokens[: at + 1], request), nodes)
            accepted += _accepted(tree, tokens[at + 1 :].tolist())
            drafts += 1
            emitted = tokens[at + 1 : at + 1 + STRIDE]
            session.observe(emitted.tolist(), example.features[at : at + len(emitted)])
            at += len(emitted)
    return 1.0 + accepted / drafts if drafts else None


def _accepted(tree: DraftTree, truth: Sequence[int]) -> int:
    """Depth of the path in the tree that the text goes on with."""
    row = depth = 0
    for token in truth:
        row = tree.child(row, token)
        if row < 0:
            break
        depth += 1
    return depth

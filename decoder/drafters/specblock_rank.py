"""SpecBlock's rank head: how far down the draft distribution the target's token is (Shi et al.).

The paper's section 3.2 and appendix B. It leaves open: the head's form (here one hidden layer),
which h it reads (here the state behind the final norm, as the language-model head does, so that
its size is bounded), and tokens outside the reduced vocabulary (they count as rank > 10).
"""

from __future__ import annotations

import torch
from torch import nn

TOP = 10  # log-probabilities in the summary
GAPS = (2, 3, 5)  # ranks whose logits are compared with the first
SUMMARY = TOP + len(GAPS) + 2
BOUNDS = (1, 4, 10)  # the last rank of each bucket but the last
BUCKETS = len(BOUNDS) + 1
HIDDEN = 128


def summary(logits: torch.Tensor) -> torch.Tensor:
    """psi, [rows, 15] in float32, of logits [rows, vocab] with vocab of 10 or more.

    Ten log-probabilities of the most likely tokens, descending; how far the first logit is
    above those of ranks 2, 3 and 5; the first probability; the entropy in nats.
    """
    logs = logits.float().log_softmax(-1)
    best = logs.topk(TOP).values
    # Differences of logits are those of log-probabilities: the normaliser cancels.
    gaps = torch.stack([best[:, 0] - best[:, rank - 1] for rank in GAPS], dim=1)
    probabilities = logs.exp()
    entropy = -(probabilities * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(-1)
    scalars = torch.stack((probabilities.amax(-1), entropy), dim=1)
    return torch.cat((best, gaps, scalars), dim=1)


def ranks_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rank of each row's token in its logits [rows, vocab], 1 the most probable; int64.

    ids  int64 [rows], -1 for a token that the drafter does not know: rank vocab + 1
    """
    own = logits.gather(-1, ids.clamp_min(0)[:, None])
    ranks = 1 + (logits > own).sum(-1)
    return torch.where(ids < 0, logits.shape[-1] + 1, ranks)


def buckets_of(ranks: torch.Tensor) -> torch.Tensor:
    """Bucket labels of ranks: 1 is b_0, 2 to 4 b_1, 5 to 10 b_2, more b_3."""
    bounds = torch.tensor(BOUNDS, device=ranks.device)
    return (ranks[..., None] > bounds).sum(-1)


class RankHead(nn.Module):
    """g_phi (equation 4): bucket logits of a state and the summary of its distribution."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden + SUMMARY, HIDDEN)
        self.outer = nn.Linear(HIDDEN, BUCKETS)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[rows, 4] of normed states [rows, hidden] and their logits; neither gets a gradient."""
        seen = summary(logits.detach()).nan_to_num_(0.0, 0.0, -100.0).to(hidden.dtype)
        inner = self.inner(torch.cat((hidden.detach(), seen), dim=-1))
        return self.outer(nn.functional.silu(inner))

"""Updates of a SpecBlock drafter: what is drafted again, what moves, and what is served."""

import numpy as np
import torch

from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.updates.adaptation import TargetResponse
from lab.papers.specblock.updates.specblock import SpecBlockKind
from tests.decoder.draft_models import VOCAB, draft_target, plain_states, rms
from tests.lab.papers.specblock.specblock_models import FEATURES, Reference, specblock_folder

TEXT = [5, 17, 3, 88, 41, 2, 2, 60, 7, 19, 44, 8, 30, 71, 12, 3, 9, 50]
PROMPT = TEXT[:5]


def response_of(target, places):
    """A response to `TEXT` with these (root, rejected) positions."""
    generator = torch.Generator().manual_seed(3)
    states = plain_states(target, TEXT[:-1])
    return TargetResponse(
        tokens=torch.tensor(TEXT),
        features=torch.cat([states[i] for i in FEATURES], dim=-1).clone(),
        roots=torch.tensor([root for root, _ in places]),
        rejected=torch.tensor([rejected for _, rejected in places]),
        logits=torch.randn(len(places), VOCAB, generator=generator) * 3,
        probabilities=np.zeros(len(places)),
    )


class TestRedraft:
    def test_against_the_reference_in_both_blocks(self, tmp_path):
        """Depth 1, 3 and 4 of a first block; 5 and 7 of one that starts at its end."""
        target = draft_target()
        folder, config, tensors = specblock_folder(tmp_path / "draft")
        drafter = SpecBlockDrafter(target, folder)
        kind = SpecBlockKind(drafter)
        places = [(5, 6), (7, 10), (9, 13), (8, 13), (10, 17)]
        response = response_of(target, places)
        found = kind.redraft(drafter.model, response)
        rank_losses = []
        for row, (root, rejected) in enumerate(places):
            reference = Reference(config, tensors, target, np.array(TEXT[: root + 1]))
            rows, path = reference.first_block()
            if rejected - root > 4:
                rows = [*rows, *reference.next_block(rows, path, 3, TEXT[root + 4])[0]]
            rows = rows[: rejected - root]
            logs, logits = found.logs[row].double(), reference.read(rows[-1])[0]
            torch.testing.assert_close(logs, logits.log_softmax(0), atol=2e-4, rtol=0)
            for token, number in zip(TEXT[root + 1 :], rows, strict=False):
                rank_losses.append(bucket_loss(reference, number, token))
        assert len(rank_losses) == 1 + 3 + 4 + 5 + 7
        np.testing.assert_allclose(found.extra.item(), 5 * np.mean(rank_losses), rtol=1e-3)
        wanted = response.logits[:, reference.tokens].double().softmax(-1)
        torch.testing.assert_close(kind.wanted(response).double(), wanted, atol=1e-6, rtol=0)


def bucket_loss(reference, row, token):
    """Cross-entropy of the rank head at a row: the bucket of a token's rank."""
    logits, normed = reference.read(row)[0], reference.hidden[row]
    normed = rms(normed, reference.parts["norm.weight"], reference.config["rms_norm_eps"])
    outer = reference.buckets(normed, logits)
    rank = 99
    if token in reference.tokens:
        rank = 1 + int((logits > logits[reference.tokens.index(token)]).sum())
    bucket = 0 if rank == 1 else 1 if rank <= 4 else 2 if rank <= 10 else 3
    return -float(outer.log_softmax(0)[bucket])

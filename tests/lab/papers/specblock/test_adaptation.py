"""Updates of a drafter while it serves, with a small drafter that learns fast."""

import numpy as np
import pytest
import torch
from torch import nn

from decoder.drafters.base import Drafter, DraftSession
from decoder.drafters.vocabulary import most_probable
from decoder.engine import TreeDecoder
from decoder.tree.draft_tree import Lattice
from lab.papers.specblock.updates import adaptation
from lab.papers.specblock.updates.adaptation import AdaptiveDrafter, Trainer, UpdateSettings
from lab.papers.specblock.updates.bandit import AlwaysUpdate, Decision
from tests.decoder.draft_models import plain_states
from tests.decoder.models import greedy, plain_logits, random_model, target_of

VOCAB, DEPTH = 97, 3
PROMPT = [5, 17, 3, 88, 41]


class Bigram(nn.Module):
    """Marginals of the next positions from the last token alone."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Embedding(VOCAB, 16)
        self.heads = nn.Linear(16, DEPTH * VOCAB)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens):
        return self.heads(self.trunk(tokens)).unflatten(-1, (DEPTH, VOCAB)).log_softmax(-1)


class BigramDrafter(Drafter, DraftSession):
    name = architecture_hash = "bigram"
    max_depth, feature_layers = DEPTH, (1,)

    def __init__(self, dtype=torch.float32, draws="whole"):
        self.model = Bigram().to(dtype).eval().requires_grad_(False)
        self.draws = draws

    def start(self, prompt, features, logits=None):
        return self

    @torch.inference_mode()
    def draft(self, context, request):
        q = self.model(torch.tensor(int(context[-1]))).exp().float()[: request.depth]
        tokens, best = most_probable(q, request.width)
        return Lattice(tokens, best, q if request.whole else None)


class BigramKind:
    """What an update needs to know of it."""

    def parameters(self, model, action):
        heads = list(model.heads.parameters())
        return heads if action == "heads" else [*heads, *model.trunk.parameters()]

    def redraft(self, model, response):
        logs = model(response.tokens[response.roots])
        places = response.rejected - response.roots - 1
        return adaptation.Redrafted(logs[torch.arange(len(places)), places])

    def wanted(self, response):
        return response.logits.float().softmax(-1)


def target():
    return target_of(random_model("qwen3"))


def adaptive(updater, drafter=None, **settings):
    drafter = drafter or BigramDrafter()
    return AdaptiveDrafter(
        drafter, drafter.model, BigramKind(), updater, UpdateSettings(**settings)
    )


class Script:
    """An updater that says what it was told to, and keeps what it heard."""

    def __init__(self, *decisions):
        self._decisions = list(decisions)
        self.queries, self.charged = [], []

    def after(self, query):
        self.queries.append(query)
        return self._decisions.pop(0)

    def charge(self, seconds):
        self.charged.append(seconds)


class TestRecording:
    @pytest.mark.parametrize("policy", ["chain", "fixed:5", "fixed:24", "plain"])
    def test_a_whole_text(self, policy):
        """Rejections from the drafter's own marginals and plain logits, round by round."""
        own, drafter, seen = target(), BigramDrafter(), []
        start = drafter.start

        def recording(prompt, features, logits):
            seen.append(
                adaptation.RecordingSession(start(prompt, features, logits), prompt, features)
            )
            return seen[-1]

        drafter.start = recording
        decoder = TreeDecoder(own, drafter=drafter, policy=policy)
        result = decoder.generate(PROMPT, max_new_tokens=25)
        response = seen[0].response(result.token_ids)
        text = [*PROMPT, *greedy(own.model, PROMPT, 40)]
        plain, length = plain_logits(own.model, text), len(PROMPT) + 25
        roots, rejected, r = [], [], []
        root = len(PROMPT)  # the first new token
        for accepted in result.stats.accepted_depths:
            place = root + accepted + 1
            left = length - 1 - root  # a round drafts what is wanted beyond its own token
            depth = min(DEPTH, left - 1)
            if policy != "plain" and accepted < depth and place < length:
                q = drafter.model(torch.tensor(text[root])).exp()[accepted]
                kept = q.topk(min(decoder.policy.max_nodes, VOCAB)).indices.tolist()
                roots.append(root)
                rejected.append(place)
                r.append(float(q[text[place]]) if text[place] in kept else 0.0)
            root = place
        assert response.tokens.tolist() == text[:length]
        assert response.roots.tolist() == roots and response.rejected.tolist() == rejected
        np.testing.assert_allclose(response.probabilities, r, atol=1e-6)
        assert response.signal == pytest.approx(sum(1 - p for p in r), abs=1e-5)
        assert (len(rejected) > 5) == (policy != "plain")
        for logits, place in zip(response.logits, rejected, strict=True):
            torch.testing.assert_close(logits, plain[place - 1], atol=1e-5, rtol=0)
        features = plain_states(own, text[: length - 1])[1]
        torch.testing.assert_close(response.features, features, atol=1e-5, rtol=0)


def response_of(seed=0, count=4):
    generator = torch.Generator().manual_seed(seed)
    roots = torch.arange(count) * 4
    return adaptation.TargetResponse(
        tokens=torch.randint(0, VOCAB, (4 * count + DEPTH,), generator=generator), features=None,
        roots=roots, rejected=roots + 1 + torch.arange(count) % DEPTH,
        logits=torch.randn(count, VOCAB, generator=generator) * 4,
        probabilities=np.full(count, 0.25),
    )  # fmt: skip


class TestUpdates:
    def test_the_loss_by_hand(self):
        model, first = Bigram(0).double(), Bigram(1).double()
        responses = [response_of(0, 4), response_of(1, 3)]
        found = Trainer(model, first, BigramKind(), UpdateSettings(kl_weight=0.3)).loss(responses)
        total = 0.0
        for response in responses:
            for i in range(len(response.rejected)):
                root, place = int(response.roots[i]), int(response.rejected[i])
                token = response.tokens[root]
                p = np.exp(response.logits[i].double().numpy())
                p = p / p.sum()
                q = model(token)[place - root - 1].detach().exp().numpy()
                q0 = first(token)[place - root - 1].detach().exp().numpy()
                total += -(p * np.log(q)).sum() + 0.3 * (q * np.log(q / q0)).sum()
        assert found.item() == pytest.approx(total / 7, rel=1e-5)

    def test_updates_lower_the_loss_and_the_penalty_holds_back(self):
        losses, moved = [], []
        for weight in (0.0, 100.0):
            model, first = Bigram(), Bigram()
            settings = UpdateSettings(kl_weight=weight, steps=40, learning_rate=1e-2)
            plain = Trainer(model, first, BigramKind(), UpdateSettings(kl_weight=0.0))
            before = plain.loss([response_of()]).item()
            Trainer(model, first, BigramKind(), settings).train("full", [response_of()])
            losses.append(plain.loss([response_of()]).item() - before)
            moved.append(float((model.trunk.weight - first.trunk.weight).norm()))
        assert losses[0] < -1.0 and losses[0] < losses[1]
        assert moved[1] < moved[0]


def weights_of(drafter):
    return {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class TestServing:
    def serve(self, drafter, texts, policy="fixed:6", tokens=16):
        own = target()
        decoder = TreeDecoder(own, drafter=drafter, policy=policy)
        for i in range(texts):
            prompt = [*PROMPT, i]
            result = decoder.generate(prompt, max_new_tokens=tokens)
            assert result.token_ids == greedy(own.model, prompt, tokens)
            yield result, drafter.finish(result)

    def test_the_text_stays_plain_decodings_while_weights_change(self):
        inner = BigramDrafter()
        before = weights_of(inner)
        drafter = adaptive(AlwaysUpdate(2), inner, learning_rate=0.1)
        assert len(list(self.serve(drafter, 6))) == 6
        assert [action for action, _ in drafter.updates] == ["full"] * 3
        assert not same(before, weights_of(inner))
        assert torch.equal(inner.model.count, torch.zeros(2, dtype=torch.int64))

    def test_a_rollback_goes_to_what_served_the_last_good_window(self):
        """Windows of two texts; the weights of the second good one are those to return to."""
        train = {"action": "full", "train": True}
        script = Script(
            Decision(**train), Decision(window=True, good=True),  # from its beginning by theta_0
            Decision(**train), Decision(window=True, good=True, **train),  # by one update
            Decision(**train), Decision(window=True), Decision(**train),
            Decision(window=True, rollback=True, action="full"),
            Decision(action="full", train=True),
        )  # fmt: skip
        inner = BigramDrafter()
        drafter = adaptive(script, inner, learning_rate=0.05)
        served = []
        for _ in self.serve(drafter, 9):
            served.append(weights_of(inner))
        assert same(served[7], served[1])
        assert not same(served[6], served[1]) and not same(served[3], served[1])
        assert not same(served[8], served[7]) and drafter.rollbacks == 1
        assert same(drafter._model.state_dict(), served[8])

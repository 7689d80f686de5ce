"""Updates of a drafter while it serves: what is recorded and drafted again, and the bandit."""

import numpy as np
import pytest
import torch
from torch import nn

from costmodel.errors import InputError
from decoder.drafters.base import Drafter, DraftSession
from decoder.drafters.factory import load_drafter
from decoder.drafters.vocabulary import most_probable
from decoder.engine import TreeDecoder
from decoder.tree.draft_tree import Lattice
from lab.papers.specblock.drafter import SpecBlockDrafter
from lab.papers.specblock.updates import adaptation
from lab.papers.specblock.updates import bandit as bandits
from lab.papers.specblock.updates.adaptation import TargetResponse, Trainer, UpdateSettings
from lab.papers.specblock.updates.bandit import BanditSettings, Decision
from lab.papers.specblock.updates.specblock import SpecBlockKind, split_updater, updatable
from tests.decoder.draft_models import VOCAB, dflash_folder, draft_target, plain_states, rms
from tests.decoder.models import greedy, plain_logits, random_model, target_of
from tests.lab.papers.specblock.specblock_models import FEATURES, Reference, specblock_folder

DEPTH = 3
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
    own = UpdateSettings(**settings)
    return adaptation.AdaptiveDrafter(drafter, drafter.model, BigramKind(), updater, own)


class Script:
    """An updater that says what it was told to."""

    def __init__(self, *decisions):
        self._decisions = iter(decisions)

    def after(self, query):
        return next(self._decisions)

    def charge(self, seconds): ...


@pytest.mark.parametrize("policy", ["chain", "fixed:5", "fixed:24", "plain"])
def test_a_whole_text_is_recorded(policy):
    """Rejections from the drafter's own marginals and plain logits, round by round."""
    own, drafter, seen = target(), BigramDrafter(), []
    start = drafter.start

    def recording(prompt, features, logits):
        seen.append(adaptation.RecordingSession(start(prompt, features, logits), prompt, features))
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
    return TargetResponse(
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
        drafter = adaptive(bandits.AlwaysUpdate(2), inner, learning_rate=0.1)
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


TEXT = [5, 17, 3, 88, 41, 2, 2, 60, 7, 19, 44, 8, 30, 71, 12, 3, 9, 50]


def response_to(target, places):
    """A response to `TEXT` with these (root, rejected) positions."""
    states = plain_states(target, TEXT[:-1])
    logits = torch.randn(len(places), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    roots, rejected = torch.tensor(places).T
    return TargetResponse(
        tokens=torch.tensor(TEXT), roots=roots, rejected=rejected, logits=logits,
        features=torch.cat([states[i] for i in FEATURES], dim=-1).clone(),
        probabilities=np.zeros(len(places)),
    )  # fmt: skip


def test_redrafts_are_the_references_in_both_blocks(tmp_path):
    """Depth 1, 3 and 4 of a first block; 5 and 7 of one that starts at its end."""
    target = draft_target()
    folder, config, tensors = specblock_folder(tmp_path / "draft")
    drafter = SpecBlockDrafter(target, folder)
    kind = SpecBlockKind(drafter)
    places = [(5, 6), (7, 10), (9, 13), (8, 13), (10, 17)]
    response = response_to(target, places)
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


class TestNames:
    def test_the_text_behind_the_name(self):
        assert split_updater("work/drafter@adapt=bandit") == ("work/drafter", "bandit")
        assert split_updater("work/drafter") == ("work/drafter", "")
        assert split_updater("demo@block=4") == ("demo@block=4", "")

    def test_other_drafters_cannot_be_updated(self, tmp_path):
        target = draft_target()
        for name in (str(dflash_folder(tmp_path / "dflash")[0]), "ngram"):
            with pytest.raises(InputError, match="only a SpecBlock drafter can be updated"):
                updatable(load_drafter(name, target), name)


def query(signal=6.0, tokens=20, verifications=10, seconds=1.0):
    return bandits.Query(signal=signal, tokens=tokens, verifications=verifications, seconds=seconds)


def revised(v, trigger, measured, cost, baseline, settings):
    """Lines 19 and 20: the values after an interval has closed."""
    action, signal = trigger
    if signal < settings.least_signal:
        return v
    seconds = cost + sum(s for _, s in measured)
    reward = (sum(t for t, _ in measured) / seconds - baseline) / signal
    return v | {action: (1 - settings.decay) * v[action] + settings.decay * reward}


def algorithm_1(queries, charges, settings, seed):
    """What happens at each query: (action, train, good, rollback, v_heads, v_full).

    A transcription with loose variables; the numbers in brackets are its line numbers.
    charges  seconds of an update that is due at query i
    """
    random = np.random.default_rng(seed)
    first, last = settings.first_epsilon, settings.last_epsilon
    warm_tokens = warm_seconds = 0.0
    v = {"heads": 0.0, "full": 0.0}
    buffer = {"heads": [], "full": []}
    events, free_from = 0, 0
    trigger = None  # (action, signal) of the update being measured
    measured = []  # (tokens, seconds) of the queries since
    cost = 0.0
    window, lengths = [], []
    told = []
    for i, q in enumerate(queries):
        if i < settings.warmup_queries:
            warm_tokens, warm_seconds = warm_tokens + q.tokens, warm_seconds + q.seconds
            told.append(("skip", False, False, False, 0.0, 0.0))
            continue
        if trigger:
            measured.append((q.tokens, q.seconds))
        s = q.signal  # (2)
        a = None
        if s > 0 and events < settings.cold_start_events:
            steps = settings.cold_start_events - 1
            epsilon = first - (first - last) * events / steps
            if random.random() < epsilon:
                a = ("heads", "full")[random.integers(2)]
        if a is None:
            gain_heads, gain_full = s * v["heads"], s * v["full"]  # (3)
            if gain_heads <= 0 and gain_full <= 0:  # (4)
                a = "skip"
            else:
                a = "heads" if gain_heads >= gain_full else "full"  # (7)
        train = False
        if a != "skip":  # (9)
            buffer[a].append(i)  # (10)
            if len(buffer[a]) >= settings.buffer_queries and i >= free_from:  # (12)
                if trigger:
                    v = revised(v, trigger, measured, cost, warm_tokens / warm_seconds, settings)
                trigger, measured, cost = (a, s), [], charges[i]  # (13), (17)
                buffer[a] = []  # (15)
                events, free_from, train = events + 1, i + 1 + settings.blocked_queries, True
        if trigger and len(measured) == settings.interval_queries:  # (19)
            v = revised(v, trigger, measured, cost, warm_tokens / warm_seconds, settings)
            trigger = None
        good = rollback = False
        window.append(q)
        if len(window) == settings.interval_queries:
            lengths.append(sum(w.tokens for w in window) / sum(w.verifications for w in window))
            window = []
            good = len(lengths) == 1 or lengths[-1] >= lengths[-2]
            rollback = len(lengths) >= 3 and lengths[-3] > lengths[-2] > lengths[-1]  # (22)
        if rollback:  # (23)
            v = {"heads": 0.0, "full": 0.0}
            buffer = {"heads": [], "full": []}
            events, free_from, trigger, lengths, train = 0, 0, None, [], False
        told.append((a, train, good, rollback, v["heads"], v["full"]))
    return told


def run(queries, charges, settings, seed):
    """The same of the bandit itself."""
    bandit, told = bandits.Bandit(settings, np.random.default_rng(seed)), []
    for q, charge in zip(queries, charges, strict=True):
        decision = bandit.after(q)
        if decision.train:
            bandit.charge(charge)
        values = (bandit.values.get("heads", 0.0), bandit.values.get("full", 0.0))
        told.append((decision.action, decision.train, decision.good, decision.rollback, *values))
    return told


def stream(seed, queries=600):
    """Queries whose throughput wanders, with signals around s_min and some of 0."""
    random = np.random.default_rng(seed)
    drift = np.cumsum(random.normal(0, 0.6, queries))
    return [
        query(
            signal=0.0 if random.random() < 0.1 else float(random.gamma(3.0, 2.5)),
            tokens=int(random.integers(20, 60)), verifications=int(random.integers(8, 20)),
            seconds=float(random.uniform(0.5, 1.5) * np.exp(-0.05 * drift[i])),
        )
        for i in range(queries)
    ]  # fmt: skip


SETTINGS = {
    "paper": BanditSettings(),
    "short": BanditSettings(interval_queries=3, buffer_queries=1),
    "hasty": BanditSettings(interval_queries=6, buffer_queries=1, blocked_queries=0),
    "eager": BanditSettings(
        warmup_queries=2, cold_start_events=20, first_epsilon=0.9, last_epsilon=0.5, decay=0.5
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_the_bandit_is_the_algorithm_on_random_streams(name, seed):
    queries = stream(seed)
    charges = np.random.default_rng(seed + 100).uniform(0.0, 3.0, len(queries)).tolist()
    found = run(queries, charges, SETTINGS[name], seed)
    expected = algorithm_1(queries, charges, SETTINGS[name], seed)
    for i, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own[:4] == other[:4], i
        assert own[4:] == pytest.approx(other[4:], abs=1e-12), i

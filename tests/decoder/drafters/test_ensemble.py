"""Two drafters as one: the union against its definition, what is learnt, and whole texts."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import InputError
from decoder.drafters.base import Drafter, DraftSession
from decoder.drafters.dflash.drafter import DFlashDrafter
from decoder.drafters.ensemble import EnsembleDrafter
from decoder.drafters.factory import load_drafter
from decoder.drafters.mixture import best_paths, join_drafts, new_statistics
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.tree.draft_tree import CandidateTree, Lattice, best_first
from tests.decoder.draft_models import PUBLISHED, dflash_folder, draft_target
from tests.decoder.models import PROMPT, as_paths, greedy, request
from tests.lab.drafters.test_pairs import random_pairs


def tree_of(paths):
    """A candidate tree of {path: probability given its parent}, shorter paths first."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    rows = {(): 0} | {path: row for row, path in enumerate(ordered, 1)}
    return CandidateTree(
        np.array([path[-1] for path in ordered], dtype=np.int64),
        np.array([rows[path[:-1]] for path in ordered], dtype=np.int64),
        np.array([paths[path] for path in ordered], dtype=np.float64),
    )


def scores_of(paths):
    """Path scores: the product of the probabilities on the way."""
    ways = {path: [path[:end] for end in range(1, len(path) + 1)] for path in paths}
    return {path: float(np.prod([paths[one] for one in way])) for path, way in ways.items()}


class Definition:
    """The union straight from what it is defined to be: every path, no search."""

    def __init__(self, first, second, statistics):
        self.first, self.second = first, second
        self.predicted, self.realised, self.counts, self.missed = statistics

    def behind(self, source, path):
        """{token: probability} that a source states behind a path."""
        if source == 1 and isinstance(self.second, Lattice):
            if len(path) >= len(self.second.tokens):
                return {}
            rows = self.second.tokens[len(path)], self.second.probabilities[len(path)]
            return dict(zip(*(row.tolist() for row in rows), strict=True))
        paths = self.second if source else self.first
        return {p[-1]: q for p, q in paths.items() if p[:-1] == path}

    def kind(self, source, path):
        stated = self.behind(source, path)
        if not stated or max(stated.values()) <= 0:
            return 0
        level = 1 + sum(max(stated.values()) >= edge for edge in (0.3, 0.6, 0.85))
        if source == 1 and isinstance(self.second, Lattice):
            best = [max(self.behind(1, path[:end]).items(), key=lambda i: i[1])[0]
                    for end in range(len(path))]  # fmt: skip
            level += 0 if list(path) == best else 4
        return level

    def corrected(self, source, path):
        stated = self.behind(source, path)
        if not stated:
            return {}
        slot = source, min(len(path) + 1, 4) - 1, self.kind(source, path)
        factors = (self.realised[slot] + 4.0) / (self.predicted[slot] + 4.0)
        best = max(stated, key=lambda token: stated[token])
        result = {t: q * factors[0 if t == best else 1] for t, q in stated.items()}
        total = sum(result.values())
        return {t: q / max(total, 1.0) for t, q in result.items()}

    def children(self, path):
        p, q = self.corrected(0, path), self.corrected(1, path)
        a, b = self.kind(0, path), self.kind(1, path)
        if not a or not b:
            return p if a else q
        weights = self.counts[min(len(path), 1), a, b]
        weights = weights / weights.sum()
        common = {t: p[t] * q[t] for t in p.keys() & q.keys()}
        neither = (1 - sum(p.values())) * (1 - sum(q.values()))
        divisor = sum(common.values()) + neither
        parts = (p, q, {t: share / divisor for t, share in common.items() if share})
        mixture = dict.fromkeys(p.keys() | q.keys(), 0.0)
        for weight, part in zip(weights, parts, strict=True):
            mixture = {t: share + weight * part.get(t, 0.0) for t, share in mixture.items()}
        named = sum(mixture.values())
        expected, realised = self.missed[min(len(path), 1), a, b]
        neither = min(neither * (realised + 1.0) / (expected + 1.0), 1.0)
        return {t: share * (1 - neither) / named for t, share in mixture.items() if named}

    def all_paths(self, path=()):
        result = {}
        for token, probability in self.children(path).items():
            if probability > 0:
                result[(*path, token)] = probability
                result |= self.all_paths((*path, token))
        return result


def random_tree(random, depth, tokens):
    paths, level = {}, [()]
    for _ in range(depth):
        following = []
        for path in level:
            count = int(random.integers(0, 3))
            shares = random.dirichlet(np.ones(count + 1))
            chosen = random.permutation(tokens)[:count].tolist()
            paths |= {(*path, t): float(q) for t, q in zip(chosen, shares, strict=False)}
            following += [(*path, t) for t in chosen]
        level = following
    return paths


def random_lattice(random, depth, width, tokens):
    shares = -np.sort(-random.dirichlet(np.full(width + 1, 0.4), depth)[:, :width], axis=1)
    chosen = [random.permutation(tokens)[:width] for _ in range(depth)]
    return Lattice(np.array(chosen, dtype=np.int64).reshape(depth, width), shares)


def cases(seed):
    """Two drafts, and statistics of some rounds."""
    random = np.random.default_rng(seed)
    first = random_tree(random, int(random.integers(0, 5)), 5)
    statistics = new_statistics()
    for part, most in zip(statistics, (30, 30, 3, 9), strict=True):
        part += random.uniform(0.1, most, part.shape)
    if seed % 2:
        second = random_lattice(random, int(random.integers(1, 5)), int(random.integers(1, 4)), 5)
        return first, second, second, statistics
    paths = random_tree(random, 3, 5)
    return first, paths, tree_of(paths), statistics


class TestUnion:
    @pytest.mark.slow
    @given(st.integers(0, 10**6), st.integers(1, 60))
    @settings(max_examples=150)
    def test_it_holds_the_best_paths_of_the_definition(self, seed, nodes):
        first, second, candidates, statistics = cases(seed)
        everything = Definition(first, second, statistics).all_paths()
        tree = best_paths(join_drafts(tree_of(first), candidates, nodes), statistics, nodes)
        found = as_paths(tree)
        assert found == pytest.approx({path: everything[path] for path in found})
        best = sorted(scores_of(everything).values(), reverse=True)[:nodes]
        scores = list(scores_of(found).values())
        assert scores == pytest.approx(best)

    def test_each_source_alone_is_itself(self):
        random = np.random.default_rng(3)
        paths, lattice = random_tree(random, 4, 5), random_lattice(random, 3, 3, 9)
        nothing, fresh = tree_of({}), new_statistics()
        kept = {path: q for path, q in paths.items() if q > 0}
        for first, second in ((tree_of(paths), nothing), (nothing, tree_of(paths))):
            tree = best_paths(join_drafts(first, second, 99), fresh, 99)
            assert as_paths(tree) == pytest.approx(kept)
        pairs = random_pairs(random, 3, 4)
        for one, first in product((lattice, pairs), (True, False)):
            alone = best_first(one, 20)
            sources = (one, nothing) if first else (nothing, one)
            drawn = best_first(best_paths(join_drafts(*sources, 20), fresh, 20), alone.nodes)
            np.testing.assert_array_equal(drawn.tokens, alone.tokens)
            np.testing.assert_array_equal(drawn.parents, alone.parents)
            np.testing.assert_allclose(drawn.scores, alone.scores)


class Stated(Drafter, DraftSession):
    """A drafter that states the same paths everywhere, and keeps the features it is given."""

    max_depth = 4

    def __init__(self, paths, name="stated", layers=()):
        self.name = self.architecture_hash = name
        self.paths, self.feature_layers, self.seen = paths, layers, []

    def start(self, prompt, features, logits=None):
        self.seen.append(features)
        return self

    def draft(self, context, request):
        return tree_of(self.paths)

    def observe(self, emitted, features):
        self.seen.append(features)


def root_children(drafter):
    drafted = drafter.start(np.array([1]), None).draft(np.array([1]), request(4))
    return {path[-1]: q for path, q in as_paths(drafted).items() if len(path) == 1}


class TestLearning:
    def drafter(self, first, second):
        return EnsembleDrafter(Stated(first), Stated(second, "other"))

    def learn(self, drafter, tokens):
        session = drafter.start(np.array([1]), None)
        for token in tokens:  # one a round
            session.draft(np.array([1]), request(4))
            session.observe([token], None)

    def test_a_source_that_is_always_wrong_fades(self):
        for right, wrong in ((0, 1), (1, 0)):
            drafter = self.drafter({(3,): 0.7}, {(4,): 0.7})
            before = root_children(drafter)
            self.learn(drafter, [3 + right] * 60)
            after = root_children(drafter)  # of another text
            assert after[3 + right] > 0.8 > before[3 + right]
            assert after[3 + wrong] < 0.05 < before[3 + wrong]

    def test_both_being_right_is_learnt_as_agreement(self):
        drafter, random = self.drafter({(3,): 0.7}, {(3,): 0.7}), np.random.default_rng(0)
        self.learn(drafter, [3 if random.random() < 0.95 else 9 for _ in range(400)])
        assert root_children(drafter)[3] == pytest.approx(0.95, abs=0.04)

    def test_sources_that_miss_together_are_found_out(self):
        """What both name comes true as often as it did, whatever independent sources would."""
        random = np.random.default_rng(0)
        independent, together = (self.drafter({(3,): 0.5}, {(4,): 0.5}) for _ in range(2))
        for drafter, tokens in ((independent, (3, 4, 9, 9)), (together, (3, 9, 9, 9))):
            self.learn(drafter, random.choice(tokens, 600).tolist())
        for drafter, share in ((independent, 0.5), (together, 0.25)):
            assert sum(root_children(drafter).values()) == pytest.approx(share, abs=0.1)


class TestBothDrafters:
    @pytest.mark.parametrize(("layers", "parts"), [
        (((1,), (2, 3)), ([0, 1], [2, 3, 4, 5])), (((), (2,)), (None, [0, 1])),
        (((5,), ()), ([0, 1], None)), (((), ()), (None, None)),
    ])  # fmt: skip
    def test_each_gets_the_features_of_its_layers(self, layers, parts):
        drafters = [Stated({}, str(i), own) for i, own in enumerate(layers)]
        drafter = EnsembleDrafter(*drafters)
        width = 2 * len(drafter.feature_layers)
        features = torch.arange(width).repeat(3, 1) if width else None
        session = drafter.start(np.array([1, 2, 3]), features)
        session.observe([4, 5, 6], features)
        for own, part in zip(drafters, parts, strict=True):
            for seen in own.seen:
                assert (None if seen is None else seen.tolist()) == (part and [part] * 3)

    def test_by_name(self, tmp_path):
        folder, target = dflash_folder(tmp_path / "draft")[0], draft_target()
        drafter = load_drafter(f"ngram + {folder}", target)
        assert isinstance(drafter, EnsembleDrafter)
        assert isinstance(drafter.first, NgramDrafter)
        assert isinstance(drafter.second, DFlashDrafter)
        assert drafter.feature_layers == drafter.second.feature_layers
        joint = dflash_folder(tmp_path / "a+b")[0]
        assert isinstance(load_drafter(str(joint), target), DFlashDrafter)
        for wrong in ("ngram+", "+ngram", "ngram+ngram+ngram"):
            with pytest.raises(InputError, match="does not name two drafters"):
                load_drafter(wrong, target)


def combined_decoder(tmp_path, second, policy, **options):
    target = draft_target("qwen3", torch.float64)
    names = [str(PUBLISHED[kind](tmp_path / kind)[0]) for kind in second.split("+")]
    drafter = load_drafter("+".join(names if len(names) == 2 else ["ngram", *names]), target)
    return TreeDecoder(target, drafter=drafter, policy=policy, **options)


@pytest.mark.slow
class TestWholeTexts:
    @pytest.mark.parametrize(("second", "policy"), [
        ("dflash", "fixed:60"), ("dspark", "fixed:8"), ("eagle3", "chain"),
        ("dflash+eagle3", "fixed:8"),
    ])  # fmt: skip
    def test_greedy_output_is_that_of_plain_decoding(self, tmp_path, second, policy):
        decoder = combined_decoder(tmp_path, second, policy)
        for prompt in (PROMPT, [9]):
            result = decoder.generate(prompt, max_new_tokens=30)
            assert result.token_ids == greedy(decoder.target.model, prompt, 30)

    def test_drawn_trees_need_both_drafters_whole_vocabularies(self, tmp_path):
        with pytest.raises(InputError, match="whole vocabulary"):
            combined_decoder(tmp_path, "dflash", "fixed:20", acceptance="traversal")

"""Every outcome of an acceptance rule with its exact probability, over a tiny vocabulary."""

import itertools
from functools import cache

import numpy as np
import torch
from scipy.stats import chi2

from decoder.tree.draft_tree import visibility
from tests.decoder.models import row_paths, shaped


class Script:
    """Random choices that follow a given list, then the first possible option each time."""

    def __init__(self, choices):
        self._choices = list(choices)
        self.taken, self.options, self.probability = [], [], 1.0

    def _choose(self, probabilities):
        possible = [option for option, chance in enumerate(probabilities) if chance > 0.0]
        step = len(self.taken)
        option = self._choices[step] if step < len(self._choices) else possible[0]
        self.taken.append(option)
        self.options.append(possible)
        self.probability *= probabilities[option]
        return option

    def __call__(self, logits):
        return self._choose(self.distribution(logits).tolist())

    def distribution(self, logits):
        return logits.exp()

    def happens(self, probability):
        assert 0.0 <= probability <= 1.0
        return self._choose([1.0 - probability, probability]) == 1

    def one_of(self, weights):
        return self._choose((weights / weights.sum()).tolist())


def chi_square_p(counts, expected):
    """p-value of counts over cells with an expectation of 5 or more; the rest are one cell."""
    counts, expected = np.ravel(counts), np.ravel(expected)
    assert counts[expected < 1e-9].sum() == 0, "nothing impossible may be drawn"
    large = expected >= 5
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] < 5:  # too little to test
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


def outcomes(rule):
    """(probability, result) of every way that rule(choices) can go."""
    waiting = [[]]
    while waiting:
        start = waiting.pop()
        script = Script(start)
        result = rule(script)
        yield script.probability, result
        for step in range(len(start), len(script.taken)):
            for other in script.options[step]:
                if other != script.taken[step]:
                    waiting.append([*script.taken[:step], other])


def ordered_draws(q, count):
    """(probability, tokens) of every draw of `count` distinct tokens from q, in order."""
    for tokens in itertools.permutations(range(len(q)), count):
        left, probability = float(sum(q)), 1.0
        for token in tokens:
            if q[token] == 0.0:
                probability = 0.0
                break
            probability *= float(q[token]) / left
            left -= float(q[token])
        if probability > 0.0:
            yield probability, tokens


def drawn_trees(parents, q):
    """(probability, tree) of every tree of a shape; q float64 [depth, vocab]."""
    parents = np.array(parents, dtype=np.int64)
    depths, inner = visibility(parents).sum(1) - 1, sorted(set(parents.tolist()))
    sources = np.full(len(parents) + 1, -1, dtype=np.int64)
    sources[inner] = depths[inner]
    children = {row: np.flatnonzero(parents == row) for row in inner}
    draws = [list(ordered_draws(q[depths[row]].tolist(), len(children[row]))) for row in inner]
    for combination in itertools.product(*draws):
        tokens = np.zeros(len(parents), dtype=np.int64)
        probability = 1.0
        for row, (chance, drawn) in zip(inner, combination, strict=True):
            tokens[children[row]] = drawn
            probability *= chance
        yield probability, shaped(parents, tokens, drawn=(q, sources))


class Target:
    """A target over a tiny vocabulary: its distribution after every path, by a function."""

    def __init__(self, after, vocab):
        self._after, self.vocab = cache(after), vocab

    def logits(self, tree):
        return torch.stack([self._after(path) for path in row_paths(tree)]).log()

    def joint(self, length):
        """[vocab] * length: the probability of every text of that length."""
        return self.continued((), length)

    def continued(self, path, length):
        """The same for texts that begin with `path`, given that they do."""
        whole = np.zeros((self.vocab,) * length)
        for rest in itertools.product(range(self.vocab), repeat=length - len(path)):
            text, chance = path, 1.0
            for token in rest:
                chance *= float(self._after(text)[token])
                text = (*text, token)
            whole[text] = chance
        return whole


def enumerate_rule(rule, trees, target, length):
    """Expected accepted tokens, and the distribution of the first `length` tokens emitted.

    rule   of (tree, logits), a function of the choices
    trees  iterable of (probability, tree)
    """
    emitted, accepted = {}, 0.0
    for chance, tree in trees:
        for branch, result in outcomes(rule(tree, target.logits(tree))):
            text = (*result.tokens, result.bonus)
            emitted[text] = emitted.get(text, 0.0) + chance * branch
            accepted += chance * branch * len(result.tokens)
    whole = np.zeros((target.vocab,) * length)
    for text, chance in emitted.items():
        whole += chance * target.continued(text, length)
    return accepted, whole

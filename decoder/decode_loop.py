"""The decode round: draft, choose a tree, verify, accept and commit, for all sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from costmodel.errors import InputError
from costmodel.online import OnlineEstimator
from decoder.acceptance.nodes import LogitRows
from decoder.acceptance.rules import AcceptanceRule, RuleName, accept_together
from decoder.device import to_device
from decoder.drafters.base import DraftRequest
from decoder.drafters.isolation import IsolatedDrafter, IsolatedSession
from decoder.model.runtime.eager import NO_TOKEN
from decoder.model.target import Step, Target
from decoder.policies.base import Limits, Policy, TreeRequest
from decoder.statistics import ForwardTimer, Round, StageTimer, Statistics
from decoder.text import ProcessedRows, TextRequest
from decoder.tree.draft_tree import EMPTY, Candidates, DraftTree, Lattice

FillShape = Callable[[DraftTree], DraftTree]  # from a chosen shape to the tree that is verified


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The parts of a decoder that its texts are generated with.

    cost          corrected by the time of every verification; None if no cost model is in use
    timer         of the verification forwards, for `cost`
    profile_line  one line: where the cost model came from
    text_numbers  the numbers of its texts, one for each that begins
    synchronise   end every stage by waiting for the device, so that its time is its own
    observers     called with every sequence's part of every round
    """

    target: Target
    drafter: IsolatedDrafter
    policy: Policy
    cost: OnlineEstimator | None
    timer: ForwardTimer
    acceptance: RuleName
    profile_line: str
    text_numbers: Iterator[int]
    synchronise: bool = False
    observers: tuple[Callable[[Round], None], ...] = ()


class TextSequence:
    """One text in progress.

    number   of the text among those of its decoder
    session  its drafting, from the prefill on
    """

    session: IsolatedSession

    def __init__(self, parts: LoopParts, request: TextRequest, place: int = 0) -> None:
        """place: its sequence in the target's cache"""
        self.number, self.place = next(parts.text_numbers), place
        self.token_ids: list[int] = []
        prompt = len(request.prompt)
        self.stats = Statistics(parts.policy.name, parts.profile_line, prompt)
        self.rule = AcceptanceRule(parts.acceptance, request.sampling, parts.target.device)
        self.sampling = request.sampling
        self._request = request
        self._tokens = np.empty(prompt + request.max_new_tokens + 1, dtype=np.int64)
        self._tokens[:prompt] = request.prompt
        self._length = prompt

    @property
    def context(self) -> NDArray[np.int64]:
        """Prompt and emitted tokens; the last is the bonus token, not yet in the cache."""
        return self._tokens[: self._length]

    @property
    def cached(self) -> int:
        return self._length - 1

    @property
    def wanted(self) -> int:
        return self._request.max_new_tokens - len(self.token_ids)

    @property
    def ended(self) -> bool:
        return bool(self.stats.finish)

    def processed(self, tree: DraftTree, logits: torch.Tensor) -> LogitRows:
        """The logits [rows, vocab] behind this text, after its logits processors."""
        if self._request.process is None:
            return logits
        return ProcessedRows(self._request.process, self.context, tree, logits)

    def take(self, emitted: Sequence[int]) -> Iterator[str]:
        """Add tokens until the text ends; yields the pieces of text that they complete."""
        for token in emitted:
            if self.ended:
                return
            self._tokens[self._length] = token
            self._length += 1
            self.token_ids.append(token)
            self.stats.new_tokens = len(self.token_ids)
            piece, request = "", self._request
            if (stream := request.stream) is not None:
                piece = request.stops.add(stream.add(token), stream.hidden(token))
            if request.stops.hit:
                self.stats.finish = "stop"
            elif token in request.ends:
                self.stats.finish = "eos"
            elif request.until is not None and request.until(self.token_ids):
                self.stats.finish = "stop"
            elif self.wanted <= 0:
                self.stats.finish = "length"
            if piece:
                yield piece
        if self.ended and self.stats.finish != "stop" and self._request.stream is not None:
            stops = self._request.stops
            rest = stops.add(self._request.stream.finish()) + stops.finish()
            if rest:
                yield rest

    def interrupt(self) -> None:
        if not self.ended:
            self.stats.finish = "interrupted"


def prefill(parts: LoopParts, sequence: TextSequence) -> int:
    """Run a new sequence's prompt and begin its drafting: its first token. Raises InputError."""
    started_s = perf_counter()
    target, prompt = parts.target, sequence.context
    logits = target.prefill(torch.from_numpy(prompt).to(target.device), sequence.place)
    bonus = sequence.rule.pick(sequence.processed(EMPTY, logits[None])[0])
    _refuse_no_token(bonus, len(prompt))
    sequence.session = parts.drafter.start(prompt, target.features(sequence.place), logits)
    sequence.stats.prefill_s = perf_counter() - started_s
    return bonus


def run_round(parts: LoopParts, sequences: Sequence[TextSequence]) -> list[Round]:
    """One round: the part of each sequence. Raises InputError for NaN or infinite logits."""
    timer = StageTimer(parts.target.device if parts.synchronise else None)
    context = sum(sequence.cached for sequence in sequences) // len(sequences)
    if parts.cost is not None:
        parts.cost.sampled = not all(sequence.rule.greedy for sequence in sequences)
    trees = _choose_trees(parts, sequences, context, timer)
    drafted = trees is not None
    if trees is None:
        trees = [EMPTY] * len(sequences)
    steps = [
        Step(int(sequence.context[-1]), tree, sequence.place)
        for sequence, tree in zip(sequences, trees, strict=True)
    ]
    nodes = sum(tree.nodes for tree in trees) / len(trees)
    if parts.cost is not None:
        parts.timer.start()
    logits = parts.target.verify(steps)
    if parts.cost is not None:
        rows = float(parts.cost.cost.bucket_rows(nodes, len(steps)))
        parts.timer.stop((rows, context, len(steps)))
    timer.end("verify_s")
    processed = [
        sequence.processed(tree, rows)
        for sequence, tree, rows in zip(sequences, trees, logits, strict=True)
    ]
    rules = [sequence.rule for sequence in sequences]
    outcomes = accept_together(rules, trees, processed, parts.target.chosen)
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        _refuse_no_token(outcome.bonus, len(sequence.context) + len(outcome.rows))
    timer.end("accept_s")
    if (cost := parts.cost) is not None:
        warning_before = cost.drift_warning
        for (rows, cached, batch), verify_s in parts.timer.finished():
            cost.observe(rows, cached, verify_s, batch)
        if cost.drift_warning is not None and warning_before is None:
            sequences[0].stats.warnings.append(cost.drift_warning)
    rounds = []
    for sequence, tree, outcome, of_tree in zip(sequences, trees, outcomes, logits, strict=True):
        finished = Round(
            tree=tree,
            accepted=outcome,
            context=sequence.cached,
            drafted=drafted,
            text=sequence.number,
            index=sequence.stats.rounds,
            batch=len(sequences),
            mean_nodes=nodes,
            mean_context=context,
            stages=timer.times,
        )
        _commit(parts, sequence, finished, of_tree)
        rounds.append(finished)
    timer.end("commit_s")
    for sequence, finished in zip(sequences, rounds, strict=True):
        sequence.stats.add(finished)
        for observe in parts.observers:
            observe(finished)
    return rounds


def _refuse_no_token(token: int, position: int) -> None:
    if token == NO_TOKEN:
        raise InputError(
            f"the target's logits for position {position} of the text (0 is the prompt's first "
            "token) are not numbers: NaN or infinite",
            hint="The weights are damaged, or overflow in this dtype: try --dtype float32.",
        )


def _choose_trees(
    parts: LoopParts, sequences: Sequence[TextSequence], context: int, timer: StageTimer
) -> list[DraftTree] | None:
    """The tree of each sequence; None if the round is a plain step without any draft."""
    policy, batch = parts.policy, len(sequences)
    # A round without a draft gives one token, so drafts serve the tokens wanted beyond it. A text
    # whose drafter has failed goes on without any.
    deepest = parts.drafter.drafter.deepest(policy.growth)
    depths = [
        0 if one.session.failure is not None else min(deepest, one.wanted - 1) for one in sequences
    ]
    # The policy is asked in every round, so that its last answer is always of this one.
    if not policy.wants_draft(context, batch) or max(depths) < 1:
        return None
    nodes = policy.wanted_nodes()
    width = min(nodes, parts.target.architecture.vocab)
    requests, drafting = [], [index for index in range(batch) if depths[index] >= 1]
    fills: list[FillShape] = []
    for index in drafting:
        candidates, fill = _draft(parts, sequences[index], depths[index], width)
        fills.append(fill)
        # The cache always has room for the policy's largest tree.
        limits = Limits(nodes=nodes, depth=depths[index])
        requests.append(TreeRequest(candidates, sequences[index].cached, limits))
    timer.end("draft_s")
    shapes = policy.choose_together(requests)
    timer.end("build_s")
    trees = [EMPTY] * batch
    for index, fill, shape in zip(drafting, fills, shapes, strict=True):
        trees[index] = fill(shape)
    timer.end("draft_s")
    return trees


def _draft(
    parts: LoopParts, sequence: TextSequence, depth: int, width: int
) -> tuple[Candidates, FillShape]:
    """The policy's candidates, and the function that makes the tree of its choice.

    A deterministic tree is the choice itself. For a sampled tree the policy sees expected
    acceptance in place of tokens, and the tokens are drawn after it has chosen the shape.
    """
    rule, session, context = sequence.rule, sequence.session, sequence.context
    drawn = rule.wants_drawn()
    tempered = drawn or parts.policy.tempered
    temperature = (sequence.sampling.temperature or 1.0) if tempered else 1.0
    if drawn and parts.drafter.drafter.draws == "levels":
        expected = rule.expectation.lattice(rule.expectation.usual_confidences(depth), width)
        return expected, lambda shape: session.draw(
            context, shape, temperature, rule.choices.generator
        )
    request = DraftRequest(
        depth=depth, width=width, growth=parts.policy.growth, temperature=temperature, whole=drawn
    )
    candidates = session.draft(context, request)
    if not drawn or session.failure is not None:
        return candidates, lambda shape: shape
    lattice = cast(Lattice, candidates)
    return rule.expected(lattice), lambda shape: rule.drawn(shape, lattice)


def _commit(
    parts: LoopParts, sequence: TextSequence, finished: Round, logits: torch.Tensor
) -> None:
    """Keep the accepted rows in the cache, and tell policy and drafter of the round."""
    rows = [0, *finished.accepted.rows]
    parts.target.commit(rows, sequence.place)
    parts.policy.observe(finished)
    features = parts.target.features(sequence.place)
    sequence.session.read_logits(logits[rows[-1]])
    if features is not None:  # copied, since the next forward may overwrite them
        features = features.index_select(0, to_device(np.array(rows), features.device))
    sequence.session.observe(finished.emitted, features)
    failure = sequence.session.failure
    if failure is not None and str(failure) not in sequence.stats.warnings:
        sequence.stats.warnings.append(str(failure))

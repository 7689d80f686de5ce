"""The decode cycle: draft, build, verify, accept and commit, for all sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from decoder.acceptance.choice import accept_together
from decoder.acceptance.rules import Accepted
from decoder.candidates import usable
from decoder.device import to_device
from decoder.drafters.base import DraftRequest, DrawingSession
from decoder.policies import Candidates, Limits, Offer
from decoder.runtime.stopwatch import Forward
from decoder.sequence import TextSequence
from decoder.statistics import Laps
from decoder.target import Step
from decoder.trace import RoundFacts, RoundRecord
from decoder.tree import EMPTY, DraftTree, Lattice

if TYPE_CHECKING:
    from decoder.engine import TreeDecoder

Fill = Callable[[DraftTree], DraftTree]  # from a chosen shape to the tree that is verified


def prefill(decoder: TreeDecoder, sequence: TextSequence) -> int:
    """Run the prompt of a new sequence; its first token."""
    target, started_s = decoder.target, perf_counter()
    prompt = sequence.context
    logits = target.prefill(torch.from_numpy(prompt).to(target.device), sequence.place)
    bonus = sequence.rule.pick(logits)
    if sequence.reader is not None:
        sequence.reader.read_logits(logits)
    sequence.session.start(prompt, target.features(sequence.place))
    sequence.stats.prefill_s = perf_counter() - started_s
    return bonus


def run_round(decoder: TreeDecoder, sequences: Sequence[TextSequence]) -> list[list[int]]:
    """One cycle; the tokens that each sequence emits, its new bonus token last."""
    started_s = perf_counter()
    laps = Laps(decoder.target.device if decoder.stage_times else None)
    trees = _choose_trees(decoder, sequences, laps)
    steps = [
        Step(int(sequence.context[-1]), tree, sequence.place)
        for sequence, tree in zip(sequences, trees, strict=True)
    ]
    logits = _verify(decoder, steps, _mean_context(sequences))
    laps.end("verify_s")
    outcomes = accept_together([sequence.rule for sequence in sequences], trees, logits)
    laps.end("accept_s")
    _observe_cost(decoder, sequences[0])
    for sequence, tree, outcome, rows in zip(sequences, trees, outcomes, logits, strict=True):
        _commit(decoder, sequence, tree, outcome, rows)
    laps.end("commit_s")
    _count(decoder, sequences, trees, outcomes, laps, perf_counter() - started_s)
    return [[*outcome.tokens, outcome.bonus] for outcome in outcomes]


def _choose_trees(
    decoder: TreeDecoder, sequences: Sequence[TextSequence], laps: Laps
) -> list[DraftTree]:
    """What to verify this round; empty trees where drafting does not pay."""
    policy, drafter = decoder.policy, decoder.drafter
    batch, context = len(sequences), _mean_context(sequences)
    # The round itself gives one token, so drafting pays only for what is wanted beyond it.
    depths = [min(drafter.max_depth, sequence.wanted - 1) for sequence in sequences]
    # Asked in any case: an answer of the round before would be taken for this one's.
    if not policy.wants_draft(context, batch) or max(depths) < 1:
        return [EMPTY] * batch
    nodes = policy.wanted_nodes()
    width = min(nodes, decoder.target.architecture.vocab)
    offers, drafting = [], [index for index in range(batch) if depths[index] >= 1]
    fills: list[Fill] = []
    for index in drafting:
        candidates, fill = _draft(decoder, sequences[index], depths[index], width)
        fills.append(fill)
        # Behind the root there is always room for the policy's largest tree.
        limits = Limits(nodes=nodes, depth=depths[index])
        offers.append(Offer(candidates, sequences[index].cached, limits))
    policy.drafted(float(np.mean([_drafted_share(sequences[index]) for index in drafting])))
    laps.end("draft_s")
    shapes = policy.choose_together(offers)
    laps.end("build_s")
    trees = [EMPTY] * batch
    for index, fill, shape in zip(drafting, fills, shapes, strict=True):
        trees[index] = fill(shape)
    laps.end("draft_s")
    return trees


def _drafted_share(sequence: TextSequence) -> float:
    return 1.0 if sequence.partial is None else sequence.partial.drafted_share()


def _draft(
    decoder: TreeDecoder, sequence: TextSequence, depth: int, width: int
) -> tuple[Candidates, Fill]:
    """What the policy chooses from, and what makes the tree of its choice.

    A deterministic tree is the choice itself. For a sampled one the policy sees expected
    acceptance in place of tokens, and the tokens are drawn once the shape is settled.
    """
    rule, session, context = sequence.rule, sequence.session, sequence.context
    temperature = sequence.sampling.temperature or 1.0
    drawn = rule.wants_drawn()
    if drawn and decoder.drafter.draws == "levels":
        drawing = cast(DrawingSession, session)
        return rule.expected_by_depth(depth, width), lambda shape: drawing.draw(
            context, shape, temperature, rule.pick.generator
        )
    request = DraftRequest(
        depth=depth,
        width=width,
        growth=decoder.policy.growth,
        temperature=temperature,
        whole=drawn,
    )
    candidates = usable(session.draft(context, request), decoder.target.architecture.vocab)
    if not drawn:
        return candidates, lambda shape: shape
    lattice = cast(Lattice, candidates)
    return rule.expected(lattice), lambda shape: rule.drawn(shape, lattice)


def _commit(
    decoder: TreeDecoder,
    sequence: TextSequence,
    tree: DraftTree,
    outcome: Accepted,
    logits: torch.Tensor,
) -> None:
    """Keep the accepted rows, and tell policy and drafter what the target did.

    logits  [rows, vocab] of the verification
    """
    kept = [0, *outcome.rows]
    decoder.target.commit(kept, sequence.place)
    decoder.policy.observe(tree, outcome.rows, sequence.cached)
    features = decoder.target.features(sequence.place)
    if sequence.reader is not None:
        sequence.reader.read_logits(logits[kept[-1]])
    if features is not None:  # copied, since the next forward may overwrite them
        features = features.index_select(0, to_device(np.array(kept), features.device))
    sequence.session.observe([*outcome.tokens, outcome.bonus], features)


def _count(
    decoder: TreeDecoder,
    sequences: Sequence[TextSequence],
    trees: list[DraftTree],
    outcomes: list[Accepted],
    laps: Laps,
    round_s: float,
) -> None:
    """Add the round to each sequence's statistics, and to the trace."""
    for sequence, tree, outcome in zip(sequences, trees, outcomes, strict=True):
        stats, accepted = sequence.stats, len(outcome.rows)
        stats.count_round(tree.nodes, accepted)
        stats.stages.add(laps.stages)
        stats.decode_s += round_s
        if decoder.on_round is not None:
            decoder.on_round(RoundFacts(tree, accepted, laps.stages, round_s))
        if decoder.trace is not None:
            verify_s, cycle_s = _predict(decoder, sequences, trees)
            record = RoundRecord(
                text=sequence.number,
                round=stats.rounds - 1,
                batch=len(sequences),
                context=sequence.cached,
                nodes=tree.nodes,
                depth=int(tree.depths.max(initial=0)),
                expected_committed=tree.expected_committed,
                accepted=accepted,
                predicted_verify_s=verify_s,
                predicted_cycle_s=cycle_s,
                stages=laps.stages,
            )
            decoder.trace.write(record)


def _verify(decoder: TreeDecoder, steps: Sequence[Step], context: int) -> list[torch.Tensor]:
    """The logits [rows, vocab] of each step; timed where the cost model learns from it."""
    source = decoder.cost_source
    if source is None:
        return decoder.target.verify(steps)
    rows = float(source.cost.cost.bucket_rows(np.mean([step.tree.nodes for step in steps])))
    decoder.stopwatch.start()
    logits = decoder.target.verify(steps)
    decoder.stopwatch.stop(Forward(rows, context, len(steps)))
    return logits


def _observe_cost(decoder: TreeDecoder, sequence: TextSequence) -> None:
    """Tell the cost model of the forwards whose time is known by now; warn of drift once."""
    source = decoder.cost_source
    if source is None:
        return
    known = source.cost.drift_warning
    finished = list(decoder.stopwatch.finished())
    # Ranks that had learnt of different forwards would choose different trees.
    for forward, verify_s in decoder.target.ranks.decide(lambda: finished):
        source.cost.observe(forward.rows, forward.context, verify_s, forward.batch)
    warning = source.cost.drift_warning
    if warning is not None and known is None:
        sequence.stats.warnings.append(warning)
        logging.getLogger(__name__).warning(warning)


def _predict(
    decoder: TreeDecoder, sequences: Sequence[TextSequence], trees: list[DraftTree]
) -> tuple[float | None, float | None]:
    """Seconds that the cost model expects of the forward and of the cycle."""
    if decoder.cost_source is None:
        return None, None
    cost, batch = decoder.cost_source.cost, len(sequences)
    nodes, context = float(np.mean([tree.nodes for tree in trees])), _mean_context(sequences)
    verify_s = float(cost.verify_s(nodes, context, batch))
    return verify_s, float(cost.cycle_s(np.array([nodes]), context, batch)[0])


def _mean_context(sequences: Sequence[TextSequence]) -> int:
    return sum(sequence.cached for sequence in sequences) // len(sequences)

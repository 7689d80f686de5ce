"""This project's decoder as an arm of a benchmark."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np

from costmodel.estimator import OnlineEstimator
from decoder.acceptance.sampling import Sampling
from decoder.engine import Generation, TreeDecoder
from decoder.run import DecodeRun
from decoder.runtime.graphs import GraphRuntime
from decoder.sequence import TextRequest, end_tokens
from decoder.text import StopStrings
from decoder.trace import RoundFacts
from decoder.training.adaptation import AdaptiveDrafter
from profiler.bench.contender import Details, Put
from profiler.bench.forced import ForcedTarget, PlainTexts
from profiler.bench.record import Arm, Rounds, Update

_DIGITS = 7


class OurContender:
    """A `TreeDecoder` of its own for one arm: what it learns, no other arm sees."""

    def __init__(
        self,
        arm: Arm,
        decoder: TreeDecoder,
        temperature: float,
        texts: PlainTexts | None = None,
    ) -> None:
        """texts  those that the decoder's `ForcedTarget` is to write; None: it writes its own"""
        self.arm = arm
        self.largest_tree = decoder.policy.max_nodes + 1
        self._decoder = decoder
        self._temperature = temperature
        self._texts = texts

    def prepare(self, tokens: int) -> None:
        """Reserve the cache, and capture forwards where the runtime captures any."""
        target = self._decoder.target
        cache = target.reserve(tokens)
        if isinstance(target.runtime, GraphRuntime):
            target.runtime.prepare(cache, self.largest_tree)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> OurDecoding:
        if self._texts is not None:
            cast(ForcedTarget, self._decoder.target).follow(self._texts.behind(ids, new_tokens))
        sampling = Sampling(temperature=self._temperature, seed=seed)
        request = TextRequest(
            prompt=list(ids),
            max_new_tokens=new_tokens,
            sampling=sampling,
            stream=None,  # token ids are what all arms are asked for
            stops=StopStrings(()),
            ends=end_tokens(self._decoder.target.model),
        )
        drafter = self._decoder.drafter
        if isinstance(drafter, AdaptiveDrafter):
            return AdaptiveDecoding(self._decoder, request, drafter)
        return OurDecoding(self._decoder, request)


class OurDecoding:
    """One text; rounds are only noted while the clock runs, and read afterwards."""

    def __init__(self, decoder: TreeDecoder, request: TextRequest) -> None:
        self._decoder, self._request = decoder, request
        self._facts: list[RoundFacts] = []
        source = decoder.cost_source
        # As it stands before the first round; its profile is shared, not copied.
        self._cost = None if source is None else _copy(source.cost)
        self._run: DecodeRun | None = None

    def run(self, put: Put) -> None:
        for _ in self.steps(put):
            pass

    def steps(self, put: Put) -> Iterator[None]:
        decoder = self._decoder
        decoder.on_round = self._facts.append
        try:
            self._run = run = DecodeRun(decoder, self._request)
            given = 0
            for _ in run.rounds():
                wanted = put(run.token_ids[given:])
                given = len(run.token_ids)
                if not wanted:
                    break
                yield
        finally:
            decoder.on_round = None

    def details(self) -> Details:
        if self._run is None:
            return Details()
        stats = self._run.stats
        stages = {name: round(value, _DIGITS) for name, value in asdict(stats.stages).items()}
        return Details(
            rounds=self._rounds(),
            stages=stages,
            warnings=tuple(stats.warnings),
        )

    def _rounds(self) -> Rounds:
        facts = self._facts
        depths = [int(fact.tree.depths.max(initial=0)) for fact in facts]
        by_depth = np.zeros(max(depths, default=0) + 1)
        for fact in facts:
            np.add.at(by_depth, fact.tree.depths, fact.tree.scores)
        verify_s, cycle_s = self._predicted()
        return Rounds(
            nodes=tuple(fact.tree.nodes for fact in facts),
            depths=tuple(depths),
            accepted=tuple(fact.accepted for fact in facts),
            expected=tuple(round(fact.tree.expected_committed, 6) for fact in facts),
            verify_s=tuple(round(fact.stages.verify_s, _DIGITS) for fact in facts),
            cycle_s=tuple(round(fact.round_s, _DIGITS) for fact in facts),
            predicted_verify_s=verify_s,
            predicted_cycle_s=cycle_s,
            expected_by_depth=tuple(round(float(score), 6) for score in by_depth[1:]),
        )

    def _predicted(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of forward and cycle expected before each round.

        The cost model as it stood before the text lives through its rounds again, outside
        the time that is measured.
        """
        cost, context = self._cost, len(self._request.prompt)
        verify_s: list[float] = []
        cycle_s: list[float] = []
        for fact in self._facts if cost is not None else ():
            nodes = np.array([float(fact.tree.nodes)])
            verify_s.append(round(float(cost.verify_s(nodes, context)[0]), _DIGITS))
            cycle_s.append(round(float(cost.cycle_s(nodes, context)[0]), _DIGITS))
            cost.observe(float(cost.cost.bucket_rows(nodes)[0]), context, fact.stages.verify_s)
            context += fact.accepted + 1
        return tuple(verify_s), tuple(cycle_s)


class AdaptiveDecoding(OurDecoding):
    """A text from which the arm's drafter learns."""

    def __init__(
        self, decoder: TreeDecoder, request: TextRequest, drafter: AdaptiveDrafter
    ) -> None:
        super().__init__(decoder, request)
        self._drafter = drafter

    def rehearse(self) -> None:
        self._drafter.rehearse(self._generation())

    def update(self) -> Update:
        decision = self._drafter.finish(self._generation())
        return Update(
            seconds=0.0, action=decision.action, trained=decision.train, rollback=decision.rollback
        )

    def _generation(self) -> Generation:
        if self._run is None:
            raise RuntimeError("a text is learnt from once it is decoded")
        return Generation(self._run.token_ids, None, self._run.stats)


def _copy(cost: OnlineEstimator) -> OnlineEstimator:
    return copy.deepcopy(cost, {id(cost.cost): cost.cost})

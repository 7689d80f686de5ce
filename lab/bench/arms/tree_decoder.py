"""This project's decoder as an arm of a benchmark."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from costmodel.online import OnlineEstimator
from decoder.acceptance.sampling import Sampling
from decoder.engine import Generation, TreeDecoder
from decoder.generation import DecodeRun
from decoder.statistics import Round
from decoder.text import TextRequest, end_tokens
from lab.bench.arms.base import ArmDecoding, ArmRunner, Details, Put
from lab.bench.arms.given_text import PlainTexts
from lab.bench.record import Arm, Rounds, Update
from lab.papers.specblock.updates.adaptation import AdaptiveDrafter

_DIGITS = 7


class TreeArm(ArmRunner):
    """An arm with its own `TreeDecoder`, which learns apart from other arms."""

    def __init__(
        self, arm: Arm, decoder: TreeDecoder, temperature: float, texts: PlainTexts | None = None
    ) -> None:
        """texts  what the decoder's `GivenTextTarget` writes; None for an ordinary target"""
        self.arm, self.largest_tree = arm, decoder.policy.max_nodes + 1
        self._decoder, self._temperature, self._texts = decoder, temperature, texts

    def prepare(self, tokens: int) -> None:
        """Reserve the cache, and capture forwards where the runtime uses CUDA graphs."""
        target = self._decoder.target
        target.reserve(tokens)
        target.prepare(self.largest_tree)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> TreeArmDecoding:
        if self._texts is not None:
            self._decoder.target.follow(self._texts.behind(ids, new_tokens))
        sampling = Sampling(temperature=self._temperature, seed=seed)
        request = TextRequest(
            prompt=list(ids),
            max_new_tokens=new_tokens,
            sampling=sampling,
            ends=end_tokens(self._decoder.target.model),
        )
        drafter = self._decoder.drafter
        if isinstance(drafter, AdaptiveDrafter):
            return AdaptiveArmDecoding(self._decoder, request, drafter)
        return TreeArmDecoding(self._decoder, request)


class TreeArmDecoding(ArmDecoding):
    """One text. Rounds are recorded while the clock runs, and evaluated afterwards."""

    pauses = True

    def __init__(self, decoder: TreeDecoder, request: TextRequest) -> None:
        self._decoder, self._request = decoder, request
        self._finished: list[Round] = []
        self._cost: OnlineEstimator | None = None
        if decoder.cost_source is not None:
            cost = decoder.cost_source.cost  # its state before the first round; profiles are shared
            self._cost = copy.deepcopy(cost, {id(cost.cost): cost.cost})
        self._run: DecodeRun | None = None

    def steps(self, put: Put) -> Iterator[None]:
        decoder = self._decoder
        decoder.on_round = self._finished.append
        try:
            self._run = run = DecodeRun(decoder.parts, self._request)
            passed = 0
            for _ in run.rounds():
                wanted = put(run.token_ids[passed:])
                passed = len(run.token_ids)
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
        return Details(rounds=self._rounds(), stages=stages, warnings=tuple(stats.warnings))

    def _rounds(self) -> Rounds:
        rounds = self._finished
        verify_s, cycle_s = self._predicted()
        return Rounds(
            nodes=tuple(one.nodes for one in rounds),
            depths=tuple(one.depth for one in rounds),
            accepted=tuple(one.accepted_tokens for one in rounds),
            expected=tuple(round(one.tree.expected_committed, 6) for one in rounds),
            verify_s=tuple(round(one.stages.verify_s, _DIGITS) for one in rounds),
            cycle_s=tuple(round(one.stages.total_s, _DIGITS) for one in rounds),
            predicted_verify_s=verify_s,
            predicted_cycle_s=cycle_s,
        )

    def _predicted(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Predicted seconds of forward and cycle before each round, by replaying a copied model."""
        cost = self._cost
        verify_s: list[float] = []
        cycle_s: list[float] = []
        for one in self._finished if cost is not None else ():
            nodes = np.array([float(one.nodes)])
            verify_s.append(round(float(cost.verify_s(nodes, one.context)[0]), _DIGITS))
            cycle_s.append(round(float(cost.cycle_s(nodes, one.context)[0]), _DIGITS))
            rows = float(cost.cost.bucket_rows(nodes)[0])
            cost.observe(rows, one.context, one.stages.verify_s)
        return tuple(verify_s), tuple(cycle_s)


class AdaptiveArmDecoding(TreeArmDecoding):
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
            raise RuntimeError("a drafter learns from a text after it was decoded")
        return Generation(self._run.token_ids, None, self._run.stats)

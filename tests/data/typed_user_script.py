"""A program of a user, which `mypy --strict` checks against the installed wheel."""

import numpy as np
import torch
from numpy.typing import NDArray

import rooftree


class RepeatSession(rooftree.DraftSession):
    def draft(self, context: NDArray[np.int64], request: rooftree.DraftRequest) -> rooftree.Lattice:
        return rooftree.Lattice(context[-1:, None], np.full((1, 1), 0.5))


class Repeat(rooftree.Drafter):
    name = "repeat"

    def start(
        self,
        prompt: NDArray[np.int64],
        features: torch.Tensor | None,
        logits: torch.Tensor | None = None,
    ) -> RepeatSession:
        return RepeatSession()


class Likely(rooftree.Policy):
    name = "likely"
    max_nodes = 16

    def choose(
        self, candidates: rooftree.Candidates, context: int, limits: rooftree.Limits
    ) -> rooftree.DraftTree:
        tree = rooftree.best_first(candidates, min(self.max_nodes, limits.nodes))
        return tree.first(int((tree.scores > 0.2).sum()))


measured = rooftree.calibrate(rooftree.CalibrationSettings(target="qwen3-8b", device="cpu"))
profile: rooftree.Profile = rooftree.find_profile("h100-sxm", "qwen3-8b")
traffic = rooftree.Traffic(prompt_tokens=1000, output_tokens=400)
request = rooftree.PlanRequest(target="qwen3-8b", gpus=("h100-sxm",), traffic=traffic, rate=5.0)
plan: rooftree.Plan = rooftree.plan(request)
decoder = rooftree.TreeDecoder.from_pretrained("./model", drafter=Repeat(), policy=Likely())
result: rooftree.Generation = decoder.generate("Hello", max_new_tokens=8, temperature=0.8, seed=1)
print(measured.path, profile.target.name, plan, result.text, result.stats.tokens_per_s)

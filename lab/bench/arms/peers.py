"""Peer arms: transformers' own `generate`, plain, with prompt lookup, and assisted."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from lab.bench.arms.base import ArmDecoding, ArmRunner, Put
from lab.bench.record import Arm

LOOKUP_TOKENS = 10  # as in transformers' documentation


def share_weights(model: Any, ends: frozenset[int]) -> Any:
    """A second model with its own modules and config around the same weight tensors.

    It does not see what this project's engine changes in its model (attention, fused layers).
    Its generation config holds only `ends` as end tokens, so that peers decode as our arms do.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    shared = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    ids = sorted(ends)
    shared.generation_config = GenerationConfig(
        eos_token_id=ids or None, pad_token_id=ids[0] if ids else 0
    )
    return shared


def tie_weights(shared: Any, model: Any) -> None:
    """Point the shared model at the weights of `model` again, after fusing has replaced some.

    It keeps its own where those of `model` are packed.
    """
    modules = dict(model.named_modules())
    for name, module in shared.named_modules():
        for key, weight in modules[name].named_parameters(recurse=False):
            if not weight.is_meta:
                setattr(module, key, weight)


class PeerArm(ArmRunner):
    """One way of calling transformers' `generate`, which grows its cache itself."""

    def __init__(
        self, arm: Arm, model: Any, temperature: float, options: Mapping[str, Any]
    ) -> None:
        self.arm = arm
        self._model = model
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._options = sampling | dict(options)

    def start(self, ids: Sequence[int], new_tokens: int, seed: int) -> PeerArmDecoding:
        arguments = {"max_new_tokens": new_tokens, **self._options}
        return PeerArmDecoding(self._model, list(ids), arguments, seed)


class PeerArmDecoding(ArmDecoding):
    """One call of `generate`, whose streamer hands over the tokens."""

    def __init__(self, model: Any, ids: list[int], arguments: Mapping[str, Any], seed: int) -> None:
        self._model, self._ids, self._arguments, self._seed = model, ids, arguments, seed

    def steps(self, put: Put) -> Iterator[None]:
        prompt = torch.tensor([self._ids], device=self._model.device)
        devices = [self._model.device] if self._model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # `generate` uses torch's global generator
            torch.manual_seed(self._seed)
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=_Streamer(put),
                **self._arguments,
            )
        yield from ()


class _Streamer(BaseStreamer):
    """Passes new tokens on; the first call, which brings the prompt, is dropped."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self._put(value.flatten().tolist())

    def end(self) -> None:
        return

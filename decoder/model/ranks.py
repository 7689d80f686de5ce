"""Tensor-parallel ranks: the processes that share one target, their collectives and layers.

Every rank holds a part of each layer and runs the same program. A forward adds up partial
products with `sum_`. Values that differ between ranks and decide the next step (times, free
memory, failures) pass through `largest`, `decide` or `any_text`. So all ranks take the same
steps, and none waits for a collective that another never calls. `ALONE` is a single process and
communicates with nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from costmodel.errors import DeviceError
from decoder.device import select_device

Value = TypeVar("Value")
# The name is new in torch 2.13.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankLost(DeviceError):
    """Another process of the group has ended, so collectives fail."""


class Ranks:
    """This process among those that share a target.

    rank, size  this process's number from 0, and the number of processes
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._muted = False

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process prints, writes files and decides."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in place."""
        if not self.alone and not self._muted:
            _together(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors [...] of one shape, stacked in order: [size, ...]."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.alone or self._muted:
            return gathered.copy_(tensor)
        source = tensor.contiguous()
        _together(lambda: ALL_GATHER(gathered.flatten(0, 1), source))
        return gathered

    def largest(self, value: float) -> float:
        """The largest of the ranks' values; waits for all of them."""
        if self.alone:
            return value
        result = torch.tensor([value], dtype=torch.float64)
        _together(lambda: dist.all_reduce(result, op=dist.ReduceOp.MAX))
        return float(result)

    def least(self, value: float) -> float:
        """The smallest of the ranks' values; waits for all of them."""
        return -self.largest(-value)

    def any_text(self, text: str) -> str:
        """The first non-empty text of the ranks; empty where all are."""
        if self.alone or self.largest(float(bool(text))) == 0:
            return text
        return next(other for other in self.collect(text) if other)

    def collect(self, value: Value) -> list[Value]:
        """The ranks' values in order, sent as pickles."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        _together(lambda: dist.all_gather_object(values, value))
        return values

    def decide(self, function: Callable[[], Value]) -> Value:
        """The first rank's result of the function, on all ranks, sent as a pickle."""
        if self.alone:
            return function()
        results = [function() if self.first else None]
        _together(lambda: dist.broadcast_object_list(results, device=torch.device("cpu")))
        return cast(Value, results[0])

    def connect(self, device: torch.device) -> None:
        """Run a first collective on the GPU, because NCCL must not connect during a capture."""
        self.gather(self.sum_(torch.ones(1, device=device)))
        torch.cuda.synchronize(device)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Forwards without communication: `sum_` and `gather` use this rank's tensor alone.

        The numbers are wrong, but the memory use is right: a rank can try by itself whether a
        forward fits.
        """
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before


ALONE = Ranks()


class SummedLinear(nn.Linear):
    """A linear layer whose input columns are split over the ranks; the bias is added once."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        """linear: a layer of this rank's sizes, dtype and device; its weights are not taken."""
        super().__init__(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The whole [..., out_features] of this rank's columns [..., in_features]."""
        summed = self._ranks.sum_(nn.functional.linear(input, self.weight))
        return summed if self.bias is None else summed + self.bias


class SplitHead(nn.Module):
    """An LM head whose vocabulary is split over the ranks; its logits are gathered.

    weight        [rows, hidden] of this rank, set by the loader
    out_features  the whole vocabulary
    width         most rows of a rank; the last ranks may have fewer
    rows          this rank's slice of the vocabulary
    """

    def __init__(self, vocab: int, ranks: Ranks) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.out_features = vocab
        self.width = -(-vocab // ranks.size)
        first = ranks.rank * self.width
        self.rows = slice(min(first, vocab), min(first + self.width, vocab))
        self._ranks = ranks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of hidden states [..., hidden]."""
        logits = nn.functional.linear(hidden, self.weight)
        missing = self.width - logits.shape[-1]
        if missing:
            logits = nn.functional.pad(logits, (0, missing))
        gathered = self._ranks.gather(logits)  # [size, ..., width]
        return gathered.movedim(0, -2).flatten(-2)[..., : self.out_features]


def join(store: dist.Store, rank: int, size: int) -> Ranks:
    """Form the group of the processes that torchrun started.

    store       where the processes find each other
    rank, size  this process's number, and how many there are
    Raises DeviceError where they are on several machines.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise DeviceError(
            f"the {size} processes are on several machines",
            hint="A target is shared by the GPUs of one machine: use --nproc-per-node alone.",
        )
    if dist.is_initialized():  # a group that ended in an error was left as it was
        dist.destroy_process_group()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return Ranks(rank, size)


def leave(ranks: Ranks) -> None:
    """Dissolve the group once all ranks have called this."""
    if not ranks.alone:
        ranks.largest(0.0)
        dist.destroy_process_group()


def rank_device(name: str | None, ranks: Ranks) -> torch.device:
    """The device of this rank: the GPU of its local number, or the CPU.

    Raises DeviceError where there is no such GPU, and for a name with a number (`cuda:1`).
    """
    device = select_device(name)
    if ranks.alone or device.type != "cuda":
        return device
    if device.index is not None:
        raise DeviceError(
            f"each of the {ranks.size} processes takes a GPU of its own, not {name}",
            hint="Use --device cuda; CUDA_VISIBLE_DEVICES chooses the GPUs.",
        )
    device = select_device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    ranks.connect(device)
    return device


def _together(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise RankLost(
            "another process of this group has ended",
            hint="What it says above, or the report of torchrun, tells why.",
        ) from error

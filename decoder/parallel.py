"""The processes that share one target, and what they have to agree on.

Each process (a rank) holds a part of every layer and runs the same program. A forward adds up
the parts of a product with `sum_`; whatever differs between processes and decides what is done
next (times, free memory, failures) passes through `largest`, `decide` or `any_text`, so that
all of them take the same steps and none waits for a collective that another never reaches.
A process on its own, `ALONE`, talks to nobody.
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
from decoder.launch import launched_rank, launched_size

Value = TypeVar("Value")
# torch 2.13 gave it the other name
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankLost(DeviceError):
    """Another process of the group has ended, so that nothing can be done together."""


class Ranks:
    """This process among those that share a target.

    rank, size  which of how many it is
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
        """Whether this is the process that speaks, writes files and decides."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, written over each."""
        if not self.alone and not self._muted:
            _together(lambda: dist.all_reduce(tensor))
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors [...] of one shape, one after another: [size, ...]."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.alone or self._muted:
            return gathered.copy_(tensor)
        given = tensor.contiguous()
        _together(lambda: ALL_GATHER(gathered.flatten(0, 1), given))
        return gathered

    def largest(self, value: float) -> float:
        """The largest of the ranks' values; waits for all of them."""
        if self.alone:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        _together(lambda: dist.all_reduce(found, op=dist.ReduceOp.MAX))
        return float(found)

    def least(self, value: float) -> float:
        return -self.largest(-value)

    def any_text(self, text: str) -> str:
        """The text of the first rank that has one; empty where none has."""
        if self.alone or self.largest(float(bool(text))) == 0:
            return text
        return next(found for found in self.collect(text) if found)

    def collect(self, value: Value) -> list[Value]:
        """The ranks' values, in order; they are pickled."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        _together(lambda: dist.all_gather_object(found, value))
        return found

    def decide(self, function: Callable[[], Value]) -> Value:
        """What the function returns on the first rank, on all of them; it is pickled."""
        if self.alone:
            return function()
        found = [function() if self.first else None]
        _together(lambda: dist.broadcast_object_list(found, device=torch.device("cpu")))
        return cast(Value, found[0])

    def connect(self, device: torch.device) -> None:
        """A first collective on a GPU: NCCL connects then, and must not within a capture."""
        self.gather(self.sum_(torch.ones(1, device=device)))
        torch.cuda.synchronize(device)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Forwards of this rank alone: `sum_` and `gather` fill in its own part.

        The numbers are wrong, but the memory is taken and no other rank is waited for, so
        that each can try whether a forward fits.
        """
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before


ALONE = Ranks()


class SummedLinear(nn.Linear):
    """A product whose input columns are split over the ranks; the bias is added once."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        """linear: a module with this rank's columns, of which only sizes and dtype are taken."""
        super().__init__(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        self._ranks = ranks

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] of this rank to the whole [..., out_features]."""
        summed = self._ranks.sum_(nn.functional.linear(input, self.weight))
        return summed if self.bias is None else summed + self.bias


class SplitHead(nn.Module):
    """An LM head whose vocabulary is split over the ranks, and the logits gathered.

    weight        [rows, hidden] of this rank, set by whoever loads it
    out_features  the whole vocabulary
    width         rows of a rank; the last ones may have fewer
    rows          which of the vocabulary this rank has
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


def join(store: dist.Store) -> Ranks:
    """Form the group of the processes that torchrun started. Raises DeviceError.

    store  where they find each other
    """
    rank, size = launched_rank(), launched_size()
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
    """Dissolve the group, once all have come here."""
    if not ranks.alone:
        ranks.largest(0.0)
        dist.destroy_process_group()


def rank_device(name: str | None, ranks: Ranks) -> torch.device:
    """The device of this rank: the GPU of its local number, or the CPU.

    Raises DeviceError where there is none, or where a number is asked for.
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

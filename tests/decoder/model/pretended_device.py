"""A CUDA device without one: tensors of PyTorch's FakeTensorMode, which hold no numbers.

Whatever asks the host for a number raises there, and so does what mixes CPU and CUDA tensors.
Our Triton kernels are recorded instead of launched; their outputs have the right shapes.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.decoder.model.compiled_kernels import recorded

SAME = (  # fills of no numbers, and what a CPU build lacks
    torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.pin_memory,
)  # fmt: skip

NAMES = {"__invert__": "bitwise_not"}  # of operations


class _Indexing(TorchFunctionMode):
    """Indexing and others by operations, as a CPU build's own functions ask CUDA itself."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function is torch.Tensor.__getitem__:
            return indexed(*arguments)
        if function is torch.Tensor.__setitem__:
            return assigned(*arguments)
        if function is torch.addmm and (named or {}).get("out") is not None:
            return torch.ops.aten.copy_(named["out"], function(*arguments))
        if function is torch.conv1d:
            return columns(*arguments, **(named or {}))
        if function in SAME or getattr(function, "__module__", "") == "torch.nn.init":
            return arguments[0] if arguments else named["tensor"]
        try:
            return function(*arguments, **(named or {}))
        except RuntimeError as error:
            if "is not linked with support for cuda" not in str(error):
                raise
            name = NAMES.get(function.__name__, function.__name__)
            return getattr(torch.ops.aten, name)(*arguments, **(named or {}))


def columns(input, weight, bias=None, stride=1, padding=0, **_):
    """The shape of a convolution along the rows of a text."""
    assert input.device == weight.device
    return input.new_empty(*input.shape[:-1], input.shape[-1] + 2 * padding + 1 - weight.shape[-1])


def indexed(tensor, index):
    """tensor[index] of whole numbers, slices, None, an ellipsis and tensors of indices."""
    view, places = view_of(tensor, index)
    return torch.ops.aten.index.Tensor(view, places) if places else view


def assigned(tensor, index, value):
    view, places = view_of(tensor, index)
    if places:
        return torch.ops.aten.index_put_(view, places, value)
    if isinstance(value, torch.Tensor):
        return torch.ops.aten.copy_(view, value)
    return view.fill_(value)


def view_of(tensor, index):
    """The view that all but tensors of indices make, and those with None between."""
    index = index if isinstance(index, tuple) else (index,)
    named = sum(one is not None and one is not Ellipsis for one in index)
    filled = []
    for one in index:
        every = [slice(None)] * (tensor.dim() - named)
        filled += every if one is Ellipsis else [one]
    axis, places = 0, []
    for one in filled:
        if one is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(one, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, one.start, one.stop, one.step or 1)
        elif not isinstance(one, torch.Tensor):
            tensor, axis = tensor.select(axis, one), axis - 1
        if isinstance(one, torch.Tensor):
            assert one.dtype != torch.bool, "a boolean index asks for the number of its rows"
            places += [None] * (axis - len(places)) + [one]
        axis += 1
    return tensor, places


@contextmanager
def pretended_device():
    """Inside it tensors on `cuda` can be made; gives the list of the launches of our kernels."""
    usable = mock.patch("decoder.model.runtime.fused.kernels_usable", lambda device: True)
    capability = mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    with usable, capability, recorded() as launched, FakeTensorMode(), _Indexing(), torch.no_grad():
        yield launched

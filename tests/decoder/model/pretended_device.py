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


class _Indexing(TorchFunctionMode):
    """Indexing and copies by operations, as a CPU build's own asks CUDA itself."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function is torch.Tensor.__getitem__:
            return indexed(*arguments)
        if function is torch.Tensor.__setitem__:
            return assigned(*arguments)
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*arguments, **(named or {}))
        return function(*arguments, **(named or {}))


def indexed(tensor, index):
    """tensor[index] of whole numbers, slices, None, an ellipsis and tensors of indices."""
    view, places = view_of(tensor, index)
    return torch.ops.aten.index.Tensor(view, places) if places else view


def assigned(tensor, index, value):
    view, places = view_of(tensor, index)
    return torch.ops.aten.index_put_(view, places, value) if places else view.copy_(value)


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

"""A graph capture for the CPU that replays as strictly as CUDA does.

Recording notes every operation with the very tensors it worked on; replaying runs the
operations again on those tensors and writes each result where the first one lies. No
Python of the captured function runs again, so a length or a slot that Python knew at
capture is frozen, as it would be in a CUDA graph.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decoder.model.runtime.capture import Capture


class ReplayCapture(Capture):
    """Counts what it records and replays; `fail_from` makes later recordings run out of memory."""

    def __init__(self, fail_from=None, budget_bytes=1 << 40):
        super().__init__(budget_bytes)
        self.recordings = 0
        self.replayed = 0
        self._fail_from = fail_from

    def recorded(self, function):
        if self._fail_from is not None and self.recordings >= self._fail_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.recordings += 1
        function()  # the warm-up
        with Recorder() as recorder:
            function()

        def replay():
            self.replayed += 1
            recorder.replay()

        return replay

    def used_bytes(self):
        return 0


class Recorder(TorchDispatchMode):
    """Notes the operations of its thread."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        results = operation(*arguments, **(named or {}))
        self.steps.append((operation, arguments, named or {}, results))
        return results

    def replay(self):
        for operation, arguments, named, results in self.steps:
            for kept, new in zip(
                tree_leaves(results), tree_leaves(operation(*arguments, **named)), strict=True
            ):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)

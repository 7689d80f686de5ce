"""What a first GPU would meet: devices, captures and memory, with `torch.cuda` pretended."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count, pairwise
from threading import Barrier, Event, Thread
from types import SimpleNamespace

import pytest
import torch

from costmodel.catalog import DeviceFingerprint
from costmodel.errors import DeviceError, RooftreeError
from decoder.device import select_device
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model import loading, making, runtime, selfcheck
from decoder.model.runtime import fused
from decoder.model.runtime.capture import BUCKETS, CaptureError, CudaCapture
from decoder.model.runtime.graphs import GraphRuntime
from decoder.model.target import Step
from decoder.nvml import failed_device, free_gpu_bytes
from decoder.profiling import measured_profile
from profiler import checks
from profiler.calibrate.decoder import Workload
from profiler.calibrate.sweep import OutOfMemory, Task
from profiler.commands.generate import command
from tests.decoder import models
from tests.decoder.model import test_gpu_runtime
from tests.decoder.model.test_graphs import graph_target
from tests.decoder.models import PROMPT, LatticeDrafter, greedy, random_model, target_of
from tests.decoder.replay import Recorder

GB = 1_000_000_000


class PretendedCuda:
    """The parts of `torch.cuda` that choose, capture and count; it fails when it is told to."""

    def __init__(self, monkeypatch):
        self.capability, self.built, self.current = (9, 0), ["sm_90"], 0
        self.stream_now, self.pools, self.modes, self.ended = "main", count(1), [], []
        self.initial_seed = lambda: 5
        self.emptied, self.broken, self.inside, self.drawing = 0, False, 0, "outside"
        self.free, self.held, self.used = 20 * GB, 0, 0
        stand_ins = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: self.current,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "a card",
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50 << 20),
            "get_arch_list": lambda: self.built,
            "mem_get_info": lambda device=None: (self.free, 24 * GB),
            "memory_reserved": lambda device=None: self.held,
            "memory_allocated": lambda device=None: self.used,
            "empty_cache": self.empty_cache,
            "synchronize": lambda device=None: None,
            "Stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
            "stream": nullcontext,
            "set_stream": lambda stream: setattr(self, "stream_now", "main"),
            "graph_pool_handle": lambda: next(self.pools),
            "CUDAGraph": SimpleNamespace,
            "graph": self.graph,
            "default_generators": [self],
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        end = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, end, lambda _, pool: self.ended.append(pool), raising=False)

    def graphsafe_set_state(self, state):
        self.drawing = state

    def empty_cache(self):
        self.emptied += 1

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode="global"):
        assert self.stream_now == "main" and pool not in self.ended
        assert self.drawing == "outside", "the generator is still in another capture"
        self.stream_now, self.inside, self.drawing = "side", self.inside + 1, "inside"
        assert self.inside == 1, "two captures at once"
        self.modes.append(capture_error_mode)
        with Recorder() as recorder:
            yield
        graph.replay = recorder.replay
        self.inside -= 1
        if self.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self.stream_now, self.drawing = "main", "outside"


@pytest.fixture
def cuda(monkeypatch):
    fused.kernels_refused.cache_clear()
    yield PretendedCuda(monkeypatch)
    fused.kernels_refused.cache_clear()


def test_a_gpu_that_is_not_current_is_refused(cuda, monkeypatch):
    monkeypatch.setattr("decoder.names.has_gpu", lambda: True)
    assert select_device("cuda:0").index == 0
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=1"):
        select_device("cuda:1")
    cuda.current = 1
    assert select_device("cuda:1").index == 1
    cuda.built = ["sm_80", "sm_90"]
    for capability, runs in (((8, 9), True), ((9, 0), True), ((12, 0), False), ((7, 5), False)):
        cuda.capability = capability
        with nullcontext() if runs else pytest.raises(DeviceError, match="is built for sm_80, sm_"):
            select_device("cuda:1")
    cuda.built, cuda.capability = ["sm_80", "compute_80"], (12, 0)
    assert select_device(None) == torch.device("cuda")


def test_an_invalidated_capture_does_not_poison_the_next(cuda, monkeypatch):
    fresh = SimpleNamespace(graphsafe_get_state=lambda: "outside")
    fresh.manual_seed = {5: fresh}.get
    monkeypatch.setattr(torch, "Generator", lambda device: fresh)
    capture = CudaCapture(torch.device("cuda"))
    cuda.broken = True
    with pytest.raises(CaptureError, match="previous error"):
        capture.record(lambda: None)
    assert (cuda.stream_now, cuda.ended, cuda.emptied) == ("main", [1], 1)
    cuda.broken = False
    capture.record(lambda: None)()
    assert cuda.modes == ["thread_local"] * 2


def test_two_threads_capture_one_after_the_other(cuda):
    captures = [CudaCapture(torch.device("cuda")) for _ in range(2)]
    started, done, seen = Event(), Event(), []

    def first():
        if cuda.inside:
            started.set()
            done.wait(0.2)  # while the other thread asks for a capture of its own

    def other():
        started.wait()
        captures[1].record(lambda: seen.append(cuda.inside))
        done.set()

    thread = Thread(target=other)
    thread.start()
    captures[0].record(first)
    thread.join()
    assert seen == [0, 0, 1]  # two warm-ups, and inside one capture


def test_two_threads_write_whole_texts_each_with_captures_of_its_own(cuda):
    """Streams, events and memory are pretended; a capture repeats its thread's operations."""
    begin, captured = Barrier(2), {}

    def write(seed):
        model = random_model("llama-gqa", seed=seed)
        target = target_of(model)
        capture = CudaCapture(torch.device("cuda"), GB)
        target.runtime = GraphRuntime(target._step, target._eager, capture)
        decoder = TreeDecoder(target, policy="fixed:7", drafter=LatticeDrafter(97), max_nodes=7)
        begin.wait()
        for prompt in (PROMPT, PROMPT[1:]):
            text = decoder.generate(prompt, max_new_tokens=12).token_ids
            assert text == greedy(model, prompt, 12)
        assert target.runtime.warnings == ()
        captured[seed] = len(target.runtime._captured[target.cache])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, (0, 1)))
    assert captured == {0: 4, 1: 4}  # 1, 2, 4 and 8 rows
    assert cuda.modes == ["thread_local"] * 8


def test_a_batch_of_unequal_texts_captures_the_ladder_at_most():
    model = random_model("llama-gqa")
    prompts = [(PROMPT * 3)[: 2 + text] for text in range(16)]
    target, capture = graph_target(model)
    decoder = TreeDecoder(target, policy="fixed:7", drafter=LatticeDrafter(97), max_nodes=7)
    results = decoder.generate_batch(prompts, max_new_tokens=5)
    assert results[3].token_ids == greedy(model, prompts[3], 5)
    assert TreeDecoder(target, policy="chain").policy.max_nodes == 255  # 256 rows: a full bucket
    prepared = capture.recordings
    for running in range(16, 0, -1):  # as the texts end one by one
        for tree in (models.random_tree(4, 0), models.random_tree(8, 0)):
            target.cache.truncate(9)
            target.verify([Step(5, tree, text) for text in range(running)])
    assert prepared == capture.recordings <= len(BUCKETS)


def test_a_growing_chat_captures_anew_only_where_its_cache_doubles(monkeypatch):
    target, capture = graph_target(random_model("qwen3", max_position_embeddings=512))
    monkeypatch.setattr("decoder.model.target.CAPACITY_STEP", 32)
    caches, recorded = [], []
    decoder = TreeDecoder(target, policy="fixed:3", drafter=NgramDrafter(), max_nodes=3)
    for turn in range(20):
        text = [token % 97 for token in range(8 + 12 * turn)]
        decoder.generate(text, max_new_tokens=4)
        caches.append(target.cache.capacity)
        recorded.append(capture.recordings)
    sizes = sorted(set(caches))
    assert len(sizes) <= 5 and all(b >= 2 * a for a, b in pairwise(sizes))
    assert len(set(recorded)) == len(sizes)


def test_a_refused_shape_is_tried_again_for_another_cache():
    target, capture = graph_target(random_model("llama-gqa"), fail_from=0)
    target.reserve(40)
    target.prepare(2)
    assert len(target.runtime.warnings) == 2
    capture._fail_from = None
    target.reserve(2000)
    target.prepare(2)
    assert target.runtime.warnings == () and capture.recordings == 2


def test_a_calibration_skips_what_cannot_be_captured_and_rounds_no_cache():
    target, _ = graph_target(random_model("llama-gqa"), budget_bytes=1 << 20, fail_from=1)
    workload = Workload(target, NgramDrafter(), capacity=100)
    workload.call(Task(kind="verify", size=4, context=8))()
    assert target.cache.capacity == 100
    with pytest.raises(OutOfMemory, match="not captured: CUDA out of memory"):
        workload.call(Task(kind="verify", size=16, context=8))()


@pytest.mark.parametrize(("error", "said"), [
    (torch.OutOfMemoryError("CUDA out of memory"), "too little free memory"),
    (torch.AcceleratorError("CUDA error: no kernel image is available"), "no kernel image"),
])  # fmt: skip
def test_errors_of_the_device_are_none_of_the_model(cuda, monkeypatch, error, said):
    def fail(*_):
        raise error

    device = torch.device("cpu")
    monkeypatch.setattr(loading, "_initialised", fail)
    with pytest.raises(DeviceError, match=said):
        loading.load_model("qwen3-0.6b", weights="random", dtype=torch.float32, device=device)
    monkeypatch.setattr(selfcheck, "_try", fail)
    monkeypatch.setattr(selfcheck, "_read", lambda key: None)
    monkeypatch.setattr(selfcheck, "_checked", {})
    with pytest.raises(RooftreeError, match=said):
        target_of(random_model("llama-gqa"))
    assert said in str(failed_device(error, device))


def pretend_kernels(monkeypatch, swiglu):
    kernels = SimpleNamespace(swiglu=swiglu)
    monkeypatch.setattr(fused, "triton_version", lambda: "3.7.0")
    monkeypatch.setitem(sys.modules, "decoder.model.runtime.kernels", kernels)
    monkeypatch.setattr(runtime, "kernels", kernels, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)


def test_where_triton_cannot_run_torch_computes(cuda, monkeypatch):
    device, trials = torch.device("cuda"), []

    def swiglu(gate_up):
        trials.append(gate_up)
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    pretend_kernels(monkeypatch, swiglu)
    cuda.capability = (7, 5)
    assert "older than compute capability 8.0" in fused.kernels_refused(device)
    assert not fused.kernels_usable(device)
    fused.kernels_refused.cache_clear()
    cuda.capability = (9, 0)
    assert "Failed to find C compiler" in fused.kernels_refused(device)
    assert fused.kernels_refused(device) and len(trials) == 1


def test_memory_that_torch_holds_and_does_not_use_is_free(cuda, monkeypatch):
    cuda.free, cuda.held, cuda.used = 2 * GB, 22 * GB, 15 * GB
    assert free_gpu_bytes(torch.device("cuda")) == 9 * GB
    loading._check_memory("x", 8 * GB, torch.device("cuda"))
    cuda.free, cuda.used = GB // 10, cuda.held
    asked_bytes = []
    monkeypatch.setattr(torch, "ones", lambda count, **_: asked_bytes.append(4 * count))
    measured_profile._buffer(torch.device("cuda"))
    assert asked_bytes == [200 << 20]  # four of its L2


def test_fusing_gives_the_old_weights_back(cuda, monkeypatch):
    loaded = target_of(random_model("llama-gqa"), "eager").loaded
    step = SimpleNamespace(device=torch.device("cuda"), rope=None, dtype=torch.float32)
    monkeypatch.setattr(making, "ModelStep", lambda model, owned: step)
    monkeypatch.setattr(making, "checked_structure", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        making.make_target(loaded)
    assert cuda.emptied == 1


def test_the_note_of_a_check_belongs_to_a_card_and_a_triton(cuda, monkeypatch):
    model = random_model("llama-gqa")
    step = SimpleNamespace(model=model, device=torch.device("cuda"), dtype=torch.float32)
    keys = []
    for cuda.capability, version in (((8, 0), "3.6.0"), ((9, 0), "3.6.0"), ((9, 0), "3.7.0")):
        monkeypatch.setattr(selfcheck, "triton_version", lambda version=version: version)
        keys.append(selfcheck._key(step))
    assert len(set(keys)) == 3


def test_the_gpu_tests_move_a_model_that_nothing_holds_on_the_cpu(monkeypatch):
    """Neither packed nor fused; and the help says where texts differ."""
    moved = []

    def cuda(model):
        moved.append(model)
        for module in model.modules():
            assert not type(module).__module__.startswith("decoder")
            assert "forward" not in vars(module)
        return model

    monkeypatch.setattr(torch.nn.Module, "cuda", cuda)
    monkeypatch.setattr(test_gpu_runtime, "make_target", lambda loaded, runtime: loaded)
    monkeypatch.setattr(test_gpu_runtime, "published", lambda *_: None)
    test_gpu_runtime.targets()
    test_gpu_runtime.drafting(None, "dflash", "graphs")
    assert len(moved) == 2
    told = " ".join(command.help.split())
    assert "in any dtype on a CPU" in told and "almost equal tokens may change places" in told


CU126, CU130 = ["sm_60", "sm_70", "sm_80", "sm_90"], ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
CARDS = {  # capability, GB, the wheel's architectures; what runs
    "T4": ((7, 5), 16, CU130, "float16, PyTorch", "Qwen/Qwen3-4B"),
    "V100": ((7, 0), 32, CU126, "float16, PyTorch", "Qwen/Qwen3-8B"),
    "RTX 3090": ((8, 6), 24, CU130, "bfloat16, our", "Qwen/Qwen3-8B"),
    "RTX 4090": ((8, 9), 24, CU126, "bfloat16, our", "Qwen/Qwen3-8B"),
    "RTX 5090": ((12, 0), 32, CU130, "bfloat16, our", "Qwen/Qwen3-8B"),
    "GB10": ((12, 1), 128, CU130, "bfloat16, our", "Qwen/Qwen3-8B"),
    "A100": ((8, 0), 80, CU126, "bfloat16, our", "Qwen/Qwen3-8B"),
    "H100": ((9, 0), 80, CU130, "bfloat16, our", "Qwen/Qwen3-8B"),
    "B200": ((10, 0), 180, CU130, "bfloat16, our", "Qwen/Qwen3-8B"),
    "V100 under cu130": ((7, 0), 32, CU130, None, ""),
    "RTX 5090 under cu126": ((12, 0), 32, CU126, None, ""),
}


@pytest.mark.parametrize("card", CARDS)
def test_doctor_says_what_runs_on_a_card(cuda, monkeypatch, card):
    cuda.capability, gigabytes, cuda.built, runs, model = CARDS[card]
    cuda.free = gigabytes * GB
    if runs is None:
        with pytest.raises(DeviceError, match="this torch is built for"):
            select_device()
        return
    here = DeviceFingerprint(kind="cuda", name=card, memory_bytes=gigabytes * GB)
    monkeypatch.setattr(checks, "fingerprint", lambda device: here)
    monkeypatch.setattr(checks, "device_by_name", lambda name: name)
    pretend_kernels(monkeypatch, lambda gate_up: None)
    assert runs in checks._device(select_device()).found
    assert loading.default_target(select_device()) == model

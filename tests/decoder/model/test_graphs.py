"""Captured forwards with a capture that replays operations on a CPU: tokens of plain decoding."""

import logging
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.errors import DeviceError, InputError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from decoder.drafters.ngram import NgramDrafter
from decoder.engine import TreeDecoder
from decoder.model.making import experts_capturable, runtime_kind
from decoder.model.runtime.capture import BUCKETS, bucket
from decoder.model.runtime.graphs import GraphRuntime
from decoder.model.target import Step, Target
from decoder.profiling.measured_profile import profile_key, runtime_section
from decoder.profiling.startup import ProfileChoice, find_cost
from decoder.tree.draft_tree import EMPTY
from tests.decoder import models
from tests.decoder.models import PROMPT, LatticeDrafter, OracleDrafter, greedy, random_model
from tests.decoder.replay import ReplayCapture

PEAKS = PeaksSection(source="measured", flops_per_s=1e11, bytes_per_s=1e10)


def graph_target(model, **capture) -> tuple[Target, ReplayCapture]:
    """A target whose forwards are captured by `ReplayCapture`."""
    target = models.target_of(model)
    stand_in = ReplayCapture(**capture)
    target.runtime = GraphRuntime(target._step, target._eager, stand_in)
    return target, stand_in


def test_graphs_serve_a_text_up_to_its_window():
    model = random_model("mistral", sliding_window=24)
    truth = greedy(model, PROMPT, 40)
    target, capture = graph_target(model)
    decoder = TreeDecoder(target, policy="fixed:7", drafter=OracleDrafter(PROMPT + truth, 97))
    assert decoder.generate(PROMPT, max_new_tokens=40).token_ids == truth
    assert capture.replayed > 1
    assert target.runtime.warnings == ("beyond a layer's window, forwards run eagerly",)


def test_buckets():
    wanted = {1: 1, 2: 2, 3: 4, 17: 24, 1024: 1024, 1025: 1025, 1026: 1536, 2049: None}
    assert {rows: bucket(rows) for rows in wanted} == wanted
    with pytest.raises(InputError, match="one row or more"):
        bucket(0)


# The routing of a mixture of experts asks the host, so it is never captured.
CAPTURABLE = [family for family in models.FAMILIES if family != "qwen3-moe"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policy"), [
    (family, ("fixed:7", "chain", "fixed:30", "plain")[turn % 4])
    for turn, family in enumerate(CAPTURABLE)
])  # fmt: skip
def test_padding_changes_no_token(family, policy):
    model = random_model(family)
    truth = greedy(model, PROMPT, 40)
    target, capture = graph_target(model)
    decoder = TreeDecoder(target, policy=policy, drafter=NgramDrafter())
    assert decoder.generate(PROMPT, max_new_tokens=40).token_ids == truth
    assert target.runtime.warnings == ()
    recorded = capture.recordings
    assert capture.replayed > 1
    assert recorded == len(target.runtime._captured[target.cache])  # one a bucket
    assert decoder.generate(PROMPT, max_new_tokens=40).token_ids == truth
    assert capture.recordings == recorded  # which serves all further rounds


@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    prompt=st.integers(1, 30),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15)
def test_logits_and_features_are_those_of_eager_forwards(rows, prompt, seed):
    model = random_model("qwen3")
    target, _ = graph_target(model)
    eager = models.target_of(model)
    trees = [models.random_tree(count, seed) if count > 1 else EMPTY for count in rows]
    steps = [Step(5, tree, sequence) for sequence, tree in enumerate(trees)]
    for one in (target, eager):
        one.capture((0, 1))
        one.reserve(120, sequences=len(rows))
        for sequence in range(len(rows)):
            one.prefill(torch.arange(prompt + sequence) % 97, sequence)
    for _ in range(2):  # the second time the recording is replayed
        logits, expected = target.verify(steps), eager.verify(steps)
        for sequence in range(len(rows)):
            torch.testing.assert_close(logits[sequence], expected[sequence])
            torch.testing.assert_close(target.features(sequence), eager.features(sequence))
            target.commit([0], sequence)
            eager.commit([0], sequence)


@pytest.mark.parametrize("captured", [0, 3, 5])
def test_running_out_of_memory_at_each_size_is_said_once(caplog, captured):
    """Buckets of 16, 8, 4, 2 and 1 rows are captured in this order until memory ends."""
    model = random_model("llama-gqa")
    truth = greedy(model, PROMPT, 12)
    target, capture = graph_target(model, fail_from=captured)
    decoder = TreeDecoder(target, policy="fixed:12", drafter=LatticeDrafter(97))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert decoder.generate(PROMPT, max_new_tokens=12).token_ids == truth
    said = [record for record in caplog.records if "running it eagerly" in record.message]
    assert capture.recordings == captured
    assert len(said) == len(target.runtime.warnings) == 5 - captured
    assert all("out of memory" in warning for warning in target.runtime.warnings)


def test_too_little_memory_for_a_cache_is_told_and_survived(monkeypatch):
    """A cache that cannot double has the tokens of its text; a text beyond that is refused."""
    model = random_model("llama-gqa", max_position_embeddings=4096)
    target, _ = graph_target(model)
    monkeypatch.setattr("decoder.model.target.CAPACITY_STEP", 64)

    def zeros(shape, **where):
        if shape[3] > 150:  # slots
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(shape, **where)

    monkeypatch.setattr(target, "new_cache", partial(target.new_cache, zeros=zeros))
    assert [target.reserve(tokens).capacity for tokens in (60, 70, 140)] == [64, 128, 140]
    with pytest.raises(InputError, match="no memory for a KV cache of 160 tokens"):
        target.reserve(160)
    decoder = TreeDecoder(target, policy="fixed:3", drafter=LatticeDrafter(97), max_nodes=3)
    assert decoder.generate(PROMPT, max_new_tokens=9).token_ids == greedy(model, PROMPT, 9)


def test_which_runtime_a_choice_means():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert runtime_kind("auto", cpu) == "packed"
    assert runtime_kind("auto", cpu, packable=False) == "eager"
    assert runtime_kind("packed", cpu, packable=False) == "eager"
    assert runtime_kind("eager", cpu) == "eager"
    assert runtime_kind("auto", cuda) == "graphs"
    assert runtime_kind("auto", cuda, capturable=False) == "eager"
    assert runtime_kind("graphs", cuda, capturable=False) == "graphs"
    with pytest.raises(InputError, match="'fast' is not a runtime"):
        runtime_kind("fast", cpu)
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        TreeDecoder.from_pretrained(random_model("llama-gqa"), runtime="graphs", device="cpu")


def test_the_profile_of_a_graph_runtime_says_so_and_is_priced_by_bucket():
    target, _ = graph_target(random_model("llama-gqa"))
    section = runtime_section(target)
    assert (section.kind, section.buckets) == ("graphs", BUCKETS)
    assert profile_key(target).runtime == "graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoder.profiling.startup.peaks_of", lambda *_: PEAKS)
        bare = (target, NgramDrafter(), ProfileChoice(calibrate=False))
        source, other_fit = find_cost(*bare), find_cost(*bare, Profile.linear_calibration)
    (warning,) = other_fit.warnings
    assert "fit needs a profile and is not used" in warning and source.warnings == ()
    seconds = source.cost.cost.verify_s(np.arange(32), 100)
    for low, high in ((4, 8), (8, 16), (16, 24), (24, 32)):
        assert len(set(seconds[low:high])) == 1
    assert len(set(seconds)) == 7  # buckets 1, 2, 4, 8, 16, 24 and 32
    rows = {batch: source.cost.cost.bucket_rows(127, batch) * batch for batch in (8, 9, 16, 17)}
    assert rows == {8: 1024, 9: 1536, 16: 2048, 17: 17 * 128}  # of a batch; more are not captured


@pytest.mark.parametrize(("way", "dtype", "capability", "expected"), [
    ("grouped_mm", torch.bfloat16, (9, 0), True),
    ("grouped_mm", torch.bfloat16, (8, 0), False),
    ("grouped_mm", torch.float16, (9, 0), False),
    ("eager", torch.bfloat16, (9, 0), False),
])  # fmt: skip
def test_experts_of_one_kernel_are_captured(monkeypatch, way, dtype, capability, expected):
    model = random_model("qwen3-moe")
    model.set_experts_implementation(way)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    step = SimpleNamespace(model=model, dtype=dtype, device=torch.device("cuda"))
    assert experts_capturable(step) is expected
    assert not experts_capturable(SimpleNamespace(**vars(step) | {"device": torch.device("cpu")}))

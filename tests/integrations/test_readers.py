"""Readers of other tools' files: every shape, time, unit and rate; one line for what is wrong."""

import csv
import io
import json
import re
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError
from costmodel.imports import read_times
from costmodel.planning.acceptance import find_acceptance, from_file
from integrations.model_optimizer.settings import speculation_profile
from integrations.vllm.read import read_metrics
from profiler.cli import run
from profiler.commands.fit import FORMATS
from tests.integrations.written_times import ROWS, forward_s, write_json, write_lines

DATA = Path(__file__).parent / "data"
LLAMA = DATA / "llama_bench.jsonl"
LINES = [json.loads(line) for line in LLAMA.read_text().splitlines()]
STEPS = {"sample_batch_tokens": [1, 8, 16, 64], "max_batch_tokens": 64}
STEPS |= {"sample_steps_per_sec": [100.0, 90.0, 80.0, 40.0]}
SUM = {"bias_seconds": 0.005, "bs_probes": [1, 4], "alpha_seconds": [0.0, 0.002]}
SUM |= {"m_probes": [1, 4, 16, 64], "theta_seconds": [0.0, 0.001, 0.002, 0.005]}


def read(name: str, path: Path, context: int | None = None):
    return read_times(name, path, context)


def times_of(table) -> dict[tuple[int, int, int], float]:
    p = table.points
    shapes = zip(p.rows, p.context, p.batch, strict=True)
    return dict(zip(((int(r), int(c), int(b)) for r, c, b in shapes), p.seconds, strict=True))


def test_files_that_llama_bench_wrote(tmp_path):
    table = read("llama-bench", LLAMA)
    times = times_of(table)
    assert len(times) == len(LINES)
    for line in LINES:
        count = max(line["n_gen"], 1)
        shape = (max(line["n_prompt"], 1), line["n_depth"] + (count - 1) // 2, 1)
        assert times[shape] == pytest.approx(median(line["samples_ns"]) / 1e9 / count)
    assert table.parameters == 134515008 and table.threads == LINES[0]["n_threads"]
    assert table.weights is not None and table.weights.dtype == "bfloat16"
    assert table.version is None  # it was built outside of a checkout
    changed = {"model_type": "llama 8B Q4_K - Medium", "build_commit": "abc", "build_number": 7}
    table = read("llama-bench", write_lines(tmp_path / "f", [one | changed for one in LINES]))
    assert table.weights is not None and table.weights.quantization == "q4_k-medium"
    assert table.weights.weight_bytes == pytest.approx(269100288 / 134515008)
    assert table.version == "llama.cpp abc (7)"
    more = [LINES[0] | {"n_prompt": 600}, LINES[0] | {"n_gen": 8}]
    table = read("llama-bench", write_lines(tmp_path / "f", [*LINES, *more]))
    assert len(table.points) == len(LINES) and sum(table.left_out.values()) == 2


def test_a_file_that_llama_batched_bench_wrote(tmp_path):
    path = DATA / "llama_batched_bench.md"
    table = read("llama-batched-bench", path)
    times = times_of(table)
    # Its own rates: 32 sequences of 32 tokens at 143.06 tokens/s; prompts of 2048 rows.
    assert times[1, 8192 + 15, 32] == pytest.approx(32 / 143.06, rel=1e-3)
    assert times[2048, 32768, 1] == pytest.approx(2048 / 1292.19)
    assert times[512, 0, 4] == pytest.approx(2048 / 3333.11, rel=1e-3)
    assert (512, 0, 1) not in times and sum(table.left_out.values()) == 16  # 1 warms up
    assert len(times) == 18 + 2 + 5 + 5 - 2  # two shapes are in both tables
    assert table.version == "llama.cpp 2f68ce7cf (6918)" and table.parameters == 30_530_000_000
    assert table.weights.quantization == "q8_0"
    assert table.weights.weight_bytes == pytest.approx(30.25 * 2**30 / 30.53e9)
    text = path.read_text()
    (tmp_path / "two").write_text(text + text.replace("30B.A3B", "8B"))
    with pytest.raises(InputError, match="2 models of llama-bench"):
        read("llama-batched-bench", tmp_path / "two")
    (tmp_path / "zero").write_text(text.replace("0.555", "0.000"))
    with pytest.raises(InputError, match="no time of a forward"):
        read("llama-batched-bench", tmp_path / "zero")


def test_both_tables_of_dspark_whose_context_must_be_given(tmp_path):
    steps = read("sglang-dspark", write_json(tmp_path / "a", STEPS), context=512)
    rates = {1: 100, 8: 90, 16: 80, 64: 40}
    expected = {(rows, 512, 1): 1 / rate for rows, rate in rates.items()}
    assert times_of(steps) == pytest.approx(expected)
    times = times_of(read("sglang-dspark", write_json(tmp_path / "b", SUM), context=512))
    # By hand: 4 requests of 4 rows are 16 rows; 10 rows of one lie half-way from 4 to 16.
    assert times[4, 512, 4] == pytest.approx(0.005 + 0.002 + 0.002)
    assert times[10, 512, 1] == pytest.approx(0.005 + 0.0 + 0.0015)
    assert max(rows * batch for rows, _, batch in times) <= 64
    with pytest.raises(InputError, match="does not say how many tokens were cached") as raised:
        read("sglang-dspark", write_json(tmp_path / "a", STEPS))
    assert "--context" in raised.value.hint


def test_tables_that_the_dspark_profiler_wrote():
    steps = times_of(read("sglang-dspark", DATA / "sglang_dspark_steps.json", context=512))
    # As its log prints them, in milliseconds.
    printed = {8: 97.3, 16: 128.0, 32: 184.4, 64: 263.2, 96: 323.1, 128: 395.7}
    found = {rows: seconds * 1e3 for (rows, _, _), seconds in steps.items()}
    assert found == pytest.approx(printed, abs=0.06)
    sums = times_of(read("sglang-dspark", DATA / "sglang_dspark_sums.json", context=512))
    assert {batch for _, _, batch in sums} == {1, 4, 16, 64}
    for (rows, _, batch), seconds in sums.items():
        made = 9e-3 + 1.2e-4 * batch + 1.1e-5 * rows * batch
        assert seconds == pytest.approx(made, rel=0.05)  # the tool rounds tokens to 64s


def without(record: dict, name: str) -> dict:
    return {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize(("name", "value", "message"), [
    ("sglang-dspark", without(STEPS, "sample_steps_per_sec"), "no field sample_steps_per_sec"),
    ("sglang-dspark", STEPS | {"sample_batch_tokens": [8, 1, 16, 64]}, "must ascend"),
    ("sglang-dspark", STEPS | {"sample_steps_per_sec": [1.0]}, "have 4 and 1 numbers"),
    ("sglang-dspark", SUM | {"bias_seconds": 0}, "bias_seconds must be a finite number above 0"),
    ("sglang-dspark", SUM | {"theta_seconds": None}, "theta_seconds must be a list"),
])  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path, name, value, message):
    path = write_json(tmp_path / "bad.json", value)
    with pytest.raises(InputError, match=rf"bad\.json.*{message}"):
        read(name, path, context=512)


@pytest.mark.parametrize(("change", "message"), [
    ({"n_prompt": None}, "line 2 n_prompt must be a whole number"),
    ({"n_threads": 64}, "line 2: n_threads is 64"),
    ({"samples_ns": [0]}, "samples_ns must be a finite number above 0"),
])  # fmt: skip
def test_what_is_wrong_in_a_line_is_named(tmp_path, change, message):
    path = write_lines(tmp_path / "bad.jsonl", [LINES[0], LINES[1] | change, *LINES[2:]])
    with pytest.raises(InputError, match=message):
        read("llama-bench", path)
    write_lines(path, [without(line, "n_prompt") for line in LINES])
    with pytest.raises(InputError, match="line 1 has no field n_prompt"):
        read("llama-bench", path)


@pytest.mark.parametrize(("change", "message"), [
    ({"gpu_info": "RTX 4090, RTX 4090", "split_mode": "layer"}, "it ran on 2 GPUs"),
    ({"n_gpu_layers": "0"}, "layers ran on the CPU"),
    ({"tensor_buft_overrides": "exps=CPU"}, "tensors were kept elsewhere"),
    ({"backends": "CUDA,RPC"}, r"other machines too \(RPC\)"),
    ({"no_kv_offload": True}, "its KV cache was in the CPU's memory"),
])  # fmt: skip
def test_what_ran_on_no_single_gpu_is_refused(tmp_path, change, message):
    gpu = {"backends": "CUDA", "gpu_info": "RTX 4090", "n_gpu_layers": 99, "model_size": 2 * 10**10}
    path = write_lines(tmp_path / "one.jsonl", [line | gpu for line in LINES])
    assert read("llama-bench", path).processor == "RTX 4090"
    with pytest.raises(InputError, match=message):
        read("llama-bench", write_lines(path, [line | gpu | change for line in LINES]))


DRESSES = st.builds(
    lambda coding, end: lambda text: text.replace("\n", end).encode(coding),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),  # with a byte order mark; PowerShell's
    st.sampled_from(["\n", "\r\n"]),
)
UNITS = {
    "seconds": 1.0,
    "forward_ms": 1e-3,
    "latency (us)": 1e-6,
    "Time [ns]": 1e-9,
    "t_msec": 1e-3,
}


@given(DRESSES, st.data())
def test_a_table_is_the_same_in_any_dress(tmp_path_factory, dress, data):
    """Coding, line ends, the order and case of columns, what parts them, units, other columns."""
    name = data.draw(st.sampled_from(sorted(UNITS)))
    columns = {"new_tokens": ROWS, "context_tokens": [256] * len(ROWS), "batch": [2] * len(ROWS)}
    columns["gpu, as told"] = ["x"] * len(ROWS)
    columns[name] = [forward_s(rows, 256, 2) / UNITS[name] for rows in ROWS]
    order = data.draw(st.permutations(sorted(columns)))
    text = io.StringIO()
    table = csv.writer(text, delimiter=data.draw(st.sampled_from(",;\t")), lineterminator="\n")
    heads = [data.draw(st.sampled_from([one, one.upper(), f" {one} "])) for one in order]
    table.writerows([heads, *zip(*(columns[one] for one in order), strict=True)])
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_bytes(dress(text.getvalue()))
    assert times_of(read("csv", path)) == pytest.approx(
        {(rows, 256, 2): forward_s(rows, 256, 2) for rows in ROWS}
    )
    table.writerows([[*heads, data.draw(st.sampled_from(heads)).title()]])
    path.write_bytes(dress(text.getvalue().splitlines()[-1]))
    with pytest.raises(InputError, match="stands twice"):
        read("csv", path)


@given(DRESSES, st.sampled_from(["llama-bench", "llama-batched-bench", "sglang-dspark"]))
def test_a_tools_file_is_the_same_in_any_dress(tmp_path_factory, dress, name):
    files = {"llama-bench": LLAMA, "llama-batched-bench": DATA / "llama_batched_bench.md"}
    source = files.get(name, DATA / "sglang_dspark_steps.json")
    path = tmp_path_factory.mktemp("file") / source.name
    path.write_bytes(dress(source.read_text(encoding="utf-8")))
    assert times_of(read(name, path, 512)) == times_of(read(name, source, 512))


def test_a_number_with_a_comma_is_no_two_cells(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("new_tokens,context_tokens,ms\n1,256,7.5\n2,1,024,7.6\n")
    with pytest.raises(InputError, match="line 3 has 4 cells, and the table 3 columns"):
        read("csv", path)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"[{", b'{"a": 1}', b"PAR1 PAR1"])
def test_damaged_files_are_one_line(tmp_path, name, content):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read(name, path, context=1)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


# Rates and tokens a step of nvidia/MiniMax-M2.7-DFlash on MT-Bench, as Model-Optimizer's pull
# requests 2247 and 2313 state them; the histogram is worked out from them and their 112,844 steps.
PUBLISHED = {
    "schema_version": "1.0", "measured": True, "method": "dflash", "num_speculative_tokens": 3,
    "draft_checkpoint": {"id": "nvidia/MiniMax-M2.7-DFlash"},
    "target_model": {"id": "MiniMaxAI/MiniMax-M2.7"},
    "conditional_accept_rates": [0.816082, 0.776577, 0.749591],
    "marginal_accept_rates": [0.816082, 0.633750, 0.475055],
    "mean_accept_length": 2.924887, "accept_length_model": "measured_per_k",
    "accept_length_by_k": {"3": 2.924887},
    "acceptance_length_histogram": {"1": 20754, "2": 20575, "3": 17907, "4": 53608},
}  # fmt: skip
NAMES = """vllm:spec_decode_num_drafts_total{engine="0",model_name="me/m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="me/m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="me/m"} 140.0
vllm:generation_tokens_total{engine="0",model_name="me/m"} 350.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="me/m"} 10.0
"""
BY_POSITION = (
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="me/m",position='
)
COUNTERS = NAMES + "".join(
    f'{BY_POSITION}"{i}"}} {n}\n' for i, n in enumerate(("80.0", "40.0", "2e1"))
)


def stored(folder, data) -> Path:
    path = folder / "file"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_published_profile_and_counters_of_vllm_give_their_lengths(tmp_path):
    read = from_file(stored(tmp_path, PUBLISHED))
    assert read.committed("chain", 3) == pytest.approx(2.9249, abs=1e-3)
    assert read.committed("chain", 1) == pytest.approx(1.816, abs=1e-3)
    assert read.measured.drafter == "nvidia/MiniMax-M2.7-DFlash" and read.spread == 0.05
    assert "drafts of 3 tokens alone" in read.doubts[0]
    by_k = PUBLISHED | {"accept_length_by_k": {"1": 1.7, "3": 2.8}}
    read = from_file(stored(tmp_path, by_k))
    assert read.chain[[1, 3]] == pytest.approx([1.7, 2.8]) and not read.doubts
    # 100 drafts in 350 - 140 - 10 = 200 rounds; 80, 40 and 20 accepted at three positions
    read = from_file(stored(tmp_path, f"# HELP vllm:x a counter\n{COUNTERS}"))
    assert read.chain == pytest.approx([1, 1.4, 1.6, 1.7]) and read.drafted_share == 0.5
    assert (read.measured.target, read.spread, read.doubts) == ("me/m", 0.1, ())
    short = COUNTERS.replace("300.0", "200.0")
    assert "2.0 of 3 tokens" in from_file(stored(tmp_path, short)).doubts[0]
    with pytest.raises(InputError, match="drafted nothing yet"):
        from_file(stored(tmp_path, COUNTERS.replace(" 100.0", " 0.0")))
    assert read_metrics("vllm:num_requests_running{} 1") is None


@pytest.mark.parametrize(("changed", "said"), [
    ({"measured": False, "note": "run specdec_bench"}, "no rates: run specdec_bench"),
    ({"conditional_accept_rates": None}, "nothing was measured"),
    ({"marginal_accept_rates": [0.9, 0.8, 0.7]}, "disagree"),
    ({"accept_length_by_k": {"x": 1}}, "cannot be read"),
])  # fmt: skip
def test_profiles_that_say_nothing_are_refused(tmp_path, changed, said):
    with pytest.raises(InputError, match=said):
        from_file(stored(tmp_path, PUBLISHED | changed))


def test_what_is_written_reads_back_and_exports_for_both(tmp_path, capsys):
    given = find_acceptance("mt_bench", "Qwen/Qwen3-8B")
    written = speculation_profile(given, "Qwen/Qwen3-8B", "dflash")
    assert not written["measured"] and written["method"] == "dflash"
    assert 1 + sum(written["marginal_accept_rates"]) == pytest.approx(given.chain[-1], abs=1e-4)
    assert from_file(stored(tmp_path, written | {"measured": True})).chain == pytest.approx(
        given.chain, abs=1e-4
    )
    # vLLM's synthetic rates are of all positions up to each one, as many as the longest draft
    asked = ["export", "h100-sxm/qwen3-8b", "--acceptance", str(stored(tmp_path, COUNTERS))]
    assert run([*asked, "--engine", "model-optimizer"]) == 2
    assert "not of Qwen/Qwen3-8B" in capsys.readouterr().err
    (tmp_path / "file").write_text(COUNTERS.replace("me/m", "Qwen/Qwen3-8B"))
    assert run([*asked, "--engine", "model-optimizer"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["measured"] and record["conditional_accept_rates"] == [0.4, 0.5, 0.5]
    assert run([*asked, "--engine", "vllm-synthetic"]) == 0
    config = json.loads(re.search(r"--speculative-config '(.*)'", capsys.readouterr().out)[1])
    most = config["num_speculative_tokens"]
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == list(np.round([0.4, 0.2, 0.1][:most], 6))

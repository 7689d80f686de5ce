"""File formats that are read without a model: sound files, and what the tool does with them.

Profiles, whose mutants are also planned with and chosen from, are in `lab.studies.faults.profiles`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from costmodel.catalog import find_target, load_devices, load_targets, resolve_target
from costmodel.compose.profiles import ComposeOptions, compose
from costmodel.imports.csv_points import read_points
from costmodel.io import read_yaml, shipped_directory
from costmodel.planning.acceptance import find_acceptance
from costmodel.planning.options import PlanOptions, request_from_options
from costmodel.planning.search import plan
from costmodel.planning.traffic import read_trace
from lab.bench.analysis.summary import derived
from lab.bench.prompts import read_files
from lab.bench.report.page import page
from lab.bench.report.terminal import print_result
from lab.bench.store import read_result
from lab.studies.faults.judge import Wrong
from lab.studies.faults.mutations import Kind
from profiler.calibrate.sweep import _recorded
from profiler.commands.generate import read_prompts
from profiler.measure.journal import Journal
from profiler.measure.lock import _owner
from profiler.report.plan_tables import print_tables

RESULTS = Path(__file__).parents[1] / "results"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of files.

    make   writes sound files into an empty folder
    kinds  how the files are mutated, by a pattern of their paths
    use    does with the folder what the tool does with such files; raises RooftreeError for
           files that it refuses, and `Wrong` where it should have
    """

    name: str
    make: Callable[[Path], None]
    kinds: Mapping[str, Kind]
    use: Callable[[Path], None]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Print to nowhere in the body."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def finite(values: object, what: str) -> None:
    """Raise Wrong unless all values are finite numbers above 0."""
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise Wrong(f"{what} is no finite number above 0")


def newest(folder: Path, pattern: str) -> Path:
    """The file that was written last: the mutated one, where sound ones lie beside it."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def one_in(count: int, path: Path) -> bool:
    """Whether a file is among those that get the slow checks too; always the same for a content."""
    return zlib.crc32(path.read_bytes()) % count == 0


def make_prompts(folder: Path) -> None:
    lines = [
        {"id": f"p{i}", "category": "math", "prompt": f"What is {i} \u00d7 7?\u2028Say it."}
        for i in range(4)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")


def use_prompts(folder: Path) -> None:
    path = folder / "prompts.jsonl"
    for identity, text in read_prompts((), path, None):
        (identity + text).encode()
    for prompt in read_files((path,), 2, 0)[0]:
        (prompt.id + prompt.category + prompt.prompt).encode()


def make_journal(folder: Path) -> None:
    header = {"device": "cpu", "target": "abc", "contexts": [32, 128], "seed": 0}
    with Journal(folder / "a.jsonl", header) as journal:
        for number in range(12):
            task = {"kind": "verify", "size": 1 + number % 3, "context": 32, "batch": 1}
            journal.append(task | {"seconds": 1e-3 * (number + 1), "disturbance": ""})


def use_journal(folder: Path) -> None:
    """A damaged line costs one sample, and the next run writes behind the others."""
    path = folder / "a.jsonl"
    before = path.read_bytes()
    header = {"device": "cpu", "target": "abc", "contexts": [32, 128], "seed": 0}
    with Journal(path, header) as journal:
        kept, damaged = len(journal.records), journal.damaged
        samples, _ = _recorded(journal)
        for values in samples.values():
            finite([seconds for _, seconds, _ in values], "a sample")
        journal.append({"kind": "plain", "size": 1, "context": 0, "batch": 1, "seconds": 1.0})
    whole = before[: before.rfind(b"\n") + 1].count(b"\n") - 1
    if kept + damaged < whole and b"\n\n" not in before:
        raise Wrong(f"{kept} records and {damaged} damaged of {whole} lines")
    with Journal(path, header) as journal:
        if len(journal.records) != kept + 1:
            raise Wrong("a record was lost between two runs")


def make_acceptance(folder: Path) -> None:
    rounds = {"accepted_depths": [3, 0, 0, 5], "tree_nodes": [7, 7, 0, 7]}
    curve = {"nodes": [0, 1, 4, 16], "committed": [1, 1.7, 2.4, 3.1], "spread": 0.1}
    depths = {"by_depth": [0.8, 0.7, 0.6], "rounds": 400, "drafted_share": 0.9}
    forms = {"rounds": rounds, "curve": {"acceptance": curve}, "depths": depths}
    forms["arm"] = {"acceptance_by_arm": {"chain": depths}}
    for name, form in forms.items():
        (folder / f"{name}.json").write_text(json.dumps(form))


def use_acceptance(folder: Path) -> None:
    path = newest(folder, "*.json")  # each takes a while
    found = find_acceptance(f"{path}{'#chain' if path.stem == 'arm' else ''}", LLAMA)
    finite(found.tree, "a committed length")
    finite(found.chain, "a committed length")
    if not math.isfinite(found.spread):
        raise Wrong("the spread is not finite")


def make_result(folder: Path) -> None:
    """Two prompts of a stored result."""
    data = json.loads((RESULTS / "bench_30_prompts.json").read_text())
    data["prompts"] = data["prompts"][:2]
    names = {prompt["id"] for prompt in data["prompts"]}
    data["responses"] = [one for one in data["responses"] if one["prompt"] in names]
    (folder / "result.json").write_text(json.dumps(data))


def use_result(folder: Path) -> None:
    result = read_result(folder / "result.json")
    json.dumps(derived(result), allow_nan=False)
    if one_in(4, folder / "result.json"):
        with silent():
            print_result(result)
    if one_in(40, folder / "result.json"):  # its pictures take a second
        page(result)


def make_catalogue(folder: Path) -> None:
    """Some entries of the shipped files."""
    for name in ("devices.yaml", "targets.yaml"):
        every = read_yaml(shipped_directory() / name)
        entries = dict(list(every.items())[::5])
        full = [entry["like"] for entry in entries.values() if "like" in entry]
        entries |= {key: every[key] for key in full}
        (folder / name).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")


def use_catalogue(folder: Path) -> None:
    for device in load_devices(folder / "devices.yaml").values():
        finite([device.peaks.flops_per_s, device.peaks.bytes_per_s, device.tdp_w], "a figure")
        finite([device.memory_bytes, device.sm_count, device.l2_bytes], "a figure")
    for target in load_targets(folder / "targets.yaml").values():
        finite([target.architecture.parameters], "a size")
        json.dumps(target.hf_config)


def make_config(folder: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        "eos_token_id": 151645, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def use_config(folder: Path) -> None:
    """A folder's config as the planner reads it, and a plan from it."""
    target = resolve_target(str(folder))
    finite([target.architecture.parameters], "a size")
    if one_in(20, folder / "config.json"):
        with silent():
            print_tables(plan(request_from_options(plan_options(target=str(folder)))))


def plan_options(**changes: object) -> PlanOptions:
    """A small plan on one shipped profile."""
    given: dict[str, object] = {"target": "Qwen/Qwen3-8B", "gpus": "h100-sxm", "rate": "5/s"}
    given |= {"prompt_tokens": 500.0, "output_tokens": 100.0, "policy": "plain"}
    return PlanOptions(**(given | changes))  # type: ignore[arg-type]


def make_trace(folder: Path) -> None:
    rows = [f"{0.4 * i:.2f},{100 + i},{20 + i}" for i in range(30)]
    text = "\n".join(["arrival_s,prompt_tokens,output_tokens", *rows])
    (folder / "trace.csv").write_text(text + "\n")


def use_trace(folder: Path) -> None:
    trace = read_trace(folder / "trace.csv")
    finite(trace.prompt_tokens, "a prompt")
    finite(trace.output_tokens, "an answer")


def make_times(folder: Path) -> None:
    rows = [
        f"{rows},{context},{1e-2 + 1e-5 * rows + 1e-8 * rows * context}"
        for rows in (1, 2, 4, 8, 16, 64)
        for context in (0, 512, 4096)
    ]
    (folder / "times.csv").write_text("\n".join(["new_tokens,context_tokens,seconds", *rows]))


def use_times(folder: Path) -> None:
    points = read_points(folder / "times.csv")
    finite(points.seconds, "a time")


OPERATORS = "rtx-pro-6000-server_llama-3.1-8b_tp1"


def make_operators(folder: Path) -> None:
    """Operator tables of a made-up speed, in the form of fused kernels."""
    place = folder / OPERATORS
    place.mkdir()
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    layers = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embedding", "layernorm",
              "rotary_emb", "act_fn", "final_layernorm")  # fmt: skip
    dense = [f"{name},{n},{20 + i + 0.1 * n}" for i, name in enumerate(layers) for n in sizes]
    heads = [f"lm_head,{n},{700 + n}" for n in sizes[:8]]
    attention = [
        f"{rows},{cached},0,0,{5 + 0.02 * rows + 1e-5 * rows * (cached + rows)}"
        for rows in sizes[4:]
        for cached in (0, 512, 4096)
    ]
    attention += [
        f"0,0,{batch},{cached},{8 + 0.002 * batch * cached}"
        for batch in (1, 2, 4, 8)
        for cached in (16, 256, 1024, 4096, 16384)
    ]
    for name, head, rows in (
        ("dense.csv", "layer,tokens,time_us", dense),
        ("per_sequence.csv", "layer,sequences,time_us", heads),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention),
    ):
        (place / name).write_text("\n".join([head, *rows]) + "\n")


def use_operators(folder: Path) -> None:
    target = find_target("qwen3-8b").architecture
    profile = compose(ComposeOptions(target=target, operators=folder / OPERATORS))
    predict = profile.verify_calibration().predict_s
    for rows, context in ((1, 0), (64, 2048), (300, 12000)):
        finite(predict(np.array([rows]), np.array([context]), np.array([1])), "a time")


def make_owner(folder: Path) -> None:
    (folder / "gpu.lock").write_text('{"pid": 4711, "started": "2026-01-02 03:04:05"}')


def use_owner(folder: Path) -> None:
    """The words about who holds a lock; a file that does not say gives none."""
    if len(_owner(folder / "gpu.lock")) > 80:
        raise Wrong("too many words about a process")


FORMATS = (
    Format(name="prompts", make=make_prompts, kinds={"*.jsonl": "jsonl"}, use=use_prompts),
    Format(name="journal", make=make_journal, kinds={"*.jsonl": "jsonl"}, use=use_journal),
    Format(name="acceptance", make=make_acceptance, kinds={"*.json": "json"}, use=use_acceptance),
    Format(name="result", make=make_result, kinds={"*.json": "json"}, use=use_result),
    Format(name="catalogue", make=make_catalogue, kinds={"*.yaml": "yaml"}, use=use_catalogue),
    Format(name="config", make=make_config, kinds={"*.json": "json"}, use=use_config),
    Format(name="trace", make=make_trace, kinds={"*.csv": "csv"}, use=use_trace),
    Format(name="times", make=make_times, kinds={"*.csv": "csv"}, use=use_times),
    Format(name="owner", make=make_owner, kinds={"*.lock": "json"}, use=use_owner),
    Format(name="operators", make=make_operators, kinds={"*/*.csv": "csv"}, use=use_operators),
)

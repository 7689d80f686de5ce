"""Damaged files of every format: a value or one line; and links, which no writer follows.

A sound file of each format is mutated at a place that hypothesis draws: a value of the parsed
document is dropped, replaced, copied elsewhere or renamed, or the text is cut, spliced or flipped.
Its reader must then give a value that is as good as any other, or raise a RooftreeError of one
line that names the file.

    python -m pytest tests/test_faults.py    # always the same mutants
    MUTANTS=5000 python -m pytest tests/test_faults.py --hypothesis-profile=searching
"""

import csv
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodel.catalog import resolve_target
from costmodel.errors import InputError, RooftreeError
from costmodel.imports import read_times
from costmodel.io import shipped_directory
from costmodel.planning.acceptance import from_file
from costmodel.planning.traffic import read_trace
from costmodel.profile.profile import Profile
from decoder.drafters.checkpoint import find_config
from decoder.drafters.dflash.config import DFlashConfig
from decoder.drafters.eagle3 import Eagle3Config
from decoder.drafters.vocabulary import read_tokens
from lab.bench.analysis.summary import derived
from lab.bench.prompts import read_files
from lab.bench.record import read_result, write_result
from profiler.commands.generate import read_prompts
from profiler.measure.journal import Journal
from tests.costmodel.conftest import make_profile
from tests.lab.bench.made_bench import PLAIN_ARM, make_result, policy_arm
from tests.tiny_folder import CONFIG

LONGEST_MESSAGE = 720
MODE = settings(
    max_examples=int(os.environ.get("MUTANTS", "25")), database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

# Values of wrong types and ranges, and such as break what comes after the reading.
ODD = (
    None, True, 0, -1, 1, 8.5, -0.0, 1e-300, 1e308, 2**31, 2**63, -(2**70), 10**400, float("nan"),
    float("inf"), "", " ", "0", "nan", "x" * 5000, "\x00", "\x1b[31mred", "\u202egnp", "../../x",
    "/dev/full", "~nosuchuser/x", "a\nb", [], {}, [[]], [None], [0], [1, "a"], [2**70], {"a": 1},
)  # fmt: skip
# Spliced into the text: what parsers of YAML, JSON and CSV differ about.
PARTS = (
    "\x00", "\ufeff", "\r", "\u2028", "{", "[", "]", "'", '"', ":", "- ", "#", "%", ",", "\n\n",
    "&a [*a]", "<<: ", "*a", "? 1", "|", "!!python/object/apply:os._exit [3]", "!!binary x",
    "!!float x", "0x10", "1:30:00", "1_0", ".inf", "1e999", "9" * 5000, "[" * 900, "z" * 70_000,
)  # fmt: skip


class Format(NamedTuple):
    """A file's name, the text of a sound one, and what reads it or refuses what nothing can use."""

    name: str
    sound: str
    use: Callable[[Path], object]


def positive(values: Any) -> None:
    array = np.asarray(values, dtype=np.float64)
    assert np.isfinite(array).all() and (array > 0).all()


def use_profile(path: Path) -> None:
    profile = Profile.from_yaml(path)
    positive(profile.verify_calibration().predict_s(np.array([1, 7, 300]), np.array([0, 900, 9e4])))
    again = path.with_name("again.yaml")
    profile.to_yaml(again)  # rounds numbers of more digits than a profile writes
    assert Profile.from_yaml(again).to_yaml() == profile.to_yaml()


DRAFTER = CONFIG | {"rms_norm_eps": 1e-6, "head_dim": 8}
DFLASH = DRAFTER | {
    "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
    "dflash_config": {"mask_token_id": 259, "target_layer_ids": [0, 1]},
}  # fmt: skip
EAGLE = DRAFTER | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
                   "draft_vocab_size": 64}  # fmt: skip


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def use_prompts(path: Path) -> None:
    str(read_prompts((), path)).encode()
    for one in read_files((path,))[0]:
        (one.id + one.category + one.prompt).encode()


HEADER = {"device": "cpu", "contexts": [32, 128]}
TASK = {"kind": "verify", "size": 3, "context": 32, "batch": 1, "disturbance": "", "seconds": 1e-3}


def use_journal(path: Path) -> None:
    """A damaged line costs one record, and the next run writes behind the others."""
    with Journal(path, HEADER) as journal:
        before, dropped = journal.records, journal.dropped
        journal.append({"size": 1})
    with Journal(path, HEADER) as journal:
        assert journal.records == [*before, {"size": 1}]
    if dropped:  # it began anew, and says so
        raise InputError(dropped)


def drafter(kind: Any) -> Callable[[Path], object]:
    return lambda path: kind.parse(find_config(path.parent), str(path))


def times_of(tool: str) -> Callable[[Path], None]:
    return lambda path: positive(read_times(tool, path, None).points.seconds)


PROMPT = {"category": "math", "prompt": "What is 6 \u00d7 7?\u2028Say it."}
DEPTHS = {"by_depth": [0.8, 0.7, 0.6], "rounds": 400, "drafted_share": 0.9}
RESULT = make_result([PLAIN_ARM, policy_arm("bastion")], per_set=2, repeats=1, sets=("gsm8k",))
(COMPOSED, *_) = (shipped_directory() / "h100-sxm").glob("qwen3-8b.*.yaml")
LLAMA = Path(__file__).parent / "integrations" / "data" / "llama_bench.jsonl"
FORMATS = {
    "profile": Format("p.yaml", make_profile().to_yaml(), use_profile),
    "composed-profile": Format("p.yaml", COMPOSED.read_text(encoding="utf-8"), use_profile),
    "target": Format(
        "config.json", json.dumps(CONFIG),
        lambda path: positive(resolve_target(str(path.parent)).architecture.parameters),
    ),
    "dflash": Format("config.json", json.dumps(DFLASH), drafter(DFlashConfig)),
    "eagle3": Format("config.json", json.dumps(EAGLE), drafter(Eagle3Config)),
    "draft-tokens": Format(
        "draft_tokens.json", "[0, 3, 5, 9, 64]", lambda path: read_tokens(path.parent)
    ),
    "prompts": Format("p.jsonl", lines([{"id": f"p{i}"} | PROMPT for i in range(3)]), use_prompts),
    "journal": Format(
        "a.jsonl", lines([{"journal": 1, "header": HEADER}, *[TASK] * 4]), use_journal
    ),
    "acceptance": Format(
        "a.json", json.dumps({"acceptance": DEPTHS, "acceptance_by_arm": {"chain": DEPTHS}}),
        lambda path: positive(from_file(path).tree),
    ),
    "result": Format(
        "r.json", json.dumps(RESULT.as_dict()),
        lambda path: json.dumps(derived(read_result(path)), allow_nan=False),
    ),
    "trace": Format(
        "trace.csv",
        "arrival_s,prompt_tokens,output_tokens\n"
        + "".join(f"{0.4 * i:.2f},{100 + i},{20 + i}\n" for i in range(6)),
        lambda path: positive(read_trace(path).prompt_tokens),
    ),
    "times": Format(
        "times.csv",
        "new_tokens,context_tokens,seconds\n" + "".join(
            f"{n},{c},{1e-2 + 1e-5 * n + 1e-8 * n * c}\n" for n in (1, 4, 64) for c in (0, 4096)),
        times_of("csv"),
    ),
    "llama-bench": Format(
        "l.jsonl", "\n".join([*LLAMA.read_text(encoding="utf-8").split("\n")[:6], ""]),
        times_of("llama-bench"),
    ),
}  # fmt: skip


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value in a document."""
    keys = document if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], (dict, list)):
            yield from places(document[key])


def changed(document: Any, draw: Callable[[Any], Any]) -> Any:
    """The document with one value dropped, replaced, retyped, copied elsewhere or renamed."""
    if not isinstance(document, (dict, list)) or not document:
        return draw(st.sampled_from(ODD))
    every = list(places(document))
    container, key = every[draw(st.integers(0, len(every) - 1))]
    value = container[key]
    match draw(st.sampled_from(("odd", "odd", "near", "drop", "copy", "rename", "repeat"))):
        case "odd":
            container[key] = draw(st.sampled_from(ODD))
        case "near" if isinstance(value, (int, float)):
            container[key] = draw(st.sampled_from((value + 1, -value, value * 10**9, str(value))))
        case "near":
            container[key] = draw(st.sampled_from(([value], value and list(value)[1:])))
        case "drop":
            del container[key]
        case "copy":
            other, place = every[draw(st.integers(0, len(every) - 1))]
            container[key] = json.loads(json.dumps(other[place]))
        case "rename" if isinstance(container, dict):
            new = draw(st.sampled_from((f"{key}x", "", "\x1b[2J", "k" * 400)))
            container[new] = container.pop(key)
        case _ if isinstance(container, list):
            container[key:key] = [container[key]] * draw(st.sampled_from((1, 30)))
    return document


def changed_text(text: str, draw: Callable[[Any], Any]) -> bytes:
    """The text cut, spliced, or with a byte flipped or a line dropped or doubled."""
    raw = text.encode("utf-8", errors="surrogatepass")
    place = draw(st.integers(0, len(raw) - 1))
    match draw(st.sampled_from(("cut", "part", "value", "flip", "line"))):
        case "cut":
            return raw[:place]
        case "part":
            return raw[:place] + draw(st.sampled_from(PARTS)).encode() + raw[place:]
        case "value":  # what stands behind the next colon
            at = raw.find(b": ", place) + 2
            end = raw.find(b"\n", at)
            return raw[:at] + draw(st.sampled_from(PARTS)).encode() + raw[max(end, at) :]
        case "flip":
            return raw[:place] + bytes([raw[place] ^ draw(st.integers(1, 255))]) + raw[place + 1 :]
    rows = raw.splitlines(keepends=True)
    at = draw(st.integers(0, len(rows) - 1))
    return b"".join(rows[:at] + [rows[at]] * draw(st.sampled_from((0, 2))) + rows[at + 1 :])


def mutated(name: str, text: str, draw: Callable[[Any], Any]) -> bytes:
    """The bytes of a file of this name with one mutation, of its document or of its text."""
    if draw(st.integers(0, 3)) == 0:
        return changed_text(text, draw)
    suffix = Path(name).suffix
    if suffix == ".csv":
        rows = list(csv.reader(io.StringIO(text)))
        table = changed(rows, draw)
        cells = [row if isinstance(row, list) else [row] for row in table or []]
        text = "\n".join(",".join(map(str, row)) for row in cells)
    elif suffix == ".yaml":
        document = changed(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), draw)
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(document, Dumper=dumper, allow_unicode=True, sort_keys=False)
    elif suffix == ".jsonl":
        rows = text.split("\n")
        at = draw(st.integers(0, len(rows) - 2))
        rows[at] = json.dumps(changed(json.loads(rows[at]), draw))
        text = "\n".join(rows)
    else:
        text = json.dumps(changed(json.loads(text), draw))
    return text.encode("utf-8", errors="surrogatepass")


def outcome(form: Format, path: Path) -> str:
    """`read` or `refused`; an AssertionError or any other exception is a fault."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy about odd numbers
            form.use(path)
    except RooftreeError as refusal:
        message = str(refusal)
        assert len(message.splitlines()) == 1, message
        assert len(message) <= LONGEST_MESSAGE, message
        assert path.name in message or path.parent.name in message, message
        return "refused"
    return "read"


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_in_one_line_or_read(name, tmp_path_factory):
    form = FORMATS[name]
    text = form.sound
    path = tmp_path_factory.mktemp(name) / form.name
    path.write_text(text, encoding="utf-8")
    assert outcome(form, path) == "read"  # otherwise every refusal might have another reason
    seen: set[str] = set()

    @MODE
    @given(data=st.data())
    def one(data):
        path.write_bytes(mutated(form.name, text, data.draw))
        seen.add(outcome(form, path))

    one()
    assert "refused" in seen


@pytest.mark.parametrize(
    "write", [lambda path: make_profile().to_yaml(path), lambda path: write_result(RESULT, path)]
)
def test_a_link_is_replaced_and_not_followed(write, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file.yaml"
    victim.write_text("precious")
    path.symlink_to(victim)
    write(path)
    assert victim.read_text() == "precious"
    assert not path.is_symlink()

"""Every wrong profile gives one line: the file, the field, what is wrong, what to do."""

import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from costmodel.errors import ProfileError
from costmodel.profile.profile import Profile

STORED = Path(__file__).parents[1] / "data/profile.yaml"
TEXT = STORED.read_text()
PROFILE = Profile.from_yaml(STORED)
GOOD = yaml.safe_load(TEXT)
for section, part in (
    (GOOD["surface"], PROFILE.surface),
    (GOOD["held_out"], PROFILE.held_out),
    *((GOOD["stages"][name], getattr(PROFILE.stages, name)) for name in GOOD["stages"]),
    *((GOOD["drafters"][name], drafter) for name, drafter in PROFILE.drafters.items()),
):
    # As arrays, whose every entry can be wrong.
    section |= {name: list(getattr(part, name)) for name in (*part.axes, *part.values)}
NAMES = "some/folder/profile.yaml"
KINDS = "'eager', 'packed', 'graphs', 'kernels', 'external', 'vllm'"


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def sections(value, path=()):
    yield path
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from sections(inner, (*path, key))


LEAVES = list(leaves(GOOD))
OPTIONAL = {
    tuple(name.split("."))
    for name in (
        "device.mig", "device.threads", "device.instruction_set", "device.driver", "device.cuda",
        "device.power_limit_w", "runtime.quantization", "runtime.tensor_parallel",
        "runtime.buckets", "runtime.torch", "runtime.transformers", "runtime.python",
        "peaks.measured_flops_per_s", "peaks.measured_bytes_per_s", "held_out.repeat_noise",
        "calibration.stairs.exact",
    )
}  # fmt: skip
OPTIONAL |= {
    ("provenance", name)
    for name in GOOD["provenance"].keys() - {"kind", "created_utc", "tool_version"}
}
OPTIONAL |= {path for path in LEAVES if path[-1] == "mad_s"}
AXES = ("rows", "context", "nodes", "tokens", "buckets")


def at(data, path):
    for key in path:
        data = data[key]
    return data


def changed(path, value):
    data = copy.deepcopy(GOOD)
    at(data, path[:-1])[path[-1]] = value
    return data


def without(path):
    data = copy.deepcopy(GOOD)
    del at(data, path[:-1])[path[-1]]
    return data


def dumped(data) -> bytes:
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)).encode()


def problem_of(data) -> str:
    """The error of a profile; checks its form."""
    raw = data if isinstance(data, bytes) else dumped(data)
    with pytest.raises(ProfileError) as caught:
        Profile.from_bytes(raw, NAMES)
    error = caught.value
    assert str(error).count("\n") == 0
    assert len(str(error)) < 400 and str(error).isprintable()
    assert error.problem.startswith(f"{NAMES}: ")
    assert "rooftree calibrate" in error.hint
    assert error.exit_code == 3
    return error.problem.removeprefix(f"{NAMES}: ")


def named(path) -> str:
    return ".".join(path)


@pytest.mark.parametrize("path", LEAVES, ids=named)
def test_each_field_of_a_wrong_kind_or_missing(path):
    """The good file is good: optional fields may be left out."""
    name, good = path[-1], at(GOOD, path)
    problem = problem_of(changed(path, "a text" if isinstance(good, list) else {"a": "mapping"}))
    if "architecture" in path:
        assert "target.architecture" in problem and name in problem
    else:
        assert problem.startswith(f"{named(path)}: ")
    if path in OPTIONAL:
        Profile.from_bytes(dumped(without(path)), NAMES)
    else:
        missing = {"qk_norm": "hash", "error": "held_out: "}.get(name, name)
        assert missing in problem_of(without(path))
    if isinstance(good, (int, float)) and name != "schema_version":
        large = 1e300 if isinstance(good, float) else 10**40  # what no machine can have
        for value in ("12", float("nan"), float("inf"), -float("inf"), large, -large):
            assert name in problem_of(changed(path, value))
        if not isinstance(good, bool):
            assert name in problem_of(changed(path, True))
            if name not in ("intercept_s", "temperature_c"):
                assert name in problem_of(changed(path, -1))


@pytest.mark.parametrize(
    "path",
    [p for p in LEAVES if isinstance(at(GOOD, p), list) and p[-1] != "busy_processes"],
    ids=named,
)
def test_each_list_with_a_wrong_entry_or_length_or_order(path):
    numbers, section, name = at(GOOD, path), named(path[:-1]), path[-1]
    large = 1e300 if isinstance(numbers[0], float) else 10**40
    for value in (float("nan"), -3, "3", [3], True, large, *([None] if name != "mad_s" else [])):
        problem = problem_of(changed(path, [*numbers[:-1], value]))
        assert problem.startswith(f"{named(path)}[{len(numbers) - 1}]: ")
    if name not in ("buckets", "contexts"):
        problem = problem_of(changed(path, numbers[:-1]))
        assert problem.startswith(f"{section}: ")
        assert name in problem and "entries" in problem
        assert section in problem_of(changed(path, []))
    if name in AXES and path[0] != "held_out":
        assert "ascend" in problem_of(changed(path, numbers[::-1]))
        if path[0] != "surface":
            assert "ascend" in problem_of(changed(path, [numbers[0]] * len(numbers)))


@pytest.mark.parametrize("path", list(sections(GOOD)), ids=lambda p: named(p) or "top")
def test_each_section_as_something_else_or_with_an_unknown_field(path):
    for value in (3, "text", [1, 2]) if path else ():
        assert named(path) in problem_of(changed(path, value))
    problem = problem_of(changed((*path, "wings"), 2))
    assert "wings" in problem
    if path != ("calibration", "cross_validated"):
        assert "known field" in problem or "unknown" in problem or "drafters" in problem


@pytest.mark.parametrize(("path", "value", "message"), [
    (("schema_version",), 1, "schema_version: must be 2 (is 1)"),
    (("schema_version",), True, "schema_version: must be 2 (is True)"),
    (("provenance", "kind"), "guessed", "must be 'measured', 'quick'"),
    (("provenance", "created_utc"), "yesterday", "provenance.created_utc"),
    (("device", "kind"), "tpu", "must be 'cuda' or 'cpu'"),
    (("runtime", "kind"), "magic", f"must be {KINDS} or 'url'"),
    (("runtime", "dtype"), "int4", "runtime.dtype"),
    (("target", "name"), "x" * 501, "target.name"),
    (("target", "architecture_hash"), "0123456789ab", "one of them was changed"),
    (("target", "architecture_hash"), "XYZ", "target.architecture_hash"),
    (("target", "architecture", "layers"), 37, "one of them was changed"),
    (("calibration", "linear", "slope"), -0.5, "must be greater than or equal to 0 (is -0.5)"),
    (("calibration", "selected"), "best", "must be 'linear', 'physical' or 'stairs'"),
    (("calibration", "linear", "mape_after"), "12%", "is '12%'"),
    (("regret", "worst"), 1.5, "less than or equal to 1"),
    (("surface", "n"), [0] + [5] * 11, "surface.n[0]: must be greater than or equal to 1"),
    (("surface", "median_s"), [0.0] + [0.1] * 11,
     "surface.median_s[0]: must be greater than or equal to 0.00000001 (is 0.0)"),
    (("surface", "rows"), [1.5] + [1] * 11, "surface.rows[0]: must be a valid integer"),
    (("surface", "mad_s"), [0.02] + [None] * 11, "mad_s"),
    (("stages", "build", "median_s"), [1e-12, 5e-6, 8e-6], "median_s"),
    (("target", "architecture", "layers"), 10**9, "more than 1e+15 parameters"),
])  # fmt: skip
def test_messages_say_what_is_wrong(path, value, message):
    assert message in problem_of(changed(path, value))


def test_sections_that_must_go_together():
    assert "surface is missing" in problem_of(without(("surface",)))
    assert "selected is stairs, but" in problem_of(without(("calibration", "stairs")))
    data = without(("device", "threads"))
    data["device"]["kind"] = "cpu"
    assert "threads" in problem_of(data)
    small = copy.deepcopy(GOOD)
    small["surface"] = {name: values[:2] for name, values in small["surface"].items()}
    assert "at least 6 points" in problem_of(small)
    repeated = copy.deepcopy(GOOD)
    for column in repeated["surface"].values():
        column.insert(0, column[0])
    assert problem_of(repeated).startswith("surface: ") and "repeats" in problem_of(repeated)
    data = changed(("device", "name"), 3)
    data["peaks"]["flops_per_s"] = 0
    assert problem_of(data).endswith("(and 1 more)")


@pytest.mark.parametrize(("raw", "message"), [
    (b"", "is not a profile"),
    (b"[1, 2]", "is not a profile"),
    (b"\xff\xfex", "not UTF-8"),
    (TEXT.encode("utf-32"), "not readable as YAML"),
    (TEXT.replace("slope:", "slope").encode(), "not readable as YAML"),
    (TEXT.encode() + b"\x00", "not readable as YAML"),
    (TEXT.encode() + b"\n---\nschema_version: 2\n", "not readable as YAML"),
    (b"[" * 2_000 + b"]" * 2_000, "is not a profile"),
    (b"a: !!int ''", "not readable as YAML"),
    (b"? [1]\n: 2", "not readable as YAML"),
    (b"a: &a 1\nb: *a", "aliases are not read"),  # merge keys alone took 10 s for 399 bytes
    (TEXT.encode() + b"\nschema_version: 2\n", "schema_version stands twice"),
    (b"a: " + b"9" * 5_000, "not readable as YAML"),
    (b"a: !!python/object/apply:os.system ['true']", "not readable as YAML"),
], ids=range(14))  # fmt: skip
def test_files_that_are_no_profiles(raw, message):
    assert message in problem_of(raw)


KIND = "  kind: cuda\n"


@pytest.mark.parametrize(("good", "bad", "message"), [
    *(("points: 12\n", f"points: {number}\n", "provenance.points: must be ")
      for number in ("1" + ":0" * 4_000, "0x" + "f" * 5_000, "2026-03-01", ".inf")),
    ("n: [5, 1, 5]", "n: !!set {5, 1}", "n: must be a list"),
    ("'560.35'", "560.35", "device.driver: must be a valid string"),
    (KIND, f"{KIND}  {'x' * 1000}: 1\n", "device.x"), (KIND, f'{KIND}  "\\e[2J": 1\n', "device."),
    (KIND, '  kind: "\\e[2J\\u202e"\n', "device.kind"),
    ("    layers: 36", f"    layers: '{'x' * 5000}'", "layers"),
    (TEXT, f"schema_version: [{'1, ' * 5_000}1]", "schema_version"),
    (TEXT, f"a: 1\n? {'x' * 900}\n: 1\n? {'x' * 900}\n: 1\n", ""),
], ids=range(12))  # fmt: skip
def test_odd_values_have_short_plain_messages(good, bad, message):
    assert message in problem_of(TEXT.replace(good, bad, 1).encode())


def test_unreadable_paths(tmp_path, monkeypatch):
    with pytest.raises(ProfileError, match="there is no such file"):
        Profile.from_yaml(tmp_path / "none.yaml")
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * 4_000_001)
    with pytest.raises(ProfileError, match="larger than 4 MB"):
        Profile.from_yaml(huge)
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr("builtins.open", Mock(side_effect=denied))
    with pytest.raises(ProfileError, match="Permission denied"):
        Profile.from_yaml(STORED)

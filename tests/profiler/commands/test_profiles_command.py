"""`rooftree profiles`: listing, showing, checking and drawing, with good and with broken files."""

import json

import pytest

from costmodel.catalog import find_target
from costmodel.io import shipped_directory
from costmodel.profile.profile import Profile
from costmodel.profile.store import ProfileStore
from profiler import cli
from tests.profiler.made_profile import TARGET, make_profile

SHIPPED_FILE = "qwen3-8b.bfloat16.kernels.tp1.yaml"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data directory of the user's."""
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs `rooftree profiles ...` and gives its exit code, stdout and stderr."""

    def call(*arguments):
        exit_code = cli.run(["profiles", *arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return call


def test_list_as_json_has_stable_fields(home, run):
    path = ProfileStore().save(make_profile())
    exit_code, out, _ = run("list", "--json")
    assert exit_code == 0
    (record,) = [record for record in json.loads(out)["profiles"] if record["path"] == str(path)]
    assert record == {
        "path": str(path),
        "problem": "",
        "device": "Test GPU",
        "target": TARGET,
        "architecture_hash": find_target(TARGET).architecture.hash,
        "dtype": "bfloat16",
        "runtime": "graphs",
        "tensor_parallel": 1,
        "provenance": "measured",
        "created_utc": "2026-01-02T03:04:05Z",
        "held_out_median": None,
        "regret_worst": None,
    }


def test_list_names_a_broken_profile_and_goes_on(home, run):
    good = ProfileStore().save(make_profile())
    broken = good.with_name("broken.yaml")
    broken.write_text(good.read_text()[:200])
    exit_code, out, err = run("list")
    assert exit_code == 0
    assert str(good) in out
    assert err.startswith(f"cannot be used: {broken}")


def test_show_by_path_and_by_name(home, run):
    path = ProfileStore().save(make_profile())
    by_path = run("show", str(path))
    assert by_path == run("show", "TEST-GPU/qwen3-8b") == run("show", "Test GPU/Qwen/Qwen3-8B")
    exit_code, out, err = by_path
    assert (exit_code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["rows", "context", "256", "context", "2048"] in lines
    assert [row for row in lines if row and row[0].isdigit()] == [
        [count, "5.00", "5.00"] for count in ("1", "2", "4", "8", "16")
    ]


def test_show_as_json_is_the_profile(home, run):
    profile = make_profile()
    path = ProfileStore().save(profile)
    exit_code, out, _ = run("show", str(path), "--json")
    assert exit_code == 0
    shown = json.loads(out)
    assert shown["path"] == str(path)
    assert shown["profile"] == json.loads(json.dumps(profile.as_dict()))


def test_show_of_an_unknown_or_ambiguous_name_is_one_line(home, run):
    store = ProfileStore()
    for dtype in ("bfloat16", "float16"):
        store.save(make_profile(dtype=dtype))
    exit_code, out, err = run("show", "test-gpu")
    assert (exit_code, out, err.count("\n")) == (2, "", 1)
    assert "fits 2 profiles" in err
    exit_code, out, err = run("show", "no-such-device/qwen3-8b")
    assert (exit_code, out, err.count("\n")) == (2, "", 1)
    assert "no known device is called 'no-such-device'" in err


@pytest.mark.parametrize("name", ["h20/qwen3-8b", "l40/qwen3-8b", "NVIDIA L40/qwen3-8b", "a10"])
def test_a_name_of_another_device_shows_none_of_its_profiles(home, run, name):
    exit_code, out, err = run("show", name)
    assert (exit_code, out, err.count("\n")) == (2, "", 1)
    assert "no stored profile is called" in err


def test_a_profile_of_ones_own_hides_the_shipped_one_and_makes_nothing_ambiguous(home, run):
    assert run("show", "h100-sxm/qwen3-8b")[0] == 0
    shipped = Profile.from_yaml(shipped_directory() / "h100-sxm" / SHIPPED_FILE)
    for degree in (2, 1):
        fields = shipped.as_dict()
        fields["runtime"]["tensor_parallel"] = degree
        own = ProfileStore().save(Profile.model_validate(fields))
        exit_code, out, _ = run("show", "h100-sxm/qwen3-8b", "--json")
        assert exit_code == 0
        folder = home if degree == 1 else shipped_directory()
        assert json.loads(out)["path"] == str(folder / "h100-sxm" / SHIPPED_FILE)
    assert run("show", "H100/qwen3-8b", "--json")[1] == run("show", str(own), "--json")[1]
    _, out, _ = run("show", "h100-sxm/qwen3-8b.bfloat16.kernels.tp2", "--json")
    assert json.loads(out)["profile"]["runtime"]["tensor_parallel"] == 2


def test_validate_says_ok_or_what_is_wrong(home, run):
    good = ProfileStore().save(make_profile())
    assert run("validate", str(good)) == (0, f"{good}: ok\n", "")
    bad = home / "bad.yaml"
    bad.write_text(good.read_text().replace("dtype: bfloat16", "dtype: int3"))
    missing = home / "missing.yaml"
    exit_code, out, err = run("validate", str(good), str(bad), str(missing))
    assert exit_code == 3
    lines = out.splitlines()
    assert lines[0] == f"{good}: ok"
    assert lines[1].startswith(f"{bad}: runtime.dtype")
    assert lines[2].startswith(f"{missing}: there is no such file")
    assert err == "rooftree: 2 of 3 profiles cannot be used\n"


def test_a_profile_never_executes_anything(home, run):
    marker = home / "executed"
    bad = home / "bad.yaml"
    bad.write_text(f"schema_version: !!python/object/apply:os.mknod ['{marker}']\n")
    exit_code, out, _ = run("validate", str(bad))
    assert exit_code == 3
    assert out.startswith(f"{bad}: ")
    assert not marker.exists()


def test_plot_writes_a_picture(home, run):
    path = ProfileStore().save(make_profile())
    picture = home / "picture.png"
    assert run("plot", str(path), str(picture)) == (0, f"{picture}\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

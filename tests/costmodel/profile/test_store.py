"""Storing and finding profiles: hard keys refuse, soft keys warn, writes are whole or absent."""

import dataclasses
import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from costmodel.errors import ProfileError
from costmodel.io import folder_lock, shipped_directory
from costmodel.profile.profile import SOFT_KEYS, Profile
from costmodel.profile.schema import DrafterSection
from costmodel.profile.store import ProfileStore, profile_file_name
from tests.costmodel.conftest import altered, shipped

STORED = Path(__file__).parents[1] / "data/profile.yaml"


def files_in(folder: Path) -> list[str]:
    """The names of a folder's files, its lock aside, which stays."""
    return [entry.name for entry in folder.iterdir() if entry.suffix != ".lock"]


@pytest.fixture
def store(tmp_path):
    return ProfileStore([tmp_path / "user", tmp_path / "shipped"])


def test_a_saved_profile_is_found(store, profile):
    path = store.save(profile)
    assert path.parent.name == "imaginary-cpu-9000"
    assert path.name == "smollm2-135m-instruct.bfloat16.eager.tp1.yaml"
    name = profile_file_name(Profile.from_yaml(STORED))
    assert name == "qwen3-4b.bfloat16-awq-4bit.graphs.tp2.yaml"
    assert path.stat().st_mode & 0o777 == 0o644
    found = store.find(profile.key)
    assert found.path == path
    assert found.profile.to_yaml() == profile.to_yaml()
    assert (found.warnings, found.online_correction, found.needs_floor_probe) == ((), False, False)
    assert [stored.path for stored in store.list()] == [path]
    # A fine-tune finds the profile of its base, and what is not known does not warn.
    fine_tune = dataclasses.replace(profile.target.architecture, name="me/my-fine-tune")
    key = dataclasses.replace(profile.key, architecture_hash=fine_tune.hash)
    assert store.find(key).profile.target.name == profile.target.name
    assert profile.key.driver is profile.key.power_limit_w is None
    for soft in (dict.fromkeys(SOFT_KEYS), {"driver": "1", "power_limit_w": 3.0}):
        assert not store.find(dataclasses.replace(profile.key, **soft)).warnings


HARD = {
    "device_name": "Another CPU", "memory_bytes": 8 * 2**30, "architecture_hash": "0123456789ab",
    "dtype": "float32", "runtime": "graphs", "attention": "sdpa", "mig": "1g.10gb", "threads": 4,
    "instruction_set": "avx2", "quantization": "awq", "tensor_parallel": 2,
    "engine_version": "0.32.0", "compilation": "none", "graphs": "full", "executor": "mp",
    "max_num_seqs": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_each_hard_key_refuses_and_is_named(store, profile, name):
    path = store.save(profile)
    key = dataclasses.replace(profile.key, **{name: HARD[name]})
    with pytest.raises(ProfileError) as caught:
        store.find(key)
    message = str(caught.value)
    with pytest.raises(ProfileError, match=rf"tp1\.yaml \({name} .*, here .*Leave --profile out"):
        store.open(path, key)
    assert "\n" not in message
    assert "rooftree calibrate" in message
    if name == "device_name":
        assert "there is none for this device" in message
    else:
        assert path.name in message
        shown = "8.0 GiB" if name == "memory_bytes" else str(HARD[name])
        assert f"{name} " in message and f"here {shown}" in message


def test_memory_agrees_within_eight_per_cent(store, profile):
    store.save(profile)
    for share, same in ((0.93, True), (1.07, True), (0.91, False), (1.1, False)):
        key = dataclasses.replace(profile.key, memory_bytes=int(profile.key.memory_bytes * share))
        with nullcontext() if same else pytest.raises(ProfileError, match="memory_bytes"):
            store.find(key)


SOFT = {"driver": "999.1", "torch": "2.99.0", "transformers": "9.9.9", "cuda": "99.9"}
SOFT |= {"power_limit_w": 150.0}


@pytest.mark.parametrize("name", SOFT_KEYS)
def test_each_soft_key_warns_and_switches_correction_on(store, name):
    profile = Profile.from_yaml(STORED)
    store.save(profile)
    found = store.find(dataclasses.replace(profile.key, **{name: SOFT[name]}))
    assert found.online_correction
    assert len(found.warnings) == 1
    assert name in found.warnings[0] and str(SOFT[name]) in found.warnings[0]


def test_the_user_s_directory_comes_first_and_can_be_set(store, profile, tmp_path, monkeypatch):
    with pytest.raises(ProfileError, match="none for this device") as caught:
        store.find(profile.key)
    assert str(tmp_path / "user") in str(caught.value) and store.list() == ()
    shipped_path = ProfileStore([tmp_path / "shipped"]).save(profile)
    assert store.find(profile.key).path == shipped_path
    user_path = store.save(profile)
    assert store.find(profile.key).path == user_path
    assert len(store.list()) == 2
    # In one directory a measured one goes before a quick one.
    altered(profile, provenance={"kind": "quick"}).to_yaml(user_path.with_name("a-quick-one.yaml"))
    assert store.find(profile.key).path == user_path
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for text, folder in (
        (str(tmp_path / "mine"), tmp_path / "mine"), ("~/mine", Path.home() / "mine"),
        ("  ", tmp_path / "data" / "rooftree"),
    ):  # fmt: skip
        monkeypatch.setenv("ROOFTREE_HOME", text)
        assert ProfileStore().directories == (folder, shipped_directory())


def test_saving_again_replaces_only_the_same_key(store, profile):
    first = store.save(profile)
    newer = altered(profile, provenance={"created_utc": "2027-01-01T00:00:00Z"})
    assert store.save(newer) == first
    assert Profile.from_yaml(first).provenance.created_utc.startswith("2027")
    threads = altered(profile, device={"threads": 8})
    second = store.save(threads)
    assert second != first and second.name.endswith(".tp1-2.yaml")
    assert store.save(threads) == second
    assert store.find(profile.key).path == first
    assert store.find(threads.key).path == second


def test_a_broken_file_is_reported_and_does_not_hide_a_good_one(store, profile):
    path = store.save(profile)
    broken = path.with_name("broken.yaml")
    broken.write_text(path.read_text()[:900])
    found = store.find(profile.key)
    assert found.path == path
    assert len(found.warnings) == 1 and "broken.yaml" in found.warnings[0]
    assert not found.online_correction
    path.write_text("nonsense")
    assert store.save(profile) == path == store.find(profile.key).path  # it is replaced
    path.unlink()
    with pytest.raises(ProfileError, match=r"broken.yaml \(cannot be used"):
        store.find(profile.key)
    assert [stored.profile for stored in store.list()] == [None]
    assert "broken.yaml" in store.list()[0].problem


RANKING = ("measured", "quick", "transferred", "composed", "datasheet")


@pytest.mark.parametrize("newer", RANKING)
@pytest.mark.parametrize("older", [*RANKING, "unusable"])
def test_no_profile_replaces_one_of_better_provenance(store, profile, tmp_path, older, newer):
    """A file that cannot be used may be a measured profile with a slip of the pen."""
    rank = RANKING.index("measured" if older == "unusable" else older)
    first = altered(profile, provenance={"kind": RANKING[rank], "source": "older"})
    second = altered(profile, provenance={"kind": newer, "source": "newer"})
    path, named = store.save(first), tmp_path / "named.yaml"
    if older == "unusable":
        path.write_text(path.read_text().replace("schema_version: 2", "schema_version: two"))
    before = path.read_bytes()
    named.write_bytes(before)
    stays = rank < RANKING.index(newer)
    saved = store.save(second)
    assert (saved != path) == stays
    assert (path.read_bytes() == before) == stays
    assert Profile.from_yaml(saved).provenance.source == "newer"
    assert store.save(second) == saved
    if older != "unusable":
        assert store.find(profile.key).profile.provenance.source == ("older" if stays else "newer")
        if stays:
            with pytest.raises(ProfileError, match=f"{older} and this one is {newer}"):
                store.put(second, named, replace=True)
        else:
            store.put(second, named, replace=True)
        assert (named.read_bytes() == before) == stays


def test_only_what_reads_back_is_written(store, profile):
    path = store.save(profile)
    before = path.read_bytes()
    regret = profile.regret.model_copy(update={"contexts": ()})
    spoilt = profile.model_copy(update={"regret": regret})
    with pytest.raises(ProfileError, match=r"not written: regret.contexts: is missing"):
        spoilt.to_yaml(path)
    assert path.read_bytes() == before


KERNELS = {"kind": "kernels", "attention": "published"}


@pytest.mark.parametrize("kind", ["composed", "transferred", "datasheet"])
def test_borrowed_profiles_serve_graphs_corrected_and_eager_after_a_probe(store, profile, kind):
    store.save(altered(profile, provenance={"kind": kind, "source": "tables"}, runtime=KERNELS))
    graphs = store.find(dataclasses.replace(profile.key, runtime="graphs"))
    assert (graphs.online_correction, graphs.needs_floor_probe) == (True, False)
    assert kind in graphs.warnings[0]
    eager = store.find(dataclasses.replace(profile.key, runtime="eager"))
    assert (eager.online_correction, eager.needs_floor_probe) == (True, True)
    with pytest.raises(ProfileError, match="dtype"):
        store.find(dataclasses.replace(profile.key, dtype="float32"))
    # A borrowed eager one serves nothing else.
    graphs.path.unlink()
    store.save(altered(profile, provenance={"kind": kind, "source": "tables"}))
    with pytest.raises(ProfileError, match="runtime eager, here graphs"):
        store.find(dataclasses.replace(profile.key, runtime="graphs"))


def test_a_lookup_does_not_parse_other_targets(store, profile, monkeypatch):
    path = store.save(profile)
    other = path.with_name("other.yaml")
    other.write_text(path.read_text().replace(profile.key.architecture_hash, "0" * 12))
    parsed, original = [], Profile.from_bytes.__func__
    noted = classmethod(lambda cls, raw, label: parsed.append(label) or original(cls, raw, label))
    monkeypatch.setattr(Profile, "from_bytes", noted)
    store.find(profile.key)
    assert parsed == [str(path)]


def failing(code):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("function", "code", "message"), [
    ("write", errno.ENOSPC, "the disk is full"),
    ("fsync", errno.ENOSPC, "the disk is full"),
    ("fsync", errno.EIO, "Input/output error"),
    ("replace", errno.EACCES, "no permission"),
    ("fchmod", errno.EPERM, "no permission"),
])  # fmt: skip
def test_a_failed_save_leaves_the_old_file(store, profile, monkeypatch, function, code, message):
    path = store.save(profile)
    before = path.read_bytes()
    newer = altered(profile, provenance={"created_utc": "2027-01-01T00:00:00Z"})
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(code))
        with pytest.raises(ProfileError, match=message) as caught:
            store.save(newer)
    assert str(path) in str(caught.value) and "ROOFTREE_HOME" in caught.value.hint
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert files_in(path.parent) == [path.name]
    with monkeypatch.context() as patch:  # short writes are continued
        patch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:7]))
        store.save(newer)
    assert Profile.from_yaml(path).to_yaml() == newer.to_yaml()


TIMED = DrafterSection(
    name="other", kind="quick", created_utc="2026-05-01T08:00:00Z", context=[1024],
    median_s=[2e-3], mad_s=[1e-4], n=[5],
)  # fmt: skip


class TestAddedDrafters:
    def test_it_is_added_and_nothing_else_changes(self, store, profile):
        path = store.save(profile)
        before = Profile.from_yaml(path)
        found = store.find(profile.key)
        store.add_drafter(found, "abc123", TIMED)
        after = Profile.from_yaml(path)
        assert after.drafters["abc123"] == TIMED
        assert after.model_copy(update={"drafters": before.drafters}) == before
        assert files_in(path.parent) == [path.name]
        measured = TIMED.model_copy(update={"kind": None, "created_utc": None, "n": (20,)})
        newer = altered(profile, provenance={"created_utc": "2027-01-01T00:00:00Z"})
        store.save(newer.with_drafter("abc123", measured))
        store.add_drafter(found, "abc123", TIMED)
        store.add_drafter(found, "def456", TIMED)
        after = Profile.from_yaml(path)
        assert after.provenance.created_utc == "2027-01-01T00:00:00Z"
        assert after.drafters["abc123"] == measured
        assert after.drafters["def456"] == TIMED

    @pytest.mark.parametrize("change", ["another key", "another version", "removed"])
    def test_a_file_that_is_another_meanwhile_stays(self, store, profile, change):
        path = store.save(profile)
        found = store.find(profile.key)
        path.unlink()
        if change != "removed":
            runtime = {"dtype": "float16"} if change == "another key" else {"torch": "9.0"}
            altered(profile, runtime=runtime).to_yaml(path)
        before = [one.read_bytes() for one in path.parent.glob("*.yaml")]
        with pytest.raises(ProfileError, match=r"has taken the place|no such file"):
            store.add_drafter(found, "abc123", TIMED)
        assert [one.read_bytes() for one in path.parent.glob("*.yaml")] == before

    @pytest.mark.parametrize(
        "case", ["other versions", "borrowed", "shipped", "named", "read-only"]
    )
    def test_what_is_not_ones_own_is_left_alone(self, store, profile, tmp_path, monkeypatch, case):
        key, stored, folder = profile.key, profile, "user"
        message = "not of exactly this device, runtime and versions"
        if case in ("shipped", "named"):
            message, folder = r"none of your own in .*user", case
        elif case == "borrowed":
            key = dataclasses.replace(key, runtime="graphs")
            made = {"kind": "composed", "source": "tables"}
            stored = altered(profile, provenance=made, runtime=KERNELS)
        elif case == "other versions":
            key = dataclasses.replace(key, torch="9.0")
        else:
            message = "no permission"
        path = ProfileStore([tmp_path / folder]).save(stored)
        before = path.read_bytes()
        found = store.open(path, key) if case == "named" else store.find(key)
        assert found.same == ("exactly" not in message)
        monkeypatch.setattr("tempfile.mkstemp", failing(errno.EROFS))
        with pytest.raises(ProfileError, match=message):
            store.add_drafter(found, "abc123", TIMED)
        assert path.read_bytes() == before

    def test_writers_take_turns(self, store, profile):
        """Each reads what the other has written: no cost is lost."""
        path = store.save(profile)
        found = store.find(profile.key)
        with ThreadPoolExecutor(4) as pool:
            names = [f"drafter{number}" for number in range(8)]
            with folder_lock(path.parent):
                waiting = [pool.submit(store.add_drafter, found, name, TIMED) for name in names]
                time.sleep(0.1)
                assert set(Profile.from_yaml(path).drafters) == {"ngram-1"}
            for one in waiting:
                one.result()
        assert set(Profile.from_yaml(path).drafters) == {"ngram-1", *names}


def test_a_writer_that_does_not_end_is_an_error(tmp_path):
    with (
        folder_lock(tmp_path / "new"),
        pytest.raises(ProfileError, match="new: not written, another process"),
        folder_lock(tmp_path / "new", wait_s=0.1),
    ):
        raise AssertionError("two hold it")
    with folder_lock(tmp_path / "new"):
        assert files_in(tmp_path / "new") == []


@pytest.mark.parametrize(("reported", "found"), [
    ("A100-SXM4-80GB", True), ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA A100-SXM4-40GB", False),
])  # fmt: skip
def test_a_device_under_another_of_its_names_finds_its_profile(reported, found):
    """Older drivers leave the vendor out."""
    key = dataclasses.replace(shipped("a100-sxm-80gb").key, device_name=reported)
    none = pytest.raises(ProfileError, match="there is none for this device")
    with nullcontext() if found else none:
        assert ProfileStore([shipped_directory()]).find(key).profile == shipped("a100-sxm-80gb")

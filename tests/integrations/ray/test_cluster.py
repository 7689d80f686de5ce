"""A fleet for real: a local Ray cluster of two nodes with CPU targets, one of which is lost.

The nodes have one and two CPUs, so that their profiles have other thread counts: two kinds. The
workers measure by a known clock: on a busy machine a real one may find too few points in its time.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from costmodel.profile.profile import Profile
from integrations.ray import cluster as fleet_ray
from integrations.ray.fleet import calibrate_fleet
from profiler import cli
from profiler.calibrate.source import CalibrationSettings
from tests.conftest import CALIBRATED
from tests.tiny_folder import fake_clock, isolate, write_config

_calibrate_here = fleet_ray._calibrate_here


def calibrate_by_a_known_clock(
    settings: CalibrationSettings, board: Any, node: str
) -> dict[str, Any]:
    """On a node: the same calibration, but calls take about 1 ms whatever else is running."""
    with pytest.MonkeyPatch.context() as patch:
        isolate(patch, Path(os.environ["ROOFTREE_HOME"]).parent)
        fake_clock(patch)
        return _calibrate_here(settings, board, node)


@pytest.fixture
def arguments(tmp_path):
    target = write_config(tmp_path / "tiny", max_position_embeddings=512)
    return ["calibrate", "fleet", "--device", "cpu", "--target", str(target), "--json"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'rooftree[fleet]'")
    from ray.cluster_utils import Cluster

    isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(fleet_ray, "_calibrate_here", calibrate_by_a_known_clock)
    monkeypatch.setattr(fleet_ray, "FIRST_SURVEY_S", 3600.0)  # a busy machine lists devices late
    # Ray's sockets lie in the temporary folder, and a socket's path has at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    Path(folder, "ray").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    # What the nodes inherit: threads by their CPUs, a data directory and locks of their own.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    made = Cluster()
    try:
        for cpus in (1, 2):
            made.add_node(num_cpus=cpus, object_store_memory=80_000_000, include_dashboard=False)
        yield made
    finally:
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_two_kinds_give_two_profiles_though_a_node_dies(cluster, arguments, capsys, monkeypatch):
    """The two-CPU node is removed as its calibration starts, and an equal one joins."""
    from integrations.ray.cluster import RayCluster

    start, removed = RayCluster.start, []

    def losing(self, device):
        job = start(self, device)
        if device.fingerprint.threads == 2 and not removed:
            (node,) = [n for n in cluster.list_all_nodes() if n.node_id == device.node]
            removed.append(node)
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
        return job

    monkeypatch.setattr(RayCluster, "start", losing)
    # Its clock stands still: a busy machine may take long to start a node, or to miss one.
    *others, _ = calibrate_fleet.__defaults__
    monkeypatch.setattr(calibrate_fleet, "__defaults__", (*others, lambda: 0.0))
    exit_code = cli.run([*arguments, cluster.address])
    captured = capsys.readouterr()
    assert exit_code in CALIBRATED, captured.err
    kinds = json.loads(captured.out)["kinds"]
    profiles = [Profile.from_yaml(kind["path"]) for kind in kinds]
    pairs = zip(profiles, kinds, strict=True)
    attempts = {profile.device.threads: kind["attempts"] for profile, kind in pairs}
    assert attempts == {1: 1, 2: 2}
    assert {profile.provenance.kind for profile in profiles} == {"measured"}
    assert all(Path(kind["picture"]).is_file() for kind in kinds)
    assert captured.err.count("measuring cpu of ") == 3  # the lost one twice
    assert "trying again" in captured.err


@pytest.mark.slow
def test_no_cluster_at_the_address_is_one_line(arguments, capsys, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'rooftree[fleet]'")
    isolate(monkeypatch, tmp_path)
    exit_code = cli.run([*arguments, "127.0.0.1:1"])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_code == 4
    assert error.startswith("rooftree: no Ray cluster answers at '127.0.0.1:1'")
    assert "ray start --head" in error


def test_without_ray_the_extra_is_named(arguments, capsys, tmp_path, monkeypatch):
    isolate(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.run(arguments) == 2
    assert "pip install 'rooftree[fleet]'" in capsys.readouterr().err

"""A whole calibration of a made-up server whose times follow a known law; no clock is read."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from costmodel.catalog import find_target
from costmodel.errors import MeasurementError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from costmodel.roofline import Roofline
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.source import CalibrationSettings
from profiler.calibrate.sources import url as module
from profiler.calibrate.sources.http_client import Completion, ServedModel
from profiler.calibrate.sources.requests import (
    ArrivalGuard,
    ServedPlan,
    ServedWorkload,
    draw_contexts,
    lm_head_s,
)
from profiler.calibrate.sources.url import UrlSource
from profiler.calibrate.sweep import Task
from tests.conftest import CALIBRATED
from tests.profiler.openai_server import MODEL, OpenAIServer

pytestmark = pytest.mark.cpu_kind

PEAKS = PeaksSection(source="measured", flops_per_s=4e11, bytes_per_s=2e10)
ROOFLINE = Roofline(architecture=find_target(MODEL).architecture, peaks=PEAKS.peaks())
URL = "http://127.0.0.1:1"


def forward_s(rows: int, context: int, batch: int = 1) -> float:
    """The law of a verification."""
    return 0.020 + 0.0007 * rows * batch + 4e-6 * context * batch


class LawfulServer:
    """Keeps the last sequences, computes the rest, and takes the law's time plus a floor.

    kept    sequences in its prefix cache
    at_once requests that run together; the others wait
    tells   whether it counts cached tokens
    """

    def __init__(self, *given: object, kept: int = 8, at_once: int = 8, tells: bool = False, **_):
        self.model, self.kept, self.at_once, self.tells = "", kept, at_once, tells
        self.block, self.requests = 16, 0
        self._sequences: list[np.ndarray] = []

    def models(self) -> tuple[list[ServedModel], str]:
        return [ServedModel(name=MODEL, most_tokens=2300)], "vllm-0.32.0"

    def complete(self, prompt: list[int], tokens: int = 1) -> Completion:
        self.requests += 1
        cached = self._cached(prompt)
        rows = len(prompt) - cached
        lm_head = lm_head_s(ROOFLINE, rows) - lm_head_s(ROOFLINE, 1)
        floor_s = 0.006 + 1e-6 * len(prompt)
        seconds = forward_s(rows, cached) - lm_head + floor_s
        seconds += (tokens - 1) * forward_s(1, cached)
        return Completion(seconds=seconds, cached_tokens=cached if self.tells else None)

    def stream(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        waves = [prompts[i : i + self.at_once] for i in range(0, len(prompts), self.at_once)]
        arrivals, start_s = [], 0.006
        for wave in waves:
            context = sum(map(self._cached, wave)) // len(wave)
            step_s = forward_s(1, context, len(wave))
            arrivals += [[start_s + i * step_s for i in range(tokens)] for _ in wave]
            start_s += tokens * step_s
        return arrivals

    def _cached(self, prompt: list[int]) -> int:
        """Tokens of the prompt in the cache, in whole blocks; the prompt is kept from now on."""
        new, shared = np.array(prompt), 0
        for kept in self._sequences:
            least = min(len(new), len(kept))
            differ = np.flatnonzero(new[:least] != kept[:least])
            same = int(differ[0]) if len(differ) else least
            shared = max(shared, min(same, len(new) - 1))
        if self.kept:
            self._sequences = [*self._sequences, new][-self.kept :]
        return shared // self.block * self.block


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFTREE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("profiler.measure.lock.lock_directory", lambda: tmp_path)


def calibrated(monkeypatch, folder: Path, **law) -> tuple[Profile, list[str], LawfulServer]:
    """The profile of a lawful server, what was said, and the server."""
    server, said = LawfulServer(**law), []
    # Nothing is measured here, so another test that measures is no reason to refuse.
    monkeypatch.setattr("profiler.measure.lock.lock_directory", lambda: folder)
    monkeypatch.setattr(module, "peaks_of", lambda device, dtype: PEAKS)
    monkeypatch.setattr(module, "ServerClient", lambda *given, **named: server)
    settings = CalibrationSettings(
        device="cpu", dtype="bfloat16", output=folder / "served.yaml", seed=3, fresh=True
    )
    listener = CalibrationListener(say=said.append)
    result = calibrate(settings, listener, UrlSource(settings, URL))
    return Profile.from_yaml(result.path), said, server


@pytest.fixture(scope="module")
def lawful(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lawful")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ROOFTREE_HOME", str(folder / "home"))
        return calibrated(monkeypatch, folder)


def check_law(profile: Profile) -> set[tuple[int, int, int]]:
    """Every point has the law's time; returns the shapes."""
    surface = profile.surface
    shapes = list(zip(surface.rows, surface.context, surface.batch, strict=True))
    for shape, seconds in zip(shapes, surface.median_s, strict=True):
        assert seconds == pytest.approx(forward_s(*shape), rel=2e-3), shape
    assert profile.held_out.error.median < 0.02
    return set(shapes)


def test_the_profile_follows_the_law(lawful):
    profile, said, server = lawful
    shapes = check_law(profile)
    assert {rows for rows, _, _ in shapes} >= {1, 2, 16}
    assert {context for _, context, _ in shapes} == {128, 256, 1024, 2048}
    assert {batch for rows, _, batch in shapes if rows == 1} == {1, 2, 4, 8}
    assert any(line.startswith("taken out of each request: 6.0") for line in said)
    assert server.requests < 3000


@pytest.mark.slow
def test_a_server_that_tells_its_blocks(monkeypatch, tmp_path):
    profile, _, _ = calibrated(monkeypatch, tmp_path, tells=True)
    assert {context for _, context, _ in check_law(profile)} == {64, 256, 1024, 2048}


@pytest.mark.slow
def test_a_server_that_keeps_one_sequence(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "BATCHES", (1,))  # several cannot be cached at once
    profile, _, _ = calibrated(monkeypatch, tmp_path, kept=1)
    assert {batch for _, _, batch in check_law(profile)} == {1}


def test_the_profile_says_where_it_is_from(lawful):
    profile, said, _ = lawful
    runtime, provenance = profile.runtime, profile.provenance
    assert (runtime.kind, runtime.attention, runtime.engine) == ("url", "vllm-0.32.0", None)
    assert provenance.kind == "measured"
    assert provenance.source == f"HTTP, {URL}, vllm-0.32.0"
    assert provenance.error_bar >= profile.held_out.error.mape
    for part in ("taken out of each request", "LM head of all rows", "extrapolated"):
        assert part in provenance.note
        assert any(part in line for line in said)
    assert profile.stages.plain.seconds(128, 4) == pytest.approx(forward_s(1, 128, 4), rel=2e-3)


def test_weights_are_those_of_the_targets_name_and_not_of_this_cpu(monkeypatch):
    monkeypatch.setattr(module, "ServerClient", lambda *given, **named: LawfulServer(tells=True))
    settings = CalibrationSettings(device="h100-sxm", target="Qwen/Qwen3-8B-FP8")
    it = UrlSource(settings, URL).prepare(print).subject.runtime
    assert (it.dtype, it.quantization, it.weight_bytes) == ("bfloat16", "fp8_block", 1.0)


def test_the_most_requests_that_run_at_once():
    def most(at_once):
        server = LawfulServer(at_once=at_once)
        return ServedWorkload(server, vocab=49152, seed=0).find_most_together((1, 2, 4, 8))

    assert [most(at_once) for at_once in (8, 3, 1)] == [8, 2, 1]


def test_streams_that_ran_apart_are_rejected():
    server = LawfulServer()
    workload = ServedWorkload(server, vocab=49152, seed=0)
    guard = ArrivalGuard(workload)
    step = workload.call(Task(kind="plain", size=1, context=256, batch=2))
    for at_once, disturbed in ((8, False), (1, True), (8, False)):
        server.at_once = at_once
        guard.start()
        assert step() > 0
        assert bool(guard.disturbance()) == disturbed


def test_a_server_without_a_prefix_cache(monkeypatch, tmp_path):
    with pytest.raises(MeasurementError, match=r"has no prefix cache: 1024 tokens .*prefix cach"):
        calibrated(monkeypatch, tmp_path, kept=0)
    with pytest.raises(MeasurementError, match="caches nothing of"):
        calibrated(monkeypatch, tmp_path, kept=0, tells=True)


def test_the_plan_has_held_out_points_of_its_own():
    contexts = (128, 2048)
    drawn = draw_contexts(contexts, 5)
    assert all(128 <= context <= 2048 for context in drawn) and len(set(drawn)) == 3
    plan = ServedPlan(contexts=contexts, batches=(1, 4), most_rows=16, held_out_contexts=(128, 640))
    shape = {(task.size, task.context) for task in plan.grid()}
    held_out = {(task.size, task.context) for task in plan.held_out()}
    assert not shape & held_out
    assert {(1, 128), (1, 640)} < held_out
    assert {task.batch for task in plan.plain()} == {1, 4}


def test_the_command_over_http(run, tmp_path, monkeypatch):
    fast = PeaksSection(source="measured", flops_per_s=1e18, bytes_per_s=1e16)
    monkeypatch.setattr(module, "peaks_of", lambda device, dtype: fast)
    details = {"prompt_tokens_details": {"cached_tokens": 10_000}}
    arguments = ["--device", "cpu", "--contexts", "128,256", "--batch", "1,2", "--json"]
    path = str(tmp_path / "served.yaml")
    with OpenAIServer(usage=lambda usage: usage | details, step_s=0.004) as server:
        words = [server.url, *arguments, "--time-budget", "10s", "--output", path]
        code, out, err = run("calibrate", "url", *words)
    assert code in CALIBRATED and "(vllm-0.32.0)" in err, err
    record = json.loads(out)
    assert record["path"] == path
    assert record["profile"]["runtime"]["kind"] == "url"
    assert run("profiles", "show", path)[0] == 0
    export = run("export", path, "--engine", "vllm", "--acceptance", "0.7")
    assert export[0] == 0 and "vllm serve" in export[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'http://HOST:PORT'"),
        ([URL, "--runtime", "eager"], "No such option"),
        ([URL, "--contexts", "128"], "two contexts or more"),
        (["no address"], "is no address of a server"),
        (["http://elsewhere:8000"], "is not this machine.*--device h100-sxm"),
        ([URL, "--device", "x100"], "no known device is called 'x100'"),
    ],
)
def test_one_line_for_each_mistake(run, arguments, message):
    code, _, err = run("calibrate", "url", *arguments)
    assert code == 2
    assert re.search(message, err.strip().splitlines()[-1]), err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (200, {}, b'{"data":[{"id":"mine-7b"}]}'),
            "its model 'mine-7b', which is no known.*--targ",
        ),
        ((200, {}, b'{"object":"list"}'), "does not speak the OpenAI API"),
        ((401, {}, b""), "wants an API key.*ROOFTREE_API_KEY"),
    ],
)
def test_models_are_named_and_the_key_comes_from_the_environment(run, monkeypatch, answer, message):
    monkeypatch.setenv("ROOFTREE_API_KEY", "secret")
    with OpenAIServer({"/v1/models": answer}) as server:
        code, _, err = run("calibrate", "url", server.url)
    assert code != 0 and re.search(message, err.strip().splitlines()[-1]), err
    assert server.requests[0][1]["Authorization"] == "Bearer secret"
    assert "secret" not in err

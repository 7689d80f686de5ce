"""Whole calibrations of a made-up server whose times follow a known law; no clock is read."""

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from costmodel.catalog import resolve_target
from costmodel.errors import MeasurementError
from costmodel.profile.profile import Profile
from costmodel.profile.schema import PeaksSection
from costmodel.roofline import Roofline
from integrations.openai_server import source as module
from integrations.openai_server.client import Address, ServerClient
from integrations.openai_server.requests import (
    ArrivalGuard,
    ServedWorkload,
    ServerTasks,
    draw_contexts,
    lm_head_s,
)
from integrations.openai_server.source import UrlSource
from profiler.calibrate.run import CalibrationListener, calibrate
from profiler.calibrate.source import CalibrationSettings
from profiler.calibrate.sweep import Task
from tests.integrations.openai_server.test_client import MODEL

pytestmark = pytest.mark.cpu_kind

PEAKS = PeaksSection(source="measured", flops_per_s=4e11, bytes_per_s=2e10)
# Of a CPU that bounds none of the times here, and of a known GPU.
FAST = PeaksSection(source="measured", flops_per_s=4e13, bytes_per_s=1e12)
H100 = PeaksSection(source="datasheet", flops_per_s=9.89e14, bytes_per_s=3.35e12)
URL = "http://127.0.0.1:1"


def relative_s(rows: int, context: int, batch: int = 1) -> float:
    """The law of a verification, in steps of one row without a context."""
    return 1.0 + 0.035 * rows * batch + 2e-4 * context * batch


class LawfulServer:
    """Keeps the last sequences, computes the rest, and takes the law's time plus a floor.

    A transport of httpx, whose answers come in pieces of any length; time passes on a clock of each
    thread. It keeps `kept` sequences, runs `at_once` requests together, and `tells` cached tokens.
    """

    def __init__(
        self,
        step_s: float = 0.020,
        peaks: PeaksSection = PEAKS,
        name: str = MODEL,
        *,
        kept: int = 16,
        at_once: int = 8,
        tells: bool = False,
    ) -> None:
        self.step_s, self.peaks = step_s, peaks
        self.roofline = Roofline(
            architecture=resolve_target(name).architecture, peaks=peaks.peaks()
        )
        self.kept, self.at_once, self.tells = kept, at_once, tells
        self.block, self.requests, self.asked = 16, 0, ""
        self.entries: list[dict[str, str]] = [{"id": name}]
        self._clock, self._lock, self._cut = threading.local(), threading.Lock(), random.Random(0)
        self._sequences: list[np.ndarray] = []
        self._streams: list[int] = []  # of the requests that came together, the cached tokens

    def client(self, address: Address, **_) -> ServerClient:
        server = self

        class Client(ServerClient):
            def stream(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
                server._together, server._streams = len(prompts), []
                return super().stream(prompts, tokens)

        return Client(address, transport=httpx.MockTransport(self.answer), now_s=self.now_s)

    def forward_s(self, rows: int, context: int, batch: int = 1) -> float:
        return self.step_s * relative_s(rows, context, batch)

    def now_s(self) -> float:
        return getattr(self._clock, "now_s", 0.0)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            told = {"owned_by": "vllm", "max_model_len": 2300}
            return httpx.Response(200, json={"data": [entry | told for entry in self.entries]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        body = json.loads(request.content)
        self.asked = body["model"]
        with self._lock:
            self.requests += 1
            cached, place = self._cached(body["prompt"]), len(self._streams)
            self._streams.append(cached)
        count, tokens = len(body["prompt"]), body["max_tokens"]
        usage: dict[str, Any] = {"prompt_tokens": count, "completion_tokens": tokens}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if body.get("stream"):
            return httpx.Response(200, content=self._pieces(place, cached, tokens, usage))
        rows = count - cached
        lm_head = lm_head_s(self.roofline, rows) - lm_head_s(self.roofline, 1)
        self._pass(self.forward_s(rows, cached) - lm_head + 0.006 + 1e-6 * count)
        self._pass((tokens - 1) * self.forward_s(1, cached))
        return httpx.Response(200, json={"choices": [{"text": "a"}], "usage": usage})

    def _pieces(self, place: int, cached: int, tokens: int, usage: dict) -> Iterator[bytes]:
        """The events of a stream in pieces of any length, an event after each step."""
        wave = place // self.at_once
        batch = min(self.at_once, self._together - wave * self.at_once)
        self._pass(0.006 + wave * tokens * self.forward_s(1, cached, self.at_once))
        for choices in [*[[{"text": "a"}]] * tokens, []]:
            event = json.dumps({"choices": choices, "usage": usage}).encode()
            data = b": alive\n\ndata:" + event + b"\r\n\r\n"
            place = self._cut.randrange(1, len(data))
            yield data[:place]
            yield data[place:]
            self._pass(self.forward_s(1, cached, batch))

    def _pass(self, seconds: float) -> None:
        self._clock.now_s = self.now_s() + seconds

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


def calibrated(
    monkeypatch, folder: Path, server: LawfulServer, **settings
) -> tuple[Profile, list[str]]:
    said: list[str] = []
    # Nothing is measured here, so another test that measures is no reason to refuse.
    monkeypatch.setattr("profiler.measure.lock.lock_directory", lambda: folder)
    monkeypatch.setattr(module, "peaks_of", lambda device, dtype: server.peaks)
    monkeypatch.setattr(module, "ServerClient", server.client)
    chosen = CalibrationSettings(output=folder / "served.yaml", seed=3, **settings)
    listener = CalibrationListener(say=said.append)
    result = calibrate(chosen, listener, UrlSource(chosen, URL))
    return Profile.from_yaml(result.path), said


@pytest.fixture(scope="module")
def lawful(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lawful")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ROOFTREE_HOME", str(folder / "home"))
        server = LawfulServer()
        return *calibrated(monkeypatch, folder, server, device="cpu", dtype="bfloat16"), server


def check_law(
    profile: Profile, step_s: float = 0.020, error: float = 2e-3
) -> set[tuple[int, int, int]]:
    """Every point has the law's time; returns the shapes."""
    surface = profile.surface
    shapes = list(zip(surface.rows, surface.context, surface.batch, strict=True))
    for shape, seconds in zip(shapes, surface.median_s, strict=True):
        assert seconds == pytest.approx(step_s * relative_s(*shape), rel=error), shape
    assert profile.held_out.error.median < 0.02
    return set(shapes)


def test_the_profile_follows_the_law_and_says_where_it_is_from(lawful):
    profile, said, server = lawful
    shapes = check_law(profile)
    assert {rows for rows, _, _ in shapes} >= {1, 2, 16}
    assert {context for _, context, _ in shapes} == {128, 256, 1024, 2048}
    assert {batch for rows, _, batch in shapes if rows == 1} == {1, 2, 4, 8}
    assert any(line.startswith("taken out of each request: 6.0") for line in said)
    assert server.requests < 3000
    runtime, provenance = profile.runtime, profile.provenance
    assert (runtime.kind, runtime.attention, runtime.engine) == ("url", "vllm-0.32.0", None)
    assert provenance.kind == "measured"
    assert provenance.source == f"HTTP, {URL}, vllm-0.32.0"
    assert provenance.error_bar >= profile.held_out.error.mape
    for part in ("taken out of each request", "LM head of all rows", "extrapolated"):
        assert part in provenance.note
        assert any(part in line for line in said)
    assert profile.stages.plain.seconds(128, 4) == pytest.approx(
        server.forward_s(1, 128, 4), rel=2e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "peaks", "name", "step_s"), [
    ({}, FAST, MODEL, 0.001), ({}, FAST, MODEL, 0.020),
    ({"device": "cpu", "dtype": "bfloat16"}, FAST, MODEL, 0.003),
    ({"device": "h100-sxm"}, H100, MODEL, 0.001),
    ({"device": "h100-sxm"}, H100, "Qwen/Qwen3-0.6B-FP8", 0.006),
])  # fmt: skip
def test_no_time_is_changed(monkeypatch, tmp_path, settings, peaks, name, step_s):
    server = LawfulServer(step_s, peaks, name)
    profile, _ = calibrated(
        monkeypatch, tmp_path, server, contexts=(128, 1024), batches=(1, 2), **settings
    )
    check_law(profile, step_s, error=0.01)  # a CPU's float32 adds logits of 4 bytes, not 2


@pytest.mark.slow
def test_a_server_that_tells_its_blocks(monkeypatch, tmp_path):
    profile, _ = calibrated(monkeypatch, tmp_path, LawfulServer(tells=True))
    assert {context for _, context, _ in check_law(profile)} == {64, 256, 1024, 2048}


@pytest.mark.slow
def test_a_server_that_keeps_one_sequence(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "BATCHES", (1,))  # several cannot be cached at once
    profile, _ = calibrated(monkeypatch, tmp_path, LawfulServer(kept=1))
    assert {batch for _, _, batch in check_law(profile)} == {1}


FP8 = "Qwen/Qwen3-8B-FP8"


@pytest.mark.parametrize(("target", "entries"), [
    (FP8, [{"id": FP8}]),
    (FP8, [{"id": "chat", "root": FP8}, {"id": "prod", "root": FP8}]),
    (None, [{"id": "chat", "root": FP8}, {"id": "prod", "root": FP8}]),
    (None, [{"id": FP8}, {"id": "adapter", "root": "/lora", "parent": FP8}]),
    (FP8, [{"id": "chat", "root": FP8}, {"id": "Qwen/Qwen3-4B"}]),
])  # fmt: skip
def test_weights_are_those_of_the_targets_name_or_root(monkeypatch, target, entries):
    server = LawfulServer(tells=True)
    server.entries = entries
    monkeypatch.setattr(module, "ServerClient", server.client)
    settings = CalibrationSettings(device="h100-sxm", target=target)
    it = UrlSource(settings, URL).prepare(print).subject.runtime
    assert (it.dtype, it.quantization, it.weight_bytes) == ("bfloat16", "fp8_block", 1.0)
    assert server.asked == entries[0]["id"]


def test_the_most_requests_that_run_at_once_and_streams_that_ran_apart():
    def most(at_once):
        client = LawfulServer(at_once=at_once).client(Address.parse(URL))
        return ServedWorkload(client, vocab=49152, seed=0).find_most_together((1, 2, 4, 8))

    assert [most(at_once) for at_once in (8, 3, 1)] == [8, 2, 1]
    server = LawfulServer()
    workload = ServedWorkload(server.client(Address.parse(URL)), vocab=49152, seed=0)
    guard = ArrivalGuard(workload)
    step = workload.call(Task(kind="plain", size=1, context=256, batch=2))
    for at_once, disturbed in ((8, False), (1, True), (8, False)):
        server.at_once = at_once
        guard.start()
        assert step() > 0
        assert bool(guard.disturbance()) == disturbed


def test_a_server_without_a_prefix_cache(monkeypatch, tmp_path):
    with pytest.raises(MeasurementError, match=r"has no prefix cache: 1024 tokens .*prefix cach"):
        calibrated(monkeypatch, tmp_path, LawfulServer(kept=0))
    with pytest.raises(MeasurementError, match="caches nothing of"):
        calibrated(monkeypatch, tmp_path, LawfulServer(kept=0, tells=True))


def test_the_plan_has_held_out_points_of_its_own():
    contexts = (128, 2048)
    drawn = draw_contexts(contexts, 5)
    assert all(128 <= context <= 2048 for context in drawn) and len(set(drawn)) == 3
    plan = ServerTasks(
        contexts=contexts, batches=(1, 4), most_rows=16, held_out_contexts=(128, 640)
    )
    shape = {(task.size, task.context) for task in plan.grid()}
    held_out = {(task.size, task.context) for task in plan.held_out()}
    assert not shape & held_out
    assert {(1, 128), (1, 640)} < held_out
    assert {task.batch for task in plan.plain()} == {1, 4}


def test_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ServerClient", LawfulServer(peaks=H100).client)
    arguments = ["--device", "h100-sxm", "--contexts", "128,256", "--batch", "1", "--json"]
    path = str(tmp_path / "served.yaml")
    code, out, err = run("calibrate", "url", URL, *arguments, "--output", path)
    assert code == 0 and "(vllm-0.32.0)" in err, err
    record = json.loads(out)
    assert record["path"] == path
    assert record["profile"]["runtime"]["kind"] == "url"
    assert run("profiles", "show", path)[0] == 0
    export = run("export", path, "--engine", "vllm", "--acceptance", "0.7")
    assert export[0] == 0 and "vllm serve" in export[1]


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "Missing argument 'http://HOST:PORT'"), ([URL, "--runtime", "eager"], "No such option"),
    ([URL, "--contexts", "128"], "two contexts or more"),
    (["no address"], "is no address of a server"),
    (["http://elsewhere:8000"], "is not this machine.*--device h100-sxm"),
    ([URL, "--device", "x100"], "no known device is called 'x100'"),
])  # fmt: skip
def test_one_line_for_each_mistake(run, arguments, message):
    code, _, err = run("calibrate", "url", *arguments)
    assert code == 2
    assert re.search(message, err.strip().splitlines()[-1]), err


@pytest.mark.parametrize(("answer", "message"), [
    ((200, {}, b'{"data":[{"id":"mine-7b"}]}'), "its model 'mine-7b', which is no known.*--targ"),
    ((200, {}, b'{"object":"list"}'), "does not speak the OpenAI API"),
    ((401, {}, b""), "wants an API key.*ROOFTREE_API_KEY"),
])  # fmt: skip
def test_models_are_named_and_the_key_comes_from_the_environment(run, monkeypatch, answer, message):
    monkeypatch.setenv("ROOFTREE_API_KEY", "secret")
    keys = []

    def answered(request):
        keys.append(request.headers["Authorization"])
        status, _, content = answer
        return httpx.Response(status, content=content)

    def client(address, **options):
        return ServerClient(address, transport=httpx.MockTransport(answered), **options)

    monkeypatch.setattr(module, "ServerClient", client)
    code, _, err = run("calibrate", "url", URL)
    assert code != 0 and re.search(message, err.strip().splitlines()[-1]), err
    assert keys[0] == "Bearer secret"
    assert "secret" not in err

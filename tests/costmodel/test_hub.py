"""Configs from the hub: a local server in its place, and no server at all."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from costmodel.catalog import find_target, resolve_target
from costmodel.errors import InputError
from costmodel.hf_config import hub_config, is_hub_id
from costmodel.planning.request import ServingPolicy
from costmodel.planning.search import plan
from tests.costmodel.planning.conftest import SHIPPED, asked

QWEN = find_target("qwen3-8b")
CONFIG = dict(QWEN.hf_config)
ANSWERS = {
    "/me/tuned/resolve/main/config.json": (200, json.dumps(CONFIG)),
    "/me/broken/resolve/main/config.json": (200, "{"),
    "/me/gated/resolve/main/config.json": (401, ""),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = ANSWERS.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_config.cache_clear()


@pytest.fixture
def hub(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_id_is_a_target(hub):
    entry = resolve_target("me/tuned", hub=True)
    assert (entry.name, entry.positions) == ("me/tuned", 40960)
    assert entry.architecture.hash == QWEN.architecture.hash
    # It can be planned, and finds the profile of its sizes.
    planned = plan(asked(target="me/tuned", policy=ServingPolicy(kind="plain")), SHIPPED)
    assert planned.options[0].origin.kind == "composed"


@pytest.mark.parametrize(("name", "message"), [
    ("me/broken", "is not JSON"),
    ("me/gated", r"HTTP 401: it has none, or the model is gated\). .*hf auth login"),
    ("me/nonesuch", "HTTP 404"),
])  # fmt: skip
def test_what_the_hub_does_not_give_is_said(hub, name, message):
    with pytest.raises(InputError, match=message) as caught:
        resolve_target(name, hub=True)
    assert "\n" not in str(caught.value)


def test_only_owner_slash_model_is_asked_for_and_no_network_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused
    with pytest.raises(InputError, match="without a network"):
        resolve_target("me/tuned", hub=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE forbids"):
        resolve_target("me/tuned", hub=True)
    monkeypatch.chdir(tmp_path)  # beside which nothing lies
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("me", "me/a/b", "../me", "/me/tuned", "me /tuned", "~/x"):
        assert not is_hub_id(name)
        with pytest.raises(InputError, match="no known target"):
            resolve_target(name, hub=True)
    with pytest.raises(InputError, match="no known target"):
        resolve_target("me/tuned")  # the decoder does not ask

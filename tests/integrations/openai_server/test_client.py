"""The client against made-up answers: what it sends, what it refuses, and its limits."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise, repeat

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import InputError, MeasurementError
from integrations.openai_server import client as client_module
from integrations.openai_server.client import Address, RequestLimits, ServerClient

MODEL = "SmolLM2-135M-Instruct"


class Answers:
    """A transport of httpx for a server that is honest, unless an answer or its usage is given.

    requests  the bodies and API keys of all requests so far
    """

    def __init__(self, answer=None, usage=lambda usage: usage):
        self.answer, self.usage, self.requests = answer, usage, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        told = {"id": MODEL, "owned_by": "vllm", "max_model_len": 4096}
        plain = {"/v1/models": {"data": [told]}, "/version": {"version": "0.32.0"}}
        if request.url.path in plain:
            return httpx.Response(200, json=plain[request.url.path])
        assert request.url.path == "/v1/completions"
        body = json.loads(request.content)
        self.requests.append((body, request.headers.get("Authorization")))
        if self.answer is not None:
            status, headers, content = self.answer
            return httpx.Response(status, headers=headers, content=content)
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage = self.usage(counts)
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [{"text": "a"}], "usage": usage})
        events = [{"choices": [{"text": "a"}]}] * body["max_tokens"]
        lines = [json.dumps(one) for one in [*events, {"choices": [], "usage": usage}]]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return httpx.Response(200, content=text.encode())


def connected(answers: Answers, **options) -> ServerClient:
    transport = httpx.MockTransport(answers)
    client = ServerClient(Address.parse("http://host"), transport=transport, **options)
    client.model = MODEL
    return client


def test_what_is_sent_what_a_server_is_and_streams_at_once():
    server = Answers()
    readings = iter([0.0, 1.0, 10.0, 10.25])  # at the start, for the limit, around the call
    answer = connected(server, now_s=lambda: next(readings)).complete([5, 6, 7])
    [(body, _)] = server.requests
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([5, 6, 7], 1, 0)
    assert body["ignore_eos"] is True
    assert (answer.seconds, answer.cached_tokens) == (0.25, None)
    (model,), version = connected(Answers()).models()
    assert (model.name, model.most_tokens, version) == (MODEL, 4096, "vllm-0.32.0")
    connected(server, api_key="secret").complete([1])
    assert [key for _, key in server.requests] == [None, "Bearer secret"]
    server = Answers()
    arrivals = connected(server).stream([[1, 2], [3, 4], [5, 6]], 5)
    assert [len(times) for times in arrivals] == [5, 5, 5]
    assert all(times == sorted(times) for times in arrivals)
    assert sorted(body["prompt"] for body, _ in server.requests) == [[1, 2], [3, 4], [5, 6]]


STREAM = b"""\
: alive\r\n\r\ndata:{"choices":[{"text":""}]}\r\n
data:{"choices":
data: [{"text":"a"}]}

data: {"choices":[{"text":"b"}]}

: still

data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}

data:  [DONE]

"""


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_a_stream_cut_at_any_byte_has_the_same_tokens(cuts):
    """With heartbeats, several data lines, no spaces, and an empty chunk before the first token."""
    parts = [STREAM[a:b] for a, b in pairwise([0, *sorted(cuts), len(STREAM)])]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iter(parts)))
    client = ServerClient(Address.parse("http://host"), transport=transport)
    assert [len(times) for times in client.stream([[1]], 2)] == [2]


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("part", [b"a" * 65536, b"data: {}\n\n" * 6554])
def test_an_answer_has_an_end(status, part, monkeypatch):
    monkeypatch.setattr(client_module, "MOST_ANSWER_BYTES", 400_000)
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=repeat(part)))
    client = ServerClient(Address.parse("http://host"), transport=transport)
    for ask in (lambda: client.complete([1]), lambda: client.stream([[1]], 1)):
        with pytest.raises(MeasurementError, match="sends an answer without an end"):
            ask()


@pytest.mark.parametrize("error", [
    (400, b'{"error":{"message":"no memory"}}'), (400, b'{"message":"no memory","object":"error"}'),
    (403, b'{"detail":"no memory"}'), (404, b'{"error":"no memory"}'), (503, b"no memory"),
    (200, b'data: {"error":{"message":"no memory"}}\n\n'),
])  # fmt: skip
def test_errors_have_the_servers_own_words(error):
    server = Answers((error[0], {"Retry-After": "7"}, error[1]))
    with pytest.raises((InputError, MeasurementError), match="'no memory'") as raised:
        connected(server).stream([[1]], 1)
    assert ("in 7 s" in str(raised.value.hint)) == (error[0] == 503)


@pytest.mark.parametrize(("answer", "message"), [
    ((401, {}, b""), "wants an API key.*ROOFTREE_API_KEY"),
    ((404, {}, b"{}"), "has no model"), ((429, {}, b""), r"too busy \(429\)"),
    ((500, {}, b"a\x1b[31mb"), r"answers 500: 'a\\x1b\[31mb'"),
    ((302, {"Location": "http://elsewhere/"}, b""), "redirects to 'http://elsewhere/'"),
    ((200, {}, b"<html>"), "does not (speak the OpenAI API|tell how many tokens)"),
    ((200, {}, b"{}"), r"does not tell how many tokens it computed \(usage\)"),
])  # fmt: skip
def test_an_answer_that_is_none(answer, message):
    for ask in (lambda c: c.complete([1]), lambda c: c.stream([[1], [2]], 3)):
        with pytest.raises((InputError, MeasurementError), match=message) as raised:
            ask(connected(Answers(answer)))
        assert "\n" not in str(raised.value)


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    """Over a network: the server that is asked for refuses, and the proxy would too."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        address = Address.parse(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(MeasurementError, match="answers 501"):
            ServerClient(address).complete([1])


@pytest.mark.parametrize("changed", [{"prompt_tokens": 4}, {"completion_tokens": 2}])
def test_other_counts_than_asked_are_refused(changed):
    client = connected(Answers(usage=lambda usage: usage | changed))
    with pytest.raises(MeasurementError, match="was sent 3 tokens and asked for 1, and counts"):
        client.complete([1, 2, 3])


@pytest.mark.parametrize(("failure", "message"), [
    (httpx.ConnectError("refused"), "nothing listens at http://host:80: .*refused"),
    (httpx.ConnectError("[SSL] wrong version"), "no secure connection"),
    (httpx.ReadTimeout("slow"), "did not answer for 120 s"),
    (httpx.RemoteProtocolError("SSH-2.0-x"), "failed"),
])  # fmt: skip
def test_a_connection_that_fails(failure, message):
    def fail(request):
        raise failure

    client = ServerClient(Address.parse("http://host"), transport=httpx.MockTransport(fail))
    with pytest.raises((InputError, MeasurementError), match=message):
        client.models()


@pytest.mark.parametrize(("limits", "message"), [
    (RequestLimits(requests=1), "more than 1 requests"),
    (RequestLimits(prompt_tokens=5), "more than 5 tokens"),
    (RequestLimits(seconds=-1.0), "more than -1 s"),
])  # fmt: skip
def test_requests_are_bounded(limits, message):
    server = Answers()
    client = connected(server, limits=limits)
    with pytest.raises(MeasurementError, match=message):
        for _ in range(2):
            client.complete([1, 2, 3])
    assert len(server.requests) <= 1


@pytest.mark.parametrize("url", [
    "", "127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://user@host",
    "http://host/v1/completions", "http://[::1",
])  # fmt: skip
def test_what_is_no_address(url):
    with pytest.raises(InputError, match="is no address"):
        Address.parse(url)


@pytest.mark.parametrize(("url", "shown", "local"), [
    ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", True),
    ("https://[::1]", "https://[::1]:443", True), ("http://gpu-box", "http://gpu-box:80", False),
])  # fmt: skip
def test_addresses(url, shown, local):
    address = Address.parse(url)
    assert (str(address), address.local) == (shown, local)

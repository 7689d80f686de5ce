"""The client against a small HTTP server: what it sends, what it refuses, and its limits."""

import re
import socket
import threading

import pytest

from costmodel.errors import InputError, MeasurementError
from profiler.calibrate.sources.http_client import Address, RequestLimits, ServerClient
from tests.profiler.openai_server import MODEL, OpenAIServer


def connected(server: OpenAIServer, **options) -> ServerClient:
    client = ServerClient(Address.parse(server.url), **options)
    client.model = MODEL
    return client


def test_a_server_says_what_it_is():
    with OpenAIServer() as server:
        (model,), version = connected(server).models()
    assert (model.name, model.most_tokens, version) == (MODEL, 4096, "vllm-0.32.0")


def test_a_completion_is_of_the_ids_that_were_given():
    with OpenAIServer() as server:
        readings = iter([0.0, 1.0, 10.0, 10.25])  # at the start, for the limit, around the call
        client = connected(server, now_s=lambda: next(readings))
        answer = client.complete([5, 6, 7])
    path, _, body = server.requests[-1]
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([5, 6, 7], 1, 0)
    assert body["ignore_eos"] is True
    assert (answer.seconds, answer.cached_tokens) == (0.25, None)


def test_streams_run_at_once_and_have_a_time_for_each_token():
    with OpenAIServer() as server:
        arrivals = connected(server).stream([[1, 2], [3, 4], [5, 6]], 5)
    assert [len(times) for times in arrivals] == [5, 5, 5]
    assert all(times == sorted(times) for times in arrivals)
    assert sorted(body["prompt"] for _, _, body in server.requests) == [[1, 2], [3, 4], [5, 6]]


def test_a_stream_without_spaces_that_ends_in_the_servers_own_words():
    said = b': alive\r\n\r\ndata:{"choices":[{"text":"a"}]}\r\n\r\ndata:%b\r\n\r\n'
    for end, message in ((b'{"error":{"message":"no memory"}}', "no memory"), (b"[DONE]", "usage")):
        answers = {"/v1/completions": (200, {}, said % end)}
        with OpenAIServer(answers) as server, pytest.raises(MeasurementError, match=message):
            connected(server).stream([[1]], 1)


def test_the_key_is_sent_only_where_one_is_given():
    with OpenAIServer() as server:
        connected(server, api_key="secret").complete([1])
        connected(server).complete([1])
    keys = [headers.get("Authorization") for _, headers, _ in server.requests]
    assert keys == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, b""), "wants an API key.*ROOFTREE_API_KEY"),
        ((403, {}, b""), "wants an API key"),
        ((404, {}, b"{}"), "has no model"),
        ((429, {}, b""), r"too busy \(429\)"),
        ((503, {}, b""), r"too busy \(503\)"),
        ((500, {}, b"a\x1b[31mb"), r"answers 500: 'a\\x1b\[31mb'"),
        ((302, {"Location": "http://elsewhere/"}, b""), "redirects to 'http://elsewhere/'"),
        ((200, {}, b"<html>"), "does not (speak the OpenAI API|tell how many tokens)"),
        ((200, {}, b"{}"), r"does not tell how many tokens it computed \(usage\)"),
    ],
)
def test_an_answer_that_is_none(answer, message):
    with OpenAIServer({"/v1/completions": answer}) as server:
        for ask in (lambda c: c.complete([1]), lambda c: c.stream([[1], [2]], 3)):
            with pytest.raises((InputError, MeasurementError), match=message) as raised:
                ask(connected(server))
            assert "\n" not in str(raised.value)


def test_a_redirect_is_not_followed():
    with OpenAIServer() as other:
        moved = (307, {"Location": f"{other.url}/v1/completions"}, b"")
        with (
            OpenAIServer({"/v1/completions": moved}) as server,
            pytest.raises(InputError, match=re.escape(other.url)),
        ):
            connected(server).complete([1])
    assert other.requests == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with OpenAIServer() as proxy, OpenAIServer() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        connected(server).complete([1])
    assert len(server.requests) == 1
    assert proxy.requests == []


@pytest.mark.parametrize("changed", [{"prompt_tokens": 4}, {"completion_tokens": 2}])
def test_other_counts_than_asked_are_refused(changed):
    with (
        OpenAIServer(usage=lambda usage: usage | changed) as server,
        pytest.raises(MeasurementError, match="was sent 3 tokens and asked for 1, and counts"),
    ):
        connected(server).complete([1, 2, 3])


def test_nothing_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address(scheme="http", host="127.0.0.1", port=free.getsockname()[1])
    with pytest.raises(InputError, match="nothing listens at http://127"):
        ServerClient(address).models()


@pytest.mark.parametrize(
    ("reply", "message"), [(None, r"did not answer for 0 s"), (b"SSH-2.0-x\r\n", "failed")]
)
def test_a_server_that_is_silent_or_speaks_something_else(reply, message):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def serve():
            peer, _ = listening.accept()
            with peer:
                if reply:
                    peer.recv(100_000)
                    peer.sendall(reply)
                else:
                    ended.wait(30)

        ended = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = Address(scheme="http", host="127.0.0.1", port=listening.getsockname()[1])
        with pytest.raises(MeasurementError, match=message):
            ServerClient(
                address, limits=RequestLimits(silence_s=0.05 if reply is None else 30.0)
            ).models()
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RequestLimits(requests=1), "more than 1 requests"),
        (RequestLimits(prompt_tokens=5), "more than 5 tokens"),
        (RequestLimits(seconds=-1.0), "more than -1 s"),
    ],
)
def test_requests_are_bounded(limits, message):
    with OpenAIServer() as server:
        client = connected(server, limits=limits)
        with pytest.raises(MeasurementError, match=message):
            for _ in range(2):
                client.complete([1, 2, 3])
    assert len(server.requests) <= 1


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://user@host",
     "http://host/v1/completions", "http://[::1"],
)  # fmt: skip
def test_what_is_no_address(url):
    with pytest.raises(InputError, match="is no address"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("url", "shown", "local"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", True),
        ("https://[::1]", "https://[::1]:443", True),
        ("http://gpu-box", "http://gpu-box:80", False),
    ],
)
def test_addresses(url, shown, local):
    address = Address.parse(url)
    assert (str(address), address.local) == (shown, local)

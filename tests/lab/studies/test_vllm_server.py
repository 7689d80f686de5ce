"""A studied vLLM server: its workers' cores, and the load client's accounting."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from lab.studies.vllm_server import (
    Answer,
    Request,
    acceptance,
    events_of_stream,
    load,
    metrics,
    summary,
    tokens_of_line,
)

# A stream as vLLM 0.32 sends it: one token, a verification with three, the usage, the end.
STREAM = [
    'data: {"choices":[{"index":0,"text":" a","token_ids":[253],"finish_reason":null}]}',
    "",
    'data: {"choices":[{"index":0,"text":" b c d","token_ids":[1,2,3],"finish_reason":null}]}',
    'data: {"choices":[],"usage":{"completion_tokens":4}}',
    "data: [DONE]",
]
BEFORE = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
"""
# 2 more answers, 42 more tokens: 2 from prompts, 40 of rounds. 8 accepted, so 32 rounds.
AFTER = """vllm:generation_tokens_total{engine="0",model_name="m"} 52.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
"""


def answer(arrival_s: float, *events: tuple[float, int]) -> Answer:
    return Answer(arrival_s=arrival_s, sent_s=arrival_s, prompt_tokens=5, events=events)


def test_tokens_are_counted_by_their_ids() -> None:
    assert [tokens_of_line(line) for line in STREAM] == [1, 0, 3, 0, 0]


def test_a_line_arrives_with_its_end() -> None:
    text = ("\n".join(STREAM) + "\n").encode()
    first, second = text.index(b"\n"), text.index(b"[1,2,3]")
    cut = [text[:first], text[first:second], text[second:]]
    assert events_of_stream([*enumerate(cut)]) == [(1, 1), (2, 3)]
    assert events_of_stream([(0.5, text)]) == [(0.5, 4)]


def test_times_count_from_the_arrival() -> None:
    one = answer(1.0, (1.5, 1), (1.7, 3), (2.0, 1))
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.5 / 4)
    assert answer(0.0, (1.0, 1)).tpot_s is None


def test_throughput_is_from_the_first_arrival_to_the_last_token() -> None:
    result = summary([answer(1.0, (2.0, 1), (3.0, 3)), answer(2.0, (4.0, 1), (6.0, 5))])
    assert result["tokens_per_s"] == pytest.approx(10 / 5)
    assert result["ttft_s"]["mean"] == pytest.approx(1.5)
    assert result["tpot_s"]["mean"] == pytest.approx((1 / 3 + 2 / 5) / 2)


def test_acceptance_from_the_counters() -> None:
    found = acceptance(metrics(BEFORE), metrics(AFTER), 3)
    assert found["rounds"] == 32
    assert found["drafted_share"] == pytest.approx(10 / 32)
    assert found["by_depth"] == pytest.approx([0.6, 1 / 3, 0.0], abs=1e-5)
    committed = 1 + found["drafted_share"] * (0.6 + 0.2)
    assert found["rounds"] * committed == pytest.approx(40)


class _Server(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        refused = body["prompt"] == [13]
        cut = body["prompt"] == [14]
        text = "too long" if refused else "\n\n".join(STREAM) + "\n\n"
        self.send_response(400 if refused else 200)
        self.send_header("Content-Length", str(len(text) + 9 * cut))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_every_request_is_sent_and_counted(url: str) -> None:
    requests = [Request(arrival_s=0.01 * n, prompt=[n], output_tokens=4) for n in range(3)]
    answers = load(url, "m", requests).answers
    assert [one.output_tokens for one in answers] == [4, 4, 4]
    assert all(one.sent_s >= one.arrival_s for one in answers)
    assert {body["max_tokens"] for body in _Server.bodies} == {4}


def test_a_refusal_an_end_and_a_short_answer_are_said(url: str) -> None:
    with pytest.raises(SystemExit, match="refused a request"):
        load(url, "m", [Request(arrival_s=0.0, prompt=[13], output_tokens=4)])
    with pytest.raises(SystemExit, match="broke off"):
        load(url, "m", [Request(arrival_s=0.0, prompt=[14], output_tokens=4)])
    with pytest.raises(SystemExit, match="4 tokens instead of 9"):
        load(url, "m", [Request(arrival_s=0.0, prompt=[1], output_tokens=9)])

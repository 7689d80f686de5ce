"""A studied vLLM server: its workers' cores, and the load client's accounting."""

from __future__ import annotations

import pytest

from lab.studies.vllm_server import (
    Answer,
    acceptance,
    events_of_stream,
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

"""The load client reads streams, however they are cut into chunks."""

import json

import pytest

from extproc.lab.harness.traffic import Answer, read_stream

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def chat(text: str) -> bytes:
    return event({"choices": [{"delta": {"content": text}}]})


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def read(chunks: list[bytes], times: list[float]) -> Answer:
    answer = Answer("sent at 0 s")
    read_stream(answer, chunks, times)
    return answer


def test_role_and_usage_are_no_tokens() -> None:
    chunks = [event(ROLE), chat("a"), chat("b"), chat("c"), event(USAGE), DONE]
    found = read(chunks, [1.0, 2.0, 3.0, 5.0, 6.0, 7.0])
    assert (found.ttft_s, [*found.gaps_s], found.problem) == (2.0, [1.0, 2.0], "")
    assert found.usage == {"prompt_tokens": 3, "completion_tokens": 2}


def test_tokens_of_a_chunk_have_no_gap() -> None:
    chunks = [event(ROLE) + chat("a") + chat("b"), chat("c") + event(USAGE) + DONE]
    found = read(chunks, [1.0, 4.0])
    assert (found.ttft_s, [*found.gaps_s]) == (1.0, [3.0])


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    whole = event(ROLE) + chat("a") + chat("b") + event(USAGE) + DONE
    chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
    found = read(chunks, [float(at) for at in range(len(chunks))])
    assert found.ttft_s == (len(event(ROLE) + chat("a")) - 3) // size
    assert found.problem == ""
    assert found.usage["completion_tokens"] == 2


def test_text_reasoning_and_tool_calls_are_tokens() -> None:
    for choice in (
        {"text": "a"},
        {"delta": {"reasoning_content": "a"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
    ):
        assert read([event({"choices": [choice]}), DONE], [1.0, 2.0]).ttft_s == 1.0


def test_lines_may_end_with_crlf() -> None:
    chunks = [event.replace(b"\n", b"\r\n") for event in (chat("a"), chat("b"), DONE)]
    found = read(chunks, [1.0, 2.0, 3.0])
    assert (found.ttft_s, [*found.gaps_s], found.problem) == (1.0, [1.0], "")


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([], "broken stream"),
        ([chat("a")], "broken stream"),
        ([chat("a"), b'data: {"choi'], "broken stream"),
        ([chat("a"), event({"error": {"message": "no"}}), DONE], "error event"),
        ([event({"object": "error", "message": "no"})], "error event"),
        ([DONE], "not a completion"),
        ([event({"choices": 5}), DONE], "not a completion"),
        ([event({"choices": ["a"]}), DONE], "not a completion"),
        ([event({"choices": [{"delta": "a"}]}), DONE], "not a completion"),
        ([b"<html>\n</html>\n", DONE], "not a completion"),
        ([event(USAGE), DONE], ""),
        ([chat('it says "error"'), DONE], ""),
        ([event({"error": None, "choices": [{"text": "a"}]}), DONE], ""),
    ],
)
def test_problem_of_a_stream_is_named(chunks: list[bytes], problem: str) -> None:
    assert read(chunks, [float(at) for at in range(len(chunks))]).problem == problem

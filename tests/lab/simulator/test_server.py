import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica
from extproc.lab.simulator.server import OUTPUT_TOKENS_HEADER
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"


def chat(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def reply(
    client: ClientSession, path: str, body: dict[str, Any], output_tokens: int | None = None
) -> dict[str, Any]:
    headers = {OUTPUT_TOKENS_HEADER: str(output_tokens)} if output_tokens else {}
    async with client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def completion_tokens(
    client: ClientSession, body: dict[str, Any], output_tokens: int | None = None
) -> int:
    usage = (await reply(client, CHAT, body, output_tokens))["usage"]
    tokens: int = usage["completion_tokens"]
    return tokens


async def test_a_trace_state_says_how_many_tokens_where_a_proxy_drops_the_header(
    client: ClientSession,
) -> None:
    for state, status, tokens in (
        ("vendor=7, simulate-output-tokens=9", 200, 9),
        ("simulate-output-tokens=0", 400, None),
    ):
        headers = {"tracestate": state}
        async with client.post(CHAT, json=chat(), headers=headers) as response:
            answer = await response.json()
            assert response.status == status
            assert answer.get("usage", {}).get("completion_tokens") == tokens


async def test_every_response_says_who_answered(client: ClientSession, url: str) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        async with client.get(path) as response:
            assert response.headers["x-served-by"] == url.removeprefix("http://")


async def test_what_runs_without_inference(client: ClientSession) -> None:
    async with client.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.get("/v1/models") as response:
        model = (await response.json())["data"][0]
        assert (model["id"], model["max_model_len"]) == ("tiny", 4096)


async def test_tokenize_counts_four_bytes_a_token(client: ClientSession) -> None:
    answer = await reply(client, "/tokenize", {"prompt": "123456789"})
    assert (answer["count"], len(answer["tokens"]), answer["max_model_len"]) == (3, 3, 4096)
    conversation = await reply(client, "/tokenize", chat())
    usage = (await reply(client, CHAT, chat(max_tokens=1)))["usage"]
    assert conversation["count"] == usage["prompt_tokens"]


async def test_bounds_are_vllms(client: ClientSession) -> None:
    assert await completion_tokens(client, chat(max_completion_tokens=3, max_tokens=5), 99) == 3
    assert await completion_tokens(client, chat(max_tokens=5), 99) == 5
    assert await completion_tokens(client, chat(), 99) == 99
    assert await completion_tokens(client, chat(max_tokens=7, ignore_eos=True)) == 7
    assert await completion_tokens(client, chat(min_tokens=300), None) >= 300
    for body, tokens in (
        ({"prompt": "hello"}, 16),
        ({"prompt": "hello", "max_tokens": 20}, 20),
        ({"prompt": "hello", "max_tokens": None}, 16),
        ({"prompt": [7] * 4090}, 6),
    ):
        usage = (await reply(client, "/v1/completions", {**body, "ignore_eos": True}))["usage"]
        assert usage["completion_tokens"] == tokens


async def test_an_answer_cut_by_its_bound_says_so(client: ClientSession) -> None:
    cut = await reply(client, CHAT, chat(max_tokens=5), 6)
    whole = await reply(client, CHAT, chat(max_tokens=5), 4)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_the_same_prompt_gets_the_same_answer(client: ClientSession) -> None:
    first, second = [await reply(client, CHAT, chat("again")) for _ in range(2)]
    other = await reply(client, CHAT, chat("something else"))
    assert first["choices"] == second["choices"]
    assert first["choices"] != other["choices"]


async def test_prompts_and_choices_multiply(client: ClientSession) -> None:
    body = {"prompt": ["one", "another"], "n": 2, "max_tokens": 4, "ignore_eos": True}
    answer = await reply(client, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 1 + 2
    assert answer["usage"]["completion_tokens"] == 16
    ids = await reply(client, "/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 1})
    assert ids["usage"]["prompt_tokens"] == 3


async def test_everything_in_a_request_counts_as_prompt(client: ClientSession) -> None:
    async def prompt_tokens(path: str, body: dict[str, Any]) -> int:
        usage = (await reply(client, path, {**body, "max_tokens": 1}))["usage"]
        tokens: int = usage.get("prompt_tokens") or usage["input_tokens"]
        return tokens

    text = {"type": "text", "text": "what is this?"}
    image = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    plain = await prompt_tokens(CHAT, {"messages": [{"role": "user", "content": [text]}]})
    seen = await prompt_tokens(CHAT, {"messages": [{"role": "user", "content": [text, image]}]})
    tooled = await prompt_tokens(CHAT, chat("what is this?", tools=[tool]))
    assert seen == plain + 576
    assert tooled > plain
    bare = await prompt_tokens("/v1/messages", chat())
    assert await prompt_tokens("/v1/messages", chat(system="Be brief.")) > bare
    assert await prompt_tokens("/v1/responses", {"input": "hello"}) < await prompt_tokens(
        "/v1/responses", {"input": [{"role": "user", "content": "hello"}], "instructions": "Sing."}
    )


async def test_the_next_turn_finds_the_last_one_in_the_cache(client: ClientSession) -> None:
    messages = [{"role": "user", "content": "tell me a long story " * 40}]
    first = await reply(client, CHAT, {"messages": messages}, 100)
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
    second = await reply(client, CHAT, {"messages": messages}, 1)
    told = first["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told - 32 <= cached <= told


async def lines(client: ClientSession, path: str, body: dict[str, Any]) -> list[str]:
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return [line for line in (await response.text()).split("\n") if line]


async def test_a_chat_stream_sends_a_chunk_a_token(client: ClientSession) -> None:
    body = chat(max_tokens=9, ignore_eos=True, n=2)
    sent = await lines(client, CHAT, body | {"stream_options": {"include_usage": True}})
    assert sent[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in sent[:-1]]
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 18
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices[:2]] == ["assistant"] * 2
    whole = await reply(client, CHAT, body)
    for index in range(2):
        mine = [choice for choice in choices[2:] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * 8 + ["length"]
        text = "".join(choice["delta"]["content"] for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]


async def test_a_completion_stream_has_no_usage_unless_asked(client: ClientSession) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    sent = await lines(client, "/v1/completions", body)
    assert len(sent) == 4
    assert "usage" not in "".join(sent)


async def test_responses_stream_numbered_events(client: ClientSession) -> None:
    body = {"input": "hello", "max_output_tokens": 3, "ignore_eos": True}
    sent = await lines(client, "/v1/responses", body)
    events = [json.loads(line.removeprefix("data: ")) for line in sent[1::2]]
    assert [line.removeprefix("event: ") for line in sent[::2]] == [e["type"] for e in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert len(deltas) == 3
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.completed", "incomplete")
    assert last["output"][0]["content"][0]["text"] == "".join(deltas)
    assert last["usage"]["output_tokens"] == 3


async def test_a_responses_stream_opens_before_the_engine_begins(
    client: ClientSession, replica: Replica
) -> None:
    replica.engine.slow = 1000
    body = {"input": "hello", "stream": True}
    async with asyncio.timeout(PATIENCE_S), client.post("/v1/responses", json=body) as response:
        opening = b""
        while opening.count(b"\n\n") < 2:
            opening += await response.content.readany()
        assert b"event: response.created" in opening
        assert b"event: response.in_progress" in opening
        assert not replica.engine.counters.first_tokens


async def test_messages_stream_in_anthropics_events(client: ClientSession) -> None:
    sent = await lines(client, "/v1/messages", chat(max_tokens=3, ignore_eos=True))
    events = [json.loads(line.removeprefix("data: ")) for line in sent[1::2]]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_messages_not_streamed(client: ClientSession) -> None:
    answer = await reply(client, "/v1/messages", chat(max_tokens=9), 3)
    assert answer["stop_reason"] == "end_turn"
    assert answer["usage"]["output_tokens"] == 3


async def test_embeddings_scores_and_rankings_decode_nothing(
    client: ClientSession, replica: Replica
) -> None:
    embedded = await reply(client, "/v1/embeddings", {"input": ["one", "two"]})
    assert len(embedded["data"]) == 2
    scored = await reply(client, "/v1/score", {"text_1": "one", "text_2": ["two", "six"]})
    assert [entry["index"] for entry in scored["data"]] == [0, 1]
    assert scored["usage"]["prompt_tokens"] == 4
    ranked = await reply(
        client, "/v1/rerank", {"query": "one", "documents": ["two", "six", "ten"], "top_n": 2}
    )
    relevance = [result["relevance_score"] for result in ranked["results"]]
    assert len(relevance) == 2
    assert relevance == sorted(relevance, reverse=True)
    assert replica.engine.counters.generated_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_leaves_nothing_behind(
    client: ClientSession, replica: Replica, stream: bool
) -> None:
    body = chat(stream=stream, ignore_eos=True, max_tokens=4000)
    replica.engine.slow = 20.0
    request = asyncio.ensure_future(client.post(CHAT, json=body))
    await until(lambda: replica.engine.running)
    if stream:
        (await request).close()
    else:
        request.cancel()
    await until(lambda: not replica.engine.running)
    assert replica.engine.kv_usage == 0
    assert replica.engine.counters.finished.total() == 0


async def test_requests_in_flight_are_told_by_their_names(client: ClientSession) -> None:
    async def names() -> set[str]:
        async with client.get("/simulate/requests") as response:
            return set(await response.json())

    def ask(name: str, stream: bool) -> Any:
        body = chat(stream=stream, ignore_eos=True, max_tokens=4000)
        headers = {"tracestate": f"simulate-output-tokens=4000,simulate-request={name}"}
        return asyncio.ensure_future(client.post(CHAT, json=body, headers=headers))

    whole, streamed = ask("whole", False), ask("streamed", True)
    async with asyncio.timeout(PATIENCE_S):
        while await names() != {"whole", "streamed"}:
            pass
        whole.cancel()
        while await names() != {"streamed"}:
            pass
        (await streamed).close()
        while await names():
            pass


async def test_a_replica_told_to_fail_fails_inference_alone(client: ClientSession) -> None:
    await reply(client, "/simulate", {"fail": 599})
    async with client.post(CHAT, json=chat()) as response:
        assert response.status == 599
        assert (await response.json())["error"]["code"] == 599
    async with client.get("/metrics") as response:
        assert response.status == 200
    await reply(client, "/simulate", {"fail": 0})
    await reply(client, CHAT, chat(max_tokens=1))


async def test_a_replica_told_to_hang_answers_nothing_until_told_otherwise(
    client: ClientSession,
) -> None:
    assert (await reply(client, "/simulate", {"hang": True}))["hang"] is True
    waiting = [
        asyncio.ensure_future(reply(client, CHAT, chat(max_tokens=1))),
        asyncio.ensure_future(client.get("/health")),
    ]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    await reply(client, "/simulate", {"hang": False})
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)


async def test_a_replica_told_to_be_slow_is(client: ClientSession, replica: Replica) -> None:
    assert await reply(client, "/simulate", {"slow": 3}) == {
        "slow": 3,
        "hang": False,
        "fail": 0,
        "freezing_gauges": False,
        "metrics_seconds": [0, 0],
    }
    assert replica.engine.slow == 3


async def test_a_replica_told_to_be_slow_with_its_metrics_is_with_nothing_else(
    client: ClientSession,
) -> None:
    await reply(client, "/simulate", {"metrics_seconds": [60, 60]})
    metrics = asyncio.ensure_future(client.get("/metrics"))
    await reply(client, CHAT, chat(max_tokens=1))
    async with client.get("/health") as response:
        assert response.status == 200
    assert not metrics.done()
    metrics.cancel()
    await reply(client, "/simulate", {"metrics_seconds": [0.01, 0.02]})
    async with client.get("/metrics") as response:
        assert response.status == 200


async def test_steps_take_the_time_the_profile_says(
    client: ClientSession, replica: Replica
) -> None:
    started = asyncio.get_running_loop().time()
    await reply(client, CHAT, chat(max_tokens=400, ignore_eos=True))
    took = asyncio.get_running_loop().time() - started
    # 400 steps of at least 6.5 ms, at 20 times the speed.
    assert took >= 400 * 0.0065 / 20

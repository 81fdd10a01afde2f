import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import CHAT, chat, get, reply
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize(
    ("state", "status", "tokens"),
    [("vendor=7, simulate-output-tokens=9", 200, 9), ("simulate-output-tokens=0", 400, None)],
)
async def test_a_trace_state_says_how_many_tokens_where_a_proxy_drops_the_header(
    client: ClientSession, state: str, status: int, tokens: int | None
) -> None:
    async with client.post(CHAT, json=chat(), headers={"tracestate": state}) as response:
        answer = await response.json()
        assert response.status == status
        assert answer.get("usage", {}).get("completion_tokens") == tokens


async def test_every_response_says_who_answered(client: ClientSession, url: str) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        async with client.get(path) as response:
            assert response.headers["x-served-by"] == url.removeprefix("http://")


async def test_health_and_models_answer_without_inference(client: ClientSession) -> None:
    async with client.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    [model] = (await get(client, "/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)


async def test_tokenize_counts_four_bytes_a_token(client: ClientSession) -> None:
    answer = await reply(client, "/tokenize", {"prompt": "123456789"})
    assert (answer["count"], len(answer["tokens"]), answer["max_model_len"]) == (3, 3, 4096)
    conversation = await reply(client, "/tokenize", chat())
    usage = (await reply(client, CHAT, chat(max_tokens=1)))["usage"]
    assert conversation["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "header", "tokens"),
    [
        (CHAT, chat(max_completion_tokens=3, max_tokens=5), 99, 3),
        (CHAT, chat(max_tokens=5), 99, 5),
        (CHAT, chat(), 99, 99),
        (CHAT, chat(max_tokens=7, ignore_eos=True), None, 7),
        ("/v1/completions", {"prompt": "hello", "ignore_eos": True}, None, 16),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}, None, 20),
        ("/v1/completions", {"prompt": "hello", "max_tokens": None, "ignore_eos": True}, None, 16),
        ("/v1/completions", {"prompt": [7] * 4090, "ignore_eos": True}, None, 6),
    ],
)
async def test_bounds_are_vllms(
    client: ClientSession, path: str, body: dict[str, Any], header: int | None, tokens: int
) -> None:
    assert (await reply(client, path, body, header))["usage"]["completion_tokens"] == tokens


async def test_an_answer_has_the_tokens_it_must_have_at_least(client: ClientSession) -> None:
    answer = await reply(client, CHAT, chat(min_tokens=300))
    assert answer["usage"]["completion_tokens"] >= 300


@pytest.mark.parametrize(("tokens", "reason"), [(6, "length"), (4, "stop")])
async def test_an_answer_cut_by_its_bound_says_so(
    client: ClientSession, tokens: int, reason: str
) -> None:
    answer = await reply(client, CHAT, chat(max_tokens=5), tokens)
    assert answer["choices"][0]["finish_reason"] == reason


async def test_the_same_prompt_gets_the_same_answer(client: ClientSession) -> None:
    asked = ("again", "again", "something else")
    first, second, other = [(await reply(client, CHAT, chat(text)))["choices"] for text in asked]
    assert first == second
    assert first != other


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
    said = {"input": [{"role": "user", "content": "hello"}], "instructions": "Sing."}
    plain = await prompt_tokens(CHAT, {"messages": [{"role": "user", "content": [text]}]})
    seen = await prompt_tokens(CHAT, {"messages": [{"role": "user", "content": [text, image]}]})
    assert seen == plain + 576
    for path, less, more in (
        (CHAT, chat("what is this?"), chat("what is this?", tools=[tool])),
        ("/v1/messages", chat(), chat(system="Be brief.")),
        ("/v1/responses", {"input": "hello"}, said),
    ):
        assert await prompt_tokens(path, less) < await prompt_tokens(path, more)
    assert await prompt_tokens(CHAT, chat("what is this?")) == plain


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


async def events(client: ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    sent = await lines(client, path, body)
    listed = [json.loads(line.removeprefix("data: ")) for line in sent[1::2]]
    assert [line.removeprefix("event: ") for line in sent[::2]] == [e["type"] for e in listed]
    return listed


async def test_a_chat_stream_sends_a_chunk_a_token(client: ClientSession) -> None:
    body = chat(max_tokens=9, ignore_eos=True, n=2)
    sent = await lines(client, CHAT, body | {"stream_options": {"include_usage": True}})
    assert sent[-1] == "data: [DONE]"
    *chunks, usage = [json.loads(line.removeprefix("data: ")) for line in sent[:-1]]
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
    sent = await events(client, "/v1/responses", body)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    deltas = [event["delta"] for event in sent if event["type"].endswith("text.delta")]
    assert len(deltas) == 3
    last = sent[-1]["response"]
    assert (sent[-1]["type"], last["status"]) == ("response.completed", "incomplete")
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
    sent = await events(client, "/v1/messages", chat(max_tokens=3, ignore_eos=True))
    assert [event["type"] for event in sent] == [
        *("message_start", "content_block_start", *["content_block_delta"] * 3),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert sent[-2]["delta"]["stop_reason"] == "max_tokens"
    assert sent[-2]["usage"]["output_tokens"] == 3


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
    documents = {"query": "one", "documents": ["two", "six", "ten"], "top_n": 2}
    ranked = await reply(client, "/v1/rerank", documents)
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
    async def until_named(*names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while {*await get(client, "/simulate/requests")} != {*names}:
                pass

    def ask(name: str, stream: bool) -> Any:
        body = chat(stream=stream, ignore_eos=True, max_tokens=4000)
        headers = {"tracestate": f"simulate-output-tokens=4000,simulate-request={name}"}
        return asyncio.ensure_future(client.post(CHAT, json=body, headers=headers))

    whole, streamed = ask("whole", False), ask("streamed", True)
    await until_named("whole", "streamed")
    whole.cancel()
    await until_named("streamed")
    (await streamed).close()
    await until_named()


async def test_a_replica_told_to_fail_fails_inference_alone(client: ClientSession) -> None:
    await reply(client, "/simulate", {"fail": 599})
    assert (await reply(client, CHAT, chat(), status=599))["error"]["code"] == 599
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
    faults = {"hang": False, "fail": 0, "freezing_gauges": False, "metrics_seconds": [0, 0]}
    assert await reply(client, "/simulate", {"slow": 3}) == {"slow": 3} | faults
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

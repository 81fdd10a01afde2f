"""Prompts have the trace's token counts, as the server counts, and the trace's shared prefixes."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks import trace
from benchmarks.load.plan import Counting, LoadTarget, Planned, ask_server, plan, prompt
from benchmarks.trace import ID_TOKENS, TracedRequest
from tests.benchmarks.conftest import TRACES

SIMULATED = LoadTarget("simulated", None, {"chat": Counting(8), "completions": Counting()})


def some(trace_name: str, count: int, target: LoadTarget = SIMULATED) -> list[Planned]:
    requests = trace.read([TRACES / f"{trace_name}.jsonl.gz"], most=count)
    return plan(requests, target, 0.5, False, Random(0))


async def token_ids(session: ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    fields = {key: body[key] for key in ("model", "messages", "prompt") if key in body}
    async with session.post(f"{url}/tokenize", json=fields) as response:
        answer = await response.json()
    return [int(token) for token in answer["tokens"]]


async def test_simulated_replica_counts_the_tokens_of_the_trace(replica_url: str) -> None:
    async with ClientSession() as session:
        target = await ask_server(replica_url, ["chat", "completions"], None, "a")
        assert (target.model, target.context) == ("simulated", 131_072)
        for name in ("azure-2023-conv", "azure-2023-code", "mooncake-synthetic"):
            planned = some(name, 20, target)
            assert {request.endpoint for request in planned} == {"chat", "completions"}
            for request in planned:
                tokens = await token_ids(session, replica_url, request.body(target, "a"))
                least = 9 if request.endpoint == "chat" else 1  # the template, and a word
                assert len(tokens) == max(request.traced.prompt_tokens, least)


async def test_equal_leading_ids_give_equal_leading_tokens(replica_url: str) -> None:
    target = LoadTarget("simulated", None, {"completions": Counting()})
    pairs = [
        (first, second, equal)
        for first, second in combinations(some("mooncake-synthetic", 400, target), 2)
        if (equal := shared(first.traced.hash_ids, second.traced.hash_ids)) > 0
        and equal < len(second.traced.hash_ids)
    ]
    assert len(pairs) > 10
    async with ClientSession() as session:
        for *both, equal in pairs[:15]:
            bodies = [request.body(target, "a") for request in both]
            tokens, others = [await token_ids(session, replica_url, body) for body in bodies]
            prefix = min(equal * ID_TOKENS, *(request.traced.prompt_tokens for request in both))
            # The next word may be equal by chance, the next ten may not.
            assert prefix <= shared(tokens, others) < prefix + 10


async def test_prompts_fit_another_tokenizer() -> None:
    """Words have several tokens, and the chat template is long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    corpus = [prompt(TracedRequest(0.0, 500, 1, 1), 1, Counting(), "a"), "and other words"]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=60, show_progress=False))

    def count(body: dict[str, Any]) -> int:
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return len(tokenizer.encode(text)) + (31 if "messages" in body else 1)

    async def answer(request: web.Request) -> web.Response:
        usage = {"prompt_tokens": count(await request.json())}
        return web.json_response({"choices": [{"text": "a"}], "usage": usage})

    app = web.Application()
    app.add_routes([web.post("/v1/{path:.*}", answer)])
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        target = await ask_server(url, ["chat", "completions"], "named", "a")
    assert target.context is None
    assert target.counting["completions"].per_word > 1.3
    planned = some("azure-2023-conv", 100, target)
    pairs = [(each.traced.prompt_tokens, count(each.body(target, "a"))) for each in planned]
    assert sum(counted for _, counted in pairs) == pytest.approx(sum(t for t, _ in pairs), rel=0.01)
    for tokens, counted in pairs:
        assert counted == pytest.approx(max(tokens, 34), abs=12)


def test_request_too_long_for_the_context_is_left_out() -> None:
    target = LoadTarget("m", 1000, {"chat": Counting(), "completions": Counting()})
    fits = TracedRequest(0.0, 500, 100, 2048)
    too_long = TracedRequest(1.0, 900, 100, 128)
    unbounded = TracedRequest(2.0, 500, 100, None)
    planned = plan([fits, too_long, unbounded], target, 1.0, False, Random(0))
    assert [request.traced for request in planned] == [fits, unbounded]
    assert 100 <= (planned[0].max_tokens or 0) <= 500
    assert (planned[1].endpoint, planned[1].max_tokens) == ("chat", None)


def test_turns_of_a_conversation_go_to_the_same_endpoint() -> None:
    turns = [
        TracedRequest(float(turn), 600, 10, 64, (conversation, 100 * conversation + turn))
        for turn in range(20)
        for conversation in range(10)
    ]
    planned = plan(turns, SIMULATED, 0.5, False, Random(0))
    endpoints = [{request.endpoint for request in planned[n::10]} for n in range(10)]
    assert all(len(chosen) == 1 for chosen in endpoints)
    assert set.union(*endpoints) == {"chat", "completions"}
    assert 50 < sum(request.streamed for request in planned) < 150


def test_body_has_the_answer_length_only_with_known_lengths() -> None:
    traced = TracedRequest(0.0, 50, 123, 512)
    for known in (False, True):
        (planned,) = plan([traced], SIMULATED, 1.0, known, Random(0))
        body = planned.body(SIMULATED, "a")
        assert body["max_tokens"] == (123 if known else 512)
        assert body.get("ignore_eos", False) is known


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))

"""Where counting requests misleads: the replica that finishes a request soonest gets it, and the
record says why.
"""

import asyncio
import re
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.lab.harness.stack import SimulatedReplica
from extproc.predict.hardware import PROFILES
from extproc.predict.step import StepModel
from tests.e2e.client import Answer, Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

COMPLETIONS = "/v1/completions"
SHORT, LONG = 200, 4000
"""Tokens of output."""
LARGE = 40_000
"""Tokens of a prompt that holds much KV cache."""
NEARLY_DONE = 120
"""Tokens a short one has when the new request comes."""
TIMES = 5
"""A scene is set up anew where the machine was so slow that it was over when the request came."""
WINDOW_S = 4.0
"""The longest stretch of polls that step times are learned from."""


def pair(model: str, **profiles: str) -> list[SimulatedReplica]:
    """Two replicas that serve a model of their own."""
    limits = ("--max-model-len", "48000", "--kv-tokens", "100000")
    small = ("--max-model-len", "42000", "--kv-tokens", "42000")
    arguments = ("--model", model, *(small if model == "small-cache" else limits))
    return [SimulatedReplica(name, profile, arguments) for name, profile in profiles.items()]


REPLICAS = [
    *pair("alike", left="llama-2-7b-h100", right="llama-2-7b-h100"),
    *pair("unlike", fast="llama-8b-h100", slow="llama-8b-a10"),
    *pair("small-cache", one="llama-2-7b-a100", two="llama-2-7b-a100"),
]


def system(directory: Path) -> Stack:
    return Stack(directory, replicas=REPLICAS, settings=SETTINGS)


class Load:
    """Streamed completions in flight, to a model through Envoy or to a replica itself.

    They end with the block at the latest.
    """

    def __init__(self, stack: Stack, client: Client, model: str) -> None:
        self._stack = stack
        self._client = client
        self._model = model
        self._open = AsyncExitStack()

    async def __aenter__(self) -> "Load":
        self._session = await self._open.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        await self._client.ledger_empty()

    async def send(self, prompt: int, output: int, policy: str = "", to: str = "") -> "Stream":
        """Returns when the response has begun, which is with its first token."""
        name = str(uuid.uuid4())
        url = f"http://{self._stack.address(to)}" if to else self._stack.url
        headers = {"x-request-id": name, "x-simulate-output-tokens": str(output)}
        response = await self._open.enter_async_context(
            self._session.post(
                url + COMPLETIONS,
                json=body(self._model, prompt, output) | {"stream": True},
                headers=headers | ({"x-extproc-policy": policy} if policy else {}),
            )
        )
        assert response.status == 200
        stream = Stream(response)
        await stream.reach(1)
        stream.replica = to or (await self._client.decisions(name))[0]["replica_name"]
        return stream


class Stream:
    """A streamed completion."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._tokens = 0
        self.replica = ""

    async def reach(self, tokens: int) -> None:
        """Returns when it has so many tokens."""
        while self._tokens < tokens:
            line = await self._response.content.readline()
            assert line, "it ended before"
            self._tokens += line.startswith(b"data:")


def body(model: str, prompt: int, output: int) -> dict[str, Any]:
    """A completion of a prompt that is in no prefix cache; a token is four bytes."""
    text = (str(uuid.uuid4()) + "the sea " * (prompt // 2))[: prompt * 4]
    return {"model": model, "prompt": text, "max_tokens": output}


async def ask(client: Client, model: str, prompt: int, output: int, policy: str = "") -> Answer:
    """The new request."""
    headers = {"x-simulate-output-tokens": str(output)}
    headers |= {"x-extproc-policy": policy} if policy else {}
    answer = await client.request("POST", COMPLETIONS, body(model, prompt, output), headers)
    assert answer.status == 200
    assert answer.decision["outcome"]["served_by"] == answer.decision["replica"]
    return answer


def candidates(answer: Answer) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in answer.decision["candidates"]}


def requests(answer: Answer) -> dict[str, float]:
    return {name: one["requests"] for name, one in candidates(answer).items()}


def figures(answer: Answer, pattern: str) -> list[float]:
    """The numbers in the words of the decision, which must match; it may say besides how late a
    busy machine was as of late."""
    late = r"(?:, and of late it took [\d.]+ times as long as predicted against [\d.]+)?"
    found = re.fullmatch(pattern.replace("#", r"([\d,.]+)") + late, answer.decision["why"])
    assert found, answer.decision["why"]
    return [float(number.replace(",", "")) for number in found.groups()]


async def decodes(client: Client, replica: str, sequences: int) -> None:
    """Returns when so many sequences with a large context decode there, and the router has known
    their speed for a while: windows it learns from that hold a part of a prefill mislead it.
    """
    profile = next(one.profile for one in REPLICAS if one.name == replica)
    work = (0, sequences, sequences * LARGE)
    right_since: float | None = None

    async def known() -> bool:
        nonlocal right_since
        state = await client.replica(replica)
        right = False
        if state["running"] == sequences and state["learned"]:
            learned = StepModel(**state["learned"]).step_time(*work)
            right = 0.7 < learned / PROFILES[profile].step.step_time(*work) < 1.4
        right_since = (right_since or state["scraped_at"]) if right else None
        return right_since is not None and state["scraped_at"] - right_since > WINDOW_S

    await until(known)


async def test_two_short_ones_about_to_finish_beat_one_long_one(
    client: Client, stack: Stack
) -> None:
    async with Load(stack, client, "alike") as load:
        long = await load.send(LARGE, LONG)
        await decodes(client, long.replica, 1)
        for _ in range(TIMES):
            short = await asyncio.gather(*(load.send(50, SHORT, "least_kv") for _ in range(2)))
            (chosen,) = {stream.replica for stream in short}
            assert chosen != long.replica
            await asyncio.gather(*(stream.reach(NEARLY_DONE) for stream in short))
            answer = await ask(client, "alike", 50, SHORT)
            if requests(answer)[chosen] == 2:
                break

    assert requests(answer) == {chosen: 2, long.replica: 1}
    assert answer.decision["replica_name"] == chosen
    finish, other, longer, there, kv_there, here, kv_here = figures(
        answer,
        f"{chosen} finishes it in # s, {long.replica} in # s though it has 1 request and {chosen} "
        "has 2: decoding would take # s longer there, # ms a token with # KV tokens in use "
        "against # ms with #",
    )
    ours, theirs = candidates(answer)[chosen], candidates(answer)[long.replica]
    assert finish == pytest.approx(ours["predicted_completion_s"], abs=0.006)
    assert other == pytest.approx(theirs["predicted_completion_s"], abs=0.006)
    slower = theirs["terms_s"]["decode"] - ours["terms_s"]["decode"]
    assert longer == pytest.approx(slower, abs=0.006)
    assert longer > 0.5 * (other - finish) > 0
    assert there > here
    assert kv_there > 30_000 > 1000 > kv_here


async def test_one_nearly_done_beats_two_long_ones(client: Client, stack: Stack) -> None:
    async with Load(stack, client, "alike") as load:
        await asyncio.gather(*(load.send(LARGE, LONG, to="left") for _ in range(2)))
        await decodes(client, "left", 2)
        for _ in range(TIMES):
            short = await load.send(50, SHORT, "least_request")
            assert short.replica == "right"
            await short.reach(NEARLY_DONE)
            answer = await ask(client, "alike", 50, SHORT)
            if requests(answer)["right"] == 1:
                break

    assert requests(answer) == {"left": 2, "right": 1}
    assert answer.decision["replica_name"] == "right"
    finish, other, longer, there, kv_there, here, kv_here = figures(
        answer,
        "right finishes it in # s, left in # s: decoding would take # s longer there, "
        "# ms a token with # KV tokens in use against # ms with #",
    )
    assert longer > 0.5 * (other - finish) > 0
    assert there > here
    assert kv_there > 60_000 > 1000 > kv_here


async def test_a_fast_busy_replica_beats_a_slow_idle_one(client: Client, stack: Stack) -> None:
    async with Load(stack, client, "unlike") as load:
        busy = await asyncio.gather(*(load.send(500, LONG) for _ in range(8)))
        assert {stream.replica for stream in busy} == {"fast"}
        answer = await ask(client, "unlike", 100, SHORT)
        counted = await ask(client, "unlike", 100, 5, "least_request")

    assert requests(answer) == {"fast": 8, "slow": 0}
    assert answer.decision["replica_name"] == "fast"
    finish, other, longer, there, here = figures(
        answer,
        "fast finishes it in # s, slow in # s though it is idle and fast has 8 requests: "
        "decoding would take # s longer there, # ms a token against # ms",
    )
    assert longer > 0.5 * (other - finish) > 0
    assert there > 2 * here
    assert counted.decision["replica_name"] == "slow"
    assert counted.decision["why"] == "0 requests in flight"


async def test_a_long_queue_beats_a_full_kv_cache(client: Client, stack: Stack) -> None:
    async with Load(stack, client, "small-cache") as load:
        long = await load.send(LARGE, 1900)
        await decodes(client, long.replica, 1)
        for _ in range(TIMES):
            queue = [asyncio.create_task(load.send(7000, 50, "least_kv")) for _ in range(4)]
            await client.has_in_flight(5)
            answer = await ask(client, "small-cache", 4000, 50)
            (chosen,) = {stream.replica for stream in await asyncio.gather(*queue)}
            if requests(answer)[chosen] == 4:
                break
            await client.has_in_flight(1)

    assert chosen != long.replica
    assert requests(answer) == {chosen: 4, long.replica: 1}
    assert answer.decision["replica_name"] == chosen
    finish, other, wait, taken, capacity = figures(
        answer,
        f"{chosen} finishes it in # s, {long.replica} in # s though it has 1 request and {chosen} "
        "has 4: there it would wait # s for KV space, # of # tokens being taken",
    )
    assert finish < wait < other
    assert LARGE <= taken <= capacity == 42_000
    assert candidates(answer)[chosen]["terms_s"]["admission"] == 0
    assert candidates(answer)[chosen]["backlog_tokens"] > 10_000

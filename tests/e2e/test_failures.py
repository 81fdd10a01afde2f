import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from math import log2
from pathlib import Path

import pytest

from extproc.ground.clock import monotonic
from extproc.lab.harness.stack import MODEL
from extproc.predict.step import PROFILES
from tests.e2e.client import CHAT, MESSAGES, Answer, Client
from tests.e2e.conftest import SETTINGS
from tests.e2e.stack import FileStack, Stack, replicas
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]


STEPS = "vllm:iteration_tokens_total_count"
OUTLIER = "outlier_detection.ejections"
FAST = PROFILES["llama-8b-h100"].step
IN_TURN = {"x-extproc-policy": "round_robin"}
AT_ONCE = 16
"""Requests at most of steady traffic: a machine too busy for the rate gets fewer, not a jam."""


def system(directory: Path) -> FileStack:
    return FileStack(directory, settings=SETTINGS)


@asynccontextmanager
async def traffic(client: Client, per_second: float = 20) -> AsyncIterator[list[Answer]]:
    answers: list[Answer] = []
    tasks: set[asyncio.Task[None]] = set()
    ended, room = asyncio.Event(), asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        try:
            answers.append(await client.chat(tokens=5))
        finally:
            room.release()

    async def send() -> None:
        while not ended.is_set():
            await room.acquire()
            tasks.add(asyncio.create_task(one()))
            await asyncio.sleep(1 / per_second)

    sender = asyncio.create_task(send())
    try:
        yield answers
    finally:
        ended.set()
        await sender
        await asyncio.gather(*tasks)


async def more(answers: list[Answer], count: int) -> list[Answer]:
    since = monotonic()

    def later() -> list[Answer]:
        return [answer for answer in answers if answer.sent > since]

    await until(lambda: len(later()) >= count)
    return later()


async def routed_again(client: Client) -> None:
    await until_read(lambda: client.chat(tokens=1), lambda now: now.decisions)


async def test_envoy_serves_without_router_until_it_is_back(client: Client, stack: Stack) -> None:
    async with traffic(client) as answers:
        await more(answers, 5)
        await stack.kill("router")
        await more(answers, 15)
        await stack.start("router")
        await stack.wait_routing()
        await more(answers, 10)
    assert {answer.status for answer in answers} == {200}
    await routed_again(client)


async def test_client_cannot_choose_replica_without_router(client: Client, stack: Stack) -> None:
    await stack.kill("router")
    forged = {"x-gateway-destination-endpoint": stack.address("slow-2")}
    steps = await client.replica_counts("slow-2", STEPS)
    answers = [await client.chat(headers=forged) for _ in range(12)]
    assert {answer.status for answer in answers} == {200}
    assert await client.replica_counts("slow-2", STEPS) - steps < 12 * 8
    await stack.start("router")
    await routed_again(client)


async def test_failing_replica_is_left_out_without_router(client: Client, stack: Stack) -> None:
    async def count(name: str) -> int:
        return await client.envoy_counts(f"^cluster.replicas.{name}$")

    async def untouched() -> bool:
        """Whether ten requests leave it alone, if it was left out all that time."""
        before = await count("retry.upstream_rq_500"), await count(f"{OUTLIER}_enforced_total")
        answers = [await client.chat(tokens=1) for _ in range(10)]
        assert {answer.status for answer in answers} == {200}
        if await count(f"{OUTLIER}_active") == 0:
            return False
        after = await count("retry.upstream_rq_500"), await count(f"{OUTLIER}_enforced_total")
        assert before[1] != after[1] or before == after
        return before == after

    await stack.kill("router")
    await client.simulate("fast-2", fail=500)
    await until(untouched)
    assert await count("retry.upstream_rq_500") >= 5
    await client.simulate("fast-2", fail=0)
    await stack.start("router")
    await routed_again(client)


async def test_bodies_on_their_way_to_dead_router_are_served(client: Client, stack: Stack) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look."}, image]}]
    opened = "^http.openai.ext_proc.streams_started$"
    before = await client.envoy_counts(opened)
    requests = asyncio.gather(*(client.chat(messages=messages) for _ in range(64)))
    await until_read(lambda: client.envoy_counts(opened), lambda now: now > before)
    await stack.kill("router")
    assert {answer.status for answer in await requests} == {200}
    await stack.start("router")
    await routed_again(client)


async def test_hung_router_is_passed_by(client: Client, stack: Stack) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
    stack.process("router").signal(signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(client.send("POST", CHAT, body) for _ in range(10)))
    finally:
        stack.process("router").signal(signal.SIGCONT)
    assert {answer.status for answer in answers} == {200}
    await routed_again(client)
    await client.ledger_empty()


async def test_routing_goes_on_without_redis(client: Client, stack: Stack) -> None:
    async with traffic(client) as answers:
        await more(answers, 5)
        await stack.kill("redis")
        await more(answers, 20)
        seen = (await client.fleet())["replicas"][0]["scraped_at"]
        await stack.start("redis")

        async def fresh() -> bool:
            replicas = (await client.fleet())["replicas"]
            return all(replica["scraped_at"] > seen + 1 for replica in replicas)

        await until(fresh)
        await more(answers, 5)
    assert {answer.status for answer in answers} == {200}
    assert all(answer.decisions for answer in answers)


async def test_dead_replica_costs_no_request_and_comes_back(client: Client, stack: Stack) -> None:
    async with traffic(client) as answers:
        await more(answers, 5)
        stopped = monotonic()
        await stack.stop("fast-1")

        async def known(healthy: bool) -> bool:
            return bool((await client.replica("fast-1"))["healthy"] is healthy)

        await until(lambda: known(False))
        later = await more(answers, 15)
        await stack.start("fast-1")
        await until(lambda: known(True))
        await more(answers, 5)
    # Those being answered by the replica when it ended are its own.
    assert {answer.status for answer in answers if answer.sent > stopped} == {200}
    assert "fast-1" not in {answer.decision["replica_name"] for answer in later}


async def test_fast_failing_replica_costs_no_request_and_is_not_fast(client: Client) -> None:
    await client.simulate("fast-2", fail=500)
    began = monotonic()
    turns = [await client.chat(headers=IN_TURN) for _ in range(8)]
    answers = turns + [await client.chat() for _ in range(32)]
    tries = int(log2(monotonic() - began + 1.0))  # after pauses of 1, 2, 4, … s
    assert {answer.status for answer in answers} == {200}
    chosen = [answer.decision["replica_name"] for answer in answers]
    assert 0 < chosen.count("fast-2") <= 3 + tries
    await client.simulate("fast-2", fail=0)

    async def back() -> bool:
        answer = await client.chat(headers=IN_TURN)
        return bool(answer.decision["replica_name"] == "fast-2" and answer.status == 200)

    await until(back)


async def test_sigterm_lets_open_streams_end(client: Client, stack: Stack) -> None:
    long = asyncio.create_task(client.chat(tokens=1000, stream=True))
    busy, router = await client.busy(), stack.process("router")
    router.signal(signal.SIGTERM)
    await client.simulate(busy, slow=0.1)
    answer = await long
    assert answer.status == 200
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    assert await router.wait() == 0
    await client.simulate(busy, slow=1.0)
    await stack.start("router")
    await routed_again(client)


async def test_throttled_replica_is_seen_and_avoided(client: Client, stack: Stack) -> None:
    await client.simulate("fast-1", slow=5.0)
    ended = asyncio.Event()

    async def load() -> None:
        url = f"http://{stack.address('fast-1')}/v1/completions"
        body = {"model": "llama-8b", "prompt": "the sea " * 200, "max_tokens": 100}
        while not ended.is_set():
            await client.post(url, body)

    loads = [asyncio.create_task(load()) for _ in range(3)]

    async def seen() -> bool:
        learned = (await client.replica("fast-1"))["learned"]
        return bool(learned and learned["c0"] > 4 * FAST.c0)

    async def avoided() -> bool:
        answers = [await client.chat(tokens=20) for _ in range(10)]
        return {answer.decision["replica_name"] for answer in answers} == {"fast-2"}

    try:
        await until(seen)
        await until(avoided)
    finally:
        ended.set()
        await asyncio.gather(*loads)


async def test_replica_drains_and_comes_back(client: Client, stack: Stack) -> None:
    long = asyncio.create_task(client.chat(tokens=500, headers={"x-extproc-policy": "round_robin"}))
    busy = await client.busy()
    await client.simulate(busy, slow=20.0)  # what is there does not end by itself
    async with traffic(client) as answers:
        await more(answers, 5)
        drained = asyncio.create_task(replicas(stack, "drain", busy, "--wait", "60"))
        await until_read(lambda: client.replica(busy), lambda now: now["draining"])
        assert not long.done()
        await client.simulate(busy, slow=0.1)
        assert await drained == 0
        assert await client.load(busy) == 0
        await client.simulate(busy, slow=1.0)
        later = await more(answers, 10)
        labels = f'reason="draining",replica="{stack.address(busy)}"'
        left_out = partial(client.metric, f"extproc_replica_left_out{{{labels}}}")
        await until(left_out)
        assert await client.metric('extproc_replicas_needed{pool="default"}') > 0.0
        assert await replicas(stack, "undrain", busy) == 0
        await until_read(lambda: client.replica(busy), lambda now: not now["draining"])
    await until_read(left_out, lambda now: now == 0)
    assert (await long).status == 200
    assert {answer.status for answer in answers} == {200}
    for answer in later:
        assert answer.decision["replica_name"] != busy
        assert {"replica": stack.address(busy), "name": busy, "why": "draining"} in (
            answer.decision["excluded"]
        )


async def test_unlisted_replica_gets_nothing_until_listed(client: Client, stack: FileStack) -> None:
    async def names() -> set[str]:
        return {one["name"] for one in (await client.fleet())["replicas"]}

    labels = f'policy="round_robin",replica="{stack.address("fast-2")}"'
    counted = partial(client.metric, f"extproc_decisions_total{{{labels}}}")
    for _ in range(8):
        await client.chat(tokens=1, headers={"x-extproc-policy": "round_robin"})
    assert await counted() > 0
    async with traffic(client) as answers:
        await more(answers, 3)
        usual = stack.listed()
        stack.list_replicas([one for one in usual if one["name"] != "fast-2"])
        await until_read(names, lambda now: "fast-2" not in now)
        later = await more(answers, 10)
        await until_read(counted, lambda now: now == 0)
        stack.list_replicas(usual)
        await until_read(names, lambda now: "fast-2" in now)
    assert {answer.status for answer in answers} == {200}
    assert "fast-2" not in {answer.decision["replica_name"] for answer in later}

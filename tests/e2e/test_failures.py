"""Router and replicas fail or hang, and a router stops, while requests run."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import log2

import pytest

from extproc.ground.clock import monotonic
from extproc.lab.harness.stack import MODEL
from tests.e2e.client import CHAT, IN_TURN, MESSAGES, EnvoyClient, RoutedAnswer
from tests.waiting import until, until_read

OUTLIER = "outlier_detection.ejections"
AT_ONCE = 16  # most requests of steady traffic in flight: a busy machine gets fewer


@asynccontextmanager
async def traffic(client: EnvoyClient, per_second: float = 20) -> AsyncIterator[list[RoutedAnswer]]:
    """Send requests within the block, which must get 200."""
    answers: list[RoutedAnswer] = []
    tasks: set[asyncio.Task[None]] = set()
    ended, room = asyncio.Event(), asyncio.Semaphore(AT_ONCE)

    async def chat() -> None:
        try:
            answers.append(await client.chat(tokens=5))
        finally:
            room.release()

    async def send() -> None:
        while not ended.is_set():
            await room.acquire()
            tasks.add(asyncio.create_task(chat()))
            await asyncio.sleep(1 / per_second)

    sender = asyncio.create_task(send())
    try:
        yield answers
    finally:
        ended.set()
        await sender
        await asyncio.gather(*tasks)


async def more(answers: list[RoutedAnswer], count: int) -> None:
    """Wait for this many answers to requests sent from now on."""
    since = monotonic()
    await until(lambda: sum(answer.sent > since for answer in answers) >= count)


async def test_envoy_serves_while_router_is_down(client: EnvoyClient) -> None:
    async with traffic(client) as answers:
        await more(answers, 5)
        before = await fail_open(client)
        async with client.without_router():
            await more(answers, 15)
        await more(answers, 10)
    after = await fail_open(client)
    assert after["failure_mode_allowed"] >= before["failure_mode_allowed"] + 15
    assert after["streams_started"] > before["streams_started"]


async def fail_open(client: EnvoyClient) -> dict[str, float]:
    """Return the counters of the alert on requests past the router, as Prometheus reads them."""
    url = f"{client.stack.envoy_admin}/stats/prometheus?filter=ext_proc"
    async with client.session.get(url) as response:
        page = await response.text()
    found = re.findall(r"^envoy_http_ext_proc_(\w+){.*} (\S+)$", page, re.M)
    return {name: float(count) for name, count in found}


async def test_outlier_detection_ejects_failing_replica_without_router(client: EnvoyClient) -> None:
    async def count(name: str) -> int:
        return await client.envoy_counts(f"^cluster.replicas.{name}$")

    async def untouched() -> bool:
        """Return true if ten requests avoid the replica while it is ejected."""
        before = await count("retry.upstream_rq_500"), await count(f"{OUTLIER}_enforced_total")
        for _ in range(10):
            await client.chat(tokens=1)
        if await count(f"{OUTLIER}_active") == 0:
            return False
        after = await count("retry.upstream_rq_500"), await count(f"{OUTLIER}_enforced_total")
        assert before[1] != after[1] or before == after
        return before == after

    async with client.without_router(), client.simulating("fast-2", fail=500):
        await until(untouched)
        assert await count("retry.upstream_rq_500") >= 5


async def test_requests_with_bodies_on_their_way_survive_death_of_router(
    client: EnvoyClient,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look."}, image]}]
    opened = "^http.openai.ext_proc.streams_started$"
    before = await client.envoy_counts(opened)
    requests = asyncio.gather(*(client.chat(messages=messages) for _ in range(64)))
    await until_read(lambda: client.envoy_counts(opened), lambda now: now > before)
    async with client.without_router():
        await requests


async def test_requests_go_on_while_router_hangs(client: EnvoyClient) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
    with client.stack.paused("router"):
        answers = await asyncio.gather(*(client.send("POST", CHAT, body) for _ in range(10)))
    assert {answer.status for answer in answers} == {200}
    await client.routes_again()
    await client.has_in_flight(0)


@pytest.mark.parametrize("status", [500, 401])
async def test_replica_that_fails_fast_is_ejected_until_healthy(
    client: EnvoyClient, status: int
) -> None:
    async with client.simulating("fast-2", fail=status):
        began = monotonic()
        turns = [await client.chat(headers=IN_TURN) for _ in range(8)]
        answers = turns + [await client.chat() for _ in range(32)]
        probes = int(log2(monotonic() - began + 1.0))  # after pauses of 1, 2, 4, … s
    chosen = [answer.decision["replica_name"] for answer in answers]
    assert 0 < chosen.count("fast-2") <= 3 + probes
    await until_read(
        lambda: client.chat(headers=IN_TURN, status=None),
        lambda now: (now.status, now.decision["replica_name"]) == (200, "fast-2"),
    )


async def test_sigterm_lets_open_streams_end(client: EnvoyClient) -> None:
    long = asyncio.create_task(client.chat(tokens=1000, stream=True))
    busy, router = await client.busy(), client.stack.process("router")
    router.signal(signal.SIGTERM)
    await client.simulate(busy, slow=0.1)
    answer = await long
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    assert await router.wait() == 0
    await client.simulate(busy, slow=1.0)
    await client.start_router()

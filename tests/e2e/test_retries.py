"""Envoy retries and hedges: a request is one entry of the ledger, on the replica that serves."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import SimulatedReplica
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack
from tests.waiting import until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = (SimulatedReplica("one", "llama-8b-h100"), SimulatedReplica("two", "llama-8b-a10"))
"""The first is chosen while nothing speaks against it."""
PATIENCE_S = 0.4  # Envoy hedges a request that is not answered by then
OUTLASTING = 120  # tokens that take `one` longer than that, and `two` several times as long
TOLERATED = 3  # failures in a row before a replica is left out


class Hedging(Stack):
    """Its Envoy retries all it can, and asks a second replica when the first takes long."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        (host,) = manager_of(bootstrap)["route_config"]["virtual_hosts"]
        route, *_ = host["routes"]  # all have one action
        route["route"]["retry_policy"] |= {
            "retry_on": "5xx,connect-failure,refused-stream,reset",
            "per_try_timeout": f"{PATIENCE_S}s",
        }
        route["route"]["hedge_policy"] = {"hedge_on_per_try_timeout": True}
        return bootstrap


class Watched:
    """A system, and what its parts say of its requests, each by itself."""

    def __init__(self, stack: Stack, client: Client) -> None:
        self.stack = stack
        self.client = client

    async def finished(self) -> dict[str, float]:
        served = {}
        for one in REPLICAS:
            with suppress(aiohttp.ClientError, TimeoutError):
                served[one.name] = await self.client.replica_counts(
                    one.name, "vllm:request_success_total"
                )
        return served

    async def retries(self) -> int:
        return await self.client.envoy_counts("^cluster.replicas.upstream_rq_retry$")

    async def in_flight(self, name: str) -> int:
        return int((await self.client.replica(name))["in_flight"])

    async def counts_once(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Sends a request, which is one entry of the ledger all the time and none after it.

        On a busy machine Envoy may hedge once more than it had to, and a replica serve it twice.
        """
        counters = (
            'extproc_requests_total{result="routed"}',
            'extproc_responses_total{status="2xx"}',
        )
        before = [await self.client.metric(name) for name in counters]
        served = await self.finished()
        seen: set[int] = set()
        request = asyncio.ensure_future(send())
        while not request.done():
            seen.add((await self.client.fleet())["in_flight"])
        answer = await request
        assert answer.status == 200
        assert seen <= {0, 1}
        await self.client.ledger_empty()
        assert [await self.client.metric(name) for name in counters] == [one + 1 for one in before]
        server = self.stack.name_of(answer.decision["outcome"]["served_by"])
        after = await self.finished()
        assert after[server] > served.get(server, 0)
        return answer

    def way(self, answer: Answer) -> tuple[str, str]:
        record = answer.decision
        served = self.stack.name_of(record["outcome"]["served_by"])
        return record["replica_name"], served

    async def left_out(self) -> list[str]:
        record = (await self.client.chat(tokens=1)).decision
        return [one["name"] for one in record["excluded"] if "failed" in one["why"]]

    async def forgiven(self) -> None:
        await until_read(
            lambda: self.client.chat(tokens=1), lambda now: self.way(now) == ("one", "one")
        )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    directory: Path = tmp_path_factory.mktemp("hedging")
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        Hedging(directory, REPLICAS, {"serve": {"chunks_per_s": 1e6}}) as stack,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        yield Watched(stack, Client(stack, session))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hedged_request_that_the_first_replica_wins(system: Watched, stream: bool) -> None:
    """Nothing is held against it, nor against the other, whose answer nobody waited for."""
    before = await system.retries()
    for _ in range(TOLERATED + 1):
        answer = await system.counts_once(
            lambda: system.client.chat(tokens=OUTLASTING, stream=stream)
        )
        assert system.way(answer) == ("one", "one")
    if not stream:  # the headers of a stream come with its first token
        assert await system.retries() >= before + TOLERATED
    assert await system.left_out() == []


async def test_a_hedged_request_that_the_second_replica_wins(system: Watched) -> None:
    before = await system.retries()
    poller = system.stack.process("poller")
    poller.signal(signal.SIGSTOP)  # or it might tell first
    await system.client.simulate("one", hang=True)
    try:
        answer = await system.counts_once(lambda: system.client.chat(tokens=3))
    finally:
        await system.client.simulate("one", hang=False)
        poller.signal(signal.SIGCONT)
    assert system.way(answer) == ("one", "two")
    assert await system.retries() > before
    await system.forgiven()


async def test_failures_are_held_against_who_failed(system: Watched) -> None:
    await system.client.simulate("one", fail=503)
    try:
        for _ in range(TOLERATED):
            answer = await system.counts_once(lambda: system.client.chat(tokens=3))
            assert system.way(answer) == ("one", "two")
        await until_read(system.left_out, lambda now: now == ["one"])
    finally:
        await system.client.simulate("one", fail=0)
    await system.forgiven()


async def test_the_ledger_holds_it_where_it_is_served(system: Watched) -> None:
    async def followed() -> Answer:
        request = asyncio.create_task(system.client.chat(tokens=OUTLASTING, stream=True))
        await until_read(lambda: system.in_flight("two"), lambda now: now == 1)
        assert await system.in_flight("one") == 0
        return await request

    await system.client.simulate("one", fail=500)
    try:
        answer = await system.counts_once(followed)
    finally:
        await system.client.simulate("one", fail=0)
    assert system.way(answer) == ("one", "two")
    await system.forgiven()


async def test_a_request_whose_replica_refuses_connections(system: Watched) -> None:
    poller = system.stack.process("poller")
    poller.signal(signal.SIGSTOP)  # or it might tell first
    await system.stack.kill("one")
    try:
        answer = await system.counts_once(lambda: system.client.chat(tokens=3))
    finally:
        poller.signal(signal.SIGCONT)
        await system.stack.start("one")
    assert system.way(answer) == ("one", "two")
    await system.forgiven()


async def test_a_request_whose_replica_dies_under_it(system: Watched) -> None:
    poller = system.stack.process("poller")
    poller.signal(signal.SIGSTOP)  # or it might tell first
    await system.client.simulate("one", hang=True)  # it does not answer before it dies

    async def sent() -> Answer:
        request = asyncio.create_task(system.client.chat(tokens=OUTLASTING))
        await until_read(lambda: system.in_flight("one"), lambda now: now == 1)
        await system.stack.kill("one")
        return await request

    try:
        answer = await system.counts_once(sent)
    finally:
        poller.signal(signal.SIGCONT)
        await system.stack.start("one")
    assert system.way(answer) == ("one", "two")
    await system.forgiven()

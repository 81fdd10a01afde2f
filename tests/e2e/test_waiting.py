"""Requests wait at the router while every replica is full, whichever part fails meanwhile."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap
from tests.e2e.client import QUEUED, EnvoyClient
from tests.e2e.stack import Behind, PatientStack, equal_pair, ext_proc_of, here
from tests.waiting import until, until_read

FIT = 4
SMALL = ("--kv-tokens", str(FIT * 1152))  # a replica has room for four requests of this test
REPLICAS = equal_pair(*SMALL)
BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX = "envoy", "istio", "endpoint_picker"
IMPATIENT = "envoy, without max_message_timeout"
FILLING, SO_SLOW = 10.0, 50.0
"""Slow-down with which no request ends before the replicas are full, and after."""
numbers = itertools.count()


class WaitingStack(Behind):
    async def behind(self, name: str) -> None:
        """Restart Envoy; timeouts of ``IMPATIENT`` are short, because its test waits for one."""
        self.patience_s = 4 if name == IMPATIENT else PatientStack.patience_s
        await super().behind(name)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        if self.name == IMPATIENT:
            del ext_proc_of(bootstrap)["max_message_timeout"]
        return bootstrap


SERVE = {"chunks_per_s": 1e6, "drain_s": 1.0, "second_choice": True}
system = partial(WaitingStack, replicas=here(REPLICAS, "one"), settings={"serve": SERVE})


def behind(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stack", names, indirect=True)


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def measured_and_empty(client: EnvoyClient) -> None:
    """Wait until the replicas are measured, because before that no request waits, and empty."""
    await until(lambda: client.measured(*(replica.name for replica in REPLICAS)))
    await client.has_in_flight(0)
    await until_read(partial(kv_usage, client), lambda now: now == 0.0)


async def kv_usage(client: EnvoyClient) -> float:
    return sum([float(replica["kv_usage"]) for replica in await client.replicas()])


async def waiting(client: EnvoyClient) -> int:
    return int(await client.metric("extproc_open_streams")) - await client.in_flight()


async def preempted(client: EnvoyClient) -> float:
    name = "vllm:num_preemptions_total"
    return sum([await client.replica_counts(replica.name, name) for replica in REPLICAS])


class Crowd:
    """Requests that were sent, and their answers."""

    def __init__(self, client: EnvoyClient) -> None:
        self.names: list[str] = []
        self.answers: list[asyncio.Task[int]] = []
        self._client = client

    async def joined_by(self, count: int) -> None:
        self.names += [f"{next(numbers)}" for _ in range(count)]
        self.answers += [
            asyncio.create_task(self._client.uncached(name, headers={"x-request-id": name}))
            for name in self.names[-count:]
        ]
        await until_read(
            lambda: self._client.metric("extproc_open_streams"), lambda now: now >= self.unanswered
        )

    @property
    def unanswered(self) -> int:
        return sum(not answer.done() for answer in self.answers)


@asynccontextmanager
async def full_replicas(client: EnvoyClient, more: int, slow: float = 1.0) -> AsyncIterator[Crowd]:
    """Fill the replicas and let ``more`` requests wait; assert at the end that all get 200.

    ``slow``: factor by which the replicas are slower within the block.
    """
    crowd = Crowd(client)

    async def full() -> bool:
        if not crowd.unanswered:
            await crowd.joined_by(len(REPLICAS) * FIT)
        return await kv_usage(client) > 0.7 * len(REPLICAS)

    await client.slow(min(slow, FILLING))
    await until(full)
    await client.slow(slow)
    await crowd.joined_by(more)
    assert await waiting(client) > 0
    yield crowd
    if slow > 1.0:
        await client.slow(1.0)
    assert set(await asyncio.gather(*crowd.answers)) == {200}


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_queued_requests_are_computed_once(client: EnvoyClient) -> None:
    before, again = await client.metric("extproc_queued_seconds_count"), await preempted(client)
    async with full_replicas(client, 30, SO_SLOW) as crowd:
        await until_read(lambda: client.metric(QUEUED), lambda now: now > 0)
    await client.nothing_left()
    records = [record for name in crowd.names for record in await client.decisions(name)]
    waited = [record for record in records if record["outcome"]["queued_s"] > 0.0]
    assert len(records) == len(crowd.names)
    assert len(waited) >= 20
    assert await client.metric("extproc_queued_seconds_count") == before + len(waited)
    assert await preempted(client) == again


@behind(BODY_FIRST)
async def test_dead_router_fails_no_queued_request(client: EnvoyClient) -> None:
    async with full_replicas(client, 12):
        await client.stack.kill("router")
    await client.start_router()
    await client.nothing_left()


@behind(BODY_FIRST)
async def test_hung_router_fails_no_queued_request(client: EnvoyClient) -> None:
    async with full_replicas(client, 12) as crowd:
        with client.stack.paused("router"):
            await until(lambda: crowd.unanswered == 0)
    await client.routes_again()
    await client.nothing_left()


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_client_that_hangs_up_leaves_queue(client: EnvoyClient) -> None:
    async with full_replicas(client, 4, SO_SLOW) as crowd:
        await client.has_in_flight(len(REPLICAS) * FIT)
        wait, in_flight = await waiting(client), await client.in_flight()
        await crowd.joined_by(1)  # several requests sent together may arrive in any order
        crowd.answers.pop().cancel()
        await until_read(lambda: waiting(client), lambda now: now == wait)
        assert await client.in_flight() == in_flight
    await client.nothing_left()


@behind(BODY_FIRST)
@pytest.mark.parametrize("part", ["poller", "redis", "one"])
async def test_dead_part_fails_no_queued_request(client: EnvoyClient, part: str) -> None:
    """Requests on a dead replica succeed, too: nothing of their responses had left Envoy."""
    async with full_replicas(client, 12):
        await client.stack.kill(part)
    await client.nothing_left()
    await client.stack.start(part)
    await client.stack.wait_routing()


@behind(IMPATIENT)
async def test_envoy_without_max_message_timeout_does_not_wait(client: EnvoyClient) -> None:
    async def sent_on() -> float:
        """Return the number of requests that were routed, or that Envoy sent on unrouted."""
        passed = await client.envoy_counts("ext_proc.failure_mode_allowed")
        return passed + await client.routed()

    before = await sent_on()
    async with full_replicas(client, 6, SO_SLOW) as crowd:
        await until_read(sent_on, lambda now: now >= before + len(crowd.answers))
        await until_read(lambda: waiting(client), lambda now: now == 0)
    await client.nothing_left()

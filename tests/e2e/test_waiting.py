"""Requests wait at the router while every replica is full, whatever fails meanwhile."""

import asyncio
import itertools
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.clock import monotonic
from extproc.demo.stack import SimulatedReplica
from tests.e2e.client import Answer, Client
from tests.e2e.stack import Stack, on_ports
from tests.e2e.test_examples import EXAMPLES
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

WORDS, TOKENS, FIT = 1000, 120, 4
SMALL = ("--kv-tokens", str(FIT * 1152))
"""Of the requests here a replica has room for four."""
REPLICAS = tuple(SimulatedReplica(name, "llama-8b-h100", SMALL) for name in ("one", "two"))
BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX = "envoy", "cluster_header", "endpoint_picker"
IMPATIENT = "envoy, without max_message_timeout"
prompts = itertools.count()


class Behind(Stack):
    """The stack behind one of the files in envoy/."""

    def __init__(self, name: str, directory: Path) -> None:
        serve = {"chunks_per_s": 1e6, "drain_s": 1.0} | EXAMPLES.get(name, {})
        super().__init__(directory, REPLICAS, {"serve": serve})
        self.name = name

    def _bootstrap(self) -> str:
        if self.name in (HEADERS_FIRST, FULL_DUPLEX):
            return on_ports(self, self.name)
        whole = super()._bootstrap()
        return re.sub(" max_message_timeout:.*", "", whole) if self.name == IMPATIENT else whole


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    async with Behind(request.param, tmp_path_factory.mktemp("waiting")) as running:
        yield running


def behind(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stack", names, indirect=True)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def known_well(client: Client) -> None:
    """Nobody waits for a replica whose speed is not known."""

    async def measured() -> bool:
        answers = await asyncio.gather(*(client.chat(tokens=300) for _ in range(8)))
        assert {answer.status for answer in answers} == {200}
        replicas = (await client.fleet())["replicas"]
        return all(one["healthy"] and one["measured"] for one in replicas)

    await until(measured)
    await client.ledger_empty()


async def ask(client: Client) -> Answer:
    """A prompt that is like no other."""
    content = f"{next(prompts)}" + " sea" * WORDS
    messages = [{"role": "user", "content": content}]
    return await client.chat(tokens=TOKENS, max_tokens=TOKENS, messages=messages)


async def waiting(client: Client) -> int:
    """How many have asked the router and are on no replica."""
    streams, fleet = await client.metric("extproc_open_streams"), await client.fleet()
    return int(streams) - int(fleet["in_flight"])


async def preempted(client: Client, stack: Stack) -> float:
    pages = []
    for one in REPLICAS:
        async with client._session.get(f"http://{stack.address(one.name)}/metrics") as page:
            pages.append(await page.text())
    lines = (line for page in pages for line in page.splitlines())
    counts = [line for line in lines if line.startswith("vllm:num_preemptions_total{")]
    assert len(counts) == len(REPLICAS)
    return sum(float(line.rpartition(" ")[2]) for line in counts)


@asynccontextmanager
async def crowd(client: Client, more: int) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """The replicas are full, and so many more wait; all are answered when the block has ended."""
    tasks = [asyncio.create_task(ask(client)) for _ in range(more + 2 * FIT)]

    async def all_came() -> bool:
        return await client.metric("extproc_open_streams") == len(tasks)

    await until(all_came)
    assert await waiting(client) > 0
    yield tasks
    await asyncio.gather(*tasks)


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_what_does_not_fit_waits_and_nothing_is_computed_twice(
    client: Client, stack: Stack
) -> None:
    before = await client.metric("extproc_waited_seconds_count")
    async with crowd(client, 30) as tasks:

        async def told() -> bool:
            return await client.metric("extproc_requests_waiting") > 0

        await until(told)
    answers = [task.result() for task in tasks]
    assert {answer.status for answer in answers} == {200}
    waited = [answer for answer in answers if answer.decision["outcome"]["waited_s"] > 0.1]
    assert len(waited) >= 20
    assert await client.metric("extproc_waited_seconds_count") - before >= len(waited)
    assert await preempted(client, stack) == 0
    await nothing_left(client)


async def nothing_left(client: Client) -> None:
    """Returns when nothing waits, nor is in flight."""

    async def so() -> bool:
        names = ("requests_waiting", "requests_in_flight", "open_streams")
        return not any([await client.metric(f"extproc_{name}") for name in names])

    await until(so)
    await client.ledger_empty()


@behind(BODY_FIRST)
async def test_a_router_that_dies_takes_none_with_it(client: Client, stack: Stack) -> None:
    async with crowd(client, 30) as tasks:
        await stack.kill("router")
    assert {task.result().status for task in tasks} == {200}
    await back(client, stack)


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_who_hangs_up_leaves_at_once(client: Client, stack: Stack) -> None:
    try:
        async with crowd(client, 10) as tasks:
            for one in REPLICAS:  # nothing ends meanwhile
                await client.simulate(one.name, slow=50.0)
            left = asyncio.create_task(ask(client))
            before = len(tasks) + 1

            async def open_streams(count: int) -> bool:
                return await client.metric("extproc_open_streams") == count

            await until(lambda: open_streams(before))
            in_flight = (await client.fleet())["in_flight"]
            left.cancel()
            await until(lambda: open_streams(before - 1))
            assert (await client.fleet())["in_flight"] == in_flight
            for one in REPLICAS:
                await client.simulate(one.name, slow=1.0)
    finally:
        for one in REPLICAS:
            await client.simulate(one.name, slow=1.0)
    assert {task.result().status for task in tasks} == {200}
    await nothing_left(client)


@behind(BODY_FIRST)
@pytest.mark.parametrize("part", ["poller", "redis", "one"])
async def test_whatever_dies_meanwhile_none_fails(client: Client, stack: Stack, part: str) -> None:
    """Not even what a replica was answering that dies: nothing of it had left Envoy."""
    async with crowd(client, 20) as tasks:
        await stack.kill(part)
    assert {task.result().status for task in tasks} == {200}
    await nothing_left(client)
    await stack.start(part)
    await stack.wait_routing()


@behind(BODY_FIRST)
async def test_a_router_that_hangs_holds_none_for_long(client: Client, stack: Stack) -> None:
    async with crowd(client, 30) as tasks:
        began = monotonic()
        stack.process("router").signal(signal.SIGSTOP)
        await asyncio.gather(*tasks)
        print("hung for", monotonic() - began)
        stack.process("router").signal(signal.SIGCONT)
    assert {task.result().status for task in tasks} == {200}
    await back(client, stack)


@behind(IMPATIENT)
async def test_for_an_envoy_that_does_not_wait_none_is_held(client: Client, stack: Stack) -> None:
    for one in REPLICAS:
        await client.simulate(one.name, slow=5.0)
    async with crowd(client, 10) as tasks:
        log = stack.directory / "router.log"
        await until(lambda: "Envoy does not wait for the router" in log.read_text())
        assert await waiting(client) <= 7
    for one in REPLICAS:
        await client.simulate(one.name, slow=1.0)
    assert {task.result().status for task in tasks} == {200}
    await asyncio.gather(*(ask(client) for _ in range(20)))
    assert await client.metric("extproc_waited_seconds_count") == 0
    await nothing_left(client)


async def back(client: Client, stack: Stack) -> None:
    """Returns when the router, started if need be, has nothing left and routes again."""
    if not stack.process("router").running:
        await stack.start("router")
    await stack.wait_routing()

    async def routed() -> bool:
        return bool((await client.chat(tokens=1)).decisions)

    await until(routed)
    await nothing_left(client)

"""Requests wait at the router while every replica is full, whatever fails meanwhile."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import MODEL, SimulatedReplica
from tests.e2e.client import CHAT, Client
from tests.e2e.stack import Behind, Stack, ext_proc_of
from tests.waiting import until, until_read

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

WORDS, TOKENS, FIT = 1000, 120, 4
SMALL = ("--kv-tokens", str(FIT * 1152))  # of the requests here a replica has room for four
REPLICAS = tuple(SimulatedReplica(name, "llama-8b-h100", SMALL) for name in ("one", "two"))
BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX = "envoy", "istio", "endpoint_picker"
IMPATIENT = "envoy, without max_message_timeout"
WAITING = 'extproc_requests_waiting{objective="",tenant=""}'
FILLING, SO_SLOW = 10.0, 50.0
"""So slow that none ends before the replicas are full, and from then on."""
numbers = itertools.count()


class Waiting(Behind):
    def __init__(self, directory: Path) -> None:
        serve = {"chunks_per_s": 1e6, "drain_s": 1.0, "second_choice": True}
        super().__init__(directory, REPLICAS, {"serve": serve})

    async def behind(self, name: str) -> None:
        """``IMPATIENT`` waits less: a wait that is longer tells nothing of Envoy."""
        self.patience_s = 4 if name == IMPATIENT else Stack.patience_s
        await super().behind(name)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        if self.name == IMPATIENT:
            del ext_proc_of(bootstrap)["max_message_timeout"]
        return bootstrap


def system(directory: Path) -> Stack:
    return Waiting(directory)


def behind(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("stack", names, indirect=True)


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def known_well(client: Client) -> None:
    """Nobody waits for a replica whose speed is not known; and no replica is taken for as full as
    it was in the test before."""

    async def measured() -> bool:
        replicas = (await client.fleet())["replicas"]
        if all(one["healthy"] and one["measured"] for one in replicas):
            return True
        answers = await asyncio.gather(*(client.chat(tokens=300) for _ in range(8)))
        assert {answer.status for answer in answers} == {200}
        return False

    async def empty() -> bool:
        replicas = (await client.fleet())["replicas"]
        return not any(one["kv_usage"] for one in replicas)

    await until(measured)
    await client.ledger_empty()
    await until(empty)


async def ask(client: Client, name: str, words: int = WORDS) -> int:
    """The status of the answer to a prompt that is like no other."""
    content = name + " sea" * words
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    headers = {"x-request-id": name, "x-simulate-output-tokens": str(TOKENS)}
    return (await client.send("POST", CHAT, body | {"max_tokens": TOKENS}, headers)).status


async def waiting(client: Client) -> int:
    streams, fleet = await client.metric("extproc_open_streams"), await client.fleet()
    return int(streams) - int(fleet["in_flight"])


async def preempted(client: Client) -> float:
    name = "vllm:num_preemptions_total"
    return sum([await client.replica_counts(one.name, name) for one in REPLICAS])


class Crowd:
    """Requests that came, and their answers."""

    def __init__(self, client: Client) -> None:
        self.names: list[str] = []
        self.asked: list[asyncio.Task[int]] = []
        self._client = client

    async def joined_by(self, count: int) -> None:
        self.names += [f"{next(numbers)}" for _ in range(count)]
        self.asked += [asyncio.create_task(ask(self._client, name)) for name in self.names[-count:]]
        await until_read(
            lambda: self._client.metric("extproc_open_streams"), lambda now: now >= self.unanswered
        )

    @property
    def unanswered(self) -> int:
        return sum(not one.done() for one in self.asked)


@asynccontextmanager
async def crowd(client: Client, more: int, slow: float = 1.0) -> AsyncIterator[Crowd]:
    """The replicas are full, and so many more wait; all are answered when the block has ended.

    ``slow``: how many times as long as usual the replicas take meanwhile.
    """
    came = Crowd(client)

    async def full() -> bool:
        if not came.unanswered:
            await came.joined_by(len(REPLICAS) * FIT)
        replicas = (await client.fleet())["replicas"]
        return sum(float(one["kv_usage"]) for one in replicas) > 0.7 * len(REPLICAS)

    await client.slow(min(slow, FILLING))
    await until(full)
    await client.slow(slow)
    await came.joined_by(more)
    assert await waiting(client) > 0
    yield came
    if slow > 1.0:
        await client.slow(1.0)
    assert set(await asyncio.gather(*came.asked)) == {200}


async def streams_open(client: Client, count: int) -> None:
    await until_read(lambda: client.metric("extproc_open_streams"), lambda now: now == count)


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_requests_wait_for_room_and_compute_once(client: Client, stack: Stack) -> None:
    before, again = await client.metric("extproc_waited_seconds_count"), await preempted(client)
    async with crowd(client, 30, SO_SLOW) as came:
        await until_read(lambda: client.metric(WAITING), lambda now: now > 0)
    await nothing_left(client)
    records = [one for name in came.names for one in await client.decisions(name)]
    waited = [one for one in records if one["outcome"]["waited_s"] > 0.0]
    assert len(records) == len(came.names)
    assert len(waited) >= 20
    assert await client.metric("extproc_waited_seconds_count") == before + len(waited)
    assert await preempted(client) == again


@behind(BODY_FIRST)
async def test_few_of_many_are_computed_twice(client: Client, stack: Stack) -> None:
    """Between two polls the router only predicts what became of them, and how long they get."""
    before = await preempted(client)
    asked = [ask(client, f"short {number}", words=WORDS // 4) for number in range(100)]
    assert set(await asyncio.gather(*asked)) == {200}
    assert await preempted(client) <= before + 10
    await nothing_left(client)


async def nothing_left(client: Client) -> None:
    async def so() -> bool:
        names = (WAITING, "extproc_requests_in_flight", "extproc_open_streams")
        return not any([await client.metric(name) for name in names])

    await until(so)
    await client.ledger_empty()


@behind(BODY_FIRST)
async def test_dead_router_loses_no_request(client: Client, stack: Stack) -> None:
    async with crowd(client, 12):
        await stack.kill("router")
    await back(client, stack)


@behind(BODY_FIRST)
async def test_hung_router_keeps_no_request(client: Client, stack: Stack) -> None:
    async with crowd(client, 12) as came:
        stack.process("router").signal(signal.SIGSTOP)
        await until(lambda: came.unanswered == 0)
        stack.process("router").signal(signal.SIGCONT)
    await back(client, stack)


@behind(BODY_FIRST, HEADERS_FIRST, FULL_DUPLEX)
async def test_client_that_hangs_up_leaves_queue(client: Client, stack: Stack) -> None:
    async with crowd(client, 4, SO_SLOW) as came:
        await client.has_in_flight(len(REPLICAS) * FIT)
        wait, in_flight = await waiting(client), (await client.fleet())["in_flight"]
        await came.joined_by(1)  # the last of many need not be the last that came
        came.asked.pop().cancel()
        await streams_open(client, wait + in_flight)
        assert await waiting(client) == wait
        assert (await client.fleet())["in_flight"] == in_flight
    await nothing_left(client)


@behind(BODY_FIRST)
@pytest.mark.parametrize("part", ["poller", "redis", "one"])
async def test_dead_part_fails_no_waiting_request(client: Client, stack: Stack, part: str) -> None:
    """Not even what a replica was answering that dies: nothing of it had left Envoy."""
    async with crowd(client, 12):
        await stack.kill(part)
    await nothing_left(client)
    await stack.start(part)
    await stack.wait_routing()


@behind(IMPATIENT)
async def test_impatient_envoy_goes_on_without_router(client: Client, stack: Stack) -> None:
    async def went_on() -> float:
        """Requests that were routed, or for which Envoy waited no longer."""
        passed = await client.envoy_counts("ext_proc.failure_mode_allowed")
        return passed + await client.routed(stack.router_admin)

    before = await went_on()
    async with crowd(client, 6, SO_SLOW) as came:
        await until_read(went_on, lambda now: now >= before + len(came.asked))
        await until(lambda: waits(client, 0))
    await nothing_left(client)


async def waits(client: Client, count: int) -> bool:
    return await waiting(client) == count


async def back(client: Client, stack: Stack) -> None:
    """Returns when the router, started if need be, has nothing left and routes again."""
    if not stack.process("router").running:
        await stack.start("router")
    await stack.wait_routing()
    await until_read(lambda: client.chat(tokens=1), lambda now: now.decisions)
    await nothing_left(client)

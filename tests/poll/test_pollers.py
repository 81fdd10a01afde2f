"""Several pollers, one of them a process that is killed or stopped, and a real Redis."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from redis.asyncio import Redis
from redis.utils import str_if_bytes

from extproc.config import Config
from extproc.lab.harness.processes import Process, free_port
from extproc.predict.step import DEFAULT_PROFILE, PROFILES
from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys, connect
from extproc.share.replicas import StateWriter
from tests.conftest import Logged, RedisServer
from tests.poll.polling import Seen, config, polling, watching
from tests.poll.replica import Handler, Replica, page, serving, text
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

Owners = dict[str, str]  # replica → the poller that holds its lease


@asynccontextmanager
async def several(count: int) -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving()) for _ in range(count)]


@asynccontextmanager
async def poller_process(settings: Config, directory: Path) -> AsyncIterator[Process]:
    """``extproc poll`` as a process of its own."""
    file = directory / "extproc.yaml"
    file.write_text(settings.model_dump_json(exclude_unset=True))
    argv: list[str | Path] = [sys.executable, "-m", "extproc", "poll", "--config", file]
    admin = ["--poll.admin", f"127.0.0.1:{free_port()}"]
    async with await Process.start("poller", [*argv, *admin], log=directory / "log") as process:
        yield process


async def leases(redis: Redis, replicas: list[Replica], holds: Callable[[Owners], bool]) -> Owners:
    """Wait until this is true of the leases."""
    keys = [Keys("default").lease + replica.id for replica in replicas]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            values = zip(replicas, await redis.mget(keys), strict=True)
            owners = {replica.id: str_if_bytes(owner) for replica, owner in values if owner}
            if holds(owners):
                return owners
            await asyncio.sleep(0.02)


def shared(*counts: int) -> Callable[[Owners], bool]:
    """Whether pollers hold so many each."""
    return lambda owners: sorted(Counter(owners.values()).values()) == sorted(counts)


async def fresh(seen: Seen, replicas: list[Replica]) -> None:
    """Wait until every replica has news that nobody had yet."""
    before = dict(seen.states)
    await seen.until(lambda now: all(now.get(each.id) != before.get(each.id) for each in replicas))


def counting(first: int = 1) -> Handler:
    """More steps at each scrape."""
    steps = first

    async def answer(_: web.Request) -> web.Response:
        nonlocal steps
        steps += 1
        return web.Response(text=page(steps=steps))

    return answer


async def test_three_pollers_share_the_replicas_and_one_that_stops_leaves_its_part(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    async with several(6) as replicas:
        first, second, third = (config(redis_server, *replicas) for _ in range(3))
        async with watching(first) as seen:
            await leases(redis_client, replicas, shared(6))
            async with polling(second):
                await leases(redis_client, replicas, shared(3, 3))
                async with polling(third):
                    await leases(redis_client, replicas, shared(2, 2, 2))
                    await fresh(seen, replicas)
                await leases(redis_client, replicas, shared(3, 3))
            await leases(redis_client, replicas, shared(6))
            await fresh(seen, replicas)


async def test_a_killed_pollers_replicas_are_taken_over_with_what_it_learned(
    redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    learned = PROFILES[DEFAULT_PROFILE].step.slowed(1.5)
    async with several(4) as replicas:
        settings = config(redis_server, *replicas)
        writer = StateWriter(redis_client, "default", ttl_s=60)
        known = (
            ReplicaState(
                id=replica.id,
                profile=DEFAULT_PROFILE,
                learned=learned,
                measured=True,
                models=("tiny",),
            )
            for replica in replicas
        )
        await writer.put(list(known))
        async with poller_process(settings, tmp_path) as other:
            await leases(redis_client, replicas, shared(4))
            async with watching(settings) as seen:
                await leases(redis_client, replicas, shared(2, 2))
                await fresh(seen, replicas)
                await other.kill()
                await leases(redis_client, replicas, shared(4))
                await fresh(seen, replicas)
                for replica in replicas:
                    state = seen.states[replica.id]
                    assert state.models == ("tiny", "adapter")
                    assert state.max_model_len == 4096
                    assert state.learned is not None
                    assert state.learned.c0 == pytest.approx(learned.c0, rel=0.05)


async def test_a_poller_that_was_stopped_publishes_nothing_it_saw_before(
    redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    async with several(2) as replicas:
        settings = config(redis_server, *replicas)
        asked, stopped = asyncio.Event(), asyncio.Event()

        async def late(_: web.Request) -> web.Response:
            asked.set()
            await stopped.wait()
            return web.Response(text=page(steps=50))

        async with poller_process(settings, tmp_path) as other:
            await leases(redis_client, replicas, shared(2))
            for replica in replicas:
                asked.clear()
                replica.answers["/metrics"] = late
                await asked.wait()
                replica.answers["/metrics"] = counting(100)
            other.signal(signal.SIGSTOP)
            stopped.set()
            async with watching(settings) as seen:
                await seen.until(lambda states: len(states) == 2 and min_steps(states) > 100)
                other.signal(signal.SIGCONT)
                owners = await leases(redis_client, replicas, shared(1, 1))
                await fresh(seen, replicas)
                assert len(set(owners.values())) == 2
                assert 50 not in [state.steps for state in seen.history]


def min_steps(states: dict[str, ReplicaState]) -> float:
    return min(state.steps for state in states.values())


async def test_redis_comes_back_empty_and_everyone_has_what_it_had(
    redis_server: RedisServer,
    redis_client: Redis,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.share.leases.LIFE_S", 60.0)  # so long each claims its own
    async with several(4) as replicas:
        first, second = (config(redis_server, *replicas) for _ in range(2))
        async with watching(first) as seen, polling(second):
            before = await leases(redis_client, replicas, shared(2, 2))
            while not any(line["lost"] for line in logged.lines("replicas to scrape changed")):
                await fresh(seen, replicas)  # one has noticed that the other took half
            await redis_server.kill()
            for replica in replicas:  # nobody waits for Redis
                replica.asked.clear()
                await replica.asked_for("/metrics", times=5)
            replicas[0].answers["/metrics"] = text(page(running=77))
            await redis_server.start()
            await seen.replica(replicas[0], lambda state: state.running == 77)
            async with connect(redis_server.url, "default") as redis:
                assert await leases(redis, replicas, lambda owners: len(owners) == 4) == before

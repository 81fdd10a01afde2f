"""Pollers share the replicas, and take over those of a poller that is killed or stopped."""

import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from redis.asyncio import Redis

from extproc.config import Config
from extproc.lab.harness.processes import Process
from extproc.predict.step import DEFAULT_PROFILE, PROFILES
from extproc.replica_state import ReplicaState
from extproc.share import assignment
from extproc.share.envelope import Skips
from extproc.share.replicas import StateWriter
from tests.conftest import RedisServer
from tests.poll.polling import PolledView, config, metrics_of, polling, watching
from tests.poll.replica import Handler, HeldAnswer, ScriptedReplica, page, serving, text
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process


@asynccontextmanager
async def several(count: int) -> AsyncIterator[list[ScriptedReplica]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving()) for _ in range(count)]


@asynccontextmanager
async def poller_process(settings: Config, directory: Path) -> AsyncIterator[Process]:
    file = directory / "extproc.yaml"
    file.write_text(settings.model_dump_json(exclude_unset=True))
    argv: list[str | Path] = [sys.executable, "-m", "extproc", "poll", "--config", file]
    async with await Process.start("poller", argv, log=directory / "log") as process:
        yield process


async def shared(count: int, *pollers: Config) -> list[int]:
    parts: list[int] = []

    async def are_shared() -> bool:
        parts[:] = [await replicas_of(poller) for poller in pollers]
        return sum(parts) == count

    await until(are_shared)
    return parts


async def replicas_of(poller: Config) -> int:
    count = re.compile(r'extproc_poll_replicas\{pool="default"\} (\S+)')
    with suppress(aiohttp.ClientConnectionError):
        if match := count.search(await metrics_of(poller)):
            return round(float(match[1]))
    return 0


async def fresh(router: PolledView, replicas: list[ScriptedReplica]) -> None:
    """Waits until the router has a newer state of every replica."""
    before = dict(router.states)
    await router.until(
        lambda now: all(now.get(each.id) != before.get(each.id) for each in replicas)
    )


def counting(first: int = 1) -> Handler:
    steps = first

    async def answer(_: web.Request) -> web.Response:
        nonlocal steps
        steps += 1
        return web.Response(text=page(steps=steps))

    return answer


async def test_replicas_of_a_killed_poller_are_taken_over_with_learned_state(
    redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    learned = PROFILES[DEFAULT_PROFILE].step.slowed(1.5)
    async with several(4) as replicas:
        settings, others = (config(redis_server, *replicas) for _ in range(2))
        writer = StateWriter(redis_client, "default", ttl_s=60)
        known: dict[str, Any] = {"learned": learned, "measured": True, "models": ("tiny",)}
        for each in replicas:
            await writer.put([ReplicaState(id=each.id, profile=DEFAULT_PROFILE, **known)])
        async with poller_process(others, tmp_path) as other:
            await shared(4, others)
            async with watching(settings) as router:
                await shared(4, others, settings)
                await fresh(router, replicas)
                await other.kill()
                await shared(4, settings)
                await fresh(router, replicas)
                for replica in replicas:
                    listed = {"models": ("tiny", "adapter"), "max_model_len": 4096}
                    state = await router.replica(replica, **listed)
                    assert state.learned is not None
                    assert state.learned.c0 == pytest.approx(learned.c0, rel=0.05)


async def test_stopped_poller_writes_no_old_state_when_it_continues(
    redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    async with several(2) as replicas:
        settings, others = (config(redis_server, *replicas) for _ in range(2))
        old = HeldAnswer(text(page(steps=50)))
        async with poller_process(others, tmp_path) as other:
            await shared(2, others)
            for replica in replicas:
                old.requested.clear()
                replica.answers["/metrics"] = old
                await old.requested.wait()
                replica.answers["/metrics"] = counting(100)
            other.signal(signal.SIGSTOP)
            old.released.set()
            async with watching(settings) as router:
                await router.until(lambda states: len(states) == 2 and min_steps(states) > 100)
                # The poller that joined may have taken the replicas while the heartbeat lived.
                await until(partial(is_alone, redis_client))
                other.signal(signal.SIGCONT)
                await shared(2, others, settings)
                await fresh(router, replicas)
                assert 50 not in [state.steps for state in router.history]


async def is_alone(redis: Redis) -> bool:
    alive, _ = await assignment.known_pollers(redis, "default", Skips())
    return len(alive) == 1


def min_steps(states: dict[str, ReplicaState]) -> float:
    return min(state.steps for state in states.values())


async def test_pollers_with_different_lists_scrape_their_union(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "LIFE_S", PATIENCE_S)  # else a busy machine ends heartbeats
    file = tmp_path / "replicas.yaml"
    async with several(8) as replicas:
        ids = [replica.id for replica in replicas]
        file.write_text(str(ids[:6]))
        first, second = (
            config(redis_server, replicas_file=file),
            config(redis_server, *replicas[4:]),
        )
        async with watching(first) as router, polling(second):
            await shared(8, first, second)
            await fresh(router, replicas)
            file.write_text(str(ids[1:4]))
            await router.until(lambda states: ids[0] not in states)
            await shared(7, first, second)
            await fresh(router, replicas[1:])
            assert router.removed == ids[:1]  # the second poller still lists the others

"""Routers as processes: readiness, state in memory, and state that pollers write to Redis."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.fleet.fleet import Fleet
from extproc.ground.clock import monotonic, wall
from extproc.lab.harness.processes import Process, answers, free_port
from extproc.observe.history import Delays
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.proxy.sharing import share
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.conftest import Logged, RedisServer
from tests.fakes import MODEL, ManualClock, chat, state
from tests.large import assert_event_loop_is_free, thousand_states
from tests.patched import patched
from tests.poll.replica import ScriptedReplica, page, serving, text
from tests.proxy.conftest import config_of
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.proxy.replies import destination
from tests.waiting import PATIENCE_S, until, until_read

pytestmark = pytest.mark.process


@dataclass
class RunningRouter:
    process: Process
    envoy: EnvoySide
    log: Path
    admin: aiohttp.ClientSession

    async def page(self, path: str) -> tuple[int, str]:
        async with self.admin.get(path) as response:
            return response.status, await response.text()


@asynccontextmanager
async def router(argv: Sequence[str], directory: Path) -> AsyncIterator[RunningRouter]:
    """A router with these arguments and free ports."""
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    where = "--serve.listen", listen, "--serve.admin", admin
    log, ready = directory / "router.log", answers(f"http://{admin}/healthz")
    async with (
        await Process.start("router", [*argv, *where], log=log, ready=ready) as process,
        grpc.aio.insecure_channel(listen) as channel,
        aiohttp.ClientSession(f"http://{admin}") as session,
    ):
        yield RunningRouter(process, EnvoySide(channel), log, session)


def list_replicas(directory: Path, *replicas: ScriptedReplica) -> list[str]:
    """Writes the file of replicas; returns the arguments of a router that follows it."""
    file = directory / "replicas.yaml"
    file.write_text(str([replica.id for replica in replicas]))
    state = "--state", "memory", "--redis.url", "redis://127.0.0.1:1"
    resolving = {"extproc.poll.poller.RESOLVE_S": 0.1}
    return patched(resolving, "serve", *state, "--replicas_file", str(file))


async def test_memory_state_follows_replicas_file(tmp_path: Path) -> None:
    async with serving() as first, serving() as second:
        async with router(list_replicas(tmp_path, first), tmp_path) as started:

            async def are(expected: dict[str, int]) -> bool:
                replicas = json.loads((await started.page("/fleet"))[1])["replicas"]
                known = {state["id"]: state["running"] for state in replicas if state["healthy"]}
                return known == expected

            await until(lambda: are({first.id: 2}))
            async with started.envoy.stream() as stream:
                reply = await stream.ask(CHAT | {"model": "tiny"})
                assert destination(reply) == [first.id]
            list_replicas(tmp_path, first, second)
            first.answers["/metrics"] = text(page(running=77))
            await until(lambda: are({first.id: 77, second.id: 2}))
            assert "extproc_decisions_total{" in (await started.page("/metrics"))[1]
            list_replicas(tmp_path, second)
            await until(lambda: are({second.id: 2}))
            polled = 'extproc_poll_replicas{pool="default"} 1.0'
            assert polled in (await started.page("/metrics"))[1]
            await started.process.stop(PATIENCE_S)
        assert started.process.returncode == 0
        assert "redis" not in started.log.read_text()


@pytest.mark.parametrize(
    ("file", "status"), [("[]", 200), ("missing", 503)], ids=["no replicas", "unreadable"]
)
async def test_router_of_an_empty_pool_is_ready(tmp_path: Path, file: str, status: int) -> None:
    """A pool is scaled to zero while a router restarts."""
    argv = list_replicas(tmp_path)
    (tmp_path / "replicas.yaml").write_text(file)
    async with router(argv, tmp_path) as started:
        polled = 'extproc_poll_lookups_failing{pool="default"} ' + str(float(status != 200))
        await until_read(lambda: started.page("/metrics"), lambda now: polled in now[1])
        await until_read(lambda: started.page("/readyz"), lambda now: now[0] == status)


async def test_readiness_follows_known_replicas(redis_server: RedisServer, tmp_path: Path) -> None:
    argv = sys.executable, "-m", "extproc", "serve", "--redis.url", redis_server.url
    async with router(argv, tmp_path) as started:

        async def ready() -> bool:
            return await started.page("/readyz") == (200, "ok\n")

        async def lost() -> bool:
            return "redis is lost" in started.log.read_text()

        assert await started.page("/readyz") == (503, "no replica is known yet\n")
        assert await started.page("/livez") == await started.page("/healthz") == (200, "ok\n")
        async with connect(redis_server.url, "default") as redis:
            await StateWriter(redis, "default", 60).put([state(1, "", ManualClock())])
        await until(ready)
        await redis_server.kill()
        await until(lost)
        assert await ready()
        async with started.envoy.stream() as stream:
            await stream.ask(CHAT | {"model": MODEL})
            started.process.signal(signal.SIGTERM)
            stopping = 503, "stopping\n"
            await until_read(lambda: started.page("/readyz"), lambda now: now == stopping)
            assert await started.page("/livez") == (200, "ok\n")
            await stream.answer()
        assert await started.process.wait() == 0
        assert "Traceback" not in started.log.read_text()


LIFE_S = 60.0
SKEW_S = 120.0


@asynccontextmanager
async def following(server: RedisServer) -> AsyncIterator[Fleet]:
    """A fleet that follows the states in Redis."""
    fleet = Fleet(OutputLengths())
    config, metrics = config_of(redis={"url": server.url}), RouterMetrics(CollectorRegistry())
    task = asyncio.create_task(share(config, fleet, metrics, Delays(monotonic)))
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_poller_clock_skew_changes_no_progress(
    redis_server: RedisServer, redis_client: Redis, logged: Logged
) -> None:
    async with connect(redis_server.url, "default") as redis, following(redis_server) as fleet:
        writer = StateWriter(redis, "default", LIFE_S)
        clock = ManualClock(wall() - SKEW_S)
        first = state(1, "llama-8b-a10", clock, running=1, steps=1300.0, life_s=LIFE_S)
        await writer.put([first])
        await until(lambda: [*fleet.members] == [first])
        fleet.dispatch(first.id, chat(10, 2000))
        fleet.first_token(fleet.dispatch(first.id, chat(10, 2000)))
        before = fleet.sequences(fleet.view(MODEL)).remaining.max()
        await redis.client_kill_filter(_type="pubsub")
        await logged.line("redis is back")
        await writer.put([other := state(2, "llama-8b-a10", clock)])
        await until(lambda: [*fleet.members] == [first, other])
        after = fleet.sequences(fleet.view(MODEL)).remaining.max()
        assert after > before - 200  # otherwise the skew would count as steps done


async def test_large_snapshot_does_not_delay_requests(redis_server: RedisServer) -> None:
    replicas = thousand_states()
    async with connect(redis_server.url, "default") as redis:
        await StateWriter(redis, "default", LIFE_S).put(replicas)

    async def follow() -> None:
        async with following(redis_server) as fleet:
            await until(lambda: len(fleet.members) == len(replicas))

    await assert_event_loop_is_free(follow)

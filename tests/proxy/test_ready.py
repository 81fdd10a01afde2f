"""What a router says of itself."""

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest

from extproc.lab.harness.processes import Process, answers, free_port
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.conftest import RedisServer
from tests.fakes import MODEL, ManualClock, state
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.waiting import until

pytestmark = pytest.mark.process

Says = Callable[[str], Awaitable[tuple[int, str]]]


@asynccontextmanager
async def router(
    redis: RedisServer, directory: Path
) -> AsyncIterator[tuple[Process, EnvoySide, Says]]:
    """A router, Envoy's side of it, and what its admin address says of its health."""
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    argv = [sys.executable, "-m", "extproc", "serve", "--redis.url", redis.url]
    where = ["--serve.listen", listen, "--serve.admin", admin]
    log, ready = directory / "router.log", answers(f"http://{admin}/healthz")
    async with (
        await Process.start("router", [*argv, *where], log=log, ready=ready) as process,
        grpc.aio.insecure_channel(listen) as channel,
        aiohttp.ClientSession() as session,
    ):

        async def says(path: str) -> tuple[int, str]:
            async with session.get(f"http://{admin}{path}") as response:
                return response.status, await response.text()

        yield process, EnvoySide(channel), says


async def test_readiness_follows_known_replicas(redis_server: RedisServer, tmp_path: Path) -> None:
    async with router(redis_server, tmp_path) as (process, envoy, says):

        async def ready() -> bool:
            return await says("/readyz") == (200, "ok\n")

        async def stopping() -> bool:
            return await says("/readyz") == (503, "stopping\n")

        async def lost() -> bool:
            return "redis is lost" in (tmp_path / "router.log").read_text()

        assert await says("/readyz") == (503, "no replica is known yet\n")
        assert await says("/livez") == await says("/healthz") == (200, "ok\n")
        async with connect(redis_server.url, "default") as redis:
            await StateWriter(redis, "default", 60).put([state(1, "", ManualClock())])
        await until(ready)
        await redis_server.kill()
        await until(lost)
        assert await ready()
        async with envoy.stream() as stream:
            await stream.ask(CHAT | {"model": MODEL})
            process.signal(signal.SIGTERM)
            await until(stopping)
            assert await says("/livez") == (200, "ok\n")
            await stream.answer()
        assert await process.wait() == 0

"""Routers as processes: readiness, and state in memory without a poller or Redis."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from extproc.cli import main
from extproc.lab.harness.processes import Process, answers, free_port
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.conftest import RedisServer
from tests.fakes import MODEL, ManualClock, state
from tests.patched import patched
from tests.poll.replica import Replica, models, page, serving, text
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.proxy.replies import destination, status_of
from tests.waiting import PATIENCE_S, until, until_read

pytestmark = pytest.mark.process


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


def router(directory: Path, ports: tuple[int, int], *replicas: Replica) -> list[str]:
    file = directory / "replicas.yaml"
    file.write_text(str([replica.id for replica in replicas]))
    listen, admin = (f"127.0.0.1:{port}" for port in ports)
    serve = ["serve", "--state", "memory", "--redis.url", "redis://127.0.0.1:1"]
    where = ["--serve.listen", listen, "--serve.admin", admin, "--replicas_file", str(file)]
    return patched({"extproc.poll.poller.RESOLVE_S": 0.1}, *serve, *where)


async def test_memory_state_follows_replicas_file(tmp_path: Path, ports: tuple[int, int]) -> None:
    admin = f"http://127.0.0.1:{ports[1]}"
    async with serving() as first, serving() as second, aiohttp.ClientSession() as session:
        argv = router(tmp_path, ports, first)
        log = tmp_path / "router.log"
        ready = answers(f"{admin}/healthz")

        async def known() -> dict[str, int]:
            async with session.get(f"{admin}/fleet") as response:
                replicas = (await response.json())["replicas"]
            return {state["id"]: state["running"] for state in replicas if state["healthy"]}

        async def are(expected: dict[str, int]) -> bool:
            return await known() == expected

        async with await Process.start("router", argv, log=log, ready=ready) as process:
            await until(lambda: are({first.id: 2}))
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
                EnvoySide(channel).stream() as stream,
            ):
                reply = await stream.ask(CHAT | {"model": "tiny"})
                assert destination(reply) == [first.id]
            router(tmp_path, ports, first, second)
            first.answers["/metrics"] = text(page(running=77))
            await until(lambda: are({first.id: 77, second.id: 2}))
            async with session.get(f"{admin}/metrics") as response:
                assert "extproc_decisions_total{" in await response.text()
            router(tmp_path, ports, second)
            await until(lambda: are({second.id: 2}))
            async with session.get(f"{admin}/metrics") as response:
                assert 'extproc_poll_replicas{pool="default"} 1.0' in await response.text()
            await process.stop(PATIENCE_S)
        assert process.returncode == 0
        assert "redis" not in log.read_text()


async def test_memory_state_refuses_no_model_early(tmp_path: Path, ports: tuple[int, int]) -> None:
    admin = f"http://127.0.0.1:{ports[1]}"
    async with serving() as first, serving() as second, aiohttp.ClientSession() as session:
        scrapes_answered = asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            await scrapes_answered.wait()
            return await text(page(model="large"))(request)

        second.answers |= {"/metrics": slow, "/v1/models": models("large")}

        async def listed() -> bool:
            async with session.get(f"{admin}/fleet") as response:
                return "adapter" in await response.text()

        argv = router(tmp_path, ports, first, second)
        ready = answers(f"{admin}/healthz")
        async with (
            await Process.start("router", argv, log=tmp_path / "router.log", ready=ready),
            grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
        ):

            async def result_of(model: str) -> list[str] | int:
                async with EnvoySide(channel).stream() as stream:
                    reply = await stream.ask(CHAT | {"model": model})
                    refused = reply.immediate_response is not None
                    return status_of(reply) if refused else destination(reply)

            await until(listed)
            assert await result_of("large") == [first.id, first.id]
            scrapes_answered.set()
            await until_read(lambda: result_of("nobody's"), lambda now: now == 404)
            assert await result_of("large") == [second.id, second.id]


def test_memory_state_refuses_separate_poller(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["poll", "--replicas", "127.0.0.1:1", "--state", "memory"]) == 2
    assert "the router polls its replicas itself" in capsys.readouterr().err


Says = Callable[[str], Awaitable[tuple[int, str]]]


@asynccontextmanager
async def redis_router(
    redis: RedisServer, directory: Path
) -> AsyncIterator[tuple[Process, EnvoySide, Says]]:
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
    async with redis_router(redis_server, tmp_path) as (process, envoy, says):

        async def ready() -> bool:
            return await says("/readyz") == (200, "ok\n")

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
            await until_read(lambda: says("/readyz"), lambda now: now == (503, "stopping\n"))
            assert await says("/livez") == (200, "ok\n")
            await stream.answer()
        assert await process.wait() == 0

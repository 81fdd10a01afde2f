"""``extproc explain`` and ``extproc top`` ask all routers that Redis names."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from socket import gethostname

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.config import AdminSettings, Config
from extproc.fleet.digest import NOTHING, Digest, DigestKind
from extproc.lab.harness.processes import free_port
from extproc.observe.dashboard.routes import Live
from extproc.proxy.app import build
from extproc.proxy.services import Services
from extproc.share import digests
from extproc.share.connection import Keys
from extproc.share.digests import send_digest
from tests.certificates import Authority
from tests.conftest import Cli, RedisServer
from tests.fakes import ManualClock, chat, state
from tests.observe.conftest import decide, serving
from tests.observe.terminal import on_terminal

pytestmark = pytest.mark.process

HERE, THERE = f"{gethostname()}:50051", f"{gethostname()}:50052"
Publish = Callable[..., Awaitable[None]]
Asks = Callable[..., Awaitable[tuple[list[str], list[str]]]]


def router(decided_at: float) -> Services:
    clock = ManualClock(decided_at)
    config = Config.model_validate({"route": {"seed": 1}})
    services = build(config, CollectorRegistry(), clock, clock)
    services.fleet.put(state(1, "llama-8b-h100", clock))
    services.fleet.pollers = {"here:1": ()}
    return services


@pytest.fixture
def first() -> Services:
    return router(1000.0)


@pytest.fixture
def second() -> Services:
    return router(1001.0)


@pytest.fixture
async def publish(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> Publish:
    monkeypatch.setattr(digests, "_LIFE_MS", 60_000)

    async def publish(process: str, admin: str, pool: str = "default") -> None:
        name = f"{process}:{pool}"
        whole = Digest(name, 1, 1.0, DigestKind.WHOLE, (), NOTHING, admin)
        await send_digest(redis_client, Keys(pool), whole)

    return publish


@pytest.fixture
async def both(publish: Publish, first: Services, second: Services) -> AsyncIterator[list[str]]:
    async with serving(first) as here, serving(second) as other:
        await publish(HERE, here)
        await publish(THERE, other)
        yield [here, other]


@pytest.fixture
def asks(redis_server: RedisServer, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Asks:
    """Runs a command with this Redis; returns the lines of stdout and stderr."""
    monkeypatch.setenv("EXTPROC_REDIS__URL", redis_server.url)
    monkeypatch.setenv("EXTPROC_SERVE__ADMIN", f"127.0.0.1:{free_port()}")

    async def asks(*arguments: str, status: int = 0) -> tuple[list[str], list[str]]:
        return await asyncio.to_thread(cli, *arguments, status=status)

    return asks


async def test_explain_merges_the_decisions_of_all_routers(
    first: Services, second: Services, both: list[str], asks: Asks
) -> None:
    decide(second, chat(100), "later")
    decide(first, chat(100), "earlier")
    lines, errors = await asks("explain")
    assert errors == []
    assert [word for line in lines for word in line.split() if word in ("earlier", "later")] == [
        "earlier",
        "later",
    ]
    assert [line.split(",")[0].strip() for line in lines[1::2]] == ["router", HERE, THERE]
    lines, _ = await asks("explain", "--last", "1", "--json")
    assert [(each["router"], each["request_id"]) for each in json.loads("\n".join(lines))] == [
        (THERE, "later")
    ]
    _, (line,) = await asks("explain", "nobody", status=1)
    urls = ", ".join(f"http://{address}" for address in both)
    assert line.startswith(f"extproc explain: no decision about request 'nobody' at {urls}: ")


async def test_explain_shows_the_routers_that_answer_and_names_the_others(
    first: Services, both: list[str], publish: Publish, asks: Asks
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    await publish(THERE, gone)
    await publish("elsewhere:50051", "127.0.0.1:9090")
    await publish("starting:50051", "")
    decide(first, chat(100), "one")
    lines, errors = await asks("explain")
    assert "one" in lines[2]
    text = "extproc explain: router"
    assert [line.removeprefix(text).split(": ")[0] for line in errors] == [
        " elsewhere:50051 is not asked",
        f" {THERE}",
    ]
    assert f"no router answers at http://{gone}: connection refused" in errors[-1]


@pytest.mark.usefixtures("both")
async def test_control_characters_from_redis_are_not_printed(publish: Publish, asks: Asks) -> None:
    await publish("\x1bc:1", "127.0.0.1:9090")
    await publish("evil:1", f"\x1bc.invalid:{free_port()}")
    for command in ("explain", "top"):
        lines, errors = await asks(command)
        text = "".join(lines + errors)
        assert text.count("?c") >= 2
        assert "\x1b" not in text


async def test_one_router_in_several_pools_is_asked_once(
    first: Services, publish: Publish, asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTPROC_POOLS", '{"batch": {"replicas": ["10.0.0.9:8000"]}}')
    decide(first, chat(100), "one")
    async with serving(first) as admin:
        await publish(HERE, admin)
        await publish(HERE, admin, "batch")
        lines, errors = await asks("explain")
    assert (len(lines), errors) == (4, [])


async def test_router_at_serve_admin_is_asked_if_redis_names_none(
    first: Services, redis_server: RedisServer, asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(first) as admin:
        monkeypatch.setenv("EXTPROC_SERVE__ADMIN", admin)
        lines, (error,) = await asks("explain")
        assert lines == ["no decisions yet"]
        only = f"asking only the router at {admin} (serve.admin)"
        assert error == f"extproc explain: Redis names no router of the pool: {only}"
        await redis_server.kill()
        lines, (error,) = await asks("explain")
        assert lines == ["no decisions yet"]
        assert re.search(r"Redis at .* does not name the routers: .*refused|Connect", error)
        lines, _ = await asks("top")
        assert lines[0].startswith("! Redis at ")


async def test_failure_of_all_routers_is_an_error_line_for_each(
    publish: Publish, asks: Asks
) -> None:
    for process in (HERE, THERE):
        await publish(process, f"127.0.0.1:{free_port()}")
    for command in ("explain", "top"):
        lines, errors = await asks(command, status=1)
        assert lines == []
        assert [line.split(": ")[1] for line in errors] == [f"router {HERE}", f"router {THERE}"]


async def test_top_has_a_line_for_each_router_and_the_warnings_of_all(
    first: Services, second: Services, both: list[str], publish: Publish, asks: Asks
) -> None:
    await publish("elsewhere:50051", "127.0.0.1:9090")
    for services in (first, second):
        services.fleet.put(
            state(2, "llama-8b-h100", ManualClock(1001.0), healthy=False, problem="it burns")
        )
        services.exclusions.look(services.fleet, services.wall())  # a second later at one of them
    second.delays.redis_refusal = "OOM command not allowed"
    second.fleet.dispatch("10.0.0.1:8000", chat(100))
    first.metrics.requests.add("routed", by=2)
    lines, errors = await asks("top")
    assert errors == []
    assert lines[0] == (
        "! router elsewhere:50051 is not asked: its serve.admin (127.0.0.1:9090) is on loopback of "
        "another machine"
    )
    header, *rows = lines[2:5]
    assert header.split() == ["Router", "In", "flight", "Waiting", "Requests/s", "5xx/s", "429/s"]
    assert [row.split() for row in rows] == [
        [HERE, "0", "0", "2.00", "0", "0"],
        [THERE, "1", "0", "0", "0", "0"],
    ]
    assert f"the fleet as {HERE} knows it" in lines[5]
    warnings = [line for line in lines[1:] if line.startswith("!")]
    assert [warning.partition(": ")[0] for warning in warnings] == [
        "! r2 is excluded",
        f"! {THERE}",
    ]
    assert "Redis stores nothing" in warnings[1]


async def test_top_shows_the_fleet_of_a_router_that_answers(
    both: list[str], publish: Publish, asks: Asks
) -> None:
    await publish(HERE, f"127.0.0.1:{free_port()}")
    lines, _ = await asks("top")
    assert lines[0].startswith(f"! router {HERE}: no router answers at ")
    (row,) = (line for line in lines if line.startswith(f"{HERE} "))
    assert set(row.split()[1:]) == {"-"}
    assert any(f"the fleet as {THERE} knows it" in line for line in lines)


@pytest.mark.usefixtures("asks")
async def test_top_follows_routers_that_start_and_stop(
    first: Services,
    second: Services,
    publish: Publish,
    redis_client: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed, frames = list[Live](), Live.frames

    def followed_frames(live: Live) -> AsyncIterator[bytes]:
        followed.append(live)
        return frames(live)

    monkeypatch.setattr(Live, "frames", followed_frames)
    former, latter = (f"{gethostname()}:{port}" for port in (50061, 50062))
    async with serving(first) as here, serving(second) as there:
        await publish(former, here)
        async with on_terminal("top") as top:
            await top.shows("1 of 1 replicas in use", but_not=f"{former} ")
            await publish(latter, there)
            await top.shows(f"\n{latter} ")
            farewell = Digest(f"{former}:default", 2, 1.0, DigestKind.FAREWELL, (), NOTHING)
            await send_digest(redis_client, Keys("default"), farewell)
            await top.shows("1 of 1 replicas in use", but_not=f"{latter} ")
            assert len(followed) == 2  # one connection to each router


async def test_token_goes_to_no_router_without_the_certificate(
    first: Services,
    second: Services,
    publish: Publish,
    asks: Asks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever writes to Redis may name a server of their own."""
    token = tmp_path / "token"
    token.write_text("an-example")
    async with AsyncExitStack() as stack:
        for name, process, services in (("own", HERE, first), ("false", THERE, second)):
            cert, key = Authority(tmp_path / name).sign("router")
            access = AdminSettings(tls_cert=cert, tls_key=key, token_file=token)
            await publish(process, await stack.enter_async_context(serving(services, access)))
            if services is first:
                monkeypatch.setenv("EXTPROC_ADMIN__TLS_CERT", str(cert))
                monkeypatch.setenv("EXTPROC_ADMIN__TLS_KEY", str(key))
                monkeypatch.setenv("EXTPROC_ADMIN__TOKEN_FILE", str(token))
        decide(first, chat(100), "one")
        lines, (error,) = await asks("explain")
    assert "one" in lines[2]
    assert error.startswith(f"extproc explain: router {THERE}: no router answers at https://")
    assert "certificate" in error

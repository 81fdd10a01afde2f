"""Drains: the command, pollers that follow it, and a Redis that lost the drains."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis.asyncio import Redis

from extproc.cli import main
from extproc.replica_state import ReplicaState
from extproc.share.assignment import known_pollers
from extproc.share.connection import Keys, connect
from extproc.share.drains import Drains, DrainStore
from extproc.share.envelope import Skips
from extproc.share.replicas import StateWriter
from tests.conftest import Cli, Logged, RedisServer
from tests.fakes import ManualClock
from tests.poll.polling import PolledView, config, polling, watching
from tests.poll.replica import ScriptedReplica, page, serving, text
from tests.share.servers import command, stop_saving
from tests.waiting import until, until_read

pytestmark = pytest.mark.process

Run = Callable[..., Coroutine[Any, Any, str]]
Watched = Callable[..., AbstractAsyncContextManager[PolledView]]


@pytest.fixture
def run(stopped_redis: RedisServer, cli: Cli) -> Run:
    async def run(*arguments: str, status: int = 0) -> str:
        argv = ["replicas", *arguments, "--redis.url", stopped_redis.url]
        printed, errors = await asyncio.to_thread(cli, *argv, status=status)
        assert status or not errors
        return "".join(f"{line}\n" for line in (errors if status else printed))

    return run


async def listed(run: Run) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in json.loads(await run("list", "--json"))}


async def drained(run: Run, seen: PolledView, replica: ScriptedReplica) -> str:
    printed = await run("drain", replica.id)
    await seen.replica(replica, lambda state: state.draining)
    return printed


@pytest.fixture
def watched(redis_server: RedisServer) -> Watched:
    """Polls replicas, and yields a router's view of them."""

    @asynccontextmanager
    async def watched(*replicas: ScriptedReplica) -> AsyncIterator[PolledView]:
        async with watching(config(redis_server, *replicas)) as seen:
            await seen.until(lambda states: states.keys() == {replica.id for replica in replicas})
            yield seen

    return watched


async def test_undrained_replica_gets_requests_again(watched: Watched, run: Run) -> None:
    async with serving() as a, serving() as b, watched(a, b) as seen:
        printed = await drained(run, seen, a)
        assert printed == f"{a.id} is draining: 2 running and 1 waiting\n"
        assert not seen.states[b.id].draining
        row = (await listed(run))[a.id]
        assert (row["state"], row["drained"]) == ("draining", True)
        assert await run("undrain", a.id) == f"{a.id} gets requests again\n"
        await seen.replica(a, lambda state: not state.draining)
        assert not (await listed(run))[a.id]["drained"]
        assert await run("undrain", a.id) == f"{a.id} was not drained\n"


async def test_new_poller_knows_drains_at_once(watched: Watched, run: Run) -> None:
    async with serving() as a, serving() as b:
        async with watched(a, b) as seen:
            await drained(run, seen, a)
        async with watched(a, b) as seen:
            await seen.replica(b, lambda state: not state.draining)
            assert all(state.draining for state in seen.history if state.id == a.id)


async def test_unreadable_drains_are_logged(
    watched: Watched, redis_client: Redis, run: Run, logged: Logged
) -> None:
    async with serving() as a, watched(a) as seen:
        names = "replica:*", "lists:*", "poller:*", "poller-names"
        keys = [f"~{{default}}:{name}" for name in names]
        await command(redis_client, "ACL", "SETUSER", "default", "resetkeys", *keys)
        line = await logged.line("redis refuses a key: 'extproc replicas' has no effect")
        assert line["key"] == "{default}:drains"
        assert "permission" in str(line["error"])
        error = await run("drain", a.id, status=1)
        assert "(redis.url): " in error
        assert "No permissions" in error
        assert "{default}:drains" in error
        await command(redis_client, "ACL", "SETUSER", "default", *str(line["allow"]).split())
        await logged.line("redis accepts the key again")
        await drained(run, seen, a)
    assert len(logged.lines("redis refuses a key: 'extproc replicas' has no effect")) == 1


async def test_redis_that_cannot_save_still_tells_drains(
    watched: Watched, redis_client: Redis, run: Run, logged: Logged
) -> None:
    async with serving() as a, watched(a) as seen:
        await drained(run, seen, a)
        await stop_saving(redis_client)
        assert (await listed(run))[a.id]["drained"]
        assert "MISCONF" in await run("undrain", a.id, status=1)
        assert seen.states[a.id].draining
    assert not logged.lines("redis refuses a key: 'extproc replicas' has no effect")


async def test_drain_waits_until_replica_is_empty(watched: Watched, run: Run) -> None:
    async with serving() as a, serving() as b, watched(a, b) as seen:
        waiting = asyncio.create_task(run("drain", a.id, "--wait", "60"))
        await seen.replica(a, lambda state: state.draining)
        a.answers["/metrics"] = text(page(running=0, waiting=1))
        await seen.replica(a, lambda state: not state.running)
        a.answers["/metrics"] = text(page(running=0, waiting=0))
        begun, ended = (await waiting).splitlines()
        assert begun == f"{a.id} is draining: 2 running and 1 waiting"
        assert ended.startswith(f"{a.id} is empty after ")
        await drained(run, seen, b)
        assert await run("drain", b.id, "--wait", "0.3", status=1) == (
            f"extproc replicas: after 0.3 s, {b.id} has 2 running and 1 waiting; "
            "the drain stays in effect\n"
        )


async def test_drained_pod_that_is_not_ready_is_empty_if_its_scrapes_say_so(
    redis_client: Redis, run: Run
) -> None:
    pod = ReplicaState(id="10.0.0.1:8000", draining=True, healthy=False, problem="not ready")
    writer = StateWriter(redis_client, "default", ttl_s=10)
    await writer.put([structs.replace(pod, draining=False)])
    error = await run("drain", pod.id, "--wait", "0.1", status=1)
    assert "no poller applied the drain" in error
    waiting = asyncio.create_task(run("drain", pod.id, "--wait", "5"))
    for scrape in count(1):
        await writer.put([structs.replace(pod, scraped_at=float(scrape))])
        if (await asyncio.wait([waiting], timeout=0.25))[0]:
            break
    assert f"{pod.id} is empty after " in await waiting
    assert scrape >= 3, "the first scrape may be older than the drain"


async def test_reader_that_leaves_ends_a_drain_without_an_error(
    redis_client: Redis,
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await StateWriter(redis_client, "default", ttl_s=10).put([ReplicaState(id=HERE)])
    read, write = os.pipe()
    os.close(read)
    words = ["replicas", "drain", HERE, "--wait", "60", "--redis.url", redis_server.url]
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert await asyncio.to_thread(main, words) == 141
    assert capsys.readouterr().err == ""


async def test_control_characters_of_a_drained_replica_are_not_printed(
    redis_client: Redis, run: Run
) -> None:
    name, problem = "\x1b[2Jr1", "\x1b[2Jdown"
    state = ReplicaState(id=HERE, name=name, problem=problem, healthy=False, draining=True)
    await StateWriter(redis_client, "default", ttl_s=10).put([state])
    assert "?[2Jr1" in await run("drain", HERE)
    error = await run("drain", HERE, "--wait", "0", status=1)
    assert "?[2Jr1 (10.0.0.1:80) is unhealthy (?[2Jdown)" in error


async def test_sleeping_replica_is_shown_and_replaces_no_other(watched: Watched, run: Run) -> None:
    async with serving() as a, serving() as b, watched(a, b) as seen:
        await seen.replica(a, lambda state: state.models == ("tiny", "adapter"))
        b.answers["/metrics"] = text(page(asleep=True))
        await seen.replica(b, lambda state: state.asleep)
        assert (await listed(run))[b.id]["state"] == "asleep"
        assert "no other replica can serve its models" in await run("drain", a.id)


async def test_drain_wait_names_why_it_cannot_end(
    watched: Watched, redis_client: Redis, run: Run
) -> None:
    dead = ScriptedReplica()
    async with serving() as a, serving() as b:
        async with watched(a, b, dead) as seen:
            await drained(run, seen, a)
            await drained(run, seen, dead)
            error = await run("drain", dead.id, "--wait", "0.2", status=1)
            assert "is unhealthy (cannot connect: connection refused)" in error
        error = await run("drain", b.id, "--wait", "0.2", status=1)
        assert "no poller applied the drain" in error
        await redis_client.delete(Keys("default").replica + a.id)
        assert (await listed(run))[a.id]["state"] == "drained, not polled"
        error = await run("drain", a.id, "--wait", "0.2", status=1)
        assert f"{a.id} is not polled, so its requests are unknown" in error


async def test_redis_that_comes_back_empty_gets_drains(
    redis_server: RedisServer, watched: Watched, run: Run, logged: Logged
) -> None:
    async with serving() as a, serving() as b:
        settings = config(redis_server, a, b)
        async with watched(a, b) as seen, polling(settings):
            await drained(run, seen, a)
            await redis_server.kill()
            await logged.line("redis is lost, retrying")
            await redis_server.start()
            async with connect(redis_server.url, "default") as redis:
                await until(DrainStore(redis, settings.pool).read)
                assert await DrainStore(redis, settings.pool).read() == {a.id: True}
                assert await redis.ttl("{default}:drains") > 3600
            # A poller that had not read the drain before Redis was lost reads it now.
            await seen.replica(a, lambda state: state.draining)


HERE, GONE = "10.0.0.1:80", "10.0.0.2:80"


@pytest.fixture
def store(redis_client: Redis) -> DrainStore:
    return DrainStore(redis_client, "default")


async def test_drain_outlives_replica_for_an_hour(store: DrainStore) -> None:
    clock, drains = ManualClock(), Drains()
    await store.write({HERE: True, GONE: True})
    await drains.look(store, clock())
    drains.listed = [HERE]
    for _ in range(2):
        await drains.look(store, clock())
        clock.advance(3601)
    assert await store.read() == {HERE: True}
    assert (drains.has(HERE), drains.has(GONE)) == (True, False)


async def test_expired_drain_stays_forgotten(store: DrainStore, clock: ManualClock) -> None:
    await store.write({GONE: True})
    pollers = Drains(), Drains()
    for poller in pollers:
        poller.listed = []
        await poller.look(store, clock())
        clock.advance(10)
    clock.advance(3581)
    for _ in range(4):
        for poller in pollers:
            await poller.look(store, clock())
            clock.advance(1)
    assert await store.read() == {}


async def test_missed_undrain_is_not_undone(store: DrainStore) -> None:
    poller = Drains()
    poller.listed = [HERE]
    await store.write({HERE: True})
    await poller.look(store, 0.0)
    await store.write({HERE: False})
    await poller.look(store, 1.0)
    assert not poller.has(HERE)
    assert await store.read() == {HERE: False}
    await store.forget([HERE])  # as when Redis comes back empty
    await poller.look(store, 2.0)
    assert not poller.has(HERE)
    assert await store.read() == {}


async def test_garbage_drains_are_skipped(
    watched: Watched, redis_client: Redis, store: DrainStore, run: Run, logged: Logged
) -> None:
    await redis_client.hset("{default}:drains", mapping={HERE: "{", GONE: ""})
    async with serving() as a, watched(a) as seen:
        await drained(run, seen, a)
        assert await store.read() == {a.id: True}
    assert {line["source"] for line in logged.lines("skipped garbage in redis")} == {HERE, GONE}


async def test_drain_suggests_names(redis_server: RedisServer, run: Run, tmp_path: Path) -> None:
    a, b = ScriptedReplica(), ScriptedReplica()
    file = tmp_path / "replicas.yaml"
    file.write_text(f"[{{url: '{a.id}', name: gpu-1}}, {{url: '{b.id}', name: gpu-1}}]")
    async with watching(config(redis_server, replicas_file=file)) as seen:
        await seen.until(lambda states: len(states) == 2)
        (line,) = (await run("drain", "gpu-2", status=1)).splitlines()
        assert line.startswith("extproc replicas: 'gpu-2' is not a replica of the pool 'default'")
        assert line.endswith("; did you mean 'gpu-1'?")
        error = await run("drain", "gpu-1", status=1)
    both = ", ".join(sorted([a.id, b.id]))
    assert f"2 replicas have the name 'gpu-1': use an address: {both}" in error


@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_list_of_unknown_pool_fails(
    watched: Watched, run: Run, options: tuple[str, ...]
) -> None:
    async with serving() as a, watched(a):
        (line,) = (await run("list", "--pool", "nope", *options, status=1)).splitlines()
    assert line == "extproc replicas: nothing is known of pool 'nope': no poller of it runs"


async def test_list_of_empty_pool_with_poller_succeeds(
    redis_server: RedisServer, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "replicas.yaml"
    file.write_text("[]")
    settings = config(redis_server, replicas_file=file)
    async with polling(settings), connect(redis_server.url, settings.pool) as redis:
        await until_read(
            lambda: known_pollers(redis, settings.pool, Skips()), lambda known: known[0]
        )
        assert await run("list") == "the pool 'default' has no replicas: its pollers know none\n"
        assert await run("list", "--json") == "[]\n"


async def test_list_shows_states_and_whole_problems(watched: Watched, run: Run) -> None:
    dead = ScriptedReplica()
    async with serving() as a, serving() as other, watched(a, dead, other) as seen:
        other.answers["/metrics"] = text("up 1\n")
        await seen.replica(other, healthy=False)
        header, *rows = (await run("list")).splitlines()
    assert header.split("  ")[0] == "name"
    row = next(row for row in rows if a.id in row)
    *figures, _, state = row.split()
    assert (figures, state) == ([a.id, a.id, "2", "1", "50%", "-", "-"], "healthy")
    assert "  cannot connect: connection refused" in next(row for row in rows if dead.id in row)
    assert "  /metrics has no line of vllm" in next(row for row in rows if other.id in row)


@pytest.mark.usefixtures("redis_server")
async def test_undrain_without_poller_fails_with_one_line(run: Run) -> None:
    (line,) = (await run("undrain", HERE, status=1)).splitlines()
    assert line.startswith("extproc replicas: ")
    assert "does a poller run?" in line


async def test_replicas_without_redis_fails_in_a_line(stopped_redis: RedisServer, run: Run) -> None:
    (line,) = (await run("list", status=1)).splitlines()
    assert line.startswith(f"extproc replicas: Redis at 127.0.0.1:{stopped_redis.port} (redis.url)")

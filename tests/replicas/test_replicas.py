"""The command against a real Redis and real pollers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from extproc.cli import main
from extproc.poll.membership import Membership
from extproc.replicas.pool import Pool
from extproc.replicas.wait import until_empty
from extproc.share.connection import connect
from extproc.share.desired import Desired, DesiredStore
from extproc.share.keys import Keys
from tests.conftest import Logged, RedisServer
from tests.fakes import ManualClock
from tests.poll.polling import config, polling, watching
from tests.poll.replica import Replica, page, serving, text
from tests.share.servers import command
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

Run = Callable[..., Coroutine[Any, Any, str]]


@pytest.fixture
def run(stopped_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> Run:
    async def run(*arguments: str, status: int = 0) -> str:
        """What it prints; on standard error where it fails."""
        argv = ["replicas", *arguments, "--redis.url", stopped_redis.url]
        capsys.readouterr()
        assert await asyncio.to_thread(main, argv) == status
        output = capsys.readouterr()
        if status:
            return output.err
        assert output.err == ""
        return output.out

    return run


async def listed(run: Run) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in json.loads(await run("list", "--json"))}


def empty(**figures: Any) -> Any:
    return text(page(running=0, waiting=0, **figures))


async def test_a_replica_is_added_and_removed(redis_server: RedisServer, run: Run) -> None:
    async with serving() as one, serving() as two, watching(config(redis_server, one)) as seen:
        await seen.until(lambda states: set(states) == {one.id})
        assert await run("add", two.id, "--name", "two", "--profile", "llama-8b-a10") == (
            f"two ({two.id}) is added\n"
        )
        await seen.until(lambda states: set(states) == {one.id, two.id})
        assert (seen.states[two.id].name, seen.states[two.id].profile) == ("two", "llama-8b-a10")
        assert await run("remove", "two") == f"two ({two.id}) is removed; 3 requests there go on\n"
        await seen.until(lambda states: set(states) == {one.id})


async def test_one_that_the_file_names_is_removed_and_taken_back(
    redis_server: RedisServer, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "replicas.yaml"
    async with serving() as one, serving() as two:
        file.write_text(f"[{{url: '{one.id}', name: first}}, '{two.id}']")
        settings = config(redis_server, replicas_file=file)
        async with watching(settings) as seen:
            await seen.until(lambda states: len(states) == 2)
            await run("remove", "first")
            await seen.until(lambda states: set(states) == {two.id})
            assert (await listed(run))[one.id]["state"] == "removed"
        async with watching(settings) as seen:  # a poller that starts knows it from the beginning
            await seen.until(lambda states: set(states) == {two.id})
            assert one.id not in seen.states
            assert await run("add", one.id) == (
                f"{one.id} is polled again, if configuration, file, DNS or Kubernetes name it\n"
            )
            await seen.until(lambda states: set(states) == {one.id, two.id})
            assert seen.states[one.id].name == "first"
            file.write_text(f"['{two.id}']")
            await seen.until(lambda states: set(states) == {two.id})
            assert await run("add", one.id) == f"{one.id} is added\n"
            await seen.until(lambda states: set(states) == {one.id, two.id})


@pytest.fixture
async def refusing(redis_server: RedisServer) -> AsyncIterator[RedisServer]:
    """A Redis that lets users do everything but what commands ask for."""
    async with connect(redis_server.url, "default") as redis:
        keys = "~{default}:replica:* ~{default}:lease:* ~{default}:pollers"
        await command(redis, "ACL", "SETUSER", "default", "resetkeys", *keys.split())
        yield redis_server


async def test_a_poller_that_may_not_read_commands_says_so_once(
    refusing: RedisServer, run: Run, logged: Logged
) -> None:
    async with serving() as one, serving() as two, watching(config(refusing, one)) as seen:
        await seen.until(lambda states: set(states) == {one.id})
        line = await logged.line("redis refuses a key: 'extproc replicas' has no effect")
        assert line["key"] == "{default}:members"
        assert "permission" in str(line["error"])
        error = await run("add", two.id, status=1)
        assert "refuses" in error
        assert "{default}:members" in error
        async with connect(refusing.url, "default") as redis:
            rule = str(line["allow"]).split()
            await command(redis, "ACL", "SETUSER", "default", *rule)
        await logged.line("redis refuses the key no longer")
        await run("add", two.id)
        await seen.until(lambda states: set(states) == {one.id, two.id})
    assert len(logged.lines("redis refuses a key: 'extproc replicas' has no effect")) == 1


async def test_draining_is_told_and_taken_back(redis_server: RedisServer, run: Run) -> None:
    async with serving() as one, serving() as two, watching(config(redis_server, one, two)) as seen:
        await seen.until(lambda states: len(states) == 2)
        assert await run("drain", one.id) == f"{one.id} is draining: 2 running and 1 waiting\n"
        await seen.replica(one, lambda state: state.draining)
        assert not seen.states[two.id].draining
        assert (await listed(run))[one.id]["state"] == "draining"
        assert await run("add", one.id) == f"{one.id} takes requests again\n"
        await seen.replica(one, lambda state: not state.draining)
        assert not (await listed(run))[one.id]["added_by_command"]


async def test_drain_waits_until_nothing_is_left(redis_server: RedisServer, run: Run) -> None:
    async with serving() as one, serving() as two, watching(config(redis_server, one, two)) as seen:
        await seen.until(lambda states: len(states) == 2)
        waiting = asyncio.create_task(run("drain", one.id, "--wait", "60"))
        await seen.replica(one, lambda state: state.draining)
        one.answers["/metrics"] = text(page(running=0, waiting=1))
        await seen.replica(one, lambda state: not state.running)
        one.answers["/metrics"] = empty()
        first, last = (await waiting).splitlines()
        assert first == f"{one.id} is draining: 2 running and 1 waiting"
        assert last.startswith(f"{one.id} is empty after ")
        await run("drain", two.id)
        await seen.replica(two, lambda state: state.draining)
        assert await run("drain", two.id, "--wait", "0.3", status=1) == (
            f"extproc replicas: {two.id} has 2 running and 1 waiting after 0.3 s; "
            "it goes on draining\n"
        )


async def test_the_last_replica_of_a_model_is_warned_of(
    redis_server: RedisServer, run: Run
) -> None:
    async with serving() as one, watching(config(redis_server, one)) as seen:
        await seen.replica(one, lambda state: state.models == ("tiny", "adapter"))
        assert "no other replica could serve its requests" in await run("drain", one.id)


async def test_waiting_for_a_replica_that_died_says_so(redis_server: RedisServer, run: Run) -> None:
    dead = Replica()
    async with watching(config(redis_server, dead)) as seen:
        await seen.until(lambda states: dead.id in states)
        await run("drain", dead.id)
        await seen.replica(dead, lambda state: state.draining)
        error = await run("drain", dead.id, "--wait", "0.2", status=1)
    assert "does not answer (cannot connect: connection refused)" in error


async def test_without_a_poller_drain_says_so(redis_server: RedisServer, run: Run) -> None:
    async with serving() as one:
        async with watching(config(redis_server, one)) as seen:
            await seen.until(lambda states: one.id in states)
        error = await run("drain", one.id, "--wait", "0.2", status=1)
    assert "was not taken up by a poller" in error


async def test_a_replica_of_which_nothing_is_known_any_more_is_not_taken_for_empty(
    redis_server: RedisServer, run: Run
) -> None:
    async with serving() as one, connect(redis_server.url, "default") as redis:
        async with watching(config(redis_server, one)) as seen:
            await seen.until(lambda states: one.id in states)
            await run("drain", one.id)
            await seen.replica(one, lambda state: state.draining)
        await redis.delete(Keys("default").replica + one.id)  # as when its life ends
        error = await run("drain", one.id, "--wait", "0.2", status=1)
        assert f"{one.id} is not polled, so that nobody knows what it has" in error
        pool = Pool(redis, "default")
        replica = await pool.find(one.id)
        await run("remove", one.id)
        assert await until_empty(pool, replica, 0, ManualClock()) == f"{one.id} has left the pool"


async def test_a_redis_that_comes_back_empty_is_filled_again(
    redis_server: RedisServer, run: Run, logged: Logged
) -> None:
    async with serving() as one, serving() as two, serving() as three:
        settings = config(redis_server, one, two)
        async with watching(settings) as seen, polling(config(redis_server, one, two)):
            await run("add", three.id)
            await seen.until(lambda states: len(states) == 3)
            await run("drain", one.id)
            await seen.replica(one, lambda state: state.draining)
            await run("remove", two.id)
            await seen.until(lambda states: len(states) == 2)
            await redis_server.kill()
            await logged.line("redis is lost, retrying")
            await redis_server.start()

            async with connect(redis_server.url, "default") as redis, asyncio.timeout(PATIENCE_S):
                store = DesiredStore(redis, settings.pool)
                members: dict[str, Desired] = {}
                while len(members) < 3:
                    members = await store.read()
                    await asyncio.sleep(0.02)
                assert await redis.ttl("{default}:members") > 3600
            await seen.until(lambda states: set(states) == {one.id, three.id})
    assert {id_: member.wish for id_, member in members.items()} == {
        one.id: "drain", two.id: "remove", three.id: "serve",
    }  # fmt: skip


async def test_what_concerns_no_replica_is_forgotten_after_an_hour(
    redis_server: RedisServer,
) -> None:
    here, gone, clock = "10.0.0.1:80", "10.0.0.2:80", ManualClock()
    async with connect(redis_server.url, "default") as redis:
        store, membership = DesiredStore(redis, "default"), Membership()
        await store.write({here: Desired(wish="remove"), gone: Desired(wish="remove")})
        for _ in range(3):
            await membership.look(store, clock())
            clock.advance(3601)
        assert len(await store.read()) == 2  # nobody has looked yet which there are
        for _ in range(2):
            assert membership.removed_of([here]) == {here}
            await membership.look(store, clock())
            clock.advance(3601)
        assert set(await store.read()) == {here}


async def test_what_one_poller_forgot_no_other_brings_back(redis_server: RedisServer) -> None:
    gone, clock = "10.0.0.2:80", ManualClock()
    async with connect(redis_server.url, "default") as redis:
        store = DesiredStore(redis, "default")
        await store.write({gone: Desired(wish="drain")})
        pollers = Membership(), Membership()
        for poller in pollers:
            poller.removed_of([])
            await poller.look(store, clock())
            clock.advance(10)
        clock.advance(3581)  # the first one's hour is over
        for _ in range(4):
            for poller in pollers:
                poller.removed_of([])
                await poller.look(store, clock())
                clock.advance(1)
        assert await store.read() == {}


async def test_garbage_in_redis_is_passed_over(
    redis_server: RedisServer, run: Run, logged: Logged
) -> None:
    async with connect(redis_server.url, "default") as redis:
        await redis.hset("{default}:members", mapping={"10.0.0.1:80": "{", "10.0.0.2:80": "{}"})
    async with serving() as one, watching(config(redis_server)) as seen:
        await run("add", one.id)
        await seen.until(lambda states: set(states) == {one.id})
    assert {line["source"] for line in logged.lines("skipped garbage in redis")} == {
        "10.0.0.1:80", "10.0.0.2:80",
    }  # fmt: skip


async def test_the_list(redis_server: RedisServer, run: Run) -> None:
    assert "nothing is known of a replica in the pool 'default'" in await run("list")
    dead = Replica()
    async with serving() as one, watching(config(redis_server, one, dead)) as seen:
        await seen.until(lambda states: len(states) == 2)
        header, *rows = (await run("list")).splitlines()
    assert header.split("  ")[0] == "name"
    row = next(row for row in rows if one.id in row)
    assert row.split()[:9] == [one.id, one.id, "healthy", "2", "1", "50%", "-", "-", row.split()[8]]
    assert "cannot connect: connection refused" in next(row for row in rows if dead.id in row)


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["add", "https://gpu:80"], 2, "not an address"),
        (["add", "no-such-host.invalid:80"], 1, "the host 'no-such-host.invalid' does not resolve"),
        (["drain", "10.0.0.1:80"], 1, "'10.0.0.1:80' is not in the pool 'default'"),
        (["remove", "10.0.0.1:80"], 1, "does a poller run?"),
    ],
)
async def test_what_cannot_be_done_is_one_line(
    redis_server: RedisServer, run: Run, arguments: list[str], status: int, problem: str
) -> None:
    (line,) = (await run(*arguments, status=status)).splitlines()
    assert line.startswith("extproc replicas: ")
    assert problem in line


async def test_an_unknown_replica_is_answered_with_the_nearest(
    redis_server: RedisServer, run: Run
) -> None:
    await run("add", "10.0.0.1:8000", "--name", "gpu-1")
    assert "'gpu-2' is not in the pool 'default'; did you mean 'gpu-1'?" in await run(
        "remove", "gpu-2", status=1
    )
    await run("add", "10.0.0.2:8000", "--name", "gpu-1")
    error = await run("drain", "gpu-1", status=1)
    assert "2 replicas are called 'gpu-1': say which of 10.0.0.1:8000, 10.0.0.2:8000" in error


async def test_one_that_the_configuration_names_keeps_its_profile(
    redis_server: RedisServer, run: Run
) -> None:
    async with serving() as one, watching(config(redis_server, one)) as seen:
        await seen.until(lambda states: one.id in states)
        assert await run("add", one.id) == f"{one.id} is in the pool already\n"
        error = await run("add", one.id, "--profile", "llama-8b-a10", status=1)
    assert "its profile and name are set there" in error


async def test_without_redis_it_is_one_line(stopped_redis: RedisServer, run: Run) -> None:
    (line,) = (await run("list", status=1)).splitlines()
    assert line.startswith(f"extproc replicas: Redis at 127.0.0.1:{stopped_redis.port} (redis.url)")


def test_a_router_without_redis_takes_no_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTPROC_STATE", "memory")
    assert main(["replicas", "list"]) == 2
    assert "state is 'memory'" in capsys.readouterr().err


def test_wrongly_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["drian"], ["drain"], ["drain", "x", "--wait", "soon"]):
        with pytest.raises(SystemExit) as caught:
            main(["replicas", *arguments])
        assert caught.value.code == 2
    assert "'soon' is not a number from 0 on" in capsys.readouterr().err
    assert main(["replicas", "list", "--redis.url", "nonsense"]) == 2
    assert "not an address of Redis" in capsys.readouterr().err

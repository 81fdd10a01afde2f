"""States in Redis: readers get a snapshot and every change, through outages and garbage."""

import asyncio
import os
import signal
from math import nan

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.ground.clock import monotonic
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys
from extproc.share.envelope import sealed_list
from extproc.share.replicas import PUT, Put, Snapshot, StateWriter
from tests.conftest import Logged, RedisServer, wait_for_redis
from tests.share.conftest import BACK, LOST, A, B, lost, reading, until
from tests.share.servers import HOST, proxied
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process


async def test_unrefreshed_state_expires(
    url: str, redis_client: Redis, writer: StateWriter
) -> None:
    await writer.put([A])
    assert 0 < await redis_client.pttl(Keys("test").replica + A.id) <= 60_000
    await StateWriter(redis_client, "test", ttl_s=0.001).put([A])
    async with reading(url) as following, asyncio.timeout(PATIENCE_S):
        while await redis_client.exists(Keys("test").replica + A.id):
            pass
        assert await following() == Snapshot(())


async def test_state_age_is_from_redis_ttl(url: str, redis_client: Redis) -> None:
    states = [ReplicaState(id=f"10.0.0.1:{port}", life_s=60) for port in range(200)]
    writer, began = StateWriter(redis_client, "test", ttl_s=60), monotonic()
    await writer.put([*states, A])
    await redis_client.pexpire(Keys("test").replica + states[7].id, 48_000)
    async with reading(url) as following:
        snapshot = await following()
    took = monotonic() - began + 0.01
    assert isinstance(snapshot, Snapshot)
    assert {state.id for state in snapshot.states} == {A.id} | {state.id for state in states}
    assert snapshot.ages.pop(states[7].id) == pytest.approx(12, abs=took)
    assert snapshot.ages.pop(A.id) == 0.0  # the state does not tell its life in Redis
    assert max(snapshot.ages.values()) < took


async def test_new_reader_misses_no_state(url: str, writer: StateWriter) -> None:

    async def write(replica: int) -> None:
        for running in range(20):
            await writer.put([ReplicaState(id=f"10.0.0.{replica}:80", running=running)])

    async with asyncio.TaskGroup() as tasks:
        for replica in range(10):
            tasks.create_task(write(replica))
        seen: dict[str, ReplicaState] = {}
        async with reading(url) as following:
            while len(seen) < 10 or any(state.running < 19 for state in seen.values()):
                match await following():
                    case Snapshot(states):
                        seen = {state.id: state for state in states}
                    case Put(state):
                        seen[state.id] = state


async def test_reader_follows_redis(
    redis_server: RedisServer, redis_client: Redis, writer: StateWriter, logged: Logged
) -> None:
    await writer.put([A])
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((A,))
        await StateWriter(redis_client, "another-pool", ttl_s=60).put([A])
        await writer.put([B])
        assert await following() == Put(B)
        await redis_server.kill()
        with pytest.raises(RedisError):
            await writer.put([A])
        again = asyncio.ensure_future(following())
        line = await logged.line(LOST)
        assert line["redis"] == f"127.0.0.1:{redis_server.port}"
        await redis_server.start()
        assert await again == Snapshot(())
        await writer.put([B])
        await until(following, Put(B))
    assert len(logged.lines(LOST)) == len(logged.lines(BACK)) == 1


async def test_hanging_redis_is_noticed(
    redis_server: RedisServer, writer: StateWriter, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot(())
        os.kill(redis_server.pid, signal.SIGSTOP)
        again = asyncio.ensure_future(following())
        await logged.line(LOST)
        os.kill(redis_server.pid, signal.SIGCONT)
        assert await again == Snapshot(())
        await writer.put([A])
        await until(following, Put(A))
    assert logged.lines(LOST)


async def test_silent_redis_is_noticed(
    redis_server: RedisServer, logged: Logged, monkeypatch: pytest.MonkeyPatch, writer: StateWriter
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    async with (
        proxied(redis_server.port) as proxy,
        reading(f"redis://{HOST}:{proxy.port}") as following,
    ):
        assert await following() == Snapshot(())
        again = asyncio.ensure_future(following())
        proxy.mute = True
        proxy.cut()
        await proxy.unanswered.wait()
        proxy.mute = False
        assert await again == Snapshot(())
        await writer.put([A])
        await until(following, Put(A))
    assert logged.lines(LOST)


@pytest.mark.parametrize("login", ["", ":secret@"])
async def test_refused_login_is_logged_with_the_setting_and_without_password(
    redis_server: RedisServer, redis_client: Redis, logged: Logged, login: str
) -> None:
    await redis_client.config_set("requirepass", "right")
    line = await lost(f"redis://{login}127.0.0.1:{redis_server.port}/0", logged)
    assert logged.lines(LOST) == [line]
    assert "login refused (redis.password, or user and password in redis.url)" in str(line)
    assert "secret" not in str(line)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        PUT.seal(Put(A))[:-1],
        sealed_list(b"\xc0"),
        PUT.seal(Put(structs.replace(A, running=-1))),
        PUT.seal(Put(structs.replace(A, block_size=0))),
        PUT.seal(Put(structs.replace(A, kv_usage=1e308))),
        PUT.seal(Put(structs.replace(A, learned=StepModel(nan, 0.0, 0.0, 0.0)))),
    ],
    ids=["empty", "cut", "list", "negative", "zero", "huge", "nan"],
)
async def test_garbage_state_is_skipped_with_one_line(
    url: str, redis_client: Redis, writer: StateWriter, logged: Logged, garbage: bytes
) -> None:
    await writer.put([A])
    await redis_client.set(Keys("test").replica + "garbage", garbage)
    await redis_client.hset(Keys("test").replica + "a hash", "field", "value")
    async with reading(url) as following:
        assert await following() == Snapshot((A,))
        for _ in range(3):
            await redis_client.publish(Keys("test").changes, garbage)
        await writer.put([B])
        assert await following() == Put(B)
    assert [line["source"] for line in logged.lines()] == [
        Keys("test").replica + "garbage",
        Keys("test").changes,
    ]


async def test_reader_and_writer_can_be_cancelled(url: str, writer: StateWriter) -> None:

    async def write() -> None:
        while True:
            await writer.put([A])

    async def read() -> None:
        async with reading(url) as following:
            while True:
                await following()

    for turns in range(100):
        tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert done == set(tasks)

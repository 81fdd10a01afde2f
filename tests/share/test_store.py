"""Replica state through a real Redis, which is killed, stopped and fed garbage."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from random import Random

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.config import RedisSettings
from extproc.ground.clock import monotonic
from extproc.replica_state import ReplicaState
from extproc.share.connection import Keys, connect
from extproc.share.envelope import sealed_list
from extproc.share.reader import keys_after
from extproc.share.replicas import PUT, Change, Put, Removed, Snapshot, StateReader, StateWriter
from tests.conftest import Logged, RedisServer, wait_for_redis
from tests.share.servers import HOST, proxied
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

A = ReplicaState(id="10.0.0.1:8000", name="a", running=3, kv_usage=0.25, models=("m", "lora"))
B = ReplicaState(
    id="[::1]:8000", name="b", waiting=7, healthy=False, problem="/health answered 503"
)

LOST = "redis is lost, retrying"
BACK = "redis is back"

Next = Callable[[], Awaitable[Change]]


@asynccontextmanager
async def reading(url: RedisSettings | str, pool: str = "test") -> AsyncIterator[Next]:
    """Yield a function that awaits the reader's next change."""
    async with (
        connect(url, pool) as redis,
        aclosing(StateReader(redis, pool, Random(1)).changes()) as changes,
    ):

        async def following() -> Change:
            async with asyncio.timeout(PATIENCE_S):
                return await anext(changes)

        yield following


async def until(following: Next, wanted: Change) -> None:
    while await following() != wanted:
        pass


async def test_a_reader_gets_what_is_there_and_then_what_changes(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    writer = StateWriter(redis_client, "test", ttl_s=60)
    await writer.put([A])
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((A,))
        await writer.put([A, B])
        assert [await following(), await following()] == [Put(A), Put(B)]
        await writer.remove([A.id])
        assert await following() == Removed(A.id)
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((B,))


async def test_state_that_nobody_refreshes_ends(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    await StateWriter(redis_client, "test", ttl_s=60).put([A])
    assert 0 < await redis_client.pttl(Keys("test").replica + A.id) <= 60_000
    await StateWriter(redis_client, "test", ttl_s=0.001).put([A])
    async with reading(redis_server.url) as following, asyncio.timeout(PATIENCE_S):
        while await redis_client.exists(Keys("test").replica + A.id):
            pass
        assert await following() == Snapshot(())


async def test_what_another_poller_has_is_not_removed(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    before, now = (StateWriter(redis_client, "test", ttl_s=60, poller=name) for name in "ab")
    lease = Keys("test").lease + A.id
    await redis_client.set(lease, "b")
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot(())
        await now.put([A])
        assert await following() == Put(A)
        await before.remove([A.id])
        await now.put([A])
        assert await following() == Put(A)
        await now.remove([A.id])
        assert await following() == Removed(A.id)
        await now.put([A])
        assert await following() == Put(A)
        await redis_client.delete(lease)
        await before.remove([A.id, B.id])
        assert [await following(), await following()] == [Removed(A.id), Removed(B.id)]


async def test_the_age_of_what_is_there_is_told_by_redis_alone(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    states = [ReplicaState(id=f"10.0.0.1:{port}", life_s=60) for port in range(200)]
    writer, began = StateWriter(redis_client, "test", ttl_s=60), monotonic()
    await writer.put([*states, A])
    await redis_client.pexpire(Keys("test").replica + states[7].id, 48_000)
    async with reading(redis_server.url) as following:
        snapshot = await following()
    took = monotonic() - began + 0.01
    assert isinstance(snapshot, Snapshot)
    assert {state.id for state in snapshot.states} == {A.id} | {state.id for state in states}
    assert snapshot.ages.pop(states[7].id) == pytest.approx(12, abs=took)
    assert snapshot.ages.pop(A.id) == 0.0  # how long it was to be kept is not known
    assert max(snapshot.ages.values()) < took


async def test_pools_do_not_see_each_other(redis_server: RedisServer, redis_client: Redis) -> None:
    async with reading(redis_server.url, "one") as one, reading(redis_server.url, "two") as two:
        assert await one() == await two() == Snapshot(())
        await StateWriter(redis_client, "one", ttl_s=60).put([A])
        await StateWriter(redis_client, "two", ttl_s=60).put([B])
        assert await one() == Put(A)
        assert await two() == Put(B)


async def test_nothing_written_while_a_reader_starts_is_missed(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    writer = StateWriter(redis_client, "test", ttl_s=60)

    async def write(replica: int) -> None:
        for running in range(20):
            await writer.put([ReplicaState(id=f"10.0.0.{replica}:80", running=running)])

    async with asyncio.TaskGroup() as tasks:
        for replica in range(10):
            tasks.create_task(write(replica))
        seen: dict[str, ReplicaState] = {}
        async with reading(redis_server.url) as following:
            while len(seen) < 10 or any(state.running < 19 for state in seen.values()):
                match await following():
                    case Snapshot(states):
                        seen = {state.id: state for state in states}
                    case Put(state):
                        seen[state.id] = state


async def test_what_was_pushed_before_a_snapshot_was_read_is_not_news_after_it(
    redis_server: RedisServer, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large fleet takes longer to read than it takes until the next poll."""
    writer = StateWriter(redis_client, "test", ttl_s=60)
    older, newer = (structs.replace(A, scraped_at=at, steps=at) for at in (10.0, 11.0))

    async def slowly(redis: Redis, beginning: str) -> list[str]:
        await writer.put([older])
        await writer.put([newer])
        return await keys_after(redis, beginning)

    monkeypatch.setattr("extproc.share.replicas.keys_after", slowly)
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((newer,))
        assert await following() == Put(newer)
        await writer.put([B])
        assert await following() == Put(B)
        await writer.put([older])  # by another poller, whose clock is slow
        assert await following() == Put(older)


async def test_redis_that_starts_after_the_reader(
    stopped_redis: RedisServer, logged: Logged
) -> None:
    async with reading(stopped_redis.url) as following:
        first = asyncio.ensure_future(following())
        await logged.line(LOST)
        await stopped_redis.start()
        assert await first == Snapshot(())
    (line,) = logged.lines(LOST)
    assert line["redis"] == f"127.0.0.1:{stopped_redis.port}"
    assert "Error 111" in str(line["error"])
    assert len(logged.lines(BACK)) == 1


async def test_redis_that_is_killed_and_comes_back_empty(
    redis_server: RedisServer, redis_client: Redis, logged: Logged
) -> None:
    writer = StateWriter(redis_client, "test", ttl_s=60)
    await writer.put([A])
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((A,))
        await redis_server.kill()
        with pytest.raises(RedisError):
            await writer.put([A])
        again = asyncio.ensure_future(following())
        await logged.line(LOST)
        await redis_server.start()
        assert await again == Snapshot(())
        await writer.put([B])
        await until(following, Put(B))
    assert len(logged.lines(LOST)) == len(logged.lines(BACK)) == 1


async def test_redis_that_hangs_is_noticed(
    redis_server: RedisServer, redis_client: Redis, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot(())
        os.kill(redis_server.pid, signal.SIGSTOP)
        again = asyncio.ensure_future(following())
        await logged.line(LOST)
        os.kill(redis_server.pid, signal.SIGCONT)
        assert await again == Snapshot(())
        await StateWriter(redis_client, "test", ttl_s=60).put([A])
        await until(following, Put(A))
    assert logged.lines(LOST)


async def test_a_server_that_answers_no_new_connection_for_a_while(
    redis_server: RedisServer, redis_client: Redis, logged: Logged, monkeypatch: pytest.MonkeyPatch
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
        await StateWriter(redis_client, "test", ttl_s=60).put([A])
        await until(following, Put(A))
    assert logged.lines(LOST)


async def test_a_wrong_password_is_one_line(
    redis_server: RedisServer, redis_client: Redis, logged: Logged
) -> None:
    await redis_client.config_set("requirepass", "right")
    url = f"redis://:secret@127.0.0.1:{redis_server.port}/0"
    async with reading(url) as following:
        waiting = asyncio.ensure_future(following())
        await logged.line(LOST)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    (line,) = logged.lines(LOST)
    assert "invalid username-password" in str(line["error"])
    assert "secret" not in str(line)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"id": "10.0.0.1:8000"}',  # as versions before envelopes wrote it
        b"\x91" * 10_000,
        PUT.seal(Put(A))[:-1],
        PUT.seal(Put(structs.replace(A, kv_usage=math.nan))),
        PUT.seal(Put(structs.replace(A, steps=math.inf))),
        PUT.seal(Put(structs.replace(A, running="many"))),
        sealed_list(b"\xc0"),
    ],
)
async def test_garbage_is_skipped_with_one_line(
    redis_server: RedisServer, redis_client: Redis, logged: Logged, garbage: bytes
) -> None:
    writer = StateWriter(redis_client, "test", ttl_s=60)
    await writer.put([A])
    await redis_client.set(Keys("test").replica + "garbage", garbage)
    await redis_client.hset(Keys("test").replica + "a hash", "field", "value")
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot((A,))
        for _ in range(3):
            await redis_client.publish(Keys("test").changes, garbage)
        await writer.put([B])
        assert await following() == Put(B)
    assert [line["source"] for line in logged.lines()] == [
        Keys("test").replica + "garbage",
        Keys("test").changes,
    ]


async def test_many_states_written_at_once_arrive_one_by_one_in_order(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    states = [ReplicaState(id=f"10.0.0.1:{port}") for port in range(100)]
    async with reading(redis_server.url) as following:
        assert await following() == Snapshot(())
        await StateWriter(redis_client, "test", ttl_s=60).put(states)
        assert [await following() for _ in states] == [Put(state) for state in states]


async def test_a_reader_and_a_writer_end_when_cancelled_at_whatever_moment(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    writer = StateWriter(redis_client, "test", ttl_s=60)

    async def write() -> None:
        while True:
            await writer.put([A])

    async def read() -> None:
        async with reading(redis_server.url) as following:
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

"""Limits of Redis: few rights, full memory, and slow readers."""

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.replicas import Put, Removed, Snapshot, StateWriter
from tests.conftest import Logged, RedisServer
from tests.share.conftest import ACL, BACK, LOST, A, B, Next, reading, refused_commands, until
from tests.share.servers import command, fill, publishing, stop_saving
from tests.share.test_forms import share_through

pytestmark = pytest.mark.process


async def test_documented_acl_suffices(redis_server: RedisServer, redis_client: Redis) -> None:
    await command(redis_client, "ACL", "SETUSER", "router", "on", ">pa:ss/word", *ACL.split())
    url = f"redis://router:pa%3Ass%2Fword@127.0.0.1:{redis_server.port}"
    await share_through(url)
    assert await refused_commands(redis_client) == []
    async with connect(url, "test") as redis:
        for words in (("SET", "{other}:key", 1), ("FLUSHALL",), ("PUBLISH", "{other}:changes", 1)):
            with pytest.raises(NoPermissionError):
                await command(redis, *words)


async def test_full_redis_is_logged_once_and_passes_states_and_removals_on(
    url: str, redis_client: Redis, logged: Logged
) -> None:
    async with publishing(url) as publisher, reading(url) as following:
        publisher.put(A)
        await until(following, Put(A))
        await fill(redis_client)
        publisher.put(B)
        assert "maxmemory" in str((await logged.line(LOST))["error"])
        await until(following, Put(B))
        publisher.remove(A.id)
        await until(following, Removed(A.id))
        assert await redis_client.dbsize() == 0
        await redis_client.config_set("maxmemory", 0)
        await logged.line(BACK)
        assert await redis_client.dbsize() == 1
    assert len(logged.lines(LOST)) == len(logged.lines(BACK)) == 1


async def test_redis_that_cannot_save_passes_states_on(
    url: str, redis_client: Redis, logged: Logged
) -> None:
    async with publishing(url) as publisher, reading(url) as following:
        publisher.put(A)
        await until(following, Put(A))
        await stop_saving(redis_client)
        publisher.remove(A.id)
        publisher.put(B)
        await until(following, Removed(A.id))
        await until(following, Put(B))
        async with reading(url) as later:
            assert isinstance(await later(), Snapshot)
            changes = [await later() for _ in range(3)]  # no further snapshot
            assert Put(B) in changes
            assert {type(change) for change in changes} <= {Put, Removed}
        await redis_client.config_set("save", "")
        await logged.line(BACK)
        async with reading(url) as later:
            assert await later() == Snapshot((B,))
    assert len(logged.lines(LOST)) == len(logged.lines(BACK)) == 1


async def test_slow_reader_is_cut_off_and_starts_anew(
    redis_client: Redis, following: Next, writer: StateWriter, logged: Logged
) -> None:
    await redis_client.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
    large = ReplicaState(id="10.0.0.1:8000", models=("x" * 1_000_000,))
    written = 0
    while await redis_client.client_list(_type="pubsub"):  # the reader does not read meanwhile
        written += 1
        await writer.put([structs.replace(large, running=written)])
    last = ReplicaState(id=large.id, running=written + 1)
    await writer.put([last])
    await until(following, Snapshot((last,)))
    assert len(logged.lines(LOST)) == len(logged.lines(BACK)) == 1

"""Lists of models and adapters, which states name by their hash."""

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.replica_state import ReplicaState
from extproc.share import replicas
from extproc.share.connection import Keys
from extproc.share.envelope import sealed_list
from extproc.share.replicas import PUT, Put, Snapshot, StateWriter
from tests.share.conftest import A, Next, reading, until
from tests.share.servers import Refuse, command, each_refusal

pytestmark = pytest.mark.process

ADAPTERS = tuple(f"adapter-number-{number}" for number in range(500))
MANY = structs.replace(A, models=("m", *ADAPTERS), adapters=ADAPTERS, max_loras=4)
FEWER = structs.replace(MANY, models=("m", *ADAPTERS[1:]), adapters=ADAPTERS[1:])
KEYS = Keys("test")


async def lists_in(redis: Redis) -> list[str]:
    return [key async for key in redis.scan_iter(match=f"{KEYS.lists}*")]


async def test_unchanged_list_of_500_adapters_adds_at_most_2_kb(
    redis_client: Redis, following: Next, writer: StateWriter
) -> None:
    """Redis counts the bytes from a poller and to a router."""

    async def sent() -> int:
        stats = await redis_client.info("stats")
        return int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])

    async def cost_of(state: ReplicaState) -> int:
        before = await sent()
        await writer.put([state])
        await until(following, Put(state))
        return await sent() - before

    assert await cost_of(MANY) > 10_000
    await cost_of(MANY)  # the router reads the list once
    plain = structs.replace(MANY, models=("m",), adapters=())
    assert await cost_of(MANY) - await cost_of(plain) <= 2_000


async def test_router_that_connects_later_finds_list(
    url: str, redis_client: Redis, writer: StateWriter
) -> None:
    for state in (MANY, MANY, structs.replace(FEWER, id="10.0.0.2:8000")):
        await writer.put([state])
    assert len(await lists_in(redis_client)) == 2
    async with reading(url) as following:
        assert await following() == Snapshot((MANY, structs.replace(FEWER, id="10.0.0.2:8000")))
        await writer.put([MANY])
        assert await following() == Put(MANY)


async def test_router_that_missed_change_finds_new_list(
    url: str, redis_client: Redis, writer: StateWriter
) -> None:
    await writer.put([MANY])
    async with reading(url) as following:
        assert await following() == Snapshot((MANY,))
        await command(redis_client, "CLIENT", "KILL", "TYPE", "pubsub")
        await writer.put([FEWER])
        await until(following, Snapshot((FEWER,)))
        await writer.put([FEWER])
        assert await following() == Put(FEWER)


async def test_redis_that_comes_back_empty_gets_list_again(
    url: str, redis_client: Redis, writer: StateWriter
) -> None:
    await writer.put([MANY])
    await redis_client.flushall()
    await writer.put([MANY])
    async with reading(url) as following:
        assert await following() == Snapshot((MANY,))
        await redis_client.delete(*await lists_in(redis_client))
        await writer.put([MANY])
        assert await following() == Put(MANY)
    assert len(await lists_in(redis_client)) == 1


async def test_poller_that_takes_over_keeps_list(
    redis_client: Redis, following: Next, writer: StateWriter
) -> None:
    successor = StateWriter(redis_client, "test", ttl_s=60)
    for active, state in ((writer, MANY), (successor, MANY), (successor, FEWER), (writer, MANY)):
        await active.put([state])
        assert await following() == Put(state)


async def test_state_whose_list_is_lost_is_skipped_until_next(
    redis_client: Redis, following: Next, writer: StateWriter
) -> None:
    unknown = Put(structs.replace(MANY, models=(), adapters=()), "unknown")
    await redis_client.publish(KEYS.changes, sealed_list(PUT.seal(unknown)))
    await writer.put([MANY])
    assert await following() == Put(MANY)


async def test_list_beyond_the_bound_is_read_again(
    following: Next, writer: StateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_MOST_LISTS", 0)
    for state in (MANY, MANY, FEWER, MANY, FEWER):
        await writer.put([state])
        assert await following() == Put(state)


@each_refusal
async def test_redis_that_refuses_writes_passes_list_on(
    redis_client: Redis, following: Next, writer: StateWriter, refuse: Refuse
) -> None:
    await refuse(redis_client)
    for state in (MANY, FEWER):
        with pytest.raises(RedisError):
            await writer.put([state])
        assert await following() == Put(state)


async def test_list_lives_longer_than_state_that_names_it(
    redis_client: Redis, writer: StateWriter
) -> None:
    for _ in range(2):
        await writer.put([MANY])
        (key,) = await lists_in(redis_client)
        assert await redis_client.pttl(key) > await redis_client.pttl(KEYS.replica + MANY.id)

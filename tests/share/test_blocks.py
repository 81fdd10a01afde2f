"""Block updates reach present and later routers, complete and in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from redis.asyncio import Redis

from extproc.fleet.held_blocks import NUMBERS, BlockUpdate, HeldBlocks
from extproc.ground.clock import monotonic, wall
from extproc.ground.runtime import in_turns, started
from extproc.poll.kv_blocks import KvBlocks
from extproc.share import blocks as shared
from extproc.share.blocks import BLOCKS, LIFE_S, BlockReader, BlockWriter, ReplicaBlockUpdate
from extproc.share.connection import Keys, connect
from extproc.share.replicas import StateWriter
from tests.conftest import Logged
from tests.fakes import ManualClock, replica, state
from tests.share.conftest import router as sharing_router
from tests.share.servers import Refuse, each_refusal, publishing
from tests.waiting import until

pytestmark = pytest.mark.process


def update_of(number: int, stored: set[int], removed: set[int] | None = None) -> BlockUpdate:
    arrays = (np.array([*keys], np.uint64) for keys in (stored, removed or ()))
    return BlockUpdate(NUMBERS + number, NUMBERS + number - 1, 16, *arrays)


def whole(number: int, stored: set[int]) -> BlockUpdate:
    return BlockUpdate(
        NUMBERS + number, 0, 16, np.array([*stored], np.uint64), np.zeros(0, np.uint64)
    )


class FollowingRouter:
    def __init__(self) -> None:
        self.blocks = HeldBlocks(monotonic)
        self.held: dict[str, set[int]] = {}
        self.wholes = 0

    async def follow(self, reader: BlockReader) -> None:
        async with aclosing(reader.changes()) as following:
            async for change in following:
                name, update = change.replica, change.update
                await in_turns(self.blocks.apply(name, update))
                self.wholes += update.whole
                held = set() if update.whole else self.held[name]
                self.held[name] = held - {*update.removed.tolist()} | {*update.stored.tolist()}

    async def holds(self, keys: set[int], number: int = 1) -> None:
        await until(lambda: self.held.get(replica(number)) == keys)


@asynccontextmanager
async def router(url: str) -> AsyncIterator[FollowingRouter]:
    follower = FollowingRouter()
    async with connect(url, "test") as redis:
        reader = BlockReader(redis, "test", follower.blocks)
        async with started(follower.follow(reader)) as [following]:
            yield follower
    assert following.cancelled()


Tell = Callable[..., Awaitable[set[str]]]


@asynccontextmanager
async def poller(url: str) -> AsyncIterator[Tell]:
    async with connect(url, "test") as redis:
        writer = BlockWriter(redis, "test")

        async def write(
            new: BlockUpdate, held: BlockUpdate | None = None, number: int = 1
        ) -> set[str]:
            return await writer.write({replica(number): (new, held)})

        yield write


@pytest.fixture
async def write(url: str) -> AsyncIterator[Tell]:
    async with poller(url) as write:
        yield write


@pytest.fixture
async def following(url: str, write: Tell) -> AsyncIterator[FollowingRouter]:
    async with router(url) as follower:
        await write(whole(1, {1}), whole(1, {1}))
        await follower.holds({1})
        yield follower


async def test_blocks_reach_present_and_new_routers(limited_url: str, redis_client: Redis) -> None:
    async with poller(limited_url) as write, router(limited_url) as first:
        assert await write(whole(1, {1, 2}), whole(1, {1, 2})) == set()
        assert await write(whole(1, {7}), whole(1, {7}), number=2) == set()
        assert await write(update_of(2, {2**64 - 1}, {1})) == set()
        await first.holds({2, 2**64 - 1})
        await first.holds({7}, number=2)
        async with router(limited_url) as second:
            await second.holds({2, 2**64 - 1})
            await second.holds({7}, number=2)
            await write(update_of(3, {3}))
            await second.holds({2, 3, 2**64 - 1})
            await first.holds({2, 3, 2**64 - 1})
        wholes = first.wholes
        await write(update_of(4, {4}), whole(4, {4}))  # readers that missed nothing skip it
        await first.holds({2, 3, 4, 2**64 - 1})
        assert first.wholes == wholes
    assert await redis_client.llen(Keys("test").blocks + replica(1)) == 1
    assert 0 < await redis_client.ttl(Keys("test").blocks + replica(1)) <= LIFE_S


async def test_blocks_of_an_older_poller_are_skipped(
    url: str, write: Tell, following: FollowingRouter
) -> None:
    before = structs.replace(update_of(5, {9}), number=7 * NUMBERS + 6, previous=7 * NUMBERS + 5)
    await write(before)
    await write(update_of(2, {2}))
    await following.holds({1, 2})
    async with router(url) as later:
        await later.holds({1, 2})


async def test_poller_writes_no_blocks_of_another_pollers_replica(url: str) -> None:
    async with router(url) as follower, publishing(url) as into:
        for number in (1, 2):
            blocks = KvBlocks(Random(number), monotonic)
            blocks.reset(complete=True)
            await into.blocks_changed(replica(number), blocks)
        into.forget(replica(1))
        await follower.holds(set(), number=2)
    assert follower.held.keys() == {replica(2)}


async def test_kv_stream_state_passes_to_next_poller(redis_client: Redis) -> None:
    writer = BlockWriter(redis_client, "test")
    assert await writer.load(replica(1)) == b""
    await writer.save(replica(1), b"known")
    assert await writer.load(replica(1)) == b"known"
    assert await writer.load(replica(2)) == b""
    assert 0 < await redis_client.ttl(Keys("test").kv_stream + replica(1)) <= LIFE_S


async def test_poller_that_takes_over_many_replicas_loads_all_positions(url: str) -> None:
    many = [replica(number) for number in range(1, 151)]  # redis-py opens 100 connections at most
    async with publishing(url) as into:
        for each in many:
            assert await into.save_blocks(each, each.encode)
        assert await asyncio.gather(*map(into.load_blocks, many)) == [*map(str.encode, many)]


async def test_saves_of_positions_do_not_queue(url: str) -> None:
    """While Redis hangs, a queue would hold up the streams of KV events."""
    async with publishing(url) as into:
        saves = [into.save_blocks(replica(number), bytes) for number in range(1, 151)]
        assert sum(await asyncio.gather(*saves)) == 8


async def test_removed_replica_leaves_no_blocks(url: str, redis_client: Redis, write: Tell) -> None:
    keys = Keys("test").blocks + replica(1), Keys("test").kv_stream + replica(1)
    async with connect(url, "test") as redis:
        await write(whole(1, {1}), whole(1, {1}))
        await write(whole(1, {1}), whole(1, {1}), number=2)
        await BlockWriter(redis, "test").save(replica(1), b"known")
        assert await redis_client.exists(*keys) == 2
        await StateWriter(redis, "test", 10).remove([replica(1)])
    assert await redis_client.exists(*keys) == 0
    assert await redis_client.exists(Keys("test").blocks + replica(2)) == 1


async def test_whole_update_is_sent_once(url: str, redis_client: Redis, write: Tell) -> None:
    async with router(url) as follower:
        many = whole(1, {*range(10_000)})
        before: Any = await redis_client.info("stats")
        assert await write(many, many) == set()
        await follower.holds({*range(10_000)})
        after: Any = await redis_client.info("stats")
    assert after["total_net_input_bytes"] - before["total_net_input_bytes"] < 90_000


async def test_router_applies_few_blocks_of_a_whole_list_in_a_turn(
    url: str, redis_client: Redis, write: Tell
) -> None:
    held = [0]
    async with sharing_router(url) as fleet:

        async def count() -> None:
            while True:
                fleet.put(state(1, "llama-8b-a10", ManualClock(wall()), kv_update=NUMBERS))
                held.append(fleet.blocks.count(replica(1)) or 0)
                await asyncio.sleep(0)

        async with started(count()):
            for number, blocks in enumerate((1, 65_536, 30_000)):
                assert not number or await redis_client.client_kill_filter(_type="pubsub")
                await write(*[whole(number, {*range(blocks)})] * 2)
                await until(partial(held.__contains__, blocks))
    assert max(abs(after - before) for before, after in pairwise(held)) <= 2048


async def test_lost_block_list_is_written_whole_again(
    write: Tell, following: FollowingRouter, redis_client: Redis
) -> None:
    await redis_client.delete(Keys("test").blocks + replica(1))
    assert await write(update_of(2, {2})) == {replica(1)}
    await following.holds({1, 2})
    assert await write(whole(3, {1, 2}), whole(3, {1, 2})) == set()


@each_refusal
async def test_redis_that_refuses_writes_passes_blocks_on(
    write: Tell, following: FollowingRouter, redis_client: Redis, refuse: Refuse
) -> None:
    await refuse(redis_client)
    assert await write(update_of(2, {2})) == {replica(1)}
    await following.holds({1, 2})
    new = whole(3, {3})
    await write(new, new)
    await following.holds({3})


async def test_missed_blocks_are_read_from_redis(
    write: Tell, following: FollowingRouter, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_READ_AGAIN_S", 0.0)
    missed = BLOCKS.seal(ReplicaBlockUpdate(replica(1), update_of(2, {2})))
    await redis_client.rpush(Keys("test").blocks + replica(1), missed)
    await write(update_of(3, {3}))
    await following.holds({1, 2, 3})
    assert await redis_client.client_kill_filter(_type="pubsub")
    await write(update_of(4, {4}))
    await following.holds({1, 2, 3, 4})


async def test_garbage_blocks_are_logged_once(
    url: str, redis_client: Redis, write: Tell, logged: Logged
) -> None:
    await redis_client.lpush(Keys("test").blocks + "list", "no blocks")
    await redis_client.set(Keys("test").blocks + "text", "no list")
    async with router(url) as follower:
        await logged.line("skipped garbage in redis")
        huge = structs.replace(whole(1, {1}), block_size=2**28)
        sealed = BLOCKS.seal(ReplicaBlockUpdate("huge", huge))  # the next prompt would take 4 GB
        for garbage in (b"", b"\n", b"\xff\xff\n\xff", b"10.0.0.1:8000\n" + bytes(50), sealed):
            await redis_client.publish(Keys("test").blocks_channel, garbage)
        await write(whole(1, {1}), whole(1, {1}))
        await follower.holds({1})
        assert "huge" not in follower.held
    assert len(logged.lines("skipped garbage in redis")) == 3

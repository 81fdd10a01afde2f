"""Models that no replica serves any more stay known when a router restarts."""

import pytest
from redis.asyncio import Redis

from extproc.ground.clock import monotonic
from extproc.share import departed
from tests.fakes import MODEL, replica
from tests.share.conftest import router
from tests.waiting import until


async def test_restarted_router_knows_departed_models(
    url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.proxy.sharing._MODELS_EVERY_S", 0.05)
    key = "{test}:departed-models"
    async with router(url) as fleet:
        assert not await redis_client.exists(key)
        for number in (1, 2):
            fleet.remove(replica(number))
        for _ in range(2):
            await until(lambda: redis_client.exists(key))
            await redis_client.flushall()
        await until(lambda: redis_client.exists(key))
    async with router(url, members=0) as fleet:
        await until(lambda: fleet.members.served_lately(MODEL, monotonic()))
        assert not fleet.members.served_lately(MODEL, monotonic() + 3600.0)
        assert not fleet.members.served_lately("other", monotonic())


async def test_departed_models_are_bounded(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departed, "MODELS_REMEMBERED", 2)
    monkeypatch.setattr(departed, "REMEMBERED_S", 60.0)
    await departed.write_departed(redis_client, "test", {"a": 1.0, "b": 2.0, "c": 3.0})
    await departed.write_departed(redis_client, "test", {"c": 2.5})
    assert await departed.read_departed(redis_client, "test") == {"b": 2.0, "c": 3.0}
    assert 0 < await redis_client.ttl("{test}:departed-models") <= 60

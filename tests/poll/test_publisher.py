"""A replica that leaves the pool and returns before its removal was written is not removed."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from extproc.config import Config
from extproc.ground.runtime import started
from extproc.poll.destination import Destination
from extproc.replica_state import ReplicaState
from extproc.share.replicas import StateReader, StateWriter
from tests.conftest import RedisServer
from tests.poll.polling import poller_of
from tests.poll.replica import serving
from tests.share.servers import publishing
from tests.waiting import PATIENCE_S, until_read

RETURNED, LEFT, NEW = (ReplicaState(id=f"10.0.0.{number}:8000") for number in range(3))


@pytest.mark.process
async def test_forgotten_replica_stays_in_redis_and_a_removed_one_goes(
    redis_server: RedisServer, redis_client: Redis
) -> None:
    await StateWriter(redis_client, "test", ttl_s=60).put([RETURNED, LEFT])
    reader = StateReader(redis_client, "test")

    async def stored() -> set[str]:
        read = await reader.read([RETURNED.id, LEFT.id, NEW.id])
        return {state.id for state in read.states}

    async with publishing(redis_server.url) as into:
        for state in (RETURNED, LEFT):  # before the first write
            into.put(state)
            into.remove(state.id)
        into.forget(RETURNED.id)
        into.put(NEW)
        await until_read(stored, lambda now: now == {RETURNED.id, NEW.id})


class Calls(Destination):
    def __init__(self) -> None:
        super().__init__()
        self._calls: asyncio.Queue[str] = asyncio.Queue()

    def put(self, state: ReplicaState) -> None:
        self._calls.put_nowait("put")

    def forget(self, replica: str) -> None:
        self._calls.put_nowait("forget")

    def remove(self, replica: str) -> None:
        self._calls.put_nowait("remove")

    async def until(self, call: str) -> list[str]:
        """Returns the calls since the last time, up to the first call of this kind."""
        calls: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while call not in calls:
                calls.append(await self._calls.get())
        return calls


async def test_poller_cancels_the_removal_of_a_replica_that_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.poll.poller.RESOLVE_S", 0.02)
    file = tmp_path / "replicas.yaml"
    async with serving() as replica:
        file.write_text(f"['{replica.id}']")
        settings = Config.model_validate({"replicas_file": file})
        calls = Calls()
        async with started(poller_of(settings, calls).run()):
            await calls.until("put")
            file.write_text("[]")
            await calls.until("remove")
            file.write_text(f"['{replica.id}'] ")
            assert "forget" in await calls.until("put")

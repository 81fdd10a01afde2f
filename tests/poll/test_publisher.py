import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.config import Config
from extproc.poll import into_redis
from extproc.poll.destination import Destination
from extproc.poll.into_redis import IntoRedis
from extproc.poll.poller import Poller
from extproc.poll.scrape import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.poll.replica import serving
from tests.waiting import PATIENCE_S

A, B, C = (ReplicaState(id=f"10.0.0.{number}:8000") for number in range(3))


class Writer(StateWriter):
    """Fails until told otherwise."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, "default", ttl_s=10)
        self.there = False
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self.written: list[ReplicaState] = []
        self.removed: list[str] = []

    async def put(self, states: Sequence[ReplicaState]) -> None:
        await self._answer()
        self.written += states

    async def remove(self, replicas: Sequence[str]) -> None:
        await self._answer()
        self.removed += replicas

    async def _answer(self) -> None:
        self.asked.set()
        await self.answered.wait()
        if not self.there:
            raise RedisConnectionError


@asynccontextmanager
async def publishing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[IntoRedis, Writer]]:
    async with connect("redis://127.0.0.1:1", "default") as redis:
        writer = Writer(redis)
        monkeypatch.setattr(into_redis, "StateWriter", lambda *_: writer)
        into = IntoRedis(redis, Config(), "", Random(1))
        task = asyncio.create_task(into.run())
        try:
            yield into, writer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def attempt(writer: Writer, there: bool) -> None:
    writer.there = there
    writer.asked.clear()
    writer.answered.set()
    await writer.asked.wait()


async def test_returned_replica_is_not_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with publishing(monkeypatch) as (publisher, writer), asyncio.timeout(PATIENCE_S):
        for state in (A, B):
            publisher.put(state)
            publisher.remove(state.id)
        await writer.asked.wait()
        publisher.forget(A.id)
        await attempt(writer, there=False)
        await attempt(writer, there=True)
        publisher.put(C)
        await attempt(writer, there=True)
    assert set(writer.removed) == {B.id}
    assert A not in writer.written
    assert B not in writer.written


class Noting(Destination):
    """Notes what becomes of a replica."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = wanted
        self._noted: asyncio.Queue[str] = asyncio.Queue()

    def _note(self, what: str, replica: str) -> None:
        if replica == self._wanted:
            self._noted.put_nowait(what)

    def put(self, state: ReplicaState) -> None:
        self._note("put", state.id)

    def forget(self, replica: str) -> None:
        self._note("forget", replica)

    def remove(self, replica: str) -> None:
        self._note("remove", replica)

    async def until(self, what: str) -> list[str]:
        noted: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while what not in noted:
                noted.append(await self._noted.get())
        return noted


async def test_a_replica_that_left_and_is_back_is_no_longer_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.poll.poller.RESOLVE_S", 0.02)
    file = tmp_path / "replicas.yaml"
    async with serving() as one:
        file.write_text(f"['{one.id}']")
        settings = Config.model_validate({"replicas_file": file})
        sink, metrics = Noting(one.id), PollMetrics(CollectorRegistry())
        poller = Poller(settings, sink, metrics, Random(1))
        task = asyncio.create_task(poller.run())
        await sink.until("put")
        file.write_text("[]")
        await sink.until("remove")
        file.write_text(f"['{one.id}'] ")
        assert "forget" in await sink.until("put")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

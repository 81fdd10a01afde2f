import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest
from msgspec import structs

from extproc.config import Config
from extproc.lab.harness.processes import free_port
from extproc.poll.into_redis import run_poller
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.lists import Put
from extproc.share.replicas import Removed, Snapshot, StateReader
from tests.conftest import RedisServer
from tests.poll.replica import Replica
from tests.waiting import PATIENCE_S

QUICK_AND_PATIENT = {
    "replica.BACKOFF_MOST_S": 0.05,
    "poller.RESOLVE_S": 0.07,  # no fraction of a heartbeat: their phases vary
    "replica.TTL_S": 100.0,
    "into_redis.TTL_S": 100.0,
}
SOON = {"timeout_s": 0.8}
"""What hangs is given up after three times as long, and what a busy machine answers late is not."""


def config(
    redis: RedisServer, *replicas: Replica, poll: Mapping[str, float] | None = None, **more: Any
) -> Config:
    times = {"interval_s": 0.02, "timeout_s": 1.5}
    return Config.model_validate(
        {
            "replicas": [replica.id for replica in replicas],
            "redis": {"url": redis.url},
            "poll": {**times, **(poll or {}), "admin": f"127.0.0.1:{free_port()}"},
            **more,
        }
    )


@asynccontextmanager
async def polling(settings: Config) -> AsyncIterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for constant, seconds in QUICK_AND_PATIENT.items():
            patched.setattr(f"extproc.poll.{constant}", seconds)
        task = asyncio.create_task(run_poller(settings))
        try:
            yield
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


class Seen:
    """The states a router would hold now."""

    def __init__(self) -> None:
        self.states: dict[str, ReplicaState] = {}
        self.history: list[ReplicaState] = []  # all that were pushed
        self.removed: list[str] = []
        self._changed = asyncio.Event()

    async def follow(self, settings: Config) -> None:
        async with (
            connect(settings.redis, settings.pool) as redis,
            aclosing(StateReader(redis, settings.pool, Random(1)).changes()) as changes,
        ):
            async for change in changes:
                match change:
                    case Snapshot(states):
                        self.states = {state.id: state for state in states}
                    case Put(state):
                        self.states[state.id] = state
                        self.history.append(state)
                    case Removed(replica_id):
                        self.states.pop(replica_id, None)
                        self.removed.append(replica_id)
                self._changed.set()

    async def until(self, holds: Callable[[dict[str, ReplicaState]], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds(self.states):
                self._changed.clear()
                await self._changed.wait()

    async def replica(
        self,
        replica: Replica,
        holds: Callable[[ReplicaState], bool] = lambda _: True,
        /,
        **fields: object,
    ) -> ReplicaState:
        """The first state with these fields for which the condition holds."""

        def so(state: ReplicaState) -> bool:
            return holds(state) and fields.items() <= structs.asdict(state).items()

        await self.until(lambda states: replica.id in states and so(states[replica.id]))
        return self.states[replica.id]


@asynccontextmanager
async def watching(settings: Config) -> AsyncIterator[Seen]:
    seen = Seen()
    async with polling(settings):
        following = asyncio.create_task(seen.follow(settings))
        try:
            yield seen
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

"""Pollers that run in the test's process, and the states that a router would hold."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.ground.runtime import started
from extproc.lab.harness.processes import free_port
from extproc.poll.destination import Destination
from extproc.poll.into_redis import run_poller
from extproc.poll.poller import Poller
from extproc.poll.scrape import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.replicas import Put, Removed, Snapshot, StateReader
from tests.conftest import RedisServer
from tests.poll.replica import ScriptedReplica
from tests.waiting import Changes

QUICK_AND_PATIENT = {
    "replica.BACKOFF_MOST_S": 0.05,
    "replica.HEALTH_EVERY_S": 0.2,
    "poller.RESOLVE_S": 0.07,  # no fraction of a heartbeat, so that their phases vary
    "replica.TTL_S": 100.0,
    "into_redis.TTL_S": 100.0,
}
SOON = {"timeout_s": 0.8}
"""Long enough for a busy machine, and short enough to wait for a request that hangs: it ends after
three times as long."""


def config(
    redis: RedisServer,
    *replicas: ScriptedReplica,
    poll: Mapping[str, float] | None = None,
    **more: Any,
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
        async with started(run_poller(settings)) as [task]:
            yield
    assert task.cancelled()


async def read(poller: Config, path: str = "/metrics") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{poller.poll.admin}{path}") as response,
    ):
        return response.status, await response.text()


async def metrics_of(poller: Config) -> str:
    return (await read(poller))[1]


def poller_of(settings: Config, into: Destination | None = None) -> Poller:
    metrics = PollMetrics(CollectorRegistry())
    return Poller(settings, into or Destination(), metrics, Random(1))


class PolledView:
    def __init__(self) -> None:
        self.states: dict[str, ReplicaState] = {}
        self.history: list[ReplicaState] = []  # all pushed states
        self.removed: list[str] = []
        self._changes = Changes()

    async def follow(self, settings: Config) -> None:
        async with (
            connect(settings.redis, settings.pool) as redis,
            aclosing(StateReader(redis, settings.pool).changes()) as changes,
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
                self._changes.note()

    async def until(self, holds: Callable[[dict[str, ReplicaState]], bool]) -> None:
        await self._changes.until(lambda: holds(self.states))

    async def replica(
        self,
        replica: ScriptedReplica,
        holds: Callable[[ReplicaState], bool] = lambda _: True,
        /,
        **fields: object,
    ) -> ReplicaState:
        """Waits until the replica's state has these fields and the condition holds for it."""

        def is_reached(states: dict[str, ReplicaState]) -> bool:
            state = states.get(replica.id)
            return bool(state and holds(state) and fields.items() <= structs.asdict(state).items())

        await self.until(is_reached)
        return self.states[replica.id]


@asynccontextmanager
async def watching(settings: Config) -> AsyncIterator[PolledView]:
    router = PolledView()
    async with polling(settings), started(router.follow(settings)) as [following]:
        yield router
    assert following.cancelled()

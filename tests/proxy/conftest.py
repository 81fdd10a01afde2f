"""Services, routers and Envoy's side for the tests of the proxy."""

import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.proxy.app import build
from extproc.proxy.service import GrpcServer
from extproc.proxy.services import Services
from extproc.route.queue import Queue
from extproc.route.router import Router
from tests.fakes import ManualClock, fleet_of, state
from tests.proxy.envoy_side import EnvoySide, Local, Stream, running


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


def on_fleet(services: Services, fleet: Fleet, **parts: Any) -> Services:
    queue = Queue(fleet, services.config.hold)
    router = Router(fleet, "completion", services.random, backlog=queue.backlog)
    return replace(services, router=router, queue=queue, **parts)


def with_fleet(services: Services, clock: ManualClock, **parts: Any) -> Services:
    """Services on this clock, in a pool of two known replicas."""
    fleet = fleet_of(clock, *["llama-8b-a10"] * 2, names=services.fleet.members.names)
    fleet.members_known.set()
    return on_fleet(services, fleet, clock=clock, **parts)


def put_replicas(services: Services, *numbers: int, **figures: Any) -> None:
    clock = ManualClock(services.wall())
    for number in numbers or (1, 2):
        services.fleet.put(state(number, "llama-8b-a10", clock, **figures))


def router_of(config: Config, *numbers: int, **figures: Any) -> Services:
    services = build(config, CollectorRegistry())
    put_replicas(services, *numbers, **figures)
    return services


def samples(metric: Collector) -> dict[tuple[str, ...], float]:
    (family,) = metric.collect()
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def alive(kind: type) -> int:
    """Counts the objects of a class that the program still holds."""
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


async def traced(*work: Awaitable[Any]) -> tuple[Any, int, int]:
    """Awaits each in turn; returns the last result, the bytes that Python then holds, and the most
    bytes that it held meanwhile."""
    result = None
    tracemalloc.start()
    try:
        for each in work:
            result = await each
        return result, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


@pytest.fixture
def config() -> Config:
    return config_of(
        route={"policy_header": "x-extproc-policy", "seed": 1},
        serve={"chunks_per_s": 1e6},
        hold={"empty_s": 0},
    )


@pytest.fixture
def services(config: Config) -> Services:
    services = router_of(config)
    services.fleet.members_known.set()
    return services


@pytest.fixture
async def envoy(services: Services) -> EnvoySide:
    return EnvoySide(Local(services))


@pytest.fixture
async def over_grpc(services: Services) -> AsyncIterator[EnvoySide]:
    async with running(GrpcServer(services)) as channel:
        yield EnvoySide(channel)


@pytest.fixture
async def stream(envoy: EnvoySide) -> AsyncIterator[Stream]:
    async with envoy.stream() as stream:
        yield stream

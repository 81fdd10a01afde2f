from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock, monotonic
from extproc.predict.lengths import OutputLengths
from extproc.proxy.app import build
from extproc.proxy.services import Services
from extproc.route.queue import Queue
from extproc.route.router import Router
from tests.fakes import ManualClock, state

H100 = "llama-8b-h100"


@pytest.fixture
def clock() -> Clock:
    return monotonic


@pytest.fixture
def services(clock: Clock) -> Services:
    """A router of which nothing is wrong, with four idle replicas."""
    config = Config.model_validate({"route": {"seed": 1}, "hold": {"most": 10}})
    fleet = Fleet(OutputLengths(), clock)
    fleet.pollers = ["here:1"]
    made = replace(
        build(config, CollectorRegistry()),
        router=Router(fleet, "completion", Random(1)),
        queue=Queue(fleet, config.hold, clock),
        clock=clock,
        wall=clock,
    )
    poll(made, clock)
    return made


def poll(services: Services, clock: Clock, *only: int, **figures: float | str | bool) -> None:
    """News of all four, or only of some."""
    for number in only or range(1, 5):
        told: dict[str, float | str | bool] = {"measured": True, "kv_tokens": 42_000} | figures
        services.fleet.put(state(number, H100, ManualClock(clock()), **told))

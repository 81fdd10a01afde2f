"""A router with four measured replicas, and shortcuts for its pollers and clients."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock, monotonic
from extproc.observe.decision_log import PredictionResult
from extproc.predict.lengths import OutputLengths
from extproc.proxy.app import build
from extproc.proxy.services import Services
from extproc.request.objective import Objective
from extproc.route.waiting import Waiting
from tests.fakes import ManualClock, chat, decided, replica, state
from tests.proxy.conftest import on_fleet

H100 = "llama-8b-h100"


@pytest.fixture
def clock() -> Clock:
    return monotonic


@pytest.fixture
def services(clock: Clock) -> Services:
    config = Config.model_validate({"route": {"seed": 1}, "hold": {"most": 10}})
    fleet = Fleet(OutputLengths(), clock)
    fleet.pollers = {"here:1": ()}
    made = on_fleet(build(config, CollectorRegistry(), clock, clock), fleet)
    poll(made)
    return made


def poll(services: Services, *only: int, **figures: Any) -> None:
    polled: dict[str, Any] = {"measured": True, "kv_tokens": 42_000}
    for number in only or range(1, 5):
        services.fleet.put(state(number, H100, ManualClock(services.clock()), **polled | figures))


def wait(services: Services, tenant: str, priority: int = 0) -> None:
    profile = replace(chat(41_000, 1000), tenant=tenant, objective=Objective(priority=priority))
    decision, now = decided(services.router, profile), services.clock()
    services.queue.enter(Waiting(profile, decision, now, lambda _: decision, lambda _: None))


def ended(
    services: Services,
    predicted: float = 1.0,
    actual: float = 1.0,
    *,
    on: int = 1,
    ago: float = 0.0,
    ttft: float | None = None,
    expected: float = 0.0,
    cached: int | None = None,
) -> None:
    """Add the result of a request that ended ``ago`` seconds ago on replica ``on``."""
    at = services.clock() - ago
    result = PredictionResult(at, replica(on), predicted, actual, ttft, expected, cached)
    services.results.append(result)

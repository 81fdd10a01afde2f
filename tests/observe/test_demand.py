"""Replicas needed: as many as there are where they can just do what comes."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.discrete import FleetSimulation
from benchmarks.fleet import FleetFile, ReplicaGroup
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served
from extproc.observe.metrics import Demand
from extproc.route.decision import Decision
from extproc.route.router import Router
from extproc.route.waiting import Waiting
from tests.fakes import ManualClock, chat, fleet_of

A10 = "llama-8b-a10"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def decision(clock: ManualClock) -> Decision:
    profile = replace(chat(500, 200), least_output=200)
    found = Router(fleet_of(clock, A10), "completion", Random(0)).decide(profile)
    assert found is not None
    return found


def demand_of(clock: ManualClock, per_second: int, seconds: int) -> Demand:
    demand, one = Demand(clock), decision(clock)
    for _ in range(seconds * per_second):
        clock.advance(1 / per_second)
        demand.arrived(one)
    return demand


@pytest.mark.parametrize("seconds", [5, 60, 600])  # as soon as a router has started
def test_twice_the_load_needs_twice_the_replicas(clock: ManualClock, seconds: int) -> None:
    some, twice = (demand_of(clock, rate, seconds).replicas(()) for rate in (4, 8))
    assert 0.5 < some < 2.0
    assert twice / some == pytest.approx(2.0, rel=0.02)


def test_no_demand_when_nothing_comes(clock: ManualClock) -> None:
    demand = demand_of(clock, 4, 60)
    clock.advance(600.0)
    assert demand.replicas(()) == pytest.approx(0.0, abs=1e-3)
    assert Demand(clock).replicas(()) == 0.0


def test_waiting_work_should_be_done_in_a_minute(clock: ManualClock) -> None:
    one = decision(clock)
    waiting = [
        Waiting(one.profile, one, clock(), lambda _: one, lambda _: None) for _ in range(100)
    ]
    needed = Demand(clock).replicas(waiting)
    assert needed == pytest.approx(100 * waiting[0].cost / 60.0)
    assert needed > 0.1


@pytest.mark.parametrize("routers", [1, 4])
def test_model_that_nothing_serves_needs_a_replica(clock: ManualClock, routers: int) -> None:
    waiting = [
        Waiting(replace(chat(500), model=model), None, clock(), lambda _: None, lambda _: None)
        for model in ("a", "b", "b")
    ]
    assert Demand(clock).replicas(waiting, routers) * routers == 2.0


@pytest.mark.parametrize(("prompt", "output", "rate"), [(500, 200, 12.0), (4000, 20, 3.0)])
def test_demand_at_saturation_equals_the_fleet(prompt: int, output: int, rate: float) -> None:
    replicas, seconds, random, at = 2, 120.0, Random(1), 0.0
    trace = list[TracedRequest]()
    while at < seconds:
        at += random.expovariate(rate)
        tokens = round(output * random.uniform(0.5, 1.5))
        trace.append(TracedRequest(at, prompt, tokens, None))
    fleet = FleetFile(replicas=(ReplicaGroup(name="r", profile=A10, count=replicas),))
    ended = list[Served]()
    for one in FleetSimulation(fleet, "completion", hold=True).run(trace):
        if (one.finished or 0.0) >= seconds:
            break
        ended.append(one)
    # More came than the replicas can do; `ended` is what they did.
    clock = ManualClock(0.0)
    demand = Demand(clock)
    for one in ended:
        clock.advance((one.finished or 0.0) - clock())
        demand.arrived(one.decision)
    assert len(ended) < 0.8 * len(trace)
    assert demand.replicas(()) == pytest.approx(replicas, rel=0.15)

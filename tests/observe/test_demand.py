"""``extproc_replicas_needed`` is the number of replicas that the load keeps busy."""

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
from tests.fakes import A10, ManualClock, chat, decided, fleet_of


@pytest.fixture
def decision(clock: ManualClock) -> Decision:
    router = Router(fleet_of(clock, A10), "completion", Random(0))
    return decided(router, replace(chat(500, 200), least_output=200))


def demand_of(decision: Decision, clock: ManualClock, per_second: int, seconds: int) -> Demand:
    demand = Demand(clock)
    for _ in range(seconds * per_second):
        clock.advance(1 / per_second)
        demand.arrived(decision)
    return demand


@pytest.mark.parametrize("seconds", [5, 60, 600])  # even right after the start
def test_twice_the_load_needs_twice_the_replicas(
    decision: Decision, clock: ManualClock, seconds: int
) -> None:
    simple, double = (demand_of(decision, clock, rate, seconds).replicas(()) for rate in (4, 8))
    assert 0.5 < simple < 2.0
    assert double / simple == pytest.approx(2.0, rel=0.02)


def test_demand_fades_when_no_request_arrives(decision: Decision, clock: ManualClock) -> None:
    demand = demand_of(decision, clock, 4, 60)
    clock.advance(600.0)
    assert demand.replicas(()) == pytest.approx(0.0, abs=1e-3)
    assert Demand(clock).replicas(()) == 0.0


def waiting_since(decision: Decision, since: float) -> Waiting:
    return Waiting(decision.profile, decision, since, lambda _: decision, lambda _: None)


def test_queue_is_to_be_cleared_within_a_minute(decision: Decision, clock: ManualClock) -> None:
    waiting = [waiting_since(decision, clock()) for _ in range(100)]
    needed = Demand(clock).replicas(waiting)
    assert needed == pytest.approx(100 * waiting[0].cost / 60.0)
    assert needed > 0.1


def test_fleet_with_a_queue_needs_more_replicas(decision: Decision, clock: ManualClock) -> None:
    """Whatever the work of the arriving requests is predicted to be."""
    queue = [waiting_since(decision, clock()) for _ in range(89)]
    clock.advance(2.0)
    assert Demand(clock).replicas(queue, usable=3) > 3.0
    assert 2 * Demand(clock).replicas(queue, routers=2, usable=3) > 3.0


def test_short_wait_does_not_count_as_a_full_fleet(decision: Decision, clock: ManualClock) -> None:
    assert Demand(clock).replicas([waiting_since(decision, clock())], usable=3) < 1.0


@pytest.mark.parametrize("routers", [1, 4])
def test_each_unserved_model_needs_a_replica(clock: ManualClock, routers: int) -> None:
    waiting = [
        Waiting(replace(chat(500), model=model), None, clock(), lambda _: None, lambda _: None)
        for model in ("a", "b", "b")
    ]
    assert Demand(clock).replicas(waiting, routers) * routers == 2.0


@pytest.mark.slow
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
    for served in FleetSimulation(fleet, "completion", hold=True).run(trace):
        if (served.finished or 0.0) >= seconds:
            break
        ended.append(served)
    assert len(ended) < 0.8 * len(trace)  # the replicas had more work than they could do
    clock = ManualClock(0.0)
    demand = Demand(clock)
    for served in ended:
        clock.advance((served.finished or 0.0) - clock())
        demand.arrived(served.decision)
    assert demand.replicas(()) == pytest.approx(replicas, rel=0.15)

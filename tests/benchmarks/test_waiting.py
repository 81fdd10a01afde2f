"""Router's queue in simulation: preemptions, urgent requests, and fairness of tenants."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean
from typing import Any

import pytest

from benchmarks import trace
from benchmarks.discrete import FleetSimulation
from benchmarks.summary import summary
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served
from extproc.route.backlog import LEAD_S
from extproc.route.order import Shares
from extproc.route.waiting import Key
from tests.benchmarks.conftest import CONVERSATION, a10s, play

pytestmark = pytest.mark.slow

TENANTS = (0, "tenant 1"), (0, "tenant 2")  # with their priority


def conversation(speed: float, most: int, **options: Any) -> list[Served]:
    """Plays the conversation on two replicas, where each request ends."""
    requests = trace.read([CONVERSATION], speed=speed, most=most)
    simulation, served = play(a10s(2), requests, **options)
    assert not simulation.failed
    return served


def preemptions(served: Sequence[Served]) -> int:
    return sum(request.sequence.preemptions for request in served)


def mean_completion(served: Sequence[Served]) -> float:
    return mean(request.completion for request in served)


@pytest.mark.parametrize("routers", [1, 3])
def test_queue_avoids_preemptions_and_shortens_completions(routers: int) -> None:
    sharing = {"routers": routers, "share_lag": 0.02}
    at_once, held = (conversation(0.75, 350, hold=hold, **sharing) for hold in (False, True))
    assert preemptions(at_once) > 30
    assert preemptions(held) < 0.2 * preemptions(at_once)
    assert mean_completion(held) < 0.98 * mean_completion(at_once)


def test_queue_changes_little_on_replicas_with_room() -> None:
    """Requests wait while the prompts ahead take over 0.2 s; then they go to any replica."""
    at_once, held = (conversation(0.3, 200, hold=hold) for hold in (False, True))
    assert mean_completion(held) == pytest.approx(mean_completion(at_once), rel=0.01)


def test_prediction_is_compared_with_the_time_after_the_wait_at_the_router() -> None:
    """Two replicas of which each has room for one of the four prompts."""
    requests = [TracedRequest(0.1 * number, 24_000, 100, None) for number in range(4)]
    known = frozenset({"lengths", "coefficients"})
    simulation, served = play(a10s(2), requests, hold=True, know=known)
    assert [request.queued_s > 5.0 for request in served] == [False, False, True, True]
    assert summary(simulation, served)["prediction"]["e2e_mape"] < 0.01


def test_urgent_requests_overtake_others() -> None:
    by_group = defaultdict(list)
    for request in conversation(0.9, 330, hold=True, urgent=0.3):
        by_group[request.arrival.objective.name].append(request.ttft)
    assert len(by_group["urgent"]) > 100
    assert mean(by_group["urgent"]) < 0.2 * mean(by_group[""])


@pytest.mark.parametrize("seed", [0, 1])
def test_small_requests_take_no_share_from_large_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenant 1 always has a request that fits into the little room that eight full replicas have;
    the requests of tenant 2, a tenth as many, need more room."""
    received, leads = dict.fromkeys(TENANTS, 0.0), []
    charge = Shares.charge

    def record(shares: Shares, key: Key, cost: float) -> None:
        charge(shares, key, cost)
        if all(tenant in shares for tenant in TENANTS):
            received[key] += cost
            leads.append(abs(shares.tag(TENANTS[0]) - shares.tag(TENANTS[1])))

    monkeypatch.setattr(Shares, "charge", record)
    simulation = FleetSimulation(a10s(8), "completion", seed=seed, hold=True, tenants=[10, 1])
    for _ in simulation.run(trace.read([CONVERSATION], speed=13.0, most=5_000)):
        if simulation.clock() > 60.0:
            break
    first, second = received.values()
    assert (first + second) ** 2 / (2 * (first**2 + second**2)) >= 0.98  # Jain's index
    assert max(leads) <= 2 * 8 * LEAD_S  # a request may decline some of the replicas

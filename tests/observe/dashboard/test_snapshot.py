"""What the page is told, and what it warns of."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic_core import from_json, to_json

from extproc.config import Config, HoldSettings
from extproc.observe.dashboard.snapshot import snapshot
from extproc.observe.decision_log import DecisionLog, PredictionResult
from extproc.proxy.services import Services
from extproc.request.objective import Objective
from extproc.request.prefix import NO_PREFIX
from extproc.route.queue import Queue
from extproc.route.waiting import Waiting
from tests.fakes import ManualClock, chat, fleet_of, replica, state
from tests.observe.dashboard.conftest import H100, poll
from tests.proxy.conftest import on_fleet


def shown(services: Services) -> dict[str, Any]:
    """The only pool, as it arrives at the page."""
    news = from_json(to_json(asyncio.run(snapshot([services])), inf_nan_mode="null"))
    (pool,) = news["pools"]
    return {**pool, "warnings": [*news["warnings"], *pool["warnings"]], "news": news}


def of(pool: dict[str, Any], name: str) -> dict[str, Any]:
    """One replica's figures."""
    place = pool["replicas"]["name"].index(name)
    return {column: values[place] for column, values in pool["replicas"].items()}


def warned(services: Services) -> list[str]:
    return list(shown(services)["warnings"])


def decide(services: Services, request_id: str = "one") -> str:
    """The replica that a request goes to."""
    decision = services.router.decide(chat(1000, 100))
    assert decision is not None
    services.fleet.dispatch(decision.replica, decision.profile)
    services.log.add(request_id, services.wall(), decision, services.config.pool)
    return decision.replica


def wait(services: Services, tenant: str, priority: int = 0) -> None:
    """A request waits that no replica can carry."""
    objective = Objective(priority=priority)
    profile = replace(chat(41_000, 1000), tenant=tenant, objective=objective)
    decision = services.router.decide(profile)
    assert decision is not None
    decide, now = (lambda: services.router.decide(chat(41_000, 1000))), services.clock()
    services.queue.enter(Waiting(decision, now, decide, lambda _: None))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def fill(services: Services, clock: ManualClock) -> None:
    """Requests that leave no room, and decode."""
    for number in range(1, 5):
        services.fleet.dispatch(replica(number), chat(40_000, 2000))
    clock.advance(5.0)
    poll(services, clock, running=1, kv_usage=0.95)


def test_nothing_is_warned_of_where_all_is_well(services: Services) -> None:
    assert warned(services) == []


def test_each_replica_is_shown_as_the_fleet_knows_it(
    services: Services, clock: ManualClock
) -> None:
    services.fleet.dispatch(replica(2), chat(20_000, 100))
    clock.advance(0.3)
    one, two = (of(shown(services), name) for name in ("r1", "r2"))
    assert (one["replica"], one["models"], one["why_not"]) == (replica(1), "llama", "")
    assert (one["running"], one["waiting"], one["backlog_s"]) == (0, 0, 0)
    assert (two["running"], two["waiting"]) == (0, 1)
    # 20,000 tokens at 38 µs, less the third of a second that has passed.
    assert two["backlog_s"] == pytest.approx(0.76 - 0.3, abs=0.05)
    assert two["prefill_per_s"] == pytest.approx(1e6 / 38, rel=0.01)
    assert one["decode_per_s"] == pytest.approx(1 / 6.5e-3, rel=0.05)
    assert two["news_age_s"] == 0.3
    assert shown(services)["in_flight"] == 1


def test_warm_tokens_are_those_of_the_prompts_that_were_sent(services: Services) -> None:
    prefix = replace(NO_PREFIX, keys=np.arange(1, 4, dtype=np.uint64), unit=64.0, tokens=192)
    prompt = replace(chat(200, 10), prefix=prefix)
    services.fleet.dispatch(replica(3), prompt)
    assert of(shown(services), "r3")["warm_tokens"] == 192
    assert of(shown(services), "r4")["warm_tokens"] == 0
    assert not of(shown(services), "r3")["warm_known"]


def test_where_requests_go_is_counted_over_the_last_minute(
    services: Services, clock: ManualClock
) -> None:
    decide(services, "long-ago")
    clock.advance(61.0)
    poll(services, clock)
    chosen = [decide(services, str(number)) for number in range(8)]
    pool = shown(services)
    assert dict(zip(pool["replicas"]["replica"], pool["replicas"]["sent"], strict=True)) == {
        replica(number): chosen.count(replica(number)) for number in range(1, 5)
    }
    assert pool["news"]["decisions_s"] == 60.0
    headers = [column["header"] for column in pool["news"]["decisions"]["columns"]]
    newest = pool["news"]["decisions"]["rows"][0]
    assert newest["figures"][headers.index("request")] == "7"
    assert newest["why"].startswith("llama: ")


def test_who_served_instead_is_named(services: Services) -> None:
    chosen = decide(services)
    other = 2 if chosen == replica(1) else 1
    outcome = services.log.last(1)[0].outcome
    outcome.served_by, outcome.status = replica(other), 200
    (row,) = shown(services)["news"]["decisions"]["rows"]
    assert row["why"].endswith(f" [served by r{other}]")


def test_where_few_decisions_are_kept_the_rate_is_theirs(
    services: Services, clock: ManualClock
) -> None:
    few = replace(services, log=DecisionLog(4))
    for number in range(8):
        clock.advance(2.0)
        decide(few, str(number))
    clock.advance(2.0)
    pool = shown(few)
    assert sum(pool["replicas"]["sent"]) == 4
    assert pool["news"]["decisions_s"] == 8.0


def test_what_waits_is_shown_by_priority_and_tenant(services: Services, clock: ManualClock) -> None:
    fill(services, clock)
    wait(services, "blue")
    clock.advance(2.0)
    for tenant, priority in (("red", 5), ("blue", 0)):
        wait(services, tenant, priority)
    held = shown(services)["held"]
    assert [(one["tenant"], one["priority"], one["requests"]) for one in held] == [
        ("red", 5, 1),
        ("blue", 0, 2),
    ]
    assert [one["longest_s"] for one in held] == [0.0, 2.0]
    assert sum(held[1]["replicas"].values()) == 2


def test_of_very_many_tenants_that_wait_some_are_shown_and_all_counted(
    services: Services, clock: ManualClock
) -> None:
    fill(services, clock)
    roomy = replace(services, queue=Queue(services.fleet, HoldSettings(), clock))
    for number in range(60):
        wait(roomy, f"tenant-{number}", priority=number)
    pool = shown(roomy)
    assert (len(pool["held"]), pool["waiting"]) == (50, 60)
    assert pool["held"][0]["priority"] == 59


def test_predictions_are_compared_with_what_came_of_them(
    services: Services, clock: ManualClock
) -> None:
    services.accuracy.add(PredictionResult(clock() - 301.0, replica(1), 1.0, 99.0, 0.0, None))
    for actual in (0.5, 1.0, 2.0):
        services.accuracy.add(PredictionResult(clock(), replica(1), 1.0, actual, 0.0, None))
    pool = shown(services)
    assert (pool["ended"], pool["actual_to_predicted"]["p50"]) == (3, 1.0)
    assert sorted(actual for _, actual in pool["points"]) == [0.5, 1.0, 2.0]


def test_of_very_many_some_are_drawn_and_all_are_counted(
    services: Services, clock: ManualClock
) -> None:
    for _ in range(4000):
        clock.advance(0.01)
        services.accuracy.add(PredictionResult(clock(), replica(1), 1.0, 1.0, 0.0, None))
    pool = shown(services)
    assert pool["ended"] == 4000
    assert 100 < len(pool["points"]) < 500
    services.accuracy.add(PredictionResult(clock(), replica(1), 1.0, 1.0, 0.0, None))
    assert abs(len(shown(services)["points"]) - len(pool["points"])) <= 1


def test_a_replica_that_is_down_is_warned_of_with_the_reason(
    services: Services, clock: ManualClock
) -> None:
    poll(services, clock, 2, healthy=False, problem="cannot connect")
    assert warned(services) == ["r2 is left out: cannot connect."]
    two = of(shown(services), "r2")
    assert (two["why_not"], two["healthy"]) == ("cannot connect", False)
    poll(services, clock, 1, 3, 4, healthy=False, problem="cannot connect")
    assert warned(services) == [
        "No replica is healthy: Envoy's own load balancing serves.",
        "r1, r2, r3 and 1 more are left out: cannot connect.",
    ]


def test_a_replica_that_fails_is_warned_of_even_where_it_is_used_for_want_of_others(
    services: Services,
) -> None:
    for number in range(1, 5):
        for _ in range(3):
            services.fleet.eligibility.failed(replica(number))
    assert warned(services) == [
        "r1, r2, r3 and 1 more are left out: it failed several requests in a row."
    ]


def test_one_that_drains_is_shown_and_not_warned_of(services: Services, clock: ManualClock) -> None:
    poll(services, clock, 2, draining=True)
    assert warned(services) == []
    assert of(shown(services), "r2")["why_not"] == "draining"


def test_stale_news_are_warned_of(services: Services, clock: ManualClock) -> None:
    clock.advance(5.1)
    assert warned(services) == ["Stale news: nothing was heard of any replica for more than 5 s."]
    poll(services, clock)
    assert warned(services) == []


def test_missing_pollers_and_a_missing_redis_are_warned_of(services: Services) -> None:
    services.fleet.pollers = []
    assert warned(services) == ["No poller is alive: start one (extproc poll)."]
    services.fleet.pollers = None
    (warning,) = warned(services)
    assert warning.startswith("Redis does not answer")
    alone = Config.model_validate({"state": "memory"})
    assert warned(replace(services, config=alone)) == []


def test_a_replica_that_drifts_from_its_prediction_is_warned_of(
    services: Services, clock: ManualClock
) -> None:
    for number in range(1, 5):
        for _ in range(50):
            services.fleet.decoded(replica(number), 1.0, 2.6 if number == 3 else 1.3)
    (warning,) = warned(services)
    assert warning.startswith("r3 is drifting from the prediction: answers take much longer")
    assert of(shown(services), "r3")["stretch"] > 2
    clock.advance(300.0)  # what was seen fades
    poll(services, clock)
    assert warned(services) == []


def test_a_fleet_that_is_busy_as_a_whole_does_not_drift(services: Services) -> None:
    for number in range(1, 5):
        for _ in range(50):
            services.fleet.decoded(replica(number), 1.0, 1.7)
    assert warned(services) == []


def test_a_full_circuit_breaker_is_warned_of(services: Services, clock: ManualClock) -> None:
    decide(services)
    services.log.last(1)[0].outcome.overloaded = True
    (warning,) = warned(services)
    assert warning.startswith("A circuit breaker of Envoy was full in the last minute")
    clock.advance(61.0)
    poll(services, clock)
    assert warned(services) == []


def test_of_two_replicas_one_drifts_beside_the_other(services: Services) -> None:
    for number in (3, 4):
        services.fleet.remove(replica(number))
    for number, actual in ((1, 1.7), (2, 1.7)):
        for _ in range(50):
            services.fleet.decoded(replica(number), 1.0, actual)
    assert warned(services) == []
    for _ in range(300):
        services.fleet.decoded(replica(2), 1.0, 5.0)
    (warning,) = warned(services)
    assert warning.startswith("r2 is drifting from the prediction: answers take much longer")


def test_a_fleet_that_is_faster_as_a_whole_does_not_drift(services: Services) -> None:
    for number in range(1, 5):
        for _ in range(50):
            services.fleet.decoded(replica(number), 1.0, 0.4)
    assert warned(services) == []


def test_old_news_are_as_old_as_they_are(services: Services, clock: ManualClock) -> None:
    services.fleet.put(state(1, H100, clock, measured=True), age=9.0)
    assert of(shown(services), "r1")["news_age_s"] == 9.0


def test_a_cache_that_does_not_hit_is_warned_of(services: Services, clock: ManualClock) -> None:
    for _ in range(10):
        services.accuracy.add(PredictionResult(clock(), replica(1), 1.0, 1.0, 1000.0, 0))
        services.accuracy.add(PredictionResult(clock(), replica(2), 1.0, 1.0, 1000.0, 900))
        services.accuracy.add(PredictionResult(clock(), replica(3), 1.0, 1.0, 1000.0, None))
        services.accuracy.add(PredictionResult(clock(), replica(4), 1.0, 1.0, 10.0, 0))
    (warning,) = warned(services)
    assert warning.startswith("r1 is not finding in the prefix cache half of what")


def test_full_limits_are_warned_of(services: Services, clock: ManualClock) -> None:
    fill(services, clock)
    for _ in range(9):
        wait(services, "blue")
    assert warned(services) == [
        "Nearly as many requests wait as may (10, hold.most): others get 429."
    ]
    few = Config.model_validate({"serve": {"max_streams": 14}, "hold": {"most": 100}})
    (warning,) = warned(replace(services, config=few))
    assert warning.startswith("This router is nearly full: it looks after at most 14 requests")
    clock.advance(151.0)
    poll(services, clock, running=1, kv_usage=0.95)
    assert any("there are too few replicas" in one for one in warned(services))


def test_a_pool_without_replicas(services: Services, clock: ManualClock) -> None:
    fleet = fleet_of(clock)
    fleet.pollers = ["here:1"]
    empty = on_fleet(services, fleet)
    assert warned(empty) == ["No replica is known yet: Envoy's own load balancing serves."]
    assert shown(empty)["replicas"]["replica"] == []

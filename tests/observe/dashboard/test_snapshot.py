"""The dashboard's snapshot shows load, queue, accuracy and decisions, and warns of problems."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.json import decode, encode

from extproc.config import Config, HoldSettings
from extproc.fleet.digest import NOTHING, Digest, DigestKind
from extproc.ground.clock import time_of_day
from extproc.observe.dashboard.snapshot import snapshot
from extproc.observe.decision_log import OVERLOADED, LoggedDecision
from extproc.observe.history import Delays, History
from extproc.predict.step import hardware_profile
from extproc.proxy.services import Services
from extproc.replica_state import TTL_S
from extproc.request.prefix import NO_PREFIX
from extproc.route.queue import Queue
from extproc.route.waiting import Waiting
from tests.fakes import ManualClock, chat, replica, state
from tests.observe.conftest import decide
from tests.observe.dashboard.conftest import H100, ended, poll, wait

NO_POLLER = "No poller reaches Redis: no poller runs, or all hang or are cut off from Redis."
ALONE = Config.model_validate({"state": "memory"})
OTHER = "other:50051:1f"  # name of another router


def page(services: Services) -> dict[str, Any]:
    """The snapshot of the only pool, as the page receives it."""
    found = decode(encode(asyncio.run(snapshot([services]))))
    (pool,) = found.pop("pools")
    return dict(found | pool | {"figures": dict(found["figures"])})


def rows(table: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    columns = {}
    for column in table["columns"]:
        title = column["title"]
        columns[title] = column["values"]
        columns |= {f"{title} {part}": column.get(part) for part in ("notes", "estimated")}
    return {
        key: {title: cells[place] for title, cells in columns.items() if cells}
        for place, key in enumerate(table["keys"])
    }


def cells(services: Services, number: int, *titles: str) -> list[Any]:
    row = rows(page(services)["replicas"])[replica(number)]
    return [row[title] for title in titles]


def warnings(services: Services) -> list[str]:
    return list(page(services)["warnings"])


def only_warning(services: Services) -> str:
    (warning,) = warnings(services)
    return warning


def dispatch(services: Services, request_id: str = "one") -> LoggedDecision:
    record = decide(services, request_id=request_id)
    services.fleet.dispatch(record.decision.replica, record.decision.profile)
    return record


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


def advance(services: Services, seconds: float) -> None:
    assert isinstance(services.clock, ManualClock)
    services.clock.advance(seconds)


def fill(services: Services) -> None:
    for number in range(1, 5):
        services.fleet.dispatch(replica(number), chat(40_000, 2000))
    advance(services, 5.0)
    poll(services, running=1, kv_usage=0.95)


def test_replica_row_shows_load_and_speed(services: Services, clock: ManualClock) -> None:
    services.fleet.dispatch(replica(2), chat(20_000, 100))
    clock.advance(0.3)
    poll(services, 3, measured=False)
    names = ("Replica", "Replica notes", "Health", "Health notes", "Running", "Waiting", "Backlog")
    assert cells(services, 1, *names) == ["r1", f"{replica(1)} llama", "ok", "", 0, 0, 0]
    assert cells(services, 2, "Running", "Waiting", "Age") == [0, 1, 0.3]
    [backlog] = cells(services, 2, "Backlog")
    # 20,000 tokens at 38 µs, less the 0.3 s that have passed.
    assert backlog == pytest.approx(0.76 - 0.3, abs=0.05)
    assert cells(services, 2, "Prefill speed") == pytest.approx([1e6 / 38], rel=0.01)
    assert cells(services, 1, "Decode speed") == pytest.approx([1 / 6.5e-3], rel=0.05)
    for number, by_profile in ((1, False), (3, True)):
        estimated = cells(services, number, "Prefill speed estimated", "Decode speed estimated")
        assert estimated == [by_profile, by_profile]
    figures = page(services)["figures"]
    assert (figures["requests in flight"], figures["replicas in use"]) == ("1", "4 of 4")
    services.fleet.put(state(1, H100, clock, measured=True), age=9.0)
    assert cells(services, 1, "Age") == [9.0]


@pytest.mark.parametrize(
    "failure", [{"unanswered_s": 3.0}, {"healthy": False, "problem": "cannot connect"}]
)
def test_age_grows_while_a_replica_answers_no_poll(
    services: Services, failure: dict[str, Any]
) -> None:
    poll(services, 2, scraped_at=5.0)
    advance(services, 3.0)
    poll(services, 2, scraped_at=5.0, **failure)
    assert cells(services, 2, "Age") == [3.0]
    poll(services, 2, scraped_at=8.0)
    assert cells(services, 2, "Age") == [0.0]


def test_replicas_are_sorted_by_number(services: Services) -> None:
    for number, name in enumerate(("r10", "r9", "R1", "a"), start=1):
        poll(services, number, name=name)
    names = [row["Replica"] for row in rows(page(services)["replicas"]).values()]
    assert names == ["a", "R1", "r9", "r10"]


def test_warm_tokens_are_those_of_dispatched_prompts(services: Services) -> None:
    prefix = replace(NO_PREFIX, keys=np.arange(1, 4, dtype=np.uint64), unit=64.0, tokens=192)
    services.fleet.dispatch(replica(3), replace(chat(200, 10), prefix=prefix))
    assert cells(services, 3, "Warm", "Warm estimated") == [192, True]
    assert cells(services, 4, "Warm") == [0]


def test_decisions_of_the_last_minute_are_counted(services: Services) -> None:
    dispatch(services, "long-ago")
    advance(services, 61.0)
    poll(services)
    chosen = [dispatch(services, str(number)).decision.replica for number in range(9)]
    found = page(services)
    assert {key: row["Share"] for key, row in rows(found["replicas"]).items()} == {
        replica(number): round(chosen.count(replica(number)) / 9, 3) for number in range(1, 5)
    }
    assert found["decisions"]["note"].startswith("-: the request still runs")
    newest = next(iter(rows(found["decisions"]).values()))
    assert newest["request"] == "8"
    assert newest["model: why"].startswith("llama: ")
    titles = [column["title"] for column in found["decisions"]["columns"]]
    assert titles[-5:] == ["TTFT s", "TTFT actual", "finish s", "finish actual", "model: why"]


def test_unhealthy_replica_shows_no_load(services: Services) -> None:
    for number in range(9):
        dispatch(services, str(number))
    advance(services, 1.0)
    poll(services, running=2, kv_usage=0.5)
    ended(services, actual=2.0, on=2)
    poll(services, 2, healthy=False, problem="cannot connect", running=2, kv_usage=0.5)
    load = ("Running", "Waiting", "KV", "Backlog", "×", "Share")
    learned = ("Prefill speed", "Decode speed", "Warm")
    assert cells(services, 2, *load, *learned) == [None] * 9
    assert cells(services, 2, "Age", "Completion p50") == [0.0, 2.0]
    assert None not in cells(services, 1, *load, *learned)


def test_replica_row_shows_latencies_of_the_last_five_minutes(services: Services) -> None:
    latencies = "Completion p50", "Completion p99", "TTFT p99"
    ended(services, actual=99.0, ttft=99.0, on=2, ago=301.0)
    assert cells(services, 2, *latencies) == [None, None, None]
    for number in range(100):
        ended(services, actual=1.0 + number, on=2)
    assert cells(services, 2, *latencies) == [50.0, 99.0, None]
    ended(services, actual=1000.0, ttft=0.25, on=2)
    assert cells(services, 2, *latencies) == [51.0, 100.0, 0.25]
    assert cells(services, 1, *latencies) == [None, None, None]


def test_share_of_hardly_any_decisions_is_not_shown(services: Services) -> None:
    assert page(services)["decisions"]["note"] == ""
    for number in range(2):
        dispatch(services, str(number))
    assert cells(services, 1, "Share") == [None]


def test_observed_requests_are_compared_with_choices_of_envoy(services: Services) -> None:
    title = "observed requests that Envoy sent elsewhere"
    poll(services, 4, max_model_len=8)  # too small for the requests, but Envoy may choose it
    records = [decide(services, observed=True) for _ in range(5)]
    assert title not in page(services)["figures"]
    too_small = records.pop().outcome
    too_small.served_by, too_small.completion_s = replica(4), 2.0
    for record, agrees in zip(records, (True, False, False), strict=False):
        chosen = record.decision.replica
        served = chosen if agrees else replica(1 + (chosen == replica(1)))
        record.outcome.served_by, record.outcome.completion_s = served, 2.0
    decide(services).outcome.served_by = replica(1)
    found = page(services)
    assert found["figures"][title] == "3 of 4"
    words = dict(found["facts"])["Observed requests"]
    assert words.startswith("mean completion of 3 requests: predicted ")
    assert words.endswith(", actual 2.000 s")
    assert "inf" not in words


@pytest.mark.parametrize(
    ("serve", "remark"),
    [
        ({}, ""),
        ({"share": 0.05}, " (for 5% of the requests)"),
        ({"share": 0.004}, " (for 0.4% of the requests)"),
        ({"mode": "observe", "share": 0.05}, " (observes: Envoy chooses)"),
    ],
)
def test_page_says_which_requests_are_steered(
    services: Services, serve: dict[str, Any], remark: str
) -> None:
    services = replace(services, config=Config.model_validate({"serve": serve}))
    assert dict(page(services)["facts"])["Policy"] == f"completion{remark}"


def test_queue_is_grouped_by_priority_and_tenant(services: Services) -> None:
    empty = page(services)["waiting"]
    assert (empty["keys"], empty["note"][:13]) == ([], "Nothing waits")
    fill(services)
    wait(services, "blue")
    advance(services, 2.0)
    for tenant, priority in (("red", 5), ("blue", 0)):
        wait(services, tenant, priority)
    found = page(services)
    groups = list(rows(found["waiting"]).values())
    assert [
        [row[title] for title in ("Tenant", "Priority", "Requests", "Longest")] for row in groups
    ] == [["red", 5, 1, 0.0], ["blue", 0, 2, 2.0]]
    assert groups[0]["For replica"].endswith(" (1)")
    assert (found["figures"]["waiting at this router"], found["waiting"]["note"]) == ("3", "")


def test_request_that_no_replica_may_serve_waits_for_any(services: Services) -> None:
    poll(services, healthy=False)
    queued = Waiting(chat(10, 10), None, services.clock(), lambda _: None, lambda _: None)
    services.queue.enter(queued)
    (row,) = rows(page(services)["waiting"]).values()
    assert row["For replica"] == "any (1)"


def test_queue_of_many_tenants_is_cut_short(services: Services) -> None:
    roomy = replace(services, queue=Queue(services.fleet, HoldSettings()))
    fill(roomy)
    for number in range(60):
        wait(roomy, f"tenant-{number}", priority=number)
    found = page(roomy)
    assert (len(found["waiting"]["keys"]), found["waiting"]["note"]) == (50, "And 10 more.")
    assert found["figures"]["waiting at this router"] == "60"
    assert next(iter(rows(found["waiting"]).values()))["Priority"] == 59


def test_request_rate_is_of_the_life_of_a_young_router(services: Services) -> None:
    services = replace(services, history=History(services.metrics, services.clock))
    advance(services, 4.0)
    for _ in range(6):
        services.metrics.requests.add("routed")
    found = page(services)
    assert found["figures"]["requests a second"] == "1.5"
    assert rows(found["history"])["minute"]["Requests/s"] == "1.50"
    started = time_of_day(services.wall() - 4.0)
    since = f"This router started at {started}: longer periods begin then."
    assert found["history"]["note"] == since
    advance(services, 3600.0)
    assert page(services)["history"]["note"] == ""


@pytest.mark.parametrize(
    ("failed", "rates"),
    [(0, ["0", "0", "0"]), (1, ["0.017", "0.0017", "0.00028"]), (900, ["15.00", "1.50", "0.25"])],
)
def test_rates_of_rare_errors_are_readable(
    services: Services, failed: int, rates: list[str]
) -> None:
    services = replace(services, history=History(services.metrics, services.clock))
    for seconds in (3000.0, 540.0):
        advance(services, seconds)
        services.history.look()
    services.metrics.responses.add("5xx", by=failed)
    services.metrics.refused.add("saturated", by=failed)
    advance(services, 60.0)
    found = rows(page(services)["history"]).values()
    assert [row["5xx/s"] for row in found] == [row["429/s"] for row in found] == rates


def test_predictions_of_the_last_five_minutes_are_compared(services: Services) -> None:
    assert page(services)["accuracy"]["quantiles"] == []
    ended(services, actual=99.0, ago=301.0)
    for actual in (0.5, 1.0, 2.0):
        ended(services, actual=actual)
    found = page(services)["accuracy"]
    assert found["words"].startswith("Of the last 3 requests that ended, half took at most 1.00 ")
    assert found["quantiles"] == pytest.approx([0.6, 1.0, 1.8])
    assert sorted(actual for _, actual in found["points"]) == [0.5, 1.0, 2.0]


def test_predictions_are_counted_and_some_drawn(services: Services) -> None:
    for _ in range(4000):
        advance(services, 0.001)
        ended(services)
    found = page(services)["accuracy"]
    assert "last 4,000 requests" in found["words"]
    assert 100 < len(found["points"]) < 500
    ended(services)
    assert abs(len(page(services)["accuracy"]["points"]) - len(found["points"])) <= 1


def test_routers_and_pollers_are_named(services: Services) -> None:
    assert page(services)["facts"] == [
        ["Routers", "this router alone"],
        ["Pollers", "here:1"],
        ["Policy", "completion"],
    ]
    services.fleet.pollers = None
    facts = page(services)["facts"]
    assert ["Routers", "unknown: Redis does not answer"] in facts
    assert ["Pollers", "unknown: Redis does not answer"] in facts
    alone = page(replace(services, config=ALONE))
    assert ["Pollers", "this router polls the replicas itself"] in alone["facts"]


def test_tables_and_warnings_name_their_pool(services: Services) -> None:
    other = services.of_pool(services.config.model_copy(update={"pool": "other"}))
    other.fleet.pollers = {"there:1": ()}
    other.fleet.listed([replica(5)])
    found = decode(encode(asyncio.run(snapshot([services, other]))))
    unknown = "Pool other: No replica is known yet: Envoy's fallback policy chooses."
    assert found["warnings"] == [unknown]
    tables = [pool["replicas"] for pool in found["pools"]]
    assert [table["caption"] for table in tables] == [
        "Replicas of pool default",
        "Replicas of pool other",
    ]
    assert [len(table["keys"]) for table in tables] == [4, 0]
    assert ["Pollers of other", "there:1"] in found["facts"]


@pytest.mark.parametrize(
    ("empty_s", "fate"),
    [(60.0, "wait for at most 60 s (hold.empty_s), then get 503."), (0.0, "Envoy's fallback")],
)
def test_requests_for_an_empty_pool_are_said_to_wait(
    services: Services, empty_s: float, fate: str
) -> None:
    config = services.config.model_copy(update={"hold": HoldSettings(empty_s=empty_s)})
    for number in range(1, 5):
        services.fleet.remove(replica(number))
    warning = only_warning(replace(services, config=config))
    assert warning.startswith("The pool has no replica: ")
    assert fate in warning


def test_replica_that_is_down_is_warned_of_with_the_reason(services: Services) -> None:
    poll(services, 2, healthy=False, problem="cannot connect")
    assert warnings(services) == ["r2 is excluded: cannot connect."]
    assert cells(services, 2, "Health", "Health notes") == ["unhealthy", "cannot connect"]
    assert page(services)["figures"]["replicas in use"] == "3 of 4"
    poll(services, 1, 3, 4, healthy=False, problem="cannot connect")
    waits = "requests wait for at most 60 s (hold.empty_s), then get 503"
    nobody = f"No replica is healthy: {waits}."
    assert warnings(services) == [nobody, "All 4 replicas are excluded: cannot connect."]
    poll(services, asleep=True)
    first, second = warnings(services)
    assert first == nobody
    assert second.startswith("All 4 replicas are excluded: its engine sleeps. Wake them up")


@pytest.mark.parametrize(
    ("figures", "warning"),
    [
        ({"healthy": False, "problem": "refused", "refuses": True}, "refused. Restart it."),
        ({"healthy": False, "problem": "hangs", "unanswered_s": 4.0}, "hangs. Restart it."),
        ({"healthy": False, "problem": "/health answered 503"}, "/health answered 503."),
        ({"asleep": True}, "its engine sleeps. Wake it up: send POST /wake_up to its own address."),
    ],
)
def test_warning_of_a_killed_hung_or_sleeping_replica_names_the_remedy(
    services: Services, figures: dict[str, Any], warning: str
) -> None:
    poll(services, 2, **figures)
    assert warnings(services) == [f"r2 is excluded: {warning}"]


def test_excluded_replicas_are_listed_by_number_and_restarted_together(services: Services) -> None:
    for number, name in enumerate(("r10", "r9", "r2", "r1"), start=1):
        down = number < 4
        poll(services, number, name=name, healthy=not down, problem="refused", refuses=down)
    assert only_warning(services) == "r2, r9 and r10 are excluded: refused. Restart them."


def test_replicas_excluded_one_after_another_share_a_warning(services: Services) -> None:
    first = last = time_of_day(services.wall())
    for number in range(1, 8):
        poll(services, number, healthy=False, problem="cannot connect")
        services.exclusions.look(services.fleet, services.wall())
        last = time_of_day(services.wall())
        advance(services, 1.0)
        poll(services, 8)
    names = "r1, r2, r3 and 4 more"
    assert only_warning(services) == (
        f"{names} are excluded: cannot connect (the first since {first})."
    )
    assert cells(services, 7, "Health notes") == [f"cannot connect (since {last})"]
    poll(services, 7)
    services.exclusions.look(services.fleet, services.wall())
    assert cells(services, 7, "Health notes") == [""]


def test_slow_replica_and_wrong_profile_are_warned_of(services: Services) -> None:
    step = hardware_profile(H100).step
    poll(services, learned=step)
    assert warnings(services) == []
    poll(services, 2, learned=step.slowed(1.8))
    since = time_of_day(services.wall())
    slower = f"r2 is much slower than other replicas of profile {H100} (since {since}): check "
    assert only_warning(services).startswith(slower)
    advance(services, 4.0)
    poll(services, 1, 3, 4, learned=step)
    poll(services, 2, learned=step.slowed(1.8))
    assert only_warning(services).startswith(slower)
    poll(services, 4, learned=step.slowed(1.8))
    assert f"r2 and r4 are much slower than other replicas of profile {H100} (the first since " in (
        only_warning(services)
    )
    for number in (1, 3, 4):
        poll(services, number, learned=step.slowed(2.5))
    all_slower = f"Replicas of profile {H100} are more than 2 times slower than the profile says"
    assert only_warning(services).startswith(all_slower)


def test_draining_replica_is_not_warned_of(services: Services) -> None:
    poll(services, 2, draining=True)
    assert warnings(services) == []
    assert cells(services, 2, "Health", "Health notes") == ["draining", ""]


def test_source_without_new_replicas_is_warned_of_with_the_reason(services: Services) -> None:
    """A Service that does not exist has lost its replicas, so the warning claims none is kept."""
    services.fleet.pollers = {"here:1": ("Service vllm, port 8000: no EndpointSlices",)}
    assert (
        "Poller here:1 finds no new replicas of Service vllm, port 8000: no EndpointSlices."
        in (page(services)["warnings"])
    )


def test_missing_pollers_and_a_missing_redis_are_warned_of(services: Services) -> None:
    services.fleet.pollers = {}
    assert only_warning(services).startswith(NO_POLLER)
    assert ["Pollers", "none reaches Redis"] in page(services)["facts"]
    services.delays.redis_refusal = "MISCONF cannot save."  # heartbeats are not stored, either
    assert "MISCONF cannot save. A new poller does not" in only_warning(services)
    assert ["Pollers", "unknown: Redis stores nothing"] in page(services)["facts"]
    services.delays.redis_refusal = ""
    services.fleet.pollers = None
    assert only_warning(services).startswith("Redis does not answer")
    assert warnings(replace(services, config=ALONE)) == []


def test_lost_poller_is_warned_of_while_another_lives(services: Services) -> None:
    for alive in ({"a:1", "here:1"}, {"here:1"}):
        services.pollers.look(alive, 1000.0, ())
    (warning,) = warnings(services)
    assert re.match(r"Poller a:1 \(since \S+\) is lost: killed, hung, or cut off", warning)
    assert "The other pollers scrape its replicas." in warning
    services.fleet.pollers = {}
    assert only_warning(services).startswith(NO_POLLER)
    facts = dict(page(services)["facts"])
    assert facts["Pollers"].startswith("none reaches Redis; left: a:1 (since ")
    services.fleet.pollers = {"c:1": ()}
    services.pollers.look({"c:1"}, 1000.0, ())
    assert only_warning(services).startswith("Pollers a:1 (since ")


@pytest.mark.parametrize(
    ("cert", "router", "admin", "links"),
    [
        (None, OTHER, "10.0.0.2:9090", {"other:50051": "http://10.0.0.2:9090/"}),
        ("router.pem", OTHER, "10.0.0.2:9090", {"other:50051": "https://10.0.0.2:9090/"}),
        (None, OTHER, "127.0.0.1:9090", {}),  # of another machine
        (None, OTHER, "", {}),
        (None, "garbage", "127.0.0.1:9090", {}),
    ],
)
def test_other_routers_have_links_to_their_pages(
    services: Services, cert: str | None, router: str, admin: str, links: dict[str, str]
) -> None:
    tls = {"admin": {"tls_cert": cert, "tls_key": cert}}
    services = replace(services, config=Config.model_validate(tls))
    other = Digest(router, 1, services.clock(), DigestKind.WHOLE, (), NOTHING, admin)
    services.fleet.receive_digest(other)
    assert page(services)["links"] == links


@pytest.mark.parametrize(
    ("pollers", "shown"),
    [
        (None, ["Redis does not answer"]),
        ({}, ["No poller reaches Redis", "Stale state of other routers"]),
        ({"here:1": ()}, ["Stale state", "Stale state of other routers"]),
    ],
)
def test_stale_state_is_not_warned_of_beside_its_cause(
    services: Services, pollers: dict[str, Any] | None, shown: list[str]
) -> None:
    other = Digest("10.0.0.2:50051:1f", 1, services.clock(), DigestKind.WHOLE, (), NOTHING)
    services.fleet.receive_digest(other)
    services.fleet.pollers = pollers
    advance(services, 5.1)
    services.fleet.drop_stale(TTL_S)
    assert [each.partition(":")[0] for each in warnings(services)] == shown
    last_heard = dict(page(services)["facts"])["Routers"].endswith("last heard: 10.0.0.2:50051")
    assert last_heard is (pollers is None)


@pytest.mark.parametrize(
    ("ratios", "drifting"),
    [
        ((1.3, 1.3, 2.6, 1.3), 3),
        ((1.7, 1.7, 1.7, 1.7), None),  # the whole fleet is busy
        ((0.4, 0.4, 0.4, 0.4), None),  # the whole fleet is faster
        ((1.7, 1.7), None),
        ((1.7, 5.0), 2),
    ],
)
def test_replica_that_drifts_unlike_the_others_is_warned_of(
    services: Services, ratios: Sequence[float], drifting: int | None
) -> None:
    for number in range(len(ratios) + 1, 5):
        services.fleet.remove(replica(number))
    for number, ratio in enumerate(ratios, start=1):
        for _ in range(50):
            services.fleet.speeds.learn_decode(replica(number), 1.0, ratio)
    if drifting is None:
        assert warnings(services) == []
        return
    begin = f"r{drifting} is drifting from the prediction (since {time_of_day(services.wall())}): "
    assert only_warning(services).startswith(f"{begin}decoding takes much longer than the measured")
    assert cells(services, drifting, "×")[0] > 2
    advance(services, 300.0)  # the ratios fade
    poll(services, *range(1, len(ratios) + 1))
    assert warnings(services) == []


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [
        (["retry"], []),
        (["unknown_address"], ["the chosen address"]),
        (["unknown_address", "fallback"], ["Envoy's fallback policy"]),  # took the second choice
        (["fallback", "other_filter"], ["Envoy's fallback policy", "another filter"]),
    ],
)
def test_decisions_not_followed_are_warned_of_by_cause(
    services: Services, reasons: list[str], causes: list[str]
) -> None:
    for reason in reasons:
        services.envoy_faults[reason] = services.clock()
    begin = "Envoy did not follow decisions in the last minute: "
    found = warnings(services)
    assert len(found) == len(causes)
    for warning, cause in zip(found, causes, strict=True):
        assert warning.startswith(begin + cause)


def test_full_circuit_breaker_is_warned_of(services: Services) -> None:
    services.envoy_faults[OVERLOADED] = services.clock()
    assert only_warning(services).startswith(
        "A circuit breaker of Envoy was full in the last minute"
    )
    advance(services, 61.0)
    poll(services)
    assert warnings(services) == []


def test_cold_prefix_cache_is_warned_of(services: Services) -> None:
    for _ in range(10):
        ended(services, on=1, expected=1000.0, cached=0)
        ended(services, on=2, expected=1000.0, cached=900)
        ended(services, on=3, expected=1000.0)
        ended(services, on=4, expected=10.0, cached=0)
    assert only_warning(services).startswith("r1 is finding less than half of the expected tokens")


def test_full_limits_are_warned_of(services: Services) -> None:
    fill(services)
    for _ in range(9):
        wait(services, "blue")
    full = "The queue is nearly full: beyond 10 requests (hold.most) the rest get 429."
    assert warnings(services) == [full]
    few = Config.model_validate({"serve": {"max_streams": 14}, "hold": {"most": 100}})
    full = "This router is nearly full: beyond 14 requests in flight"
    assert only_warning(replace(services, config=few)).startswith(full)
    advance(services, 151.0)
    poll(services, running=1, kv_usage=0.95)
    assert any("add replicas" in warning for warning in warnings(services))


def test_warnings_of_faults_that_cost_requests_come_first(services: Services) -> None:
    services.delays.redis_refusal = "OOM"
    poll(services, 1, healthy=False, problem="connection refused")
    first, second = warnings(services)
    assert first.startswith("Redis stores nothing")
    assert second.startswith("r1 is excluded")
    poll(services, 2, 3, 4, healthy=False, problem="connection refused")
    assert warnings(services)[0].startswith("No replica is healthy")


@pytest.mark.parametrize(
    ("loop_delay_s", "redis_s", "warned"),
    [
        (0.001, 0.05, ["Redis is slow"]),
        (0.01, 0.03, []),  # the router runs late itself, and so finds Redis slow
        (0.03, 0.05, ["This router is slow"]),
        (0.001, 0.003, []),
    ],
)
def test_slow_router_blames_itself_and_not_redis(
    services: Services, loop_delay_s: float, redis_s: float, warned: list[str]
) -> None:
    services = replace(services, delays=Delays(services.clock))
    for _ in range(300):
        advance(services, 1.0)
        services.delays.loop_delay_s.add(loop_delay_s)
        services.delays.redis_s.add(redis_s)
    poll(services)
    assert [warning.partition(":")[0] for warning in warnings(services)] == warned


def test_gauges_that_do_not_move_are_warned_of_until_they_move(services: Services) -> None:
    for _ in range(5):
        advance(services, 1.0)
        poll(services, 4, running=3, steps=5.0)
    since = f"(since {time_of_day(services.wall())})"
    (warning,) = warnings(services)
    assert warning.startswith(f"r4 is showing gauges that do not move {since}: the router ignores")
    assert warning.endswith("whose gauges still do not move after its next requests.")
    poll(services, 1, 2, 3)
    advance(services, 4.0)
    poll(services, 4, running=3, steps=5.0)
    assert cells(services, 4, "Health notes") == [f"gauges ignored: they do not move {since}"]
    assert warnings(services) == [warning]
    poll(services, 4, running=3, steps=6.0)
    assert warnings(services) == []

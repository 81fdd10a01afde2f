"""The next poll corrects a wrong backlog, whatever made it wrong."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from extproc.fleet.digest import Digest, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.step import hardware_profile
from extproc.replica_state import ReplicaState
from tests.fakes import (
    A10,
    A100,
    H100,
    MODEL,
    ManualClock,
    chat,
    embedding,
    fleet_of,
    replica,
    state,
)
from tests.fleet.conftest import PolledFleet


def backlog(fleet: Fleet) -> float:
    return float(fleet.view(MODEL).backlog[0])


def test_poll_removes_cached_prompts_from_the_backlog() -> None:
    fleet = PolledFleet(1, A100)
    for sent in range(1, 37):
        fleet.dispatch(replica(1), chat(4000, 400))
        fleet.clock.advance(1 / 12)
        if sent % 12 == 0:
            before = backlog(fleet)
            fleet.poll(1, running=sent, steps=20 * sent)
            assert backlog(fleet) <= 5 * 4000 < before, (
                "those of the last 0.4 s may be on their way"
            )


def test_poll_of_a_slow_replica_restores_the_backlog() -> None:
    """The replica is four times slower than its profile."""
    fleet = PolledFleet(1, H100)
    for _ in range(4):
        fleet.dispatch(replica(1), chat(30_000, 400))
    fleet.clock.advance(5.0)
    assert backlog(fleet) == 0
    fleet.poll(1, running=1, waiting=3, kv_usage=0.1)
    assert 90_000 <= backlog(fleet) <= 120_000
    fleet.clock.advance(0.5)
    fleet.poll(1, running=3, waiting=1, kv_usage=0.1)
    assert 30_000 <= backlog(fleet) <= 60_000


def test_poll_undoes_no_first_token(fleet: PolledFleet) -> None:
    for ticket in [fleet.dispatch(replica(1), chat(2000, 400)) for _ in range(4)]:
        fleet.clock.advance(0.6)
        fleet.first_token(ticket)
    aborted = [fleet.dispatch(replica(1), chat(2000, 400)) for _ in range(4)]
    fleet.clock.advance(0.1)
    for ticket in aborted:
        fleet.release(ticket, prefilled=False)
    fleet.clock.advance(0.1)
    fleet.put(state(1, A10, fleet.clock, running=4, waiting=4), age=0.15)
    assert (backlog(fleet), fleet.view(MODEL).batch[0]) == (0, 4)


def test_queue_of_others_leaves_prompts_prefilled(fleet: PolledFleet) -> None:
    for _ in range(4):
        fleet.dispatch(replica(1), chat(1000, 400))
    fleet.clock.advance(5.0)
    fleet.receive_digest(_other_router(requests=5))
    fleet.poll(1, running=4, waiting=5)
    assert backlog(fleet) == 0


def test_prompts_of_a_batch_are_queued_one_by_one(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(2000, 100))
    fleet.dispatch(replica(1), replace(embedding(8000), prompts=50, longest_share=0.02))
    fleet.clock.advance(5.0)
    fleet.poll(1, running=1, waiting=50)
    assert backlog(fleet) == pytest.approx(8000, abs=1)


def test_prompt_sent_after_the_poll_stays_queued(fleet: PolledFleet) -> None:
    fleet.poll(1)
    fleet.dispatch(replica(1), chat(1000, 100))
    fleet.clock.advance(0.5)
    fleet.dispatch(replica(1), chat(1500, 100))
    fleet.clock.advance(0.1)
    fleet.poll(1, running=2, scrape_seconds=0.15)
    assert 1100 < backlog(fleet) < 1500


def test_idle_replica_has_no_backlog(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(16_000, 100))
    fleet.clock.advance(0.5)
    fleet.poll(1)
    assert backlog(fleet) > 10_000, "its first step may not have ended yet"
    fleet.clock.advance(1.0)
    fleet.poll(1)
    assert backlog(fleet) == 0


def test_prompts_that_left_a_shared_queue_are_prefilled(fleet: PolledFleet) -> None:
    for _ in range(20):
        fleet.dispatch(replica(1), chat(1000, 100))
    fleet.clock.advance(1.5)
    fleet.receive_digest(_other_router(requests=5))
    fleet.poll(1, running=20, waiting=5)
    assert backlog(fleet) == pytest.approx(5 * 1000 + 2048, abs=1)


def test_aborted_prompts_build_up_no_backlog(fleet: PolledFleet) -> None:
    streams = []
    for served in range(1, 200):
        streams.append(fleet.dispatch(replica(1), chat(500, 1000)))
        gone = fleet.dispatch(replica(1), chat(500, 1000))
        fleet.clock.advance(2.0)
        fleet.release(gone, prefilled=False)
        fleet.poll(1, running=len(streams), generated_tokens=10 * served)
        if len(streams) == 20:
            fleet.release(streams.pop(0), prefilled=False)
    assert backlog(fleet) <= 2048


def test_restarted_replica_has_no_backlog(fleet: PolledFleet) -> None:
    fleet.poll(1, steps=500)
    fleet.dispatch(replica(1), chat(16_000, 100))
    fleet.clock.advance(0.1)
    fleet.poll(1, steps=0)
    assert backlog(fleet) == 0


@pytest.mark.parametrize("believed", [H100, A100, A10])
@pytest.mark.parametrize("cached", [0.0, 0.9])
def test_backlog_follows_an_engine_of_another_profile(believed: str, cached: float) -> None:
    """At each poll the backlog equals the engine's, to within the prompts of two seconds: gauges
    date from the start of a step, and the last prompts may still be on their way."""
    random, clock = Random(3), ManualClock(0.0)
    profile = hardware_profile(A100)
    engine = Engine(profile, kv_tokens=400_000)
    fleet = fleet_of(clock, believed)
    tickets: dict[int, Ticket] = {}
    errors = []
    for number in range(1, 600):
        clock.advance(random.expovariate(12.0))
        prompt, output = random.randrange(50, 4000), random.randrange(1, 200)
        for outcome in engine.advance(clock()):
            for sequence in outcome.finished:
                fleet.release(tickets.pop(sequence.id))
        hashes = list(range(int(prompt * cached) // 16))
        tickets[number] = fleet.dispatch(replica(1), chat(prompt, output))
        engine.add(Sequence(number, prompt, output, hashes), clock())
        if number % 3 == 0:
            clock.advance(0.001)
            engine.advance(clock())
            fleet.put(_page([engine], clock, profile=believed))
            errors.append(backlog(fleet) - sum(s.prompt_tokens for s in engine.queued))
    slack = 2.0 * 12.0 * 2025  # seconds · prompts/s · mean tokens
    assert all(-slack <= error <= slack for error in errors)


@pytest.mark.parametrize(
    ("late", "engines", "slack"), [(0.01, 1, 12_000), (1.0, 1, 60_000), (0.01, 4, 90_000)]
)
def test_backlog_stays_right_for_minutes(late: float, engines: int, slack: float) -> None:
    """Sixty streams at a time on an A100; one in ten has a visible response.

    ``late``: seconds that a scrape takes.
    """
    random, clock = Random(3), ManualClock(0.0)
    servers = [Engine(hardware_profile(A100), kv_tokens=2_000_000) for _ in range(engines)]
    fleet = fleet_of(clock, A100)
    tickets: dict[int, tuple[Ticket, bool]] = {}
    pages: list[tuple[float, ReplicaState]] = []
    sent, errors, true = 0, [], 0.0
    for tick in range(1, 1200):
        while len(tickets) < 60:
            sent += 1
            prompt, output = random.randrange(50, 8000), random.randrange(1, 30)
            tickets[sent] = fleet.dispatch(replica(1), chat(prompt, output)), sent % 10 == 0
            servers[sent % engines].add(Sequence(sent, prompt, output), clock())
        clock.advance(0.1)
        for outcome in [outcome for server in servers for outcome in server.advance(clock())]:
            for sequence in outcome.prefilled:
                if tickets[sequence.id][1]:
                    fleet.first_token(tickets[sequence.id][0])
            for sequence in outcome.finished:
                fleet.release(*tickets.pop(sequence.id))
        while pages and pages[0][0] <= clock():
            fleet.put(pages.pop(0)[1])
            queued = [sequence for server in servers for sequence in server.queued]
            true = sum(sequence.prompt_tokens - sequence.computed for sequence in queued)
            errors.append(backlog(fleet) - true)
        if tick % 2:
            pages.append((clock() + late / 2, _page(servers, clock, late)))
    assert true > 150_000
    assert all(-slack <= error <= slack for error in errors[len(errors) // 2 :])


def _page(
    servers: list[Engine], clock: ManualClock, late: float = 0.0, profile: str = A100
) -> ReplicaState:
    gauges = [server.gauges for server in servers]
    counters = [server.counters for server in servers]
    return state(
        1,
        profile,
        clock,
        engines=len(servers),
        scrape_seconds=late,
        running=sum(values.running for values in gauges),
        waiting=sum(values.waiting for values in gauges),
        kv_usage=sum(values.kv_usage for values in gauges) / len(servers),
        steps=sum(values.steps for values in counters) / len(servers),
        generated_tokens=sum(values.generated_tokens for values in counters),
    )


def test_prompts_in_a_shared_queue_are_not_prefilled() -> None:
    """An A10 with the profile of an H100."""
    fleet, begun = PolledFleet(1, H100), 1
    for _ in range(30):
        fleet.dispatch(replica(1), chat(8000, 400))
    for number in range(1, 61):
        fleet.clock.advance(0.2)
        fleet.receive_digest(_other_router(requests=1, number=number))
        begun = 1 + int(number * 0.2 / 2.08)
        figures = {"running": 1 + begun, "waiting": 30 - begun}
        fleet.poll(1, kv_usage=0.1, generated_tokens=50 * number, **figures)
    assert backlog(fleet) == pytest.approx((30 - begun) * 8000, abs=2 * 8192)


@pytest.mark.parametrize("again", ["rejoins", "is heard of no more for a while"])
def test_returning_replica_keeps_its_backlog(again: str, fleet: PolledFleet) -> None:
    counted = {"running": 1, "waiting": 9, "generated_tokens": 9000}
    fleet.poll(1, **(counted | {"waiting": 0}))
    for _ in range(10):
        fleet.dispatch(replica(1), chat(4000, 100))
    fleet.clock.advance(0.2)
    fleet.poll(1, **counted)
    before = backlog(fleet)
    if again == "rejoins":
        fleet.remove(replica(1))
    else:
        fleet.poll(1, healthy=False)
    fleet.poll(1, **counted)
    assert backlog(fleet) == pytest.approx(before)
    assert before > 36_000


def test_backlog_of_a_dead_router_is_external(fleet: PolledFleet) -> None:
    """Fifty prompts of 4,000 tokens wait on the replica, and no router reports them."""
    left = {"running": 20, "waiting": 50, "first_tokens": 100, "prompt_tokens": 400_000}
    for _ in range(3):
        fleet.clock.advance(0.2)
        fleet.poll(1, generated_tokens=5000, **left)
    assert backlog(fleet) == pytest.approx(200_000)
    fleet.clock.advance(0.2)
    fleet.poll(1, generated_tokens=5000, **(left | {"waiting": 0}))
    assert backlog(fleet) == 0


def test_late_page_makes_no_external_load(fleet: PolledFleet) -> None:
    for _ in range(20):
        tickets = [fleet.dispatch(replica(1), chat(100, 50)) for _ in range(8)]
        fleet.clock.advance(3.0)
        for ticket in tickets:
            fleet.release(ticket)
        fleet.poll(1, running=8, scrape_seconds=2.0)
    view = fleet.view(MODEL)
    assert (view.requests[0], view.batch[0]) == (0, 0)


def _other_router(requests: int, number: int = 1) -> Digest:
    load = [requests, 0, 0, 0, requests, requests * 500, requests * 50, 0, 0, requests]
    figures = np.array([load], dtype=float).T
    return Digest("other", number, 0.0, DigestKind.WHOLE, (replica(1),), figures)

"""Slow start limits the requests of a new replica until its speed is measured."""

from dataclasses import asdict

import pytest

from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.predict.inputs import usual_step
from extproc.predict.step import profile_or_default
from extproc.proxy.sharing import apply
from extproc.share.replicas import Snapshot
from tests.fakes import A10, H100, MODEL, ManualClock, chat, fleet_of, replica, state
from tests.large import bytecodes, thousand_states

NEW = replica(3)
FAST = asdict(profile_or_default(A10).step.slowed(0.3))


def joined(clock: ManualClock, profile: str) -> Fleet:
    """Fleet of two measured replicas and a third that has just joined."""
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(3, profile, clock, measured=False))
    return fleet


def fill(fleet: Fleet) -> list[Ticket]:
    """Sends requests to the new replica while it is a candidate."""
    tickets: list[Ticket] = []
    while NEW in fleet.view(MODEL).ids:
        tickets.append(fleet.dispatch(NEW, chat(10, 10)))
    return tickets


def assert_unlimited(fleet: Fleet, *replicas: str) -> None:
    for name in replicas * 20:
        assert name in fleet.view(MODEL).ids
        fleet.dispatch(name, chat(10, 10))


def test_new_replica_gets_four_requests_at_first() -> None:
    fleet = joined(ManualClock(), H100)
    tickets = fill(fleet)
    assert len(tickets) == 4
    view = fleet.view(MODEL)
    assert view.candidates.everywhere == {MODEL}, "a retry may go to the new replica"
    (excluded,) = view.excluded
    assert (excluded.replica, excluded.name) == (NEW, "r3")
    assert excluded.why == "new, and its speed not measured yet: at most 4 requests at a time"


def test_full_new_replica_costs_a_decision_few_bytecodes(clock: ManualClock) -> None:
    """Replicas of a large pool come and go all the time."""
    fleet = joined(clock, A10)
    for other in thousand_states():
        fleet.put(other)
    first, *_ = fill(fleet)
    candidates = fleet.view(MODEL).candidates
    full = bytecodes(lambda: fleet.view(MODEL))
    assert fleet.view(MODEL).candidates is candidates, "queued requests share its set of rows"
    fleet.release(first)
    assert full < 2 * bytecodes(lambda: fleet.view(MODEL))


def test_newly_full_new_replica_costs_a_decision_few_bytecodes(clock: ManualClock) -> None:
    """While a large pool starts anew, the replicas that are full change with each request."""
    fleet = joined(clock, A10)
    for other in thousand_states():
        fleet.put(other)
    first, *_ = fill(fleet)
    fleet.release(first)
    for _ in range(2):
        fleet.dispatch(NEW, chat(10, 10))
    assert bytecodes(lambda: fleet.view(MODEL)) < 2 * bytecodes(lambda: fleet.view(MODEL))
    assert NEW not in fleet.view(MODEL).ids


def test_equal_new_replicas_are_predicted_equal(clock: ManualClock) -> None:
    fleet = joined(clock, A10)
    fleet.put(state(4, A10, clock, measured=False))
    for number in (1, 2):
        fleet.put(state(number, H100, clock, measured=True))
    third, fourth = fleet.view(MODEL).c0[2:]
    assert third == fourth


def test_each_ended_request_raises_the_limit_of_a_new_replica() -> None:
    fleet = joined(ManualClock(), H100)
    for ticket in fill(fleet):
        fleet.release(ticket)
    assert len(fill(fleet)) == 8


def test_requests_from_before_a_rejoin_do_not_raise_the_limit(clock: ManualClock) -> None:
    fleet = joined(clock, H100)
    fleet.put(state(4, H100, clock, measured=False))
    tickets = fill(fleet)
    fleet.remove(NEW)
    fleet.put(state(3, H100, clock, healthy=False, measured=False))
    for ticket in tickets:
        fleet.release(ticket)
    fleet.put(state(3, H100, clock, measured=False))
    assert len(fill(fleet)) == 4


def test_measured_replica_has_no_limit(clock: ManualClock) -> None:
    fleet = joined(clock, H100)
    fill(fleet)
    fleet.put(state(3, H100, clock, measured=True))
    assert_unlimited(fleet, NEW)
    fleet.put(state(3, H100, clock, measured=False))  # idle for so long that it is forgotten
    assert NEW in fleet.view(MODEL).ids


def test_restarted_replica_gets_four_requests_at_first(clock: ManualClock) -> None:
    fleet = joined(clock, H100)
    fleet.put(state(3, H100, clock, steps=100, measured=True))
    fleet.put(state(3, H100, clock, steps=1, measured=False))
    for _ in range(4):
        fleet.dispatch(NEW, chat(10, 10))
    assert NEW not in fleet.view(MODEL).ids


def test_pool_that_restarts_as_a_whole_has_no_limit(clock: ManualClock) -> None:
    fleet, numbers = fleet_of(clock, A10, A10, A10), (1, 2, 3)
    for number in numbers:  # a failed scrape keeps the last figures
        fleet.put(state(number, A10, clock, healthy=False, started_at=1.0))
    for number in numbers:
        fleet.put(state(number, A10, clock, measured=False, started_at=2.0))
    assert_unlimited(fleet, *map(replica, numbers))


def test_external_load_counts_towards_the_limit(clock: ManualClock) -> None:
    fleet = joined(clock, H100)
    for _ in range(2):
        clock.advance(0.2)
        fleet.put(state(3, H100, clock, running=4, measured=False))
    assert NEW not in fleet.view(MODEL).ids


def test_first_replicas_of_a_pool_have_no_limit(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10, A10)
    fleet.put(state(1, A10, clock, measured=True))
    assert_unlimited(fleet, NEW)
    assert len(fleet.view(MODEL)) == 3


def test_replicas_of_the_first_snapshot_have_no_limit(clock: ManualClock) -> None:
    fleet = fleet_of(clock)
    states = (state(1, A10, clock, measured=True), state(3, A10, clock, measured=False))
    list(apply(fleet, Snapshot(states)))
    assert_unlimited(fleet, NEW)


def test_limit_is_ignored_if_all_replicas_are_new() -> None:
    fleet = joined(ManualClock(), A10)
    fill(fleet)
    for number in (1, 2):
        fleet.remove(replica(number))
    assert fleet.view(MODEL).ids == [NEW]


def test_slow_start_begins_when_a_replica_is_healthy(clock: ManualClock) -> None:
    fleet = fleet_of(clock)
    fleet.put(state(3, H100, clock, healthy=False, measured=False))
    fleet.put(state(1, A10, clock, measured=True))
    fleet.put(state(3, H100, clock, measured=False))
    assert len(fill(fleet)) == 4


@pytest.mark.parametrize("in_flight", [0, 1])
def test_idle_new_replica_is_predicted_as_fast_as_fastest_replica(
    in_flight: int, clock: ManualClock
) -> None:
    """All three have the same profile, which is right for none of them."""
    fleet = fleet_of(clock)
    for number in (1, 2):
        fleet.put(state(number, A10, clock, learned=FAST, measured=True))
    fleet.put(state(3, A10, clock, measured=False))
    for _ in range(in_flight):
        fleet.dispatch(NEW, chat(10, 10))
    view = fleet.view(MODEL)
    slow = [column[2] > column[0] * 1.01 for column in (view.c_batch, view.c0, view.decode_step)]
    assert slow == [in_flight > 0] * 3


# -- first tokens before the first measurement -------------------------------------------------


def prefill_times(fleet: Fleet) -> list[float]:
    return [float(seconds) for seconds in fleet.view(MODEL).c_prefill]


@pytest.fixture
def fresh() -> Fleet:
    clock = ManualClock()
    fleet = fleet_of(clock)
    for number in (1, 2, 3):
        fleet.put(state(number, A10, clock, measured=False))
        fleet.dispatch(replica(number), chat(10, 10))
    return fleet


@pytest.mark.parametrize("slowness", [0.3, 3.0])
def test_first_token_of_unmeasured_replica_tells_its_speed(fresh: Fleet, slowness: float) -> None:
    before = prefill_times(fresh)[0]
    step = usual_step(fresh.view(MODEL), 0)
    fresh.speeds.learn_first_token(replica(1), 100.0, 100.0 * step * slowness)
    first, *others = prefill_times(fresh)
    assert first == pytest.approx(before * slowness, rel=0.05)
    assert others == [before, before]


def test_measured_speed_replaces_that_of_first_tokens(fresh: Fleet) -> None:
    before, clock = prefill_times(fresh), ManualClock()
    fresh.speeds.learn_first_token(replica(1), 100.0, 100.0)
    fresh.put(state(1, A10, clock, measured=True))
    assert prefill_times(fresh) == before
    fresh.speeds.learn_first_token(replica(1), 100.0, 100.0)
    assert prefill_times(fresh) == before


def test_new_process_forgets_first_tokens_of_the_old_one(fresh: Fleet) -> None:
    before, clock = prefill_times(fresh), ManualClock()
    fresh.put(state(1, A10, clock, measured=False, started_at=1.0))
    fresh.speeds.learn_first_token(replica(1), 100.0, 100.0)
    assert prefill_times(fresh) != before
    fresh.put(state(1, A10, clock, measured=False, started_at=2.0))
    assert prefill_times(fresh) == before

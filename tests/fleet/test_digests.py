"""Digests are due in time, and let routers count each other's requests."""

from functools import partial

import pytest
from msgspec.structs import replace

from extproc.fleet.digest import EVERY_S, NOTHING, Digest, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.share.digests import DIGEST
from extproc.share.envelope import Skips
from tests.fakes import A10, MODEL, ManualClock, chat, embedding, fleet_of, replica, state


def routers(clock: ManualClock, count: int, replicas: int = 2) -> list[Fleet]:
    return [fleet_of(clock, *[A10] * replicas) for _ in range(count)]


def deliver(sender: Fleet, *receivers: Fleet) -> Digest | None:
    """Delivers the digest that is due, encoded and decoded."""
    digest = sender.digests.due(sender.now)
    if digest is not None:
        for receiver in receivers:
            receiver.receive_digest(Skips().open("test", DIGEST.seal(digest), DIGEST))
    return digest


def due(fleet: Fleet) -> Digest:
    digest = fleet.digests.due(fleet.now)
    assert digest is not None
    return digest


def seen(fleet: Fleet, *columns: str) -> list[list[float]]:
    view = fleet.view(MODEL)
    return [getattr(view, column).tolist() for column in columns]


# -- when a digest is due -------------------------------------------------------------------


def test_digest_is_due_after_a_change_and_as_a_sign_of_life(clock: ManualClock) -> None:
    (fleet,) = routers(clock, 1)

    def kinds(seconds: float) -> list[tuple[str, int]]:
        said = []
        for _ in range(round(seconds / EVERY_S)):
            clock.advance(EVERY_S)
            digest = fleet.digests.due(clock())
            if digest is not None:
                said.append((digest.kind.name, len(digest.replicas)))
        return said

    assert kinds(0.02) == [("WHOLE", 0)]
    assert kinds(2.0) == [("WHOLE", 0)] * 4, "idle: it is alive, and no more"
    ticket = fleet.dispatch(replica(1), embedding(0))
    assert kinds(0.06)[0] == ("CHANGES", 1)
    busy = kinds(0.4)
    assert set(busy) == {("CHANGES", 0)}
    assert len(busy) == 10, "nothing changed, and nobody takes it for dead"
    fleet.release(ticket)
    assert kinds(0.02) == [("CHANGES", 1)]
    assert ("CHANGES", 0) not in kinds(0.2), "idle again"


def test_router_without_peers_sends_only_whole_digests(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    deliver(first, second)
    first.dispatch(replica(1), chat(1000, 100))
    clock.advance(EVERY_S)
    assert first.digests.due(clock(), no_peers=not first.peers) is None
    deliver(second, first)
    digest = first.digests.due(clock(), no_peers=not first.peers)
    assert digest is not None
    assert (digest.kind, digest.replicas) == (DigestKind.CHANGES, (replica(1),))
    second.receive_digest(digest)
    assert second.view(MODEL).requests.tolist() == [1, 0]


def test_router_cut_off_from_redis_still_sends_changes(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    deliver(second, first)
    deliver(first, second)
    clock.advance(0.3)
    deliver(first, second)
    for _ in range(20):
        clock.advance(0.1)
        first.view(MODEL)
        deliver(first, second)
    first.dispatch(replica(1), chat(1000, 100))
    clock.advance(EVERY_S)
    assert first.digests.due(clock(), no_peers=not first.peers) is not None


def test_digest_after_a_failed_send_is_whole(clock: ManualClock) -> None:
    (fleet,) = routers(clock, 1)
    fleet.dispatch(replica(1), chat(10))
    fleet.digests.due(clock())
    fleet.digests.repeat()
    digest = due(fleet)
    assert (digest.kind, digest.replicas) == (DigestKind.WHOLE, (replica(1),))


# -- requests of peers ----------------------------------------------------------------------


def test_peers_requests_count_as_the_peer_counts_them(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    ticket = first.dispatch(replica(1), chat(1000, 100, sequences=3))
    deliver(first, second)
    columns = ("requests", "waiting", "backlog", "batch", "kv_used")
    assert seen(second, *columns) == seen(first, *columns)
    assert seen(second, "requests", "backlog") == [[1, 0], [1000, 0]]
    own, peers = (fleet.sequences(fleet.view(MODEL)) for fleet in (first, second))
    assert own.weight @ own.remaining == pytest.approx(peers.weight @ peers.remaining)
    clock.advance(EVERY_S)
    first.release(ticket)
    deliver(first, second)
    assert seen(second, *columns) == [[0, 0]] * 5


def test_peers_requests_progress_between_digests(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    for _ in range(3):
        first.dispatch(replica(1), chat(1000, 500))
    deliver(first, second)
    for _ in range(40):
        clock.advance(0.02)
        for fleet in (first, second):
            fleet.view(MODEL)
        (own,), (peers,) = ([seen(fleet, "backlog")[0][0]] for fleet in (first, second))
        assert peers == pytest.approx(own, rel=0.02, abs=1)
        second.receive_digest(_still(first, clock))
    for _ in range(25):
        clock.advance(0.02)
        for fleet in (first, second):
            fleet.view(MODEL)
        second.receive_digest(_still(first, clock))
    assert seen(second, "batch")[0][0] == pytest.approx(3, abs=0.01)
    assert seen(second, "waiting")[0][0] == pytest.approx(0, abs=0.01)
    kv, expected = (seen(fleet, "kv_used")[0][0] for fleet in (second, first))
    assert kv == pytest.approx(expected, rel=0.02)
    before = second.sequences(second.view(MODEL)).context[0]
    clock.advance(0.05)
    assert second.sequences(second.view(MODEL)).context[0] > before


def _still(fleet: Fleet, clock: ManualClock) -> Digest:
    """Digest without changes, as a sign of life."""
    number = round(clock() * 1000)
    return Digest(fleet.router, number, clock(), DigestKind.CHANGES, (), NOTHING)


def test_whole_digests_have_the_admin_address_until_the_peer_leaves(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.digests.admin = "10.0.0.1:9090"
    deliver(first, second)
    admins = {first.router.rpartition(":")[0]: "10.0.0.1:9090"}
    assert second.peers.admins == admins
    first.dispatch(replica(1), embedding(0))
    clock.advance(EVERY_S)
    digest = deliver(first, second)
    assert digest is not None
    assert (digest.kind, digest.admin) == (DigestKind.CHANGES, "")
    assert second.peers.admins == admins
    second.receive_digest(first.digests.farewell())
    assert second.peers.admins == {}


def test_prompt_takes_longer_beside_a_peers_prompt(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.dispatch(replica(1), chat(3000, 100))
    second.dispatch(replica(1), chat(1000, 100))
    deliver(first, second)
    clock.advance(0.5)
    second.receive_digest(_still(first, clock))
    assert 0 < seen(second, "backlog")[0][0] < 4000
    clock.advance(1.0)
    second.receive_digest(_still(first, clock))
    assert seen(second, "backlog", "batch") == [[0, 0], [2, 0]]


def test_silent_peer_is_dead_once_the_routers_own_digests_come_back(clock: ManualClock) -> None:
    """While Redis hangs, no digest comes, and no peer is to blame."""
    first, second = routers(clock, 2)
    deliver(first, second)
    clock.advance(1.6)
    second.drop_stale(10)
    assert len(second.peers) == 1
    deliver(second, second)
    assert len(second.peers) == 0


def test_digest_of_an_unknown_replica_is_ignored(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.put(state(3, A10, clock))
    first.dispatch(replica(3), chat(100, 1000))
    first.dispatch(replica(2), chat(100, 1000))
    deliver(first, second)
    assert seen(second, "requests") == [[0, 1]]
    assert len(second.sequences(second.view(MODEL)).weight) == 1
    second.put(state(3, A10, clock))
    clock.advance(0.6)
    deliver(first, second)
    assert seen(second, "requests") == [[0, 1, 1]]


def test_reused_row_has_no_peers_requests(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.dispatch(replica(1), chat(100, 1000))
    deliver(first, second)
    second.remove(replica(1))
    second.put(state(7, A10, clock))
    assert seen(second, "requests") == [[0, 0]]
    assert len(second.sequences(second.view(MODEL)).weight) == 0


# -- fresh and stale digests ----------------------------------------------------------------


def _six_decode(clock: ManualClock) -> list[Fleet]:
    """Two routers with one replica; the first has six requests, which the other knows."""
    first, second = routers(clock, 2, replicas=1)
    for _ in range(6):
        first.first_token(first.dispatch(replica(1), chat(5000, 2000)))
    deliver(first, second)
    return [first, second]


def _polled(clock: ManualClock, *fleets: Fleet) -> None:
    """Two polls report six running requests of 5,000 tokens each."""
    for _ in range(2):
        clock.advance(EVERY_S)
        for fleet in fleets:
            fleet.put(state(1, A10, clock, running=6, kv_usage=30_000 / 42_000, first_tokens=6))


def test_stale_digest_turns_a_peers_load_into_external_load(clock: ManualClock) -> None:
    first, second = _six_decode(clock)
    _polled(clock, first, second)
    for _ in range(3):
        deliver(first, second)
        assert seen(second, "requests", "batch") == [[6], [6]]
        assert seen(second, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
        clock.advance(0.11)
        assert seen(second, "requests", "batch") == [[6], [6]]
        assert seen(second, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
        assert second.peers.stale


def test_peers_request_after_a_poll_is_added_to_polled_load(clock: ManualClock) -> None:
    first, second = routers(clock, 2, replicas=1)
    deliver(first, second)
    _polled(clock, second)
    first.first_token(first.dispatch(replica(1), chat(5000, 2000)))
    clock.advance(EVERY_S)
    deliver(first, second)
    before = seen(second, "requests", "kv_used")
    assert before[0] == [7]
    clock.advance(0.11)
    assert seen(second, "requests")[0] == [6]
    deliver(first, second)
    assert seen(second, "requests")[0] == [7]
    assert seen(second, "kv_used")[0][0] == pytest.approx(before[1][0], rel=0.01)


def test_load_polled_while_a_peer_was_stale_is_the_peers_again(clock: ManualClock) -> None:
    first, second = _six_decode(clock)
    clock.advance(0.11)
    assert seen(second, "requests")[0] == [0]
    _polled(clock, first, second)
    assert seen(second, "requests")[0] == [6]
    assert second.peers.stale
    deliver(first, second)
    assert seen(second, "requests", "batch") == [[6], [6]]
    assert seen(second, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
    assert not second.peers.stale


def test_digest_age_ignores_the_senders_clock(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.dispatch(replica(1), chat(100, 1000))
    digest = due(first)
    second.receive_digest(replace(digest, sent_at=clock() - 3600))
    assert seen(second, "requests") == [[1, 0]]


def test_peer_whose_first_digest_is_empty_counts(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    own = due(first)
    clock.advance(0.02)
    first.receive_digest(own)  # digests take 20 ms
    first.receive_digest(_still(second, clock))
    assert not first.peers.stale


def test_peers_are_stale_and_not_dead_while_redis_is_away(clock: ManualClock) -> None:
    first, second = routers(clock, 2)
    first.dispatch(replica(1), chat(100, 1000))
    deliver(first, second)
    for _ in range(10):
        clock.advance(1.0)
        assert seen(second, "requests") == [[0, 0]]
        assert second.peers.stale
    second.peers.connected()
    deliver(first, second)
    assert seen(second, "requests") == [[1, 0]]
    assert not second.peers.stale


def test_decode_times_of_all_routers_correct_predictions(clock: ManualClock) -> None:
    first, other = routers(clock, 2)
    for fleet in (first, other):
        fleet.dispatch(replica(1), chat(100, 4000))
    first.speeds.learn_decode(replica(1), predicted=10.0, actual=15.0)
    other.speeds.learn_decode(replica(1), predicted=10.0, actual=18.0)
    deliver(other, first)
    expected = (15.0 + 18.0 + 5.0) / (10.0 + 10.0 + 5.0)
    assert first.view(MODEL).stretch[0] == pytest.approx(expected)
    clock.advance(60.0)
    assert 1.0 < first.view(MODEL).stretch[0] < 1.2, "the correction fades"


def test_replicas_with_fewer_requests_of_a_peer_are_named_once(clock: ManualClock) -> None:
    here, other = routers(clock, 2, replicas=3)
    tickets = [other.dispatch(replica(number), chat(100)) for number in (1, 2, 3)]
    deliver(other, here)
    assert not here.peers.take_freed(most=2)
    for ticket in tickets:
        other.release(ticket)
    clock.advance(0.1)
    deliver(other, here)
    assert [*here.peers.take_freed(most=2), *here.peers.take_freed(most=2)] == [0, 1, 2]
    assert not here.peers.take_freed(most=2)


def test_queues_of_fresh_peers_count_up_to_a_limit_each(clock: ManualClock) -> None:
    here, *others = routers(clock, 3)
    queues = ({replica(1): {0: 1.5, 1: 9.0}, replica(2): {0: 0.5}}, {replica(1): {0: 5.0}})
    for other, queued in zip(others, queues, strict=True):
        other.digests.queued = partial(dict, queued)
        deliver(other, here)
    assert here.peers.queued(0, most=3.0) == 2.0 + 3.0
    assert here.peers.queued(1, most=10.0) == 9.0
    clock.advance(0.7)
    deliver(others[0], here)
    assert here.peers.queued(0, most=3.0) == 2.0


def test_changed_queue_is_sent_without_requests_in_flight(clock: ManualClock) -> None:
    here, other = routers(clock, 2)
    queue = {replica(1): {0: 1.0}, replica(2): {0: 2.0}, replica(3): {1: 4.0}}
    other.digests.queued = lambda: dict(queue)
    deliver(other, here)
    assert here.peers.queued(0, most=10.0) == 3.0
    del queue[replica(1)]
    queue[replica(2)] = {0: 5.0}
    clock.advance(2 * EVERY_S)
    digest = deliver(other, here)
    assert digest is not None
    assert digest.queued == {replica(1): {}, replica(2): {0: 5.0}}
    assert [here.peers.queued(priority, most=10.0) for priority in (0, 1)] == [5.0, 4.0]
    assert not here.peers.queued_for(replica(1))
    clock.advance(0.3)
    assert deliver(other, here) is None
    clock.advance(0.2)
    digest = deliver(other, here)
    assert digest is not None
    assert digest.queued == queue

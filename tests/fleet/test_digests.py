"""What routers tell each other, and what each makes of it."""

import pytest
from msgspec.structs import replace

from extproc.fleet.digest import EVERY_S, NOTHING, Digest, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.predict.lengths import OutputLengths
from extproc.share.digests import DIGEST
from tests.fakes import MODEL, ManualClock, chat, embedding, replica, state

A10 = "llama-8b-a10"


def routers(clock: ManualClock, count: int, replicas: int = 2) -> list[Fleet]:
    fleets = [Fleet(OutputLengths(), clock, clock) for _ in range(count)]
    for fleet in fleets:
        for number in range(1, replicas + 1):
            fleet.put(state(number, A10, clock))
    return fleets


def tell(teller: Fleet, *hearers: Fleet, clock: ManualClock) -> Digest | None:
    """Sends what is due, as bytes; None where nothing is."""
    digest = teller.digests.due(clock())
    if digest is not None:
        for hearer in hearers:
            hearer.receive_digest(DIGEST.unseal(DIGEST.seal(digest)))
    return digest


def seen(fleet: Fleet, *columns: str) -> list[list[float]]:
    view = fleet.view(MODEL)
    return [getattr(view, column).tolist() for column in columns]


# -- when there is something to tell --------------------------------------------------------


def test_digest_is_due_after_a_change_and_as_a_sign_of_life() -> None:
    clock = ManualClock()
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


def test_router_without_peers_sends_only_whole_digests() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    tell(one, two, clock=clock)
    one.dispatch(replica(1), chat(1000, 100))
    clock.advance(EVERY_S)
    assert one.digests.due(clock(), no_peers=not one.peers) is None
    tell(two, one, clock=clock)
    digest = one.digests.due(clock(), no_peers=not one.peers)
    assert digest is not None
    assert (digest.kind, digest.replicas) == (DigestKind.CHANGES, (replica(1),)), "what two missed"
    two.receive_digest(digest)
    assert two.view(MODEL).requests.tolist() == [1, 0]


def test_router_cut_off_from_redis_still_sends_changes() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    tell(two, one, clock=clock)
    tell(one, two, clock=clock)
    one.peers.cut_off()
    clock.advance(0.3)
    tell(one, two, clock=clock)
    for _ in range(20):
        clock.advance(0.1)
        one.view(MODEL)
        tell(one, two, clock=clock)
    one.dispatch(replica(1), chat(1000, 100))
    clock.advance(EVERY_S)
    assert one.digests.due(clock(), no_peers=not one.peers) is not None


def test_digest_after_a_failed_send_is_whole() -> None:
    clock = ManualClock()
    (fleet,) = routers(clock, 1)
    fleet.dispatch(replica(1), chat(10))
    fleet.digests.due(clock())
    fleet.digests.repeat()
    digest = fleet.digests.due(clock())
    assert digest is not None
    assert (digest.kind, digest.replicas) == (DigestKind.WHOLE, (replica(1),))


# -- what others make of it -----------------------------------------------------------------


def test_peers_requests_count_as_the_peer_counts_them() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    ticket = one.dispatch(replica(1), chat(1000, 100, sequences=3))
    tell(one, two, clock=clock)
    columns = ("requests", "waiting", "backlog", "batch", "kv_used")
    assert seen(two, *columns) == seen(one, *columns)
    assert seen(two, "requests", "backlog") == [[1, 0], [1000, 0]]
    ours, theirs = (fleet.sequences(fleet.view(MODEL)) for fleet in (one, two))
    assert ours.weight @ ours.remaining == pytest.approx(theirs.weight @ theirs.remaining)
    clock.advance(EVERY_S)
    one.release(ticket)
    tell(one, two, clock=clock)
    assert seen(two, *columns) == [[0, 0]] * 5


def test_peers_requests_progress_between_digests() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    for _ in range(3):
        one.dispatch(replica(1), chat(1000, 500))
    tell(one, two, clock=clock)
    for _ in range(40):
        clock.advance(0.02)
        for fleet in (one, two):
            fleet.view(MODEL)
        (ours,), (theirs,) = ([seen(fleet, "backlog")[0][0]] for fleet in (one, two))
        assert theirs == pytest.approx(ours, rel=0.02, abs=1)
        two.receive_digest(_still(one, clock))
    for _ in range(25):
        clock.advance(0.02)
        for fleet in (one, two):
            fleet.view(MODEL)
        two.receive_digest(_still(one, clock))
    assert seen(two, "batch")[0][0] == pytest.approx(3, abs=0.01)
    assert seen(two, "waiting")[0][0] == pytest.approx(0, abs=0.01)
    kv, expected = (seen(fleet, "kv_used")[0][0] for fleet in (two, one))
    assert kv == pytest.approx(expected, rel=0.02)
    before = two.sequences(two.view(MODEL)).context[0]
    clock.advance(0.05)
    assert two.sequences(two.view(MODEL)).context[0] > before


def _still(fleet: Fleet, clock: ManualClock) -> Digest:
    """A sign of life, and no more."""
    number = round(clock() * 1000)
    return Digest(fleet.router, number, clock(), DigestKind.CHANGES, (), NOTHING)


def test_prompt_takes_longer_beside_a_peers_prompt() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    one.dispatch(replica(1), chat(3000, 100))
    two.dispatch(replica(1), chat(1000, 100))
    tell(one, two, clock=clock)
    clock.advance(0.5)
    two.receive_digest(_still(one, clock))
    assert 0 < seen(two, "backlog")[0][0] < 4000
    clock.advance(1.0)
    two.receive_digest(_still(one, clock))
    assert seen(two, "backlog", "batch") == [[0, 0], [2, 0]]


def test_the_first_digest_takes_others_out_of_what_polls_saw() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    for _ in range(4):
        one.dispatch(replica(1), chat(100, 1000))
    clock.advance(0.5)
    for _ in range(2):
        clock.advance(0.2)
        for fleet in (one, two):
            fleet.put(state(1, A10, clock, running=6, kv_usage=0.05))
    assert seen(two, "requests")[0][0] == 6
    tell(one, two, clock=clock)
    assert seen(two, "requests", "batch") == [[6, 0], [6, 0]]
    clock.advance(0.05)
    tell(one, two, clock=clock)
    two.put(state(1, A10, clock, running=6, kv_usage=0.05))
    assert seen(two, "requests", "batch") == [[6, 0], [6, 0]]
    assert seen(two, "kv_used")[0][0] == pytest.approx(0.05 * 42_000, rel=0.1)


def test_idle_router_forgets_dead_peers() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    tell(one, two, clock=clock)
    two.drop_stale(10)
    assert len(two.peers) == 1
    clock.advance(1.6)
    two.drop_stale(10)
    assert len(two.peers) == 0


def test_digest_of_an_unknown_replica_is_ignored() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    one.put(state(3, A10, clock))
    one.dispatch(replica(3), chat(100, 1000))
    one.dispatch(replica(2), chat(100, 1000))
    tell(one, two, clock=clock)
    assert seen(two, "requests") == [[0, 1]]
    assert len(two.sequences(two.view(MODEL)).weight) == 1
    two.put(state(3, A10, clock))
    clock.advance(0.6)
    tell(one, two, clock=clock)
    assert seen(two, "requests") == [[0, 1, 1]]


def test_reused_row_has_no_peers_requests() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    one.dispatch(replica(1), chat(100, 1000))
    tell(one, two, clock=clock)
    two.remove(replica(1))
    two.put(state(7, A10, clock))
    assert seen(two, "requests") == [[0, 0]]
    assert len(two.sequences(two.view(MODEL)).weight) == 0


# -- how fresh it is ------------------------------------------------------------------------


def _six_decode(clock: ManualClock) -> list[Fleet]:
    """Two routers before one replica, and requests of the first that the other has heard of."""
    one, two = routers(clock, 2, replicas=1)
    for _ in range(6):
        one.first_token(one.dispatch(replica(1), chat(5000, 2000)))
    tell(one, two, clock=clock)
    return [one, two]


def _polled(clock: ManualClock, *fleets: Fleet) -> None:
    """Both polls see six running requests, of 5,000 tokens each."""
    for _ in range(2):
        clock.advance(EVERY_S)
        for fleet in fleets:
            fleet.put(state(1, A10, clock, running=6, kv_usage=30_000 / 42_000, first_tokens=6))


def test_stale_digest_turns_a_peers_load_into_external_load() -> None:
    clock = ManualClock()
    one, two = _six_decode(clock)
    _polled(clock, one, two)
    for _ in range(3):
        tell(one, two, clock=clock)
        assert seen(two, "requests", "batch") == [[6], [6]]
        assert seen(two, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
        clock.advance(0.11)
        assert seen(two, "requests", "batch") == [[6], [6]]
        assert seen(two, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
        assert two.peers.stale


def test_peers_request_after_a_poll_is_added_to_polled_load() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2, replicas=1)
    tell(one, two, clock=clock)
    _polled(clock, two)
    one.first_token(one.dispatch(replica(1), chat(5000, 2000)))
    clock.advance(EVERY_S)
    tell(one, two, clock=clock)
    before = seen(two, "requests", "kv_used")
    assert before[0] == [7]
    clock.advance(0.11)
    assert seen(two, "requests")[0] == [6]
    tell(one, two, clock=clock)
    assert seen(two, "requests")[0] == [7]
    assert seen(two, "kv_used")[0][0] == pytest.approx(before[1][0], rel=0.01)


def test_load_polled_while_a_peer_was_stale_is_the_peers_again() -> None:
    clock = ManualClock()
    one, two = _six_decode(clock)
    clock.advance(0.11)
    assert seen(two, "requests")[0] == [0]
    _polled(clock, one, two)
    assert seen(two, "requests")[0] == [6]
    assert two.peers.stale
    tell(one, two, clock=clock)
    assert seen(two, "requests", "batch") == [[6], [6]]
    assert seen(two, "kv_used")[0][0] == pytest.approx(30_000, rel=0.01)
    assert not two.peers.stale


def test_digest_age_ignores_the_senders_clock() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    one.dispatch(replica(1), chat(100, 1000))
    digest = one.digests.due(clock())
    assert digest is not None
    two.receive_digest(replace(digest, sent_at=clock() - 3600))
    assert seen(two, "requests") == [[1, 0]]


def test_peer_whose_first_digest_is_empty_counts() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    own = one.digests.due(clock())
    assert own is not None
    clock.advance(0.02)
    one.receive_digest(own)  # digests take 20 ms
    one.receive_digest(_still(two, clock))
    assert not one.peers.stale


def test_peers_are_stale_and_not_dead_while_redis_is_away() -> None:
    clock = ManualClock()
    one, two = routers(clock, 2)
    two.peers.cut_off()
    two.view(MODEL)
    assert not two.peers.stale, "there was nobody"
    two.peers.connected()
    one.dispatch(replica(1), chat(100, 1000))
    tell(one, two, clock=clock)
    two.peers.cut_off()
    for _ in range(10):
        clock.advance(1.0)
        assert seen(two, "requests") == [[0, 0]]
        assert two.peers.stale
    two.peers.connected()
    tell(one, two, clock=clock)
    assert seen(two, "requests") == [[1, 0]]
    assert not two.peers.stale


def test_decode_times_of_all_routers_correct_predictions() -> None:
    clock = ManualClock()
    one, other = routers(clock, 2)
    for fleet in (one, other):
        fleet.dispatch(replica(1), chat(100, 4000))
    one.decoded(replica(1), predicted=10.0, actual=15.0)
    other.decoded(replica(1), predicted=10.0, actual=18.0)
    tell(other, one, clock=clock)
    expected = (15.0 + 18.0 + 5.0) / (10.0 + 10.0 + 5.0)
    assert one.view(MODEL).stretch[0] == pytest.approx(expected)
    clock.advance(60.0)
    assert 1.0 < one.view(MODEL).stretch[0] < 1.2, "it fades, also where nothing comes"

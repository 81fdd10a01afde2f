"""Load on shared replicas stays right when digests and polls are late, lost or repeated."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.fleet.digest import EVERY_S, REQUESTS, WHOLE_EVERY_S, Digest, DigestKind
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.fleet.peers import DEAD_S, STALE_S
from extproc.predict.lengths import OutputLengths
from extproc.replica_state import ReplicaState
from extproc.share.digests import DIGEST
from extproc.share.envelope import Skips
from tests.examples import examples
from tests.fakes import A10, ManualClock, chat, replica, state

ROUTERS, REPLICAS = 3, 2
ROUTER, REPLICA = st.integers(0, ROUTERS - 1), st.integers(0, REPLICAS - 1)
WHOLE_S = 0.6  # seconds after which a router's next digest is a whole sent


class Sent(NamedTuple):
    router: int
    replica: int
    ticket: Ticket
    sequences: int


@dataclass
class LastDigest:
    """Last digest of a router, as the model of the test expects it."""

    number: int
    at: float
    requests: dict[str, float]

    @property
    def fresh_s(self) -> float:
        return STALE_S if any(self.requests.values()) else STALE_S + WHOLE_EVERY_S


class SharedLoad(RuleBasedStateMachine):
    """Routers, replicas, the requests in flight on them, and senders of external load."""

    @initialize()
    def start(self) -> None:
        self.clock = ManualClock()
        self.fleets = [Fleet(OutputLengths(), self.clock, self.clock) for _ in range(ROUTERS)]
        self.requests: list[Sent] = []
        self.external = [0] * REPLICAS
        self.steps = 0
        self.late: list[Digest] = []
        self.polls: list[tuple[float, ReplicaState]] = []
        names = [fleet.router for fleet in self.fleets]
        self.last: dict[str, dict[str, LastDigest]] = {name: {} for name in names}  # by listener
        self.echo_s, self.echo_at = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for number in range(REPLICAS):
            self.poll(number, 0.0, 0.0)

    def on(self, number: int) -> list[Sent]:
        return [sent for sent in self.requests if sent.replica == number]

    # -- events -----------------------------------------------------------------------------

    @rule(router=ROUTER, number=REPLICA, prompt=st.integers(0, 9000), sequences=st.integers(1, 4))
    def send(self, router: int, number: int, prompt: int, sequences: int) -> None:
        ticket = self.fleets[router].dispatch(replica(number + 1), chat(prompt, 200, sequences))
        self.requests.append(Sent(router, number, ticket, sequences))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def token(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.requests))
        self.fleets[sent.router].first_token(sent.ticket)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.requests) - 1))
        sent = self.requests[place]
        to = (sent.replica + 1) % REPLICAS
        self.fleets[sent.router].move(sent.ticket, replica(to + 1))
        self.requests[place] = sent._replace(replica=to)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), prefilled=st.booleans())
    def end(self, data: st.DataObject, prefilled: bool) -> None:
        sent = data.draw(st.sampled_from(self.requests))
        self.requests.remove(sent)
        self.fleets[sent.router].release(sent.ticket, prefilled)
        with pytest.raises(KeyError):
            self.fleets[sent.router].release(sent.ticket, prefilled)

    @rule(number=REPLICA, requests=st.integers(0, 5))
    def others_send(self, number: int, requests: int) -> None:
        self.external[number] = requests

    @rule(number=REPLICA, waiting=st.floats(0, 1), usage=st.floats(0, 1), late=st.booleans())
    def poll(self, number: int, waiting: float, usage: float, late: bool = False) -> None:
        total = sum(sent.sequences for sent in self.on(number)) + self.external[number]
        self.steps += 1
        figures: dict[str, Any] = {"waiting": round(total * waiting), "kv_usage": usage}
        figures |= {"running": total - figures["waiting"], "steps": self.steps}
        self.polls.append((self.clock(), state(number + 1, A10, self.clock, **figures)))
        if not late:
            self.put(self.polls.pop())

    @precondition(lambda self: self.polls)
    @rule(data=st.data())
    def late_poll(self, data: st.DataObject) -> None:
        self.put(self.polls.pop(data.draw(st.integers(0, len(self.polls) - 1))))

    def put(self, poll: tuple[float, ReplicaState]) -> None:
        for fleet in self.fleets:
            fleet.put(poll[1], age=self.clock() - poll[0])

    @rule(router=ROUTER, fate=st.sampled_from(["in time", "late", "lost"]))
    def digest(self, router: int, fate: str) -> None:
        sent = self.fleets[router].digests.due(self.clock())
        if sent is not None and fate != "lost":
            self.late.append(Skips().open("test", DIGEST.seal(sent), DIGEST))
            if fate == "in time":
                self.hear(self.late[-1])

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_digest(self, data: st.DataObject) -> None:
        """Delivers a digest late, or once more."""
        self.hear(self.late.pop(data.draw(st.integers(0, len(self.late) - 1))))

    @rule(router=ROUTER, number=REPLICA)
    def overtaken_digest(self, router: int, number: int) -> None:
        for fate in ("late", "in time"):
            self.wait(EVERY_S)  # or no digest is due yet
            self.send(router, number, 100, 1)
            self.digest(router, fate)
        self.hear(self.late[-2])

    @rule(router=ROUTER)
    def farewell(self, router: int) -> None:
        self.hear(Skips().open("test", DIGEST.seal(self.fleets[router].digests.farewell()), DIGEST))

    def hear(self, digest: Digest) -> None:
        for fleet in self.fleets:
            fleet.receive_digest(digest)
        name, now = digest.router, self.clock()
        self.echo_s[name], self.echo_at[name] = now - digest.sent_at, now
        reported = dict(zip(digest.replicas, digest.figures[REQUESTS].tolist(), strict=True))
        for listener, peers in self.last.items():
            before = peers.get(name) or LastDigest(0, now, {})
            if listener != name and digest.number > before.number:
                unchanged = before.requests if digest.kind is DigestKind.CHANGES else {}
                peers[name] = LastDigest(digest.number, now, unchanged | reported)
                if digest.kind is DigestKind.FAREWELL:
                    del peers[name]
            echo_at = self.echo_at[listener]
            for dead in [peer for peer, last in peers.items() if echo_at - last.at > DEAD_S]:
                del peers[dead]

    @rule(seconds=st.sampled_from([0.01, EVERY_S, 0.05, STALE_S, 0.3, DEAD_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- properties -------------------------------------------------------------------------

    @invariant()
    def nothing_is_negative(self) -> None:
        for fleet in getattr(self, "fleets", ()):
            view = fleet.overview()
            columns = ("requests", "queued", "external", "waiting", "backlog", "taken", "batch")
            for name in (*columns, "kv_used", "external_backlog"):
                column = getattr(view, name)
                assert (column >= -1e-6).all(), name
                assert np.isfinite(column).all(), name
            sequences = fleet.sequences(view)
            assert (sequences.weight > 0.0).all()
            assert (sequences.context >= 0.0).all()
            assert (sequences.remaining >= 0.0).all()

    @invariant()
    def load_is_own_and_of_fresh_peers_and_external(self) -> None:
        for router, fleet in enumerate(getattr(self, "fleets", ())):
            peers = self.last[fleet.router].values()
            now, echo_s = self.clock(), self.echo_s[fleet.router]
            fresh = [last for last in peers if now - last.at + echo_s <= last.fresh_s]
            view = fleet.overview()
            assert fleet.peers.stale == (bool(peers) and not fresh)
            assert (fleet.peers.digest_age is None) == (not peers)
            for number, found in enumerate((view.requests - view.external).tolist()):
                own = sum(sent.router == router for sent in self.on(number))
                reported = sum(last.requests.get(replica(number + 1), 0.0) for last in fresh)
                assert fleet.in_flight_on(replica(number + 1)) == own
                assert found == pytest.approx(own + reported)

    @rule(usage=st.floats(0, 1))
    def all_digests_arrive(self, usage: float) -> None:
        """Checks that sums equal the polls while digests are fresh, stale, and fresh again."""
        self.late.clear()
        self.polls.clear()
        self.all_send_digests()
        for _ in range(2):
            for number in range(REPLICAS):
                self.poll(number, 0.0, usage)
        self.sums_equal_polls()
        self.clock.advance(WHOLE_S + EVERY_S)
        self.sums_equal_polls()
        self.all_send_digests()
        self.sums_equal_polls()

    def all_send_digests(self) -> None:
        self.clock.advance(WHOLE_S)
        for router in range(ROUTERS):
            self.digest(router, "in time")

    def sums_equal_polls(self) -> None:
        for router, fleet in enumerate(self.fleets):
            for number, external in enumerate(fleet.overview().external.tolist()):
                others = [sent.sequences for sent in self.on(number) if sent.router != router]
                late = sum(others) if fleet.peers.stale else 0
                assert external == pytest.approx(self.external[number] + late)

    def teardown(self) -> None:
        for sent in self.requests:
            self.fleets[sent.router].release(sent.ticket, prefilled=False)
        self.requests.clear()
        self.external = [0] * REPLICAS
        self.all_digests_arrive(0.0)
        for fleet in self.fleets:
            view = fleet.overview()
            for name in ("requests", "batch", "backlog", "kv_used", "waiting", "taken"):
                assert getattr(view, name) == pytest.approx(np.zeros(REPLICAS), abs=1e-6), name


TestLoad = SharedLoad.TestCase
TestLoad.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

"""Only gauges that do not move, and that an answer or an empty ledger refutes, are ignored."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from tests.fakes import A10, MODEL, ManualClock, chat, excluded, fleet_of, replica, state
from tests.fleet.conftest import PolledFleet

TICK_S, POLL_S = 0.05, 0.25
NAMED_S = 10.0  # time within which gauges that do not move are ignored
PROMPT, OUTPUT = 100, 10
COUNTERS = "steps", "prompt_tokens", "generated_tokens", "first_tokens"


@dataclass
class RequestOnEngine:
    ticket: Ticket
    first_token_at: float
    ends_at: float
    started: bool = False


@dataclass
class LoadedReplica:
    """Replica under a steady load. Its engine prefills one prompt after another, without chunks."""

    gap_s: float = 0.25  # between two requests
    prefill_s: float = 0.1
    decode_s: float = 0.4
    streamed: bool = True
    refuses: bool = False  # answers with an error before the engine gets the request
    scrape_s: float = 0.0  # time from a scrape until its state arrives
    repeats: bool = False  # the poller sends each state again for a while, as while scrapes fail
    restarts_every_s: float = 1e9
    missing: frozenset[str] = frozenset()  # figures that the page lacks
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.fleet: Fleet = fleet_of(self.clock, A10, A10)
        self.marked = False  # True: its gauges were ignored at some time
        self.page: dict[str, Any] | None = None  # figures of every poll; None: the engine's
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._requests: list[RequestOnEngine] = []
        self._polls: list[tuple[float, dict[str, Any]]] = []  # when each arrives, and its figures
        self._engine_free_at = self._request_at = self._poll_at = self.clock()
        self._restart_at = self.clock() + self.restarts_every_s

    @property
    def frozen(self) -> bool:
        return self.fleet.eligibility.conditions[replica(1)].frozen

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def freeze(self) -> None:
        self.page = self.figures()

    def pass_s(self, seconds: float) -> None:
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            self.clock.advance(TICK_S)
            self._work(self.clock())
            self._poll(self.clock())
            self.marked |= self.frozen

    def _work(self, now: float) -> None:
        if now >= self._restart_at:
            self._restart_at = now + self.restarts_every_s
            self._counts = dict.fromkeys(COUNTERS, 0.0)
        for request in self._requests:
            if now >= request.first_token_at and not request.started:
                request.started = True
                self.count(prompt_tokens=PROMPT, first_tokens=1, steps=1, generated_tokens=1)
                if self.streamed:
                    self.fleet.first_token(request.ticket)
        for request in [each for each in self._requests if now >= each.ends_at]:
            self._requests.remove(request)
            self.count(steps=OUTPUT, generated_tokens=OUTPUT)
            self.fleet.release(request.ticket)
        if now >= self._request_at:
            self._request_at = now + self.gap_s
            self._send(now)

    def _send(self, now: float) -> None:
        ticket = self.fleet.dispatch(replica(1), chat(PROMPT, OUTPUT))
        if self.refuses:
            self.fleet.eligibility.response_seen(replica(1))  # 400
            self.fleet.release(ticket, prefilled=False)
            return
        first_token_at = max(self._engine_free_at, now) + self.prefill_s
        self._engine_free_at = first_token_at
        request = RequestOnEngine(ticket, first_token_at, first_token_at + self.decode_s)
        self._requests.append(request)

    def count(self, **more: float) -> None:
        for name, by in more.items():
            self._counts[name] += by

    def figures(self) -> dict[str, Any]:
        gauges = {"running": len(self._requests), "kv_usage": 0.1 * bool(self._requests)}
        return {
            name: figure
            for name, figure in (self._counts | gauges).items()
            if name not in self.missing
        }

    def _poll(self, now: float) -> None:
        if now >= self._poll_at:
            self._poll_at = now + max(POLL_S, self.scrape_s)
            figures = self.figures() if self.page is None else self.page
            polled = figures | {"scrape_seconds": self.scrape_s, "scraped_at": now}
            self._polls += [(now + self.scrape_s, polled)]
            if self.repeats:
                self._poll_at = now + 6.0
                self._polls += [(now + later, polled) for later in range(1, 6)]
        for poll in [poll for poll in self._polls if poll[0] <= now]:
            self._polls.remove(poll)
            self.fleet.put(state(1, A10, self.clock, **poll[1]))
            self.fleet.put(state(2, A10, self.clock))


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("gap_s", "busy"), [(0.1, True), (0.6, True), (0.6, False), (3.0, True), (3.0, False)]
)
def test_gauges_that_stand_still_under_steady_load_are_ignored(
    gap_s: float, busy: bool, streamed: bool
) -> None:
    loaded = LoadedReplica(gap_s, streamed=streamed)
    loaded.pass_s(5.0)
    while loaded.busy != busy:
        loaded.pass_s(TICK_S)
    assert not loaded.marked
    loaded.freeze()
    loaded.pass_s(NAMED_S)
    assert loaded.frozen
    for _ in range(30):
        loaded.pass_s(0.5)
        assert loaded.frozen
        assert replica(1) not in excluded(loaded.fleet)
    loaded.page = None
    loaded.pass_s(2 * POLL_S)
    assert not loaded.frozen


def test_ledger_moves_on_beside_gauges_that_stand_still() -> None:
    loaded = LoadedReplica()
    loaded.pass_s(5.0)
    loaded.page = loaded.figures() | {"running": 40, "waiting": 9, "kv_usage": 0.9}
    loaded.pass_s(NAMED_S)
    loaded.fleet.dispatch(replica(1), chat(PROMPT, 1000))
    loaded.pass_s(5.0)
    view = loaded.fleet.view(MODEL, among=frozenset({replica(1)}))
    assert view.requests[0] < 5
    assert view.waiting[0] < 5
    assert view.kv_usage[0] < 0.1
    assert loaded.fleet.sequences(view).context.max() > PROMPT + 100


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streamed": False},
        {"gap_s": 7.0},
        {"gap_s": 7.0, "streamed": False},
        {"gap_s": 10.0, "prefill_s": 60.0},
        {"gap_s": 10.0, "prefill_s": 8.0, "streamed": False},
        {"gap_s": 30.0, "decode_s": 20.0},
        {"refuses": True},
        {"gap_s": 5.0, "refuses": True},
        {"gap_s": 10.0, "scrape_s": 3.0},
        {"gap_s": 10.0, "scrape_s": 3.0, "streamed": False},
        {"gap_s": 3.5, "repeats": True},
        {"restarts_every_s": 3.0},
        {"gap_s": 3.0, "restarts_every_s": 0.3},
        *({"gap_s": 3.0, "missing": frozenset({counter})} for counter in COUNTERS),
        {"gap_s": 5.0, "missing": frozenset({"running", "kv_usage", *COUNTERS})},
    ],
    ids=lambda options: "-".join(options) or "steady",
)
def test_gauges_of_a_healthy_engine_are_never_ignored(options: dict[str, Any]) -> None:
    loaded = LoadedReplica(**options)
    loaded.pass_s(90.0)
    assert not loaded.marked


def test_gauges_of_a_replica_without_requests_are_ignored_if_they_do_not_move(
    fleet: PolledFleet,
) -> None:
    """vLLM's gauges keep their last values when all requests are aborted at once."""
    ticket = fleet.dispatch(replica(1), chat(100, 100))
    figures = {"running": 20, "waiting": 5, "kv_usage": 0.9, "kv_tokens": 42_000, "steps": 7.0}
    fleet.poll(1, **figures)
    fleet.release(ticket)
    for _ in range(10):
        fleet.clock.advance(0.25)
        fleet.poll(1, **figures)
    view = fleet.view(MODEL)
    assert view.ids == [replica(1)]
    assert view.requests[0] == 0.0
    assert view.kv_usage[0] == pytest.approx(0.0, abs=0.01)


def test_request_that_the_router_learns_of_late_refutes_no_gauges() -> None:
    """Envoy sends an observed request to its replica before the router learns of it."""
    loaded = LoadedReplica(gap_s=1000.0)
    loaded.pass_s(5.0)
    loaded.count(prompt_tokens=PROMPT, first_tokens=1, steps=1, generated_tokens=1)
    loaded.pass_s(1.0)
    loaded.fleet.first_token(loaded.fleet.dispatch(replica(1), chat(PROMPT, OUTPUT)))
    loaded.pass_s(5.0)
    assert not loaded.marked


def test_engine_that_answers_nothing_is_stalled_and_its_gauges_count() -> None:
    """vLLM sends the headers of a stream before the engine has begun with the request."""
    loaded = LoadedReplica()
    loaded.pass_s(5.0)
    loaded.decode_s = loaded.prefill_s = 1e9
    loaded.pass_s(2.0)
    loaded.freeze()
    for _ in range(20):
        loaded.pass_s(1.0)
        loaded.fleet.eligibility.succeeded(replica(1))
    assert "nothing moved in its engine" in excluded(loaded.fleet)[replica(1)]
    assert not loaded.marked

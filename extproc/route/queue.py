"""Queue of the requests that no replica can carry to their end yet.

Guarantees, with B = 3 s (:data:`~extproc.route.waiting.OVERTAKEN_S`):

- *No idle waiting.* A request waits for a replica only while its predicted completion there,
  expected wait included, is earlier than on every replica that could start it now. There are two
  exceptions. A request may stay with its session or with the response that it continues. In the
  first 30 s a request may wait to spare others of at least its priority: it passes over a replica
  on which they would lose more than on the replica that it waits for, by at least twice what the
  request gains. On an idle replica nobody loses anything. The expected wait counts the requests
  queued ahead at this and at other routers (:meth:`~extproc.route.backlog.Backlog.ahead`). A
  replica can start a request if the replica has room (:mod:`extproc.route.room`) and is not
  reserved (:meth:`~extproc.route.backlog.Backlog.reserves`). The request is decided anew when the
  expected wait has passed. The first request of a model is also decided anew every 0.2 s, for 16
  models at a time, and when a replica gets more room, for the first 32 models there; the
  first that waits for an excluded replica, every second and when a request ends there. No request
  is refused while a replica could start it, with three exceptions: the request continues a response
  that another replica stores, the request would miss the target of its objective, or more than 16
  requests exceed the longest wait at once.
- *No blocking across models.* Each model has a line of its own on each replica. The head of a line
  delays other models of its priority only on the replica that it waits for. There it delays a
  request only if the request arrives more than B seconds after the head was due, and only if the
  request's tenant received no less than the head's tenant.
- *Bounded overtaking.* On the replica that a request waits for, requests of its model, priority and
  tenant overtake it only if they arrived at most B seconds after it. Between tenants the rule
  *Fair* applies.
- *Priority.* No request is refused or delayed because of queued requests of lower priority. The
  router preempts no running request. When the queue is full, the router refuses a request of the
  lowest priority: the newest request of the tenant with the most queued. This may be the request
  that has just arrived.
- *Fair.* While tenants have requests of one priority queued, each gets the same replica-seconds
  (start-time fair queueing). For requests for one model on R replicas, no tenant gets more than R
  replica-seconds (:data:`~extproc.route.backlog.LEAD_S`) and one request ahead, except on replicas
  that the other tenant's first request declines (*No idle waiting*) or does not wait for. For
  different models equal shares hold only over a minute, because the head of a line does not delay
  older requests for another model, even if their tenant received more. The bounds hold for a
  tenant, not for each request: a request that needs much KV space may wait for one replica while
  later requests of its tenant start on other replicas.
- *Several routers.* A replica on which a request of this router ends may be another router's turn
  (:mod:`extproc.route.turns`). Then, until 0.1 s after the first such end, this router sends no
  request of the priority of that router's work or below there, of whatever model or tenant. Other
  room goes to the router that decides first.
- *Cost.* With n queued requests for m models, an arrival or the end of a request costs
  O(m + log n), and a number of decisions that depends on neither. A sweep decides a bounded number
  of requests: if thousands could start at once, dispatching them takes seconds.
- *Isolation.* A client that leaves frees its place. The queue then offers the awaited replica to
  other requests, as if a request on it had ended. Nothing else changes.
- *Every wait ends* with a dispatch, with a refusal that names the reason and the time to retry, or
  when the client leaves.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import exp, inf

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.request.errors import Saturated
from extproc.route.backlog import Backlog
from extproc.route.decision import Decision
from extproc.route.order import Ranked
from extproc.route.turns import Turns
from extproc.route.waiting import ANEW_S, Waiting, key_of

SWEEP_EVERY_S = 0.05  # seconds between two sweeps
_MODELS = 16  # lines of models whose first request a sweep decides anew, in rotation
_OFFERS = 32  # limit of the decisions each time a replica is offered to the queue
_DUE = 16  # limit of the due requests that one sweep decides anew
_ROUND = 20  # sweeps in which every replica is offered to the queue once
_BEFORE_TIMEOUT_S = 1.0  # refuse this long before Envoy's timeout, at which Envoy sends the request
_STUCK_S = 5.0  # seconds without progress after which a request is sent to a full replica
_DRAIN_S = 30.0  # time constant of the rate of dispatches


class Queue:
    """Queued requests of one pool; the module docstring states the guarantees."""

    def __init__(self, fleet: Fleet, settings: HoldSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._backlog = Backlog(fleet.now)
        # Queued requests as predictions see them; None if the settings let no request wait.
        self.backlog = self._backlog if settings.longest_s > 0.0 else None
        self._turns = Turns(fleet, self._backlog)
        fleet.digests.queued = self._backlog.work
        self._requests: dict[Waiting, None] = {}  # the oldest first
        self._due = Ranked[Waiting]()  # by the time at which a request is decided anew
        self._numbers = count(1)
        self._members: dict[str, int] = {}  # replicas and their rows, at the last sweep
        self._moved_at = fleet.now  # when a request was last dispatched, or ended
        self._sweeps = 0  # modulo _ROUND
        self._rate, self._rate_at = 0.0, fleet.now  # dispatches per second

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def sizes(self) -> Counter[tuple[str, str]]:
        """Count queued requests by objective and tenant."""
        return Counter((queued.profile.objective.name, queued.tenant) for queued in self)

    def unserved_by_model(self) -> Counter[str]:
        """Count queued requests that no replica serves now, by model."""
        return Counter(queued.model for queued in self if queued.unserved_since is not None)

    def shares(self) -> dict[str, float]:
        """Replica-seconds that each tenant received lately while requests were queued."""
        return self._backlog.shares.recent(self._fleet.now)

    def retry_after_s(self) -> float:
        """Seconds until the queue has drained at the dispatch rate of the last half minute."""
        if not self._requests:
            return 0.0
        rate = self._rate * exp((self._rate_at - self._fleet.now) / _DRAIN_S)
        longest = self._settings.longest_s
        return min(len(self) / rate, longest) if rate > 0.0 else longest

    # -- events -----------------------------------------------------------------------------

    def admit(self, decision: Decision) -> bool:
        """Return True if a new request may start now; otherwise the caller has to queue it.

        A request that starts now is charged to its tenant if the tenant has queued requests.
        """
        if decision.wait_s > 0.0:
            return False
        key = key_of(decision.profile)
        if key in self._backlog.shares:
            self._backlog.shares.charge(key, decision.work_s)
        return True

    def enter(self, request: Waiting) -> None:
        """Queue a request; if the queue is then over its limit, refuse :meth:`Backlog.victim`."""
        request.number = next(self._numbers)
        self._requests[request] = None
        self._due.put(request, request.retry_at, request.number)
        self._backlog.enter(request)
        if len(self) > self._settings.most:
            others = f"{self._settings.most} requests wait already"
            self._dismiss(self._backlog.victim(), others, "too_many_waiting")

    def abandon(self, request: Waiting) -> None:
        self._leave(request)
        self._offer(request.replica)

    def request_ended(self, replica: str) -> None:
        """Offer the replica to queued requests, because a request on it has ended. If it is another
        router's turn, only requests of higher priority may start there."""
        self._moved_at = self._fleet.now
        self._turns.leave(replica)
        self._offer(replica)

    def sweep(self) -> None:
        """Refuse requests that exceeded the longest wait, and decide due requests anew. Call this
        every 0.05 s."""
        for row in (*self._turns.freed(), *self._turns.over()):
            self._offer(self._fleet.members.by_row[row].id)
        if not self._requests:
            return
        now = self._fleet.now
        self._refuse_overdue(now)
        self._leave_departed(now)
        for _ in range(_DUE):
            if not self._due or (request := self._due.first()[1]).retry_at > now:
                break
            self._decide(request, now)
        self._decide_firsts(now)
        self._sweeps = (self._sweeps + 1) % _ROUND
        for replica in list(self._fleet.members.rows)[self._sweeps :: _ROUND]:
            self._offer(replica)

    def _offer(self, replica: str) -> None:
        """Dispatch requests to a replica that may have more room than before. Decide anew the first
        requests that wait for it and that it may not serve any more."""
        decided, row = 0, self._fleet.members.rows.get(replica)
        candidates = self._fleet.eligibility.candidates
        while row is not None and self._requests and decided < _OFFERS:
            now, room = self._fleet.now, self._fleet.free_kv_tokens(replica)
            left = self._backlog.left.get(row, -inf)
            for request in self._backlog.heads(row, _MODELS, _OFFERS):
                full = room < request.tokens and row in candidates(request.model).row_set
                if request.priority <= left or full or request.declines(row, now):
                    continue
                decided += 1
                if self._decide(request, now) or decided == _OFFERS:
                    break
            else:
                return

    def _leave_departed(self, now: float) -> None:
        """Let requests whose awaited replica has left the pool wait for any replica."""
        members = self._fleet.members.rows
        if members != self._members:
            self._members = dict(members)
            for request in self:
                if request.row is not None and members.get(request.replica) != request.row:
                    self._wait_on(request, None, now)

    def _decide_firsts(self, now: float) -> None:
        """Decide the first request of each model anew; after each dispatch also the next request of
        the model."""
        for _ in range(_DUE):
            firsts = self._backlog.firsts(_MODELS)
            due = [request for request in firsts if request.decided_at <= now - ANEW_S]
            if not [request for request in due if self._decide(request, now)]:
                return

    def _refuse_overdue(self, now: float) -> None:
        longest_s = self._settings.longest_s
        until = now - longest_s + min(_BEFORE_TIMEOUT_S, longest_s / 2)
        decisions = _DUE  # if thousands are overdue at once, hardly any but the first could start
        while self._requests and (oldest := next(iter(self))).since <= until:
            waited = f"the request has waited for {now - oldest.since:.0f} s"
            self._dismiss(oldest, waited, "waited_too_long", decisions > 0)
            decisions -= 1

    # -- decisions --------------------------------------------------------------------------

    def _decide(self, request: Waiting, now: float, last_chance: bool = False) -> bool:
        """Decide a request anew; return True if the request has left the queue."""
        request.last_chance = last_chance
        outcome: Decision | Exception | None
        try:
            outcome = request.decide(request)
        except Exception as error:  # concerns this request alone
            outcome = error
        if not isinstance(outcome, Exception) and self._stays(request, outcome, now):
            self._wait_on(request, outcome, now)
            return False
        if isinstance(outcome, Decision):
            if outcome.wait_s > 0.0 and not last_chance:  # no progress: rather where there is room
                return self._decide(request, now, last_chance=True)
            self._moved_at = now
            self._backlog.shares.charge(request.key, outcome.work_s)  # while the tenant is queued
            self._rate *= exp((self._rate_at - now) / _DRAIN_S)
            self._rate, self._rate_at = self._rate + 1.0 / _DRAIN_S, now
        self._leave(request)
        request.resolve(outcome)
        return True

    def _stays(self, request: Waiting, decision: Decision | None, now: float) -> bool:
        """Return True if a request stays queued, for room or until a replica serves its model.

        After 5 s without progress the first request of a model is sent to a replica that can start
        it, or else to the replica that it waits for, even if that replica looks full: its gauges
        may be wrong.
        """
        if decision is None:
            request.unserved_since = request.unserved_since or now
            return now - request.unserved_since < self._settings.empty_s
        request.unserved_since = None
        if decision.wait_s <= 0.0:
            return False
        moved = now - max(self._moved_at, request.since) < _STUCK_S
        moved |= self._fleet.eligibility.progresses(decision.replica, _STUCK_S)
        return moved or not self._backlog.is_first(request)

    def _wait_on(self, request: Waiting, decision: Decision | None, now: float) -> None:
        self._backlog.await_no_more(request)
        request.wait_on(decision, now)
        self._backlog.await_replica(request)
        self._due.put(request, request.retry_at, request.number)

    def _dismiss(self, request: Waiting, why: str, code: str, decides: bool = True) -> None:
        """Refuse a request. With ``decides``, first decide the request once more, and dispatch it
        if a replica can start it now."""
        if decides and self._decide(request, self._fleet.now, last_chance=True):
            return
        self._leave(request)
        message = f"every replica is full: {why}"
        full = Saturated(message, code=code, retry_after=self.retry_after_s())
        request.resolve(full if request.unserved_since is None else None)

    def _leave(self, request: Waiting) -> None:
        del self._requests[request]
        self._due.drop(request)
        self._backlog.leave(request)

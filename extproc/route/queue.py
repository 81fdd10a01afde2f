"""The queue: requests that wait at the router while no replica can carry them to their end.

Guarantees, with B = 3 s (:data:`~extproc.route.waiting.OVERTAKEN_S`):

- *No idle waiting.* A request waits only while its predicted completion on the replica it waits
  for, expected wait included, is earlier than on every replica that could start it now. The request
  is decided anew when that wait has passed; the first request of a model also every 0.2 s, and when
  a replica has more room. A request is never refused while a replica could start it, unless it
  waited too long with more than 16 others at once, or would miss the target of its objective. A
  replica could start a request if it has room for it and is not reserved
  (:meth:`~extproc.route.backlog.Backlog.reserves`).
- *No blocking across models.* Each model has a line of its own on each replica. A head that cannot
  start holds up other models of its priority only on the replica it waits for, and only requests
  that arrive more than B seconds after it was due.
- *Bounded overtaking.* On the replica that a request waits for, requests of its model, priority and
  tenant overtake it only if they arrived at most B seconds after it. Between tenants *Fair*
  decides.
- *Priority.* No request is refused or delayed because of queued requests of lower priority. The
  router preempts nothing that runs. When the queue is full, the victim is, among the lowest
  priority, the newest request of the tenant with the most queued. It may be the newcomer.
- *Fair.* While tenants of one priority have requests queued, each gets the same replica-seconds
  (start-time fair queueing), so a tenant waits at most for its backlog divided by its share.
- *Cost.* An arrival or an end costs O(log n), and a number of decisions that does not depend on n.
  A look decides a bounded number, so thousands that could start at once take seconds to go.
- *Isolation.* A client that leaves frees its place and changes nothing else.
- *Every wait ends* with a dispatch, with a refusal that names the reason and when to come again, or
  when the client leaves.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from math import exp

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.request.errors import Saturated
from extproc.route.backlog import Backlog
from extproc.route.decision import Decision
from extproc.route.order import Ranked
from extproc.route.waiting import ANEW_S, Waiting, key_of

SWEEP_EVERY_S = 0.05  # seconds between two looks
_MODELS = 16  # models whose first request is tried per look, in rotation
_TRIED = 32  # decisions at most when a replica has more room
_DUE = 16  # requests that are decided anew in one look
_REPLICAS = 20  # looks until every replica has been offered to the queue
_SOONER_S = 1.0  # before Envoy's own time is up, or it would go on without the router
_STUCK_S = 5.0  # seconds in which no request is dispatched or ends, and no engine moves
_DRAIN_S = 30.0  # time constant of the rate of dispatches


class Queue:
    """Requests that wait at the router; see the top of this file for its guarantees."""

    def __init__(self, fleet: Fleet, settings: HoldSettings, clock: Clock) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._lines = Backlog(clock())
        self._waiting: dict[Waiting, None] = {}  # all, the oldest first
        self._due = Ranked[Waiting]()  # by when each is decided anew
        self._numbers = count(1)
        self._members: dict[str, int] = {}  # rows of the replicas, at the last look
        self._moved_at = clock()  # when a request was dispatched, or ended
        self._turn = 0  # of the replicas, by looks
        self._rate, self._rate_at = 0.0, clock()  # dispatches a second

    @property
    def backlog(self) -> Backlog | None:
        """Queued requests as predictions see them; None where no request ever waits."""
        return self._lines if self._settings.longest_s > 0.0 else None

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def sizes(self) -> Counter[tuple[str, str]]:
        """Queued requests by objective and tenant."""
        return Counter((one.profile.objective.name, one.tenant) for one in self._waiting)

    def unserved_by_model(self) -> Counter[str]:
        """Queued requests that no replica serves now, by model."""
        return Counter(one.model for one in self._waiting if one.unserved_since is not None)

    def shares(self) -> dict[str, float]:
        """Replica-seconds that each tenant got lately while requests were queued."""
        return self._lines.shares.recent(self._clock())

    def admit(self, decision: Decision) -> bool:
        """Return True if a new request may start now; otherwise the caller has to queue it.

        A request that starts now is charged to its tenant while others of that tenant are queued.
        """
        if self.backlog is not None and decision.wait_s > 0.0:
            return False
        key = key_of(decision.profile)
        if key in self._lines.shares:
            self._lines.shares.sent(key, decision.work_s)
        return True

    def retry_after_s(self) -> float:
        """Seconds until the queue has drained, at the rate of the last half minute."""
        if not self._waiting:
            return 0.0
        rate = self._rate * exp((self._rate_at - self._clock()) / _DRAIN_S)
        longest = self._settings.longest_s
        return min(len(self) / rate, longest) if rate > 0.0 else longest

    # -- events -----------------------------------------------------------------------------

    def enter(self, one: Waiting) -> None:
        """Queue a request that has to wait; if the queue is full, dismiss the victim."""
        one.number = next(self._numbers)
        self._waiting[one] = None
        self._due.put(one, one.retry_at, one.number)
        self._lines.enter(one)
        if len(self._waiting) > self._settings.most:
            others = f"{self._settings.most} requests wait already"
            self._dismiss(self._lines.tenants.victim(), others, "too_many_waiting")

    def abandon(self, one: Waiting) -> None:
        """Remove a request whose client has left."""
        self._leave(one)
        self._offer(one.replica)

    def request_ended(self, replica: str) -> None:
        """A request has ended on a replica."""
        self._moved_at = self._clock()
        self._offer(replica)

    def _offer(self, replica: str) -> None:
        """Dispatch requests to a replica that may have more room than before."""
        tried, row = 0, self._fleet.members.rows.get(replica)
        while row is not None and self._waiting and tried < _TRIED:
            now, room = self._clock(), self._fleet.room(replica)
            for one in self._lines.heads(row, _MODELS):
                if room < one.tokens or one.declines(row, now):
                    continue
                tried += 1
                if self._try(one, now):
                    break
            else:
                return

    def sweep(self) -> None:
        """Refuse what waited too long and decide anew what is due: to be called often."""
        if not self._waiting:
            return
        now = self._clock()
        self._refuse(now)
        self._leave_departed(now)
        for _ in range(_DUE):
            if not self._due or (one := self._due.first()[1]).retry_at > now:
                break
            self._try(one, now)
        self._look_at_firsts(now)
        self._turn = (self._turn + 1) % _REPLICAS
        for replica in list(self._fleet.members.rows)[self._turn :: _REPLICAS]:
            self._offer(replica)

    def _leave_departed(self, now: float) -> None:
        """Requests that wait for a replica that has left wait for any other."""
        members = self._fleet.members.rows
        if members != self._members:
            self._members = dict(members)
            for one in self._waiting:
                if one.row is not None and members.get(one.replica) != one.row:
                    self._waits_on(one, None, now)

    def _look_at_firsts(self, now: float) -> None:
        """Decide the first of each model anew, and those behind a request that was dispatched."""
        for _ in range(_DUE):
            firsts = self._lines.firsts(_MODELS)
            due = [one for one in firsts if one.decided_at <= now - ANEW_S]
            gone = [one for one in due if self._try(one, now)]
            if not gone:
                return

    # -- what follows -----------------------------------------------------------------------

    def _try(self, one: Waiting, now: float, last_chance: bool = False) -> bool:
        """Decide anew; returns whether the request has left the queue."""
        decision, error = None, None
        one.last_chance = last_chance
        try:
            decision = one.decide(one)
        except Exception as raised:  # concerns this request alone
            error = raised
        if error is None and self._stays(one, decision, now):
            self._waits_on(one, decision, now)
            return False
        self._leave(one)
        if decision is not None:
            self._moved_at = now
            self._lines.shares.sent(one.key, decision.work_s)
            self._rate *= exp((self._rate_at - now) / _DRAIN_S)
            self._rate, self._rate_at = self._rate + 1.0 / _DRAIN_S, now
        one.go(error or decision)
        return True

    def _stays(self, one: Waiting, decision: Decision | None, now: float) -> bool:
        """Return True if a request goes on waiting: for room, or for a replica that serves it.

        After 5 s without progress the first request of a model is sent to the replica that it waits
        for, full or not: the gauges may be wrong.
        """
        if decision is None:
            since = one.unserved_since or now
            return now - since < self._settings.empty_s
        if decision.wait_s <= 0.0:
            return False
        moved = now - max(self._moved_at, one.since) < _STUCK_S
        moved |= self._fleet.eligibility.progresses(decision.replica, _STUCK_S)
        return moved or not self._lines.is_first(one)

    def _waits_on(self, one: Waiting, decision: Decision | None, now: float) -> None:
        self._lines.await_no_more(one)
        one.decided(decision, now)
        self._lines.await_replica(one)
        self._due.put(one, one.retry_at, one.number)

    def _refuse(self, now: float) -> None:
        longest_s = self._settings.longest_s
        until = now - longest_s + min(_SOONER_S, longest_s / 2)
        tries = _DUE  # of thousands that time out together hardly any but the first could start
        while self._waiting and (oldest := next(iter(self._waiting))).since <= until:
            waited = f"the request has waited for {now - oldest.since:.0f} s"
            self._dismiss(oldest, waited, "waited_too_long", tries > 0)
            tries -= 1

    def _dismiss(self, one: Waiting, why: str, code: str, tries: bool = True) -> None:
        """Refuse a request, unless it ``tries`` and a replica can start it now."""
        if tries and self._try(one, self._clock(), last_chance=True):
            return
        self._leave(one)
        full = Saturated(f"every replica is full: {why}", code, self.retry_after_s())
        one.go(full if one.unserved_since is None else None)

    def _leave(self, one: Waiting) -> None:
        del self._waiting[one]
        self._due.drop(one)
        self._lines.leave(one)

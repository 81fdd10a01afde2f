"""What waits at the router, and what of it may go now."""

import logging
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from math import inf

from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.request.errors import Saturated
from extproc.route.order import Order
from extproc.route.router import Decision
from extproc.route.waiting import Waiting, cost, fits

logger = logging.getLogger(__name__)

LET_GO_EVERY_S = 0.05  # seconds between two looks
_AHEAD, _CHEAP, _FURTHER = 4, 0.1, 256
"""Of those that wait and could go to a replica, the first so many may pass each other. Of those
further back only the ones that take at most this share of what the first one takes: where prompts
are of all sizes the small ones need not wait for the large, and where they are alike nobody waits
long. Nobody looks further than that."""
_PATIENCE_S, _USUAL = 10.0, 100
"""Seconds beyond what the last so many waited, on average, after which nobody passes a request on
the way to one replica."""
_ANEW_S = 0.2
_ANEW = 16
"""Seconds after which a request is decided anew though no replica has more room than before, for
another one may be better by now; and how many are at a time, the first of them."""
_SOONER_S = 1.0  # before Envoy's own time is up, or it would go on without the router
_TRIED = 32  # decisions at most when something ended
_IN_TURN = 4  # replicas that are waited for, and looked at by turns
_ALIKE_S, _SHORT_S, _IN_A_ROW = 0.1, 5.0, 3
"""So many requests that leave after waiting equally long, and less than this, tell that Envoy does
not wait for the router: clients are more patient, or not all alike."""
_DISTRUST_S = 600.0  # seconds for which nothing waits then


Kept = dict[str, float]  # by replica, the least priority of those that may still go there


class Queue:
    """Requests that wait at the router until the replica chosen can carry them to their end.

    An engine that admits more than its KV cache can carry preempts sequences and computes them
    again, and everyone waits. What waits here can still go to whichever replica is first able to
    carry it. Those that fit may pass those that do not, but none that waited for long.
    """

    def __init__(self, fleet: Fleet, settings: HoldSettings, clock: Clock) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._order = Order(clock())
        self._waiting: dict[Waiting, None] = {}  # all, the oldest first
        self._models = Counter[str]()
        self._awaited = Counter[str]()  # how many wait of each model, and for each replica
        self._trust_from = -inf
        self._waited = 0.0  # seconds: the longest wait that Envoy had the patience for
        self._usual_wait = 0.0  # seconds: of the last that were sent, the mean
        self._gave_up: deque[float] = deque(maxlen=_IN_A_ROW)  # seconds that the last ones waited

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def held(self) -> Counter[tuple[str, str]]:
        """How many wait, by objective and tenant."""
        return Counter((one.profile.objective.name, one.tenant) for one in self._waiting)

    def shares(self) -> dict[str, float]:
        """What each tenant got as of late while its requests waited, in seconds of a replica."""
        return self._order.shares.recent(self._clock())

    def keeps(self, decision: Decision) -> bool:
        model, replica = decision.profile.model, decision.replica
        alone = model not in self._models and replica not in self._awaited
        if (alone and fits(decision)) or not self._fleet.tells_room(replica):
            return False
        return self._settings.longest_s > 0.0 and self._clock() >= self._trust_from

    def wait_s(self, model: str, priority: int, replicas: int) -> float:
        """Seconds that a request would wait that comes now for one of so many replicas, about, and
        rather less: those ahead may give up, and it may pass some."""
        return min(self._order.ahead(model, priority) / replicas, self._settings.longest_s)

    def enter(self, one: Waiting) -> None:
        """It waits, unless it may go at once.

        Raises:
            Saturated: too many wait.
        """
        if len(self._waiting) >= self._settings.most:
            message = f"every replica is full, and {self._settings.most} requests wait already"
            raise Saturated(message, "too_many_waiting", self._wait_s(one))
        self._waiting[one] = None
        self._order.enter(one)
        self._models[one.model] += 1
        self._awaited[one.replica] += 1
        self.let_go(one.replica)

    def gave_up(self, one: Waiting, timed: bool) -> None:
        """Its stream is over; ``timed``: it may be that Envoy did not want to wait."""
        self._leave(one)
        if timed and self._clock() >= self._trust_from:
            self._doubt(self._clock() - one.since)
        self.let_go(one.replica)

    def _doubt(self, waited: float) -> None:
        """Has nothing wait any more if Envoy does not wait."""
        self._gave_up.append(waited)
        least, most = min(self._gave_up), max(self._gave_up)
        alike = len(self._gave_up) == _IN_A_ROW and most - least < _ALIKE_S
        oldest = next(iter(self._waiting), None)
        longest = max(self._waited, 0.0 if oldest is None else self._clock() - oldest.since)
        if alike and most < _SHORT_S and longest < least:
            self._gave_up.clear()
            self._trust_from = self._clock() + _DISTRUST_S
            logger.error(
                "Envoy does not wait for the router, so no request waits for a replica: set "
                "max_message_timeout of its ext_proc filter to hold.longest_s, or that to 0",
                extra={"waited_s": round(waited, 3), "longest_s": self._settings.longest_s},
            )

    def let_go(self, replica: str) -> None:
        """Sends what may go, in order, now that something ended on a replica."""
        if not self._waiting:
            return
        now, room, cheap = self._clock(), self._fleet.room(replica), inf
        place = tried = 0
        kept: Kept = {}
        for one in self._order:
            if replica not in one.candidates:
                continue
            if place >= _AHEAD and one.cost > cheap and not self._is_old(one, now):
                place += 1
                continue
            may_go = room >= one.tokens and one.priority >= kept.get(replica, -inf)
            if may_go and not one.passes(replica, now - _ANEW_S) and tried < _TRIED:
                tried += 1
                self._try(one, now, kept)
                room = self._fleet.room(replica)
            if not one.passes(replica, now - _ANEW_S):
                self._keep(one, now, kept, replica)
                place += 1
                cheap = one.cost * _CHEAP if place == 1 else cheap
            if place >= _FURTHER or kept.get(replica) == inf:
                return

    def look(self) -> None:
        """Sends what may go by whatever else was heard, and refuses what waited too long: to be
        called often."""
        now, tried = self._clock(), 0
        kept: Kept = {}
        self._refuse(now)
        for one in islice(self._order, _FURTHER):
            gone = now - one.decided_at >= _ANEW_S and self._try(one, now, kept)
            self._keep(one, now, kept, one.replica)
            tried += not gone
            if tried >= _ANEW:
                break
        for replica in [*islice(self._awaited, _IN_TURN)]:
            if replica in self._awaited:
                self._awaited[replica] = self._awaited.pop(replica)  # the others are next
                self.let_go(replica)

    def _try(self, one: Waiting, now: float, kept: Kept) -> bool:
        decision, error = None, None
        try:
            decision = one.decide()
        except Exception as raised:  # it is that request's alone
            error = raised
        if decision is not None and not self._goes(one, decision, kept):
            _drop(self._awaited, one.replica)
            one.decided(decision, now)
            self._awaited[one.replica] += 1
            return False
        self._leave(one)
        if error is None:
            seconds = one.cost if decision is None else cost(decision)
            self._order.shares.sent(one.tenant, seconds)
        waited = now - one.since
        self._waited = max(self._waited, waited)
        self._usual_wait += (waited - self._usual_wait) / _USUAL
        one.go(error or decision)
        return True

    def _is_old(self, one: Waiting, now: float) -> bool:
        return now - one.since > _PATIENCE_S + self._usual_wait

    def _keep(self, one: Waiting, now: float, kept: Kept, replica: str) -> None:
        """Where one waits, nobody of a lower priority goes; and nobody at all once it has waited
        for long, to a replica that none before it keeps: its own, or else the one given."""
        if one not in self._waiting:
            return
        if not self._is_old(one, now):
            kept[one.replica] = max(one.priority, kept.get(one.replica, -inf))
        elif kept.get(one.replica) != inf:
            kept[one.replica] = inf
        else:
            kept[replica] = inf

    def _goes(self, one: Waiting, decision: Decision, kept: Kept) -> bool:
        """Whether nobody is to go before it, and the replica chosen can carry it, or it is not
        known what that could."""
        passes = one.priority >= kept.get(decision.replica, -inf)
        tells = self._fleet.tells_room(decision.replica)
        return passes and (fits(decision) or not tells)

    def _refuse(self, now: float) -> None:
        longest_s = self._settings.longest_s
        until = now - longest_s + min(_SOONER_S, longest_s / 2)
        while self._waiting and (oldest := next(iter(self._waiting))).since <= until:
            self._leave(oldest)
            message = (
                f"every replica is full: the request has waited for {now - oldest.since:.0f} s"
            )
            oldest.go(Saturated(message, "waited_too_long", self._wait_s(oldest)))

    def _wait_s(self, one: Waiting) -> float:
        return self.wait_s(one.model, one.priority, len(one.candidates) or 1)

    def _leave(self, one: Waiting) -> None:
        self._order.leave(one)
        del self._waiting[one]
        _drop(self._models, one.model)
        _drop(self._awaited, one.replica)


def _drop(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]

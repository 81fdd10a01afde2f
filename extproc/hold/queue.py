"""What waits at the router, and what of it may go now."""

import logging
import os
from collections import deque
from math import inf

from extproc.clock import Clock
from extproc.config import HoldSettings
from extproc.fleet.fleet import Fleet
from extproc.hold.order import Order, Shares
from extproc.hold.waiting import Waiting, fits
from extproc.request.errors import Saturated
from extproc.route.router import Decision

logger = logging.getLogger(__name__)

LET_GO_EVERY_S = 0.05
"""Seconds between two looks."""
_LOOKED_AT = 64
"""Of those that wait for a replica, so many may go before each other."""
_PATIENCE_S = float(os.environ.get("PAT", "20"))
"""Seconds after which nobody passes who waits for the same replica."""
_ANEW_S = 0.2
_ANEW = 16
"""Seconds after which a request is decided anew though its replica has no more room than before,
for another one may be better by now; and how many are at a time, the first of each line."""


_ALIKE_S, _SHORT_S, _IN_A_ROW = 0.1, 5.0, 3
"""So many requests that leave after waiting equally long, and less than this, tell that Envoy does
not wait for the router: clients are more patient, or not all alike."""
_DISTRUST_S = 600.0
"""Seconds for which nothing waits then."""


class Queue:
    """Requests that wait at the router until the replica chosen can carry them to their end.

    An engine that admits more than its KV cache can carry preempts sequences and computes them
    again, and everyone waits. What waits here can still go to another replica, or before others.
    Each waits in the line of the replica that was chosen for it, and changes lines when another is
    better. In a line those that fit may pass those that do not, but for one that waited for long.
    """

    def __init__(self, fleet: Fleet, settings: HoldSettings, clock: Clock) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._shares = Shares()
        self._lines: dict[str, Order] = {}
        """By the replica that they wait for."""
        self._waiting: dict[Waiting, None] = {}
        """All, the oldest first."""
        self._trust_from = -inf
        self._waited = 0.0
        """Seconds: the longest wait that Envoy had the patience for."""
        self._gave_up: deque[float] = deque(maxlen=_IN_A_ROW)
        """Seconds that the last ones waited that left, since one was sent."""

    def __len__(self) -> int:
        return len(self._waiting)

    def keeps(self, decision: Decision) -> bool:
        """Whether a request that comes now has to wait."""
        if fits(decision) and decision.replica not in self._lines:
            return False
        return self._settings.longest_s > 0.0 and self._clock() >= self._trust_from

    def enter(self, one: Waiting) -> None:
        """It waits, unless it may go at once.

        Raises:
            Saturated: too many wait.
        """
        if len(self._waiting) >= self._settings.most:
            message = f"every replica is full, and {self._settings.most} requests wait already"
            raise Saturated(message, code="too_many_waiting")
        self._waiting[one] = None
        self._join(one)
        self.let_go(one.carried.replica)

    def gave_up(self, one: Waiting) -> None:
        """Its stream is over."""
        self._leave(one)
        waited = self._clock() - one.since
        self._gave_up.append(waited)
        least, most = min(self._gave_up), max(self._gave_up)
        alike = len(self._gave_up) == _IN_A_ROW and most - least < _ALIKE_S
        if alike and most < _SHORT_S and self._waited < least:
            self._gave_up.clear()
            self._trust_from = self._clock() + _DISTRUST_S
            logger.error(
                "Envoy does not wait for the router, so no request waits for a replica: set "
                "max_message_timeout of its ext_proc filter to hold.longest_s, or that to 0",
                extra={"waited_s": round(waited, 3), "longest_s": self._settings.longest_s},
            )

    def let_go(self, replica: str) -> None:
        """Sends what may go, in order, of those that wait for a replica where something ended."""
        if (line := self._lines.get(replica)) is None:
            return
        now = self._clock()
        for one in line.first(_LOOKED_AT):
            if self._fleet.room(replica) >= one.carried.tokens:
                self._try(one, now)
            if one in self._waiting and now - one.since > _PATIENCE_S:
                return

    def look(self) -> None:
        """Sends what may go by whatever else was heard, has some change lines, and refuses those
        that waited too long: to be called often."""
        now, anew = self._clock(), _ANEW
        self._refuse(now)
        for replica, line in list(self._lines.items()):
            for one in line.first(_ANEW):
                if anew > 0 and now - one.decided_at >= _ANEW_S:
                    anew -= 1
                    self._try(one, now)
            self.let_go(replica)

    def _try(self, one: Waiting, now: float) -> None:
        """Decides anew: it goes, or waits where that is best now."""
        decision, before = one.decide(), one.carried
        if decision is None or fits(decision):
            self._shares.sent(one.tenant, before.cost)
            self._leave(one)
            self._gave_up.clear()
            self._waited = max(self._waited, now - one.since)
            one.go(decision)
            return
        self._part(one)
        one.decided(decision, now)
        self._join(one)

    def _refuse(self, now: float) -> None:
        longest_s = self._settings.longest_s
        while self._waiting and now - (oldest := next(iter(self._waiting))).since >= longest_s:
            self._leave(oldest)
            message = f"every replica is full: the request has waited for {longest_s:g} s"
            oldest.go(Saturated(message, code="waited_too_long"))

    def _leave(self, one: Waiting) -> None:
        del self._waiting[one]
        self._part(one)

    def _join(self, one: Waiting) -> None:
        line = self._lines.get(one.carried.replica)
        if line is None:
            line = self._lines[one.carried.replica] = Order(self._shares)
        line.enter(one)

    def _part(self, one: Waiting) -> None:
        line = self._lines[one.carried.replica]
        line.leave(one)
        if not line:
            del self._lines[one.carried.replica]

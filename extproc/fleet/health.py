"""Which replicas answered badly of late: a replica that fails fast must not look fast."""

from math import inf

from extproc.clock import Clock

_TOLERATED = 3
"""Failures in a row before a replica is left out."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_MOST_DOUBLINGS = 5
"""Seconds it is left out, doubling with every failure that follows."""
_REMEMBERED_S = 2 * _LONGEST_PAUSE
"""Longer than until the next try of a replica that goes on failing."""


class Health:
    """Failures in a row per replica, as this router saw them.

    A replica that fails several requests in a row is left out for a pause. After it one request
    tries again, and its outcome decides: Envoy may answer a request that failed there from
    another replica, and long after, so many would try before the first is heard of.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._failed_at = -inf
        self._paused_until: dict[str, float] = {}
        self._tried: set[str] = set()
        """Those to which a request was sent after a pause, whose outcome is not known yet."""
        self._changed = False
        self._next_end = inf
        """When the next pause ends."""

    @property
    def troubled(self) -> bool:
        """Whether a replica failed within the last minute, and was not well since."""
        return bool(self._failures) and self._clock() - self._failed_at < _REMEMBERED_S

    def changed(self) -> bool:
        """Whether :meth:`usable` may answer otherwise than when this was last asked."""
        now = self._clock()
        if not self._changed and now < self._next_end:
            return False
        self._changed = False
        self._next_end = min((end for end in self._paused_until.values() if end > now), default=inf)
        return True

    def usable(self, replica: str) -> bool:
        """Whether requests may be sent to it now."""
        until = self._paused_until.get(replica)
        return until is None or self._clock() >= until

    def sent(self, replica: str) -> None:
        """A request was sent to it: after a pause that is enough until its outcome is known, or
        was not for as long as the pause."""
        if replica in self._paused_until and self.usable(replica):
            self._tried.add(replica)
            self._pause(replica)

    def failed(self, replica: str) -> None:
        """A request sent to it was answered with a 5xx, or had to be served by another.

        Those that were sent before a pause and fail during it do not count again.
        """
        if not self.usable(replica) and replica not in self._tried:
            return
        self._tried.discard(replica)
        self._failed_at = self._clock()
        self._failures[replica] = self._failures.get(replica, 0) + 1
        if self._failures[replica] >= _TOLERATED:
            self._pause(replica)

    def answered(self, replica: str) -> None:
        """A request sent to it was answered."""
        self.forget(replica)

    def forget(self, replica: str) -> None:
        """Nothing is held against it any more."""
        self._failures.pop(replica, None)
        self._tried.discard(replica)
        if self._paused_until.pop(replica, None) is not None:
            self._changed = True

    def _pause(self, replica: str) -> None:
        doublings = min(self._failures[replica] - _TOLERATED, _MOST_DOUBLINGS)
        pause = min(_FIRST_PAUSE * 2.0**doublings, _LONGEST_PAUSE)
        self._paused_until[replica] = self._clock() + pause
        self._changed = True
